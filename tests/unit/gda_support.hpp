// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, connected by the gda path on softnic: the device communicator is put together here
// from bootstrap, arena, NIC and queues, so that the path is tested below the core.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "gda/nic.hpp"
#include "gda/queues.hpp"
#include "marrow/device.cuh"
#include "marrow/device/launch.cuh"
#include "memory/arena.hpp"

namespace marrow::gda_test {

struct Setting {
  int ranks = 2;
  Sharing sharing = Sharing::device;
  std::uint64_t first_index = 0;
  int depth = 1024;
  bool collapsed = false;
  int contexts = 1;
  int counters = 16;
  std::uint64_t window_bytes = 1 << 20;
  std::string faults;
  std::uint64_t wait_ns = 20'000'000'000;
  /// As if everything were in this GPU's memory: puts take their short way.
  bool device_release = false;
};

/// One rank's end of everything.
class Rank {
 public:
  Rank(const UniqueId& id, int rank, const Setting& setting, std::barrier<>& meeting)
      : setting_(setting), meeting_(meeting) {
    bootstrap_ = std::make_unique<bootstrap::Bootstrap>(id, setting.ranks, rank);
    base::Parameters parameters;
    parameters.set("MARROW_NIC", "softnic");
    parameters.set("MARROW_SOFTNIC", setting.faults);
    parameters.set("MARROW_GDA_DEPTH", std::to_string(setting.depth));
    parameters.set("MARROW_GDA_CQ", setting.collapsed ? "collapsed" : "ring");
    arena_ = memory::Arena::create(Place::cpu());
    nic_ = gda::Nic::open(*bootstrap_, parameters, Place::cpu());
    control_ = arena_->allocate(sizeof(ControlBlock), Memory::host);

    comm_.abi = kAbiVersion;
    comm_.bytes = sizeof(comm_);
    comm_.rank = rank;
    comm_.nranks = setting.ranks;
    comm_.lsa_size = 1;
    comm_.lsa_first = rank;
    comm_.contexts = setting.contexts;
    comm_.signals = comm_.signal_words = 64;
    comm_.counters = setting.counters;
    comm_.packets = 16;
    comm_.atomic_path = Path::gda;
    comm_.feeds = comm_.connected = 1u << static_cast<int>(Path::gda);
    comm_.sharing = setting.sharing;
    comm_.wait_ns = setting.wait_ns;
    comm_.control = reinterpret_cast<ControlBlock*>(control_.device);
    const std::vector<std::uint8_t> paths(static_cast<std::size_t>(setting.ranks),
                                          static_cast<std::uint8_t>(Path::gda));
    comm_.path = arena_->upload(std::span<const std::uint8_t>(paths));
    window_ = make_window(setting.window_bytes, gda::Access::data);
    comm_.sync[1] = make_window(64 * 8 + 16 * 16, gda::Access::sync);
    base_.resize(64);
    shadow_.resize(64);
    counter_base_.resize(64);
    comm_.signal_base = base_.data();
    comm_.signal_shadow = shadow_.data();
    comm_.counter_base = counter_base_.data();
    gda::Region counters;
    if (setting.counters) {
      const memory::Block block =
          arena_->allocate(static_cast<std::uint64_t>(setting.counters) * 8, Memory::host);
      counters = nic_->register_region(block, gda::Access::sync);
      regions_.push_back(counters);
      comm_.counter[1] = reinterpret_cast<std::uint64_t*>(block.device);
    }
    Requirements requirements;
    requirements.contexts = setting.contexts;
    requirements.counters = setting.counters;
    requirements.sharing = setting.sharing;
    requirements.first_index = setting.first_index;
    queues_ =
        nic_->connect(*bootstrap_, *arena_, requirements, setting.counters ? &counters : nullptr);
    comm_.gda = queues_->device();
    if (setting.device_release) {
      for (int i = 0; i < setting.contexts * setting.ranks; ++i)
        queue(0, i).release = static_cast<std::uint8_t>(GdaRelease::device);
    }
  }

  ~Rank() {
    barrier();
    queues_.reset();
    for (gda::Region& region : regions_) nic_->deregister(region);
    nic_.reset();
    bootstrap_->close();
  }

