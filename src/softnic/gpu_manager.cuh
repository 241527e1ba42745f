// SPDX-License-Identifier: Apache-2.0
// The warp that manages the engine block: it carries out the host's commands while the workers stand still,
// passes on what peers ask for, and ends the block. See gpu_engine_block.cu.
#pragma once

#include "softnic/gpu_block.cuh"

namespace marrow::softnic::gpu {
namespace {

constexpr unsigned kAll = 0xffffffffu;
template <class T>
__device__ T from_lane(T value, int lane) {
  return __shfl_sync(kAll, value, lane);
}

class Manager {
  static constexpr std::uint32_t kNapsPerLook = 8;

 public:
  explicit __device__ Manager(unsigned lane) : lane_(lane) {}

  __device__ void work() {
    std::uint64_t done = load_relaxed<Scope::system>(&the_launch().tables->replies.done);
    std::uint64_t beat = ~std::uint64_t{0};
    std::uint32_t naps = 0;
    Nanoseconds beat_at = now_ns(), active_at = beat_at, looked_at = beat_at;
    for (;;) {
      if (from_lane(board_open(), 0)) help(lane_);
      __nanosleep(1000);
      // Reads of host memory are few: they hold up the SM's fences.
      if (++naps % kNapsPerLook != 0) continue;
      const Nanoseconds now = now_ns();
      const Cell16 words = load_cell(&the_launch().mailbox->heartbeat);
      const std::uint64_t command = from_lane(words.high, 0);
      if (lane_ == 0) {
        if (words.low != beat) {
          beat = words.low;
          beat_at = now;
        }
        if (volatile_load(the_block().active) != 0) {
          volatile_store(the_block().active, 0u);
          active_at = now;
        }
        if (now - looked_at > 20'000) {
          looked_at = now;
          if (look_around(now)) active_at = now;  // not to end before the workers have looked
        }
      }
      if ((command & ~kQuit) != done) {
        halt();
        if (lane_ == 0) settle<Scope::system>();  // meets the host's release of the command number
        __syncwarp();
        carry_out();
        done = command & ~kQuit;
        __syncwarp();
        if (lane_ == 0) {
          __threadfence_block();
          volatile_store(the_block().go, halts_);
          publish<Scope::system>(Store{&the_launch().tables->replies.done, done});
        }
        active_at = now_ns();
      }
      // The host asks for it, there is nothing to do, or the host's process gives no sign of life.
      const bool quit = (command & kQuit) != 0 ||
                        (now > active_at && now - active_at > the_launch().idle) ||
                        (now > beat_at && now - beat_at > the_launch().heartbeat);
      if (from_lane(quit, 0)) {
        // Only then: a worker that still leaves the last halt would go uncounted.
        halt();
        if (lane_ == 0) volatile_store(the_block().quit, 1u);
        return;
      }
    }
  }

 private:
  /// Every worker stands still between two steps.
  __device__ void halt() {
    ++halts_;
    if (lane_ == 0) {
      volatile_store(the_block().stopped, 0u);
      __threadfence_block();
      volatile_store(the_block().stop, halts_);
      call_attention();
    }
    __syncwarp();
    while (from_lane(volatile_load(the_block().stopped), 0) != kWorkers) help(lane_);
    if (lane_ == 0) __threadfence_block();
    __syncwarp();
  }

  /// @return whether somebody has written to an inbox
  __device__ bool look_around(Nanoseconds now) {
    if (volatile_load(the_block().stalled) != 0) {
      const Nanoseconds until = volatile_load(the_launch().tables->stalled_until);
      if (until != ~Nanoseconds{0} && now >= until) {
        volatile_store(the_launch().tables->stalled_until, Nanoseconds{0});
        volatile_store(the_block().stalled, 0u);
      }
    }
    const std::uint64_t rung = load_relaxed<Scope::system>(
        word(the_launch().directory->processes[the_launch().process].inbox_rings));
    if (rung == the_launch().tables->inbox_rings) return false;
    the_launch().tables->inbox_rings = rung;
    settle<Scope::system>();
    volatile_store(the_block().inboxes, volatile_load(the_block().inboxes) + 1);
    call_attention();
    return true;
  }

  __device__ void words_from_host(void* to, std::uint32_t bytes) const {
    const auto* from = reinterpret_cast<const std::uint64_t*>(the_launch().mailbox->payload);
    for (std::uint32_t i = lane_; i < bytes / 8; i += 32)
      static_cast<std::uint64_t*>(to)[i] = load_relaxed<Scope::system>(from + i);
    __syncwarp();
  }
  __device__ void words_to_host(const void* from, std::uint32_t bytes) const {
    auto* to = reinterpret_cast<std::uint64_t*>(the_launch().tables->replies.payload);
    for (std::uint32_t i = lane_; i < bytes / 8; i += 32)
      store_relaxed<Scope::system>(to + i, static_cast<const std::uint64_t*>(from)[i]);
    __syncwarp();
  }

  __device__ void carry_out() {
    const Mailbox& box = *the_launch().mailbox;
    const auto kind = static_cast<Command>(
        load_relaxed<Scope::system>(reinterpret_cast<const std::uint32_t*>(&box.kind)));
    const std::uint32_t index = load_relaxed<Scope::system>(&box.index);
    const std::uint32_t flags = load_relaxed<Scope::system>(&box.flags);
    const std::uint32_t bytes = load_relaxed<Scope::system>(&box.bytes);
    const std::uint64_t address = load_relaxed<Scope::system>(&box.address);
    switch (kind) {
      case Command::write: words_from_host(reinterpret_cast<void*>(address), bytes); return;
      case Command::put_queue_pair: {
        QueuePair& qp = queue_pair(index);
        words_from_host(&qp, sizeof qp);
        if (lane_ == 0) adopt(qp, index, flags);
        return;
      }
      case Command::get_queue_pair:
        words_to_host(&queue_pair(index), sizeof(QueuePair));
        if (lane_ == 0 && (flags & kFreeze) != 0) queue_pair(index).state = mlx5::kReset;
        return;
      case Command::put_completion_queue:
        words_from_host(&completion_queue(index), sizeof(CompletionQueue));
        return;
      case Command::get_completion_queue:
        words_to_host(&completion_queue(index), sizeof(CompletionQueue));
        return;
      case Command::set_peer: words_from_host(&queue_pair(index).peer, sizeof(PeerFacts)); return;
      default: return;
    }
  }

  __device__ void adopt(QueuePair& qp, std::uint32_t index, std::uint32_t flags) {
    qp.send_cq = &completion_queue(qp.send_index);
    qp.receive_cq = &completion_queue(qp.receive_index);
    if ((flags & kPrime) != 0) {
      const Hints hints = load_hints<GpuAccess>(qp);
      qp.last_record = hints.record;
      qp.last_doorbell = hints.doorbell;
    }
    if ((flags & kClearCell) != 0 && qp.doorbell != nullptr) {
      store_relaxed<Scope::system>(qp.doorbell, std::uint64_t{0});
    }
    if (index >= the_block().queue_count) volatile_store(the_block().queue_count, index + 1);
  }

  unsigned lane_;
  std::uint32_t halts_ = 0;
};

__device__ __noinline__ void manage(unsigned lane) { Manager(lane).work(); }

}  // namespace
}  // namespace marrow::softnic::gpu
