// SPDX-License-Identifier: Apache-2.0
// The memory of one device communicator's rings, as kernels and as progress threads see it.
#pragma once

#include <memory>

#include "marrow/abi/proxy_ring.h"
#include "marrow/marrow.hpp"
#include "memory/arena.hpp"
#include "proxy/message.hpp"

namespace marrow::proxy {

class DeviceRings {
 public:
  /// @param stage_bytes  largest put that kernels write to staging slots, of one thread stage_thread_bytes; 0: none
  /// @param number    stream group: differs between device communicators that live at once, the same on all ranks
  /// @param log_size  of each ring
  /// Throws Error(out_of_memory | cuda | system).
  DeviceRings(memory::Arena& arena, const Requirements& requirements, const memory::Block& counters,
              int nranks, int threads, std::uint32_t log_size, std::uint32_t number,
              std::uint32_t stage_bytes = 0, std::uint32_t stage_thread_bytes = 0);

  int contexts() const { return contexts_; }
  int nranks() const { return nranks_; }
  int counters() const { return counters_; }
  std::uint32_t log_size() const { return log_size_; }
  std::uint64_t first_index() const { return first_; }
  std::uint32_t number() const { return number_; }
  const ProxyDevice* device() const { return device_; }

  // Host addresses, for the thread that serves the ring.
  ProxyDescriptor* slots(int context, int thread) const {
    return slots_ + (ring(context, thread) << log_size_);
  }
  std::uint64_t* consumed(int context, int thread) const {
    return &lines_[ring(context, thread)].consumed;
  }
  ProxyChunk* results(int context, int thread) const {
    return results_ + ring(context, thread) * kProxyFetchSlots;
  }
  ProxyCompletion& completion(int context, int peer) const {
    return completion_[context * nranks_ + peer];
  }
  std::uint64_t* counter(int id) const { return counter_words_ + id; }

  /// Staging slots of kernels, to be registered as region stage_region(); empty: none.
  const memory::Block& stage() const { return stage_; }
  std::uint32_t stage_region() const { return kProxyStageRegions + number_ / kDeviceStreams; }
  std::uint32_t stage_log_slot() const { return stage_log_slot_; }
  std::uint32_t stage_log_size() const { return stage_log_size_; }
  std::uint64_t* stage_consumed(int context, int thread) const {
    return &stage_lines_[ring(context, thread)].consumed;
  }
  /// [1 << stage_log_size()]
  std::uint64_t* stage_unused(int context, int thread) const {
    return stage_unused_ + (ring(context, thread) << stage_log_size_);
  }
  /// Number of that ring's first slot in stage().
  std::uint64_t stage_first(int context, int thread) const {
    return static_cast<std::uint64_t>(ring(context, thread)) << stage_log_size_;
  }

 private:
  struct alignas(64) Line {
    std::uint64_t consumed;
  };
  void make_stage(memory::Arena& arena, std::uint32_t bytes, ProxyDevice& device);
  std::size_t ring(int context, int thread) const {
    return static_cast<std::size_t>(context) * threads_ + thread;
  }

  int contexts_;
  int nranks_;
  int threads_;
  int counters_;
  std::uint32_t log_size_;
  std::uint32_t number_;
  std::uint64_t first_;
  ProxyDescriptor* slots_ = nullptr;
  Line* lines_ = nullptr;
  ProxyChunk* results_ = nullptr;
  ProxyCompletion* completion_ = nullptr;
  std::uint64_t* counter_words_ = nullptr;
  memory::Block stage_;
  std::uint32_t stage_log_slot_ = 0;
  std::uint32_t stage_log_size_ = 0;
  Line* stage_lines_ = nullptr;
  std::uint64_t* stage_unused_ = nullptr;
  const ProxyDevice* device_ = nullptr;
};

}  // namespace marrow::proxy
