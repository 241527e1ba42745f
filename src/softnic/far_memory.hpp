// SPDX-License-Identifier: Apache-2.0
// Memory that a CPU engine reaches by copies instead of loads and stores: a GPU's, through its copy
// engine (option engine=copy, gpu_copies.cpp), or a test's. One a process. About 10 us an access: for
// judging fidelity, never for speed. Atomics on it are atomic among the engine's own operations only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

namespace marrow::softnic {

class FarMemory {
 public:
  virtual ~FarMemory() = default;
  /// Moves bytes where at least one side is far; complete and visible when it returns.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  /// Whether memory that is being registered is far.
  virtual bool is_far(const void* base) const = 0;

  /// Notes a range that was registered, if it is far. @return whether it is
  bool note(const void* base, std::size_t bytes);
  /// Takes the note back.
  void forget(const void* base);
  bool covers(const void* at) const;

  /// The process's, null as long as nobody asked for one.
  static FarMemory* active() { return active_.load(std::memory_order_acquire); }
  /// Makes it the process's, or gives that up (null). Kept alive by the caller.
  static void activate(FarMemory* memory) { active_.store(memory, std::memory_order_release); }
  static bool is(const void* at) {
    const FarMemory* memory = active();
    return memory != nullptr && memory->covers(at);
  }

 private:
  struct Range {
    std::size_t bytes;
    std::uint32_t notes;
  };
  static inline std::atomic<FarMemory*> active_{nullptr};
  mutable std::shared_mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
};

/// The GPU's copy engine as FarMemory of this process; made with the first caller, ended with the last.
/// @throws Error(unsupported) without a driver
std::shared_ptr<FarMemory> gpu_copies();

}  // namespace marrow::softnic
