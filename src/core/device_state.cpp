// SPDX-License-Identifier: Apache-2.0
#include "core/device_state.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace marrow::core {
namespace {

void check_range(const char* what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(Code::invalid_argument, base::cat("Requirements::", what, " = ", value),
              base::cat("use ", low, " to ", high));
}

void validate(const Requirements& r) {
  check_range("contexts", r.contexts, 1, 64);
  check_range("signals", r.signals, 0, 65536);
  check_range("counters", r.counters, 0, 65536);
  check_range("barriers", r.barriers, 0, 1024);
  check_range("packets", r.packets, 0, 1 << 20);
}

}  // namespace

DeviceState::DeviceState(std::shared_ptr<CommunicatorState> comm, const Requirements& requirements,
                         std::uint32_t number)
    : comm_(comm),
      requirements_(requirements),
      recipe_{Recipe::What::device_communicator,
              number,
              {static_cast<std::uint64_t>(requirements.contexts),
               static_cast<std::uint64_t>(requirements.signals),
               static_cast<std::uint64_t>(requirements.counters),
               static_cast<std::uint64_t>(requirements.barriers),
               static_cast<std::uint64_t>(requirements.packets)}} {
  comm->begin_making(recipe_);
  if (!comm->being_admitted()) {
    comm->together("checking requirements", [&] { validate(requirements); });
    comm->same_on_all("Requirements::contexts", requirements.contexts);
    comm->same_on_all("Requirements::signals", requirements.signals);
    comm->same_on_all("Requirements::counters", requirements.counters);
    comm->same_on_all("Requirements::barriers", requirements.barriers);
    comm->same_on_all("Requirements::packets", requirements.packets);
  }
  make(*comm);
  comm->end_making();
}

void DeviceState::rebuild(CommunicatorState& comm) {
  comm.begin_making(recipe_);
  make(comm);
  comm.end_making();
}

void DeviceState::make(CommunicatorState& comm) {
  release();
  handle_ = {};
  path_table_ = nullptr;
  counters_ = {};
  const Requirements& requirements = requirements_;
  arena_ = memory::Arena::create(comm.place());
  const PathPlan& plan = comm.plan();
  const int rank = comm.rank();
  DeviceCommunicator& h = handle_;
  h.abi = kAbiVersion;
  h.bytes = sizeof(DeviceCommunicator);
  h.owner = comm.number();
  h.rank = rank;
  h.nranks = comm.nranks();
  h.lsa_first = plan.lsa_first[rank];
  h.lsa_rank = rank - plan.lsa_first[rank];
  h.lsa_size = plan.lsa_size[rank];
  h.contexts = requirements.contexts;
  h.signals = requirements.signals;
  h.counters = requirements.counters;
  h.barriers = requirements.barriers;
  h.packets = requirements.packets;
  h.signal_words = requirements.signals + requirements.barriers * comm.nranks();
  h.atomic_path = plan.atomic;
  h.feeds = plan.feeds(rank);
  h.connected = plan.connected();
  h.sharing = requirements.sharing;
  h.wait_ns = static_cast<std::uint64_t>(
                  base::parameter_duration("MARROW_WAIT_TIMEOUT", comm.parameters()).count()) *
              1000000;
  h.control = comm.control_device();

  std::vector<std::uint8_t> paths(comm.nranks());
  const std::vector<bool> masked = comm.bootstrap().mask();
  for (int r = 0; r < comm.nranks(); ++r) {
    paths[r] = masked[r] ? kPathFailed : static_cast<std::uint8_t>(plan.path[rank][r]);
  }
  comm.together("allocating a device communicator", [&] {
    path_table_ = arena_->upload(std::span<const std::uint8_t>(paths));
    h.path = path_table_;
    h.signal_base = private_words(h.signal_words);
    h.signal_shadow = private_words(h.signal_words);
    h.counter_base = private_words(h.counters);
    h.look = private_words(2);
  });
  if (comm.uses(Path::gda)) comm.nic()->choose_engine(comm.bootstrap());
  make_sync_memory(comm);
  make_counters(comm);
  connect(comm);
  comm.bootstrap().barrier();  // every rank's sync memory is mapped before anybody signals
  open_ = true;
}

DeviceState::~DeviceState() { release(); }

/// Zeroed words that only our kernels touch.
std::uint64_t* DeviceState::private_words(std::uint64_t count) {
  return reinterpret_cast<std::uint64_t*>(
      arena_->allocate(std::max<std::uint64_t>(count, 1) * 8, Memory::device).device);
}

/// Who adds decides where the word is: SMs, also a NIC's: device memory. A CPU thread: host memory.
Memory DeviceState::sync_memory(CommunicatorState& comm, Path path) {
  switch (path) {
    case Path::lsa: return Memory::device;
    case Path::gda: return comm.nic()->sync_memory();
    default: return Memory::host;
  }
}

