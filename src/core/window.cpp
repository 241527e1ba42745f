// SPDX-License-Identifier: Apache-2.0
#include "core/window.hpp"

#include "base/text.hpp"

namespace marrow::core {

WindowState::WindowState(std::shared_ptr<CommunicatorState> comm, const memory::Block& block,
                         const Recipe& recipe)
    : comm_(comm), block_(block), recipe_(recipe) {
  try {
    make(*comm);
  } catch (...) {
    give_back(*comm);
    throw;
  }
}

void WindowState::make(CommunicatorState& comm) {
  // Load/store pointers are made for the whole team whatever the paths are: Lsa::pointer needs them.
  symmetric_ = std::make_unique<SymmetricBlock>(
      comm, comm.arena(), block_, comm.next_symmetric_id(),
      static_cast<PathBits>(comm.plan().connected() | bit(Path::lsa)), gda::Access::data);
}

void WindowState::rebuild(CommunicatorState& comm) {
  comm.begin_making(recipe_);
  comm.together("taking a window into a new set of ranks", [] {});  // a newcomer's allocation
  make(comm);
  comm.end_making();
}

void WindowState::give_back(CommunicatorState& comm) {
  if (recipe_.what == Recipe::What::allocated) {
    comm.arena().release(block_);
  } else {
    comm.arena().disown(block_);
  }
}

void WindowState::close() {
  const auto comm = comm_.lock();
  if (!comm || !open_) return;
  comm->bootstrap().barrier();  // nobody uses it any more
  comm->forget(this);
  release();
}

void WindowState::release() {
  const auto comm = comm_.lock();
  if (!open_) return;
  open_ = false;
  symmetric_.reset();
  if (comm) give_back(*comm);
}

const SymmetricBlock& WindowState::symmetric() const {
  if (const auto comm = comm_.lock(); comm && open_ && !symmetric_) {
    throw Error(Code::peer_failed, "the window is not usable: " + comm->why_torn(),
                "call agree_failures() on every survivor, then take handles anew");
  }
  if (!symmetric_) {
    throw Error(Code::invalid_argument, "the window is closed",
                "keep the Window and its Communicator open while kernels use it");
  }
  return *symmetric_;
}

std::shared_ptr<WindowState> CommunicatorState::keep(std::shared_ptr<WindowState> window) {
  std::lock_guard lock(mutex_);
  windows_.push_back(window);
  return window;
}

void CommunicatorState::forget(WindowState* window) {
  std::lock_guard lock(mutex_);
  std::erase_if(windows_, [&](const auto& kept) { return kept.get() == window; });
}

std::shared_ptr<WindowState> CommunicatorState::allocate(std::uint64_t bytes, Memory kind) {
  Recipe recipe{Recipe::What::allocated, made_, {bytes, static_cast<std::uint64_t>(kind)}};
  begin_making(recipe);
  if (!being_admitted()) {
    same_on_all("window size in bytes", bytes);
    same_on_all("window memory kind (0 device, 1 host)", static_cast<std::uint64_t>(kind));
  }
  if (bytes == 0 || bytes > std::uint64_t{1} << 46) {
    throw Error(Code::invalid_argument, base::cat("a window of ", bytes, " bytes"),
                "ask for 1 to 2^46 bytes");
  }
  memory::Block block;
  together(base::cat("allocating a window of ", bytes, " bytes"),
           [&] { block = arena_->allocate(bytes, kind); });
  auto window = keep(std::make_shared<WindowState>(shared_from_this(), block, recipe));
  end_making();
  return window;
}

std::shared_ptr<WindowState> CommunicatorState::register_window(void* pointer,
                                                                std::uint64_t bytes) {
  Recipe recipe{Recipe::What::registered, made_, {bytes}};
  begin_making(recipe);
  if (!being_admitted()) same_on_all("window size in bytes", bytes);
  memory::Block block;
  together(base::cat("registering a window of ", bytes, " bytes"), [&] {
    if (!pointer || bytes == 0) {
      throw Error(Code::invalid_argument, base::cat("register_window(", pointer, ", ", bytes, ")"),
                  "give memory of at least one byte");
    }
    block = arena_->adopt(pointer, bytes);
  });
  auto window = keep(std::make_shared<WindowState>(shared_from_this(), block, recipe));
  end_making();
  return window;
}

LocalBufferState::LocalBufferState(std::shared_ptr<CommunicatorState> comm,
                                   const memory::Block& block, std::uint32_t id)
    : comm_(std::move(comm)), block_(block) {
  handle_.abi = kAbiVersion;
  handle_.id = id;
  handle_.bytes = block.bytes;
  handle_.owner = comm_->number();
  handle_.local = block.device;
  handle_.host_memory = block.kind == Memory::host;
  try {
    attach();
  } catch (...) {
    release();
    throw;
  }
  comm_->keep(this);
}

LocalBufferState::~LocalBufferState() {
  comm_->forget(this);
  release();
}

void LocalBufferState::attach() {
  if (comm_->nic()) {
    gda_ = comm_->nic()->register_region(block_, gda::Access::local);
    handle_.gda_local = gda_.iova;
    handle_.gda_lkey = gda_.lkey_be;
  }
  if (comm_->proxy()) {
    if (const std::string why = comm_->proxy()->refuses(block_, false); !why.empty()) {
      throw Error(Code::unsupported, base::cat("a local buffer on the proxy path: ", why),
                  "use host memory, or MARROW_PATH=lsa");
    }
    comm_->proxy()->register_region(handle_.id, block_);
    handle_.staged = comm_->proxy()->staged(handle_.id);
  }
}

void LocalBufferState::suspend() {
  if (comm_->proxy()) comm_->proxy()->deregister(handle_.id);  // nothing, if it was not registered
  if (comm_->nic()) comm_->nic()->deregister(gda_);
  gda_ = {};
  handle_.staged = 0;
  handle_.gda_local = 0;
  handle_.gda_lkey = 0;
}

void LocalBufferState::release() {
  suspend();
  comm_->arena().disown(block_);
}

void CommunicatorState::keep(LocalBufferState* buffer) {
  std::lock_guard lock(mutex_);
  buffers_.push_back(buffer);
}

void CommunicatorState::forget(LocalBufferState* buffer) {
  std::lock_guard lock(mutex_);
  std::erase(buffers_, buffer);
}

std::uint32_t CommunicatorState::next_local_id() {
  std::lock_guard lock(mutex_);
  return next_local_++;
}

std::shared_ptr<LocalBufferState> CommunicatorState::register_local(void* pointer,
                                                                    std::uint64_t bytes) {
  if (!pointer || bytes == 0) {
    throw Error(Code::invalid_argument, base::cat("register_local(", pointer, ", ", bytes, ")"),
                "give memory of at least one byte");
  }
  return std::make_shared<LocalBufferState>(shared_from_this(), arena_->adopt(pointer, bytes),
                                            next_local_id());
}

}  // namespace marrow::core
