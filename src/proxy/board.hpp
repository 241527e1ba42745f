// SPDX-License-Identifier: Apache-2.0
// What host threads tell progress threads: which regions exist, which device communicators have rings,
// which peers failed. A change makes a new View and a new version; each thread takes the view when it
// sees the version and acknowledges it once nothing of the old one is in use any more. So a progress
// thread takes no lock in its loop, and a host thread knows when memory may go.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.hpp"
#include "memory/block.hpp"
#include "proxy/staging.hpp"

namespace marrow::proxy {

class DeviceRings;

/// Memory that operations may name, and its handles in each thread's network.
struct Region {
  std::uint32_t id = 0;
  bool window = false;
  bool staged = false;  ///< the network cannot reach it
  memory::Block block;
  std::vector<void*> local;  ///< [threads]; null when staged
  std::vector<void*>
      remote;  ///< [nranks], of the thread that talks to that peer, null where staged; windows only

  bool holds(std::uint64_t offset, std::uint64_t bytes) const {
    return offset <= block.bytes && bytes <= block.bytes - offset;
  }
};

struct View {
  std::uint64_t version = 0;
  std::unordered_map<std::uint32_t, std::shared_ptr<const Region>> regions;
  std::vector<std::shared_ptr<DeviceRings>> devices;
  std::vector<char> failed;                ///< [nranks]
  std::shared_ptr<const Staging> staging;  ///< null: no window or buffer of any rank is staged

  const Region* find(std::uint32_t id) const {
    const auto at = regions.find(id);
    return at == regions.end() ? nullptr : at->second.get();
  }
};

class Board {
 public:
  Board(int nranks, int threads) : acknowledged_(threads) {
    auto first = std::make_shared<View>();
    first->failed.resize(nranks);
    view_ = std::move(first);
  }

  /// Applies change(View&) to a copy and publishes it. Returns its version.
  template <class Change>
  std::uint64_t change(Change&& change) {
    std::lock_guard lock(mutex_);
    auto next = std::make_shared<View>(*view_);
    change(*next);
    ++next->version;
    view_ = next;
    version_.store(next->version, std::memory_order_release);
    return next->version;
  }

  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }
  std::shared_ptr<const View> view() const {
    std::lock_guard lock(mutex_);
    return view_;
  }

  void acknowledge(int thread, std::uint64_t version) {
    acknowledged_[thread].store(version, std::memory_order_release);
  }
  /// The threads are gone: nothing is in use, nobody acknowledges any more.
  void close() { closed_.store(true, std::memory_order_release); }

  /// Whether every thread acknowledged that version in time.
  bool wait_acknowledged(std::uint64_t version, base::Deadline deadline) const {
    for (const auto& seen : acknowledged_) {
      while (seen.load(std::memory_order_acquire) < version) {
        if (closed_.load(std::memory_order_acquire)) return true;
        if (deadline.expired()) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const View> view_;
  std::atomic<std::uint64_t> version_{0};
  std::vector<std::atomic<std::uint64_t>> acknowledged_;
  std::atomic<bool> closed_{false};
};

}  // namespace marrow::proxy