void DeviceState::make_sync_memory(CommunicatorState& comm) {
  const std::uint64_t bytes =
      (static_cast<std::uint64_t>(handle_.signal_words) * 8 + 15) / 16 * 16 +
      static_cast<std::uint64_t>(handle_.packets) * 16;
  const std::vector<std::uint64_t> nobody(comm.nranks());
  for (int p = 0; p < kPaths; ++p) {
    const Path path = static_cast<Path>(p);
    if (!comm.uses(path)) {
      // Kernels load the peer's entry before they know its path.
      handle_.sync[p].lsa = arena_->upload(std::span<const std::uint64_t>(nobody));
      continue;
    }
    const Memory kind = sync_memory(comm, path);
    memory::Block block;
    comm.together(base::cat("allocating ", bytes, " bytes of sync memory"),
                  [&] { block = arena_->allocate(std::max<std::uint64_t>(bytes, 16), kind); });
    sync_[p] = std::make_unique<SymmetricBlock>(comm, *arena_, block, comm.next_symmetric_id(),
                                                bit(path), gda::Access::sync);
    handle_.sync[p] = sync_[p]->handle();
    handle_.sync[p].atomic_path = path;
  }
}

void DeviceState::make_counters(CommunicatorState& comm) {
  for (int p = 0; p < kPaths; ++p) {
    if (!comm.uses(static_cast<Path>(p)) && p != 0) continue;
    counters_[p] = arena_->allocate(static_cast<std::uint64_t>(std::max(handle_.counters, 1)) * 8,
                                    sync_memory(comm, static_cast<Path>(p)));
    handle_.counter[p] = reinterpret_cast<std::uint64_t*>(counters_[p].device);
  }
  handle_.connected |= bit(Path::lsa);  // local completions of the lsa path need no connection
}

void DeviceState::connect(CommunicatorState& comm) {
  if (comm.uses(Path::gda)) {
    const bool counting = handle_.counters > 0;
    if (counting) {
      comm.together("registering counters with the NIC", [&] {
        gda_counters_ =
            comm.nic()->register_region(counters_[static_cast<int>(Path::gda)], gda::Access::sync);
      });
    }
    try {
      queues_ = comm.nic()->connect(comm.bootstrap(), *arena_, requirements_,
                                    counting ? &gda_counters_ : nullptr);
    } catch (...) {
      comm.nic()->deregister(gda_counters_);
      throw;
    }
    handle_.gda = queues_->device();
  }
  if (comm.uses(Path::proxy)) {
    proxy_device_ = comm.proxy()->create_device(*arena_, requirements_,
                                                counters_[static_cast<int>(Path::proxy)]);
    handle_.proxy = proxy_device_->device();
  }
}

void DeviceState::stop() {
  if (proxy_device_) proxy_device_->stop();
}

void DeviceState::check() const {
  if (!queues_) return;
  const std::vector<gda::QueueError> errors = queues_->errors();
  if (errors.empty()) return;
  const gda::QueueError& first = errors.front();
  throw Error(first.code,
              errors.size() == 1
                  ? first.sentence
                  : base::cat(first.sentence, " (", errors.size(), " queues in error)"),
              first.next_step);
}

const DeviceCommunicator& DeviceState::handle() const {
  if (const auto comm = comm_.lock(); comm && !closed_ && !open_) {
    throw Error(Code::peer_failed, "the device communicator is not usable: " + comm->why_torn(),
                "call agree_failures() on every survivor, then take handles anew");
  }
  if (!open_) {
    throw Error(Code::invalid_argument, "the device communicator is closed",
                "keep it and its Communicator open while kernels use it");
  }
  return handle_;
}

void DeviceState::close() {
  const auto comm = comm_.lock();
  if (!comm || closed_) return;
  comm->bootstrap().barrier();  // no kernel uses it any more
  stop();
  comm->bootstrap().barrier();  // no proxy thread either
  comm->forget(this);
  release();
  closed_ = true;
}

void DeviceState::release() {
  open_ = false;
  // An admission that ended half way leaves some of it.
  proxy_device_.reset();
  queues_.reset();
  if (const auto comm = comm_.lock(); comm && comm->nic()) comm->nic()->deregister(gda_counters_);
  for (auto& block : sync_) block.reset();
  arena_.reset();
}

void DeviceState::mask(const std::vector<bool>& failed) {
  if (!open_) return;
  for (std::size_t r = 0; r < failed.size(); ++r) {
    if (!failed[r]) continue;
    arena_->update(path_table_, r, &kPathFailed, 1);
    if (queues_) queues_->mask_peer(static_cast<int>(r));
  }
}

}  // namespace marrow::core
