// SPDX-License-Identifier: Apache-2.0
// The memory of one device communicator's rings, as kernels and as progress threads see it.
#pragma once

#include <memory>

#include "marrow/abi/proxy_ring.h"
#include "marrow/marrow.hpp"
#include "memory/arena.hpp"

namespace marrow::proxy {

class DeviceRings {
 public:
  /// @param number    stream group: differs between device communicators that live at once, the same on all ranks
  /// @param log_size  of each ring
  /// Throws Error(out_of_memory | cuda | system).
  DeviceRings(memory::Arena& arena, const Requirements& requirements, const memory::Block& counters,
              int nranks, int threads, std::uint32_t log_size, std::uint32_t number);

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

 private:
  struct alignas(64) Line {
    std::uint64_t consumed;
  };
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
  const ProxyDevice* device_ = nullptr;
};

}  // namespace marrow::proxy