  const DeviceCommunicator& comm() const { return comm_; }
  const WindowHandle& window() const { return window_; }
  int rank() const { return comm_.rank; }
  gda::Queues& queues() { return *queues_; }
  gda::Nic& nic() { return *nic_; }
  bootstrap::Bootstrap& bootstrap() { return *bootstrap_; }
  std::uint64_t* words() const { return reinterpret_cast<std::uint64_t*>(window_.local); }
  std::uint64_t* signals() const { return reinterpret_cast<std::uint64_t*>(comm_.sync[1].local); }
  /// All ranks meet. Not the bootstrap's: ThreadSanitizer cannot see that sockets order memory.
  void barrier() { meeting_.arrive_and_wait(); }
  /// As if this rank had died: its queues are gone.
  void drop_queues() { queues_.reset(); }
  std::uint64_t count = 0;  ///< for tests

  LocalBufferHandle local(std::uint64_t bytes) {
    const memory::Block block = arena_->allocate(bytes, Memory::host);
    const gda::Region region = nic_->register_region(block, gda::Access::local);
    regions_.push_back(region);
    LocalBufferHandle handle;
    handle.abi = kAbiVersion;
    handle.bytes = bytes;
    handle.local = block.device;
    handle.gda_local = region.iova;
    handle.gda_lkey = region.lkey_be;
    handle.host_memory = 1;
    return handle;
  }

  GdaQueue& queue(int context, int peer) {
    auto* queues = reinterpret_cast<GdaQueue*>(const_cast<GdaDevice*>(comm_.gda) + 1);
    return queues[context * comm_.nranks + peer];
  }

 private:
  WindowHandle make_window(std::uint64_t bytes, gda::Access access) {
    const memory::Block block = arena_->allocate(bytes, Memory::host);
    const gda::Region region = nic_->register_region(block, access);
    regions_.push_back(region);
    const auto all = bootstrap_->allgather(std::as_bytes(std::span(&region, 1)));
    std::vector<std::uint64_t> bases;
    std::vector<std::uint32_t> keys;
    for (const auto& each : all) {
      gda::Region remote;
      std::memcpy(&remote, each.data(), sizeof remote);
      bases.push_back(remote.iova);
      keys.push_back(remote.rkey_be);
    }
    WindowHandle handle;
    handle.abi = kAbiVersion;
    handle.bytes = bytes;
    handle.local = block.device;
    handle.gda_base = arena_->upload(std::span<const std::uint64_t>(bases));
    handle.gda_rkey = arena_->upload(std::span<const std::uint32_t>(keys));
    handle.gda_local = region.iova;
    handle.gda_lkey = region.lkey_be;
    handle.atomic_path = Path::gda;
    handle.host_memory = 1;
    return handle;
  }

  Setting setting_;
  std::barrier<>& meeting_;
  std::unique_ptr<bootstrap::Bootstrap> bootstrap_;
  std::unique_ptr<memory::Arena> arena_;
  std::unique_ptr<gda::Nic> nic_;
  memory::Block control_;
  std::vector<gda::Region> regions_;
  std::vector<std::uint64_t> base_, shadow_, counter_base_;
  WindowHandle window_;
  std::unique_ptr<gda::Queues> queues_;
  DeviceCommunicator comm_;
};

/// A kind of queue that cases run on.
struct QueueKind {
  const char* name;
  Sharing sharing;
  bool collapsed;
  int depth;
  std::uint64_t first;
  bool device_release = false;
};
inline std::ostream& operator<<(std::ostream& out, const QueueKind& kind) {
  return out << kind.name;
}

class QueueTest : public ::testing::TestWithParam<QueueKind> {
 protected:
  static Setting setting(int ranks) {
    Setting s;
    s.ranks = ranks;
    s.sharing = GetParam().sharing;
    s.collapsed = GetParam().collapsed;
    s.depth = GetParam().depth;
    s.first_index = GetParam().first;
    s.device_release = GetParam().device_release;
    return s;
  }
};
inline std::string kind_name(const ::testing::TestParamInfo<QueueKind>& info) {
  return info.param.name;
}

/// Runs body(rank) on `ranks` threads; an exception fails the test.
inline void run_ranks(const Setting& setting, const std::function<void(Rank&)>& body) {
  const UniqueId id = UniqueId::create();
  std::vector<std::thread> threads;
  std::barrier<> meeting(setting.ranks);
  for (int r = 0; r < setting.ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(id, r, setting, meeting);
        body(rank);
      } catch (const std::exception& error) {
        meeting.arrive_and_drop();
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace marrow::gda_test
