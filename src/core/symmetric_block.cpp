// SPDX-License-Identifier: Apache-2.0
#include "core/symmetric_block.hpp"

#include "base/text.hpp"

namespace marrow::core {

// Sync memory (signals) is where its path can update it, so this is asked of windows alone.
std::string why_no_atomics(bool gpu, Path atomic_path, const memory::Block& block,
                           bool gpu_engine) {
  if (atomic_path == Path::proxy && !block.host) {
    return "atomics take the proxy path, whose threads cannot add to GPU memory; use Memory::host "
           "for windows with words that peers add to";
  }
  if (gpu && atomic_path == Path::lsa && block.kind == Memory::host) {
    return "atomics take the lsa path, and several GPUs that add to host memory lose each other's "
           "updates; use Memory::device for windows with words that peers add to";
  }
  if (gpu_engine && atomic_path == Path::gda && block.kind == Memory::host) {
    return "atomics take the gda path, softnic's engines are blocks on the ranks' GPUs, and "
           "several "
           "GPUs that add to host memory lose each other's updates; use Memory::device for windows "
           "with words that peers add to";
  }
  return {};
}

SymmetricBlock::SymmetricBlock(CommunicatorState& comm, memory::Arena& arena,
                               const memory::Block& block, std::uint32_t id, PathBits paths,
                               gda::Access access)
    : comm_(comm),
      arena_(arena),
      block_(block),
      paths_(paths),
      access_(access),
      peers_(comm.nranks()) {
  handle_.abi = kAbiVersion;
  handle_.id = id;
  handle_.bytes = block.bytes;
  handle_.owner = comm.number();
  handle_.local = block.device;
  handle_.atomic_path = comm.plan().atomic;
  handle_.host_memory = block.kind == Memory::host;
  try {
    if (paths_ & bit(Path::lsa)) map_peers();
    // Kernels load the peer's entry before they know its path: the table is always there.
    if (!handle_.lsa)
      handle_.lsa =
          arena_.upload(std::span<const std::uint64_t>(std::vector<std::uint64_t>(peers_.size())));
    if (paths_ & bit(Path::gda)) register_gda(access);
    if (paths_ & bit(Path::proxy)) register_proxy();
  } catch (...) {
    release();  // a refused window leaves nothing behind
    throw;
  }
}

SymmetricBlock::~SymmetricBlock() { release(); }

std::string SymmetricBlock::why_no_atomics() const {
  return core::why_no_atomics(comm_.place().on_gpu(), handle_.atomic_path, block_,
                              comm_.nic() && comm_.nic()->on_gpu_engine());
}

WindowHandle SymmetricBlock::handle() const {
  WindowHandle handle = handle_;
  handle.no_atomics = !why_no_atomics().empty();
  return handle;
}

void SymmetricBlock::release() {
  if (proxy_registered_) comm_.proxy()->deregister(handle_.id);
  proxy_registered_ = false;
  if (comm_.nic()) comm_.nic()->deregister(gda_);
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    // Mappings are ours to release; aliases and our own block are not (release ignores them).
    if (!mapped_.empty() && mapped_[r] && peers_[r].device) arena_.release(peers_[r]);
  }
  peers_.clear();
  arena_.drop(handle_.lsa);
  arena_.drop(handle_.gda_base);
  arena_.drop(handle_.gda_rkey);
  handle_ = {};
}

void SymmetricBlock::map_peers() {
  peers_ = comm_.share(arena_, block_);
  mapped_.resize(peers_.size());
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    mapped_[r] = r != comm_.rank() && !comm_.bootstrap().same_process(r);
  std::vector<std::uint64_t> addresses(peers_.size());
  for (std::size_t r = 0; r < peers_.size(); ++r)
    addresses[r] = reinterpret_cast<std::uint64_t>(peers_[r].device);
  const auto first = static_cast<std::size_t>(comm_.plan().lsa_first[comm_.rank()]);
  for (std::size_t i = 0; i < kNear && first + i < addresses.size(); ++i)
    handle_.near[i] = addresses[first + i];
  handle_.lsa = arena_.upload(std::span<const std::uint64_t>(addresses));
}

void SymmetricBlock::register_gda(gda::Access access) {
  comm_.together("registering memory with the NIC", [&] {
    std::string why;
    if (!comm_.nic()->can_use(block_.kind, &why)) {
      throw Error(Code::unsupported,
                  base::cat("a window of ", block_.kind == Memory::host ? "host" : "device",
                            " memory on the gda path of rank ", comm_.rank(), ": ", why),
                  "use Memory::host for windows of this communicator, or MARROW_PATH=lsa|proxy; "
                  "`marrow info` shows each pair");
    }
    gda_ = comm_.nic()->register_region(block_, access);
  });
  struct Remote {
    std::uint64_t iova;
    std::uint32_t rkey;
    std::uint32_t reserved;
  };
  const auto remotes = comm_.allgather(Remote{gda_.iova, gda_.rkey_be, 0});
  std::vector<std::uint64_t> bases;
  std::vector<std::uint32_t> keys;
  for (const Remote& remote : remotes) {
    bases.push_back(remote.iova);
    keys.push_back(remote.rkey);
  }
  handle_.gda_base = arena_.upload(std::span<const std::uint64_t>(bases));
  handle_.gda_rkey = arena_.upload(std::span<const std::uint32_t>(keys));
  handle_.gda_local = gda_.iova;
  handle_.gda_lkey = gda_.lkey_be;
}

void SymmetricBlock::register_proxy() {
  comm_.together("checking memory for the proxy path", [&] {
    const std::string why = comm_.proxy()->refuses(block_, true);
    if (!why.empty()) {
      throw Error(Code::unsupported,
                  base::cat("a window on the proxy path of rank ", comm_.rank(), ": ", why),
                  "use Memory::host for windows of this communicator, or MARROW_PATH=lsa; `marrow "
                  "info` shows each pair");
    }
  });
  comm_.proxy()->register_window(handle_.id, block_, access_ == gda::Access::data);
  proxy_registered_ = true;
  handle_.staged = comm_.proxy()->staged(handle_.id);
}

}  // namespace marrow::core
