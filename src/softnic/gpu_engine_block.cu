// SPDX-License-Identifier: Apache-2.0
// The NIC as one persistent block on a GPU. 15 warps serve queues (queue i is warp i % 15's), a lane looks at
// one queue's doorbell; WQEs run through QueueMachine, by one lane, except that runs of small WRITEs go a WQE a
// lane and long copies take all warps that are free. The last warp, the manager, carries out the host's
// commands while the others stand still, and ends the block when the host says so, when there is nothing to
// do, or when the host's heartbeat stops. All state outlives the block: the host simply starts it again.
#include <cuda_runtime.h>

#include "softnic/gpu_block.cuh"

namespace marrow::softnic::gpu {
namespace {

constexpr unsigned kAll = 0xffffffffu;
/// WQEs of one queue before the warp looks at its other ones.
constexpr std::uint32_t kTurnWqes = 128;

template <class T>
__device__ T from_lane(T value, int lane) {
  return __shfl_sync(kAll, value, lane);
}

__device__ __noinline__ void help_all(unsigned lane) {
  while (help(lane)) {
  }
}
__device__ __noinline__ void copy_now(unsigned lane, unsigned warp) {
  copy_together(lane, the_block().piece[warp]);
}

/// QueueMachine's steps; apart, so that their registers do not count in the loops around them.
__device__ __noinline__ Turn general_step(unsigned warp, QueuePair& qp) {
  GpuEnv env(warp);
  CopyPiece piece;
  const Turn turn = QueueMachine<GpuEnv>(env).advance(qp, now_ns(), piece);
  if (turn == Turn::copy) the_block().piece[warp] = piece;
  return turn;
}
__device__ __noinline__ void stop_overrun(unsigned warp, QueuePair& qp) {
  GpuEnv env(warp);
  QueueMachine<GpuEnv>(env).stop_overrun(qp);
}
__device__ __noinline__ bool serve_inbox(unsigned warp, QueuePair& qp) {
  GpuEnv env(warp);
  return QueueMachine<GpuEnv>(env).serve_inbox(qp);
}

/// One WQE of one block, in registers.
struct Small {
  std::byte* to = nullptr;  ///< null: a NOP
  const std::byte* from = nullptr;
  std::uint64_t value = 0;
  std::uint32_t bytes = 0;  ///< 4 or 8
  std::uint8_t opcode = 0;
  bool completes = false;
  bool good = false;
};

/// A WRITE of one aligned word, or a NOP, that passes every check; everything else is left to QueueMachine,
/// which says what is wrong with it.
__device__ __forceinline__ Small small_write(const GpuEnv& env, const QueuePair& qp,
                                             std::uint16_t index) {
  using mlx5::from_big32;
  Small small;
  const auto* block = reinterpret_cast<const uint4*>(qp.sq + (index & (qp.depth - 1)) *
                                                                 std::size_t{mlx5::kBlockBytes});
  const uint4 head = __ldcg(block), target = __ldcg(block + 1), data = __ldcg(block + 2);
  const std::uint32_t first = from_big32(head.x), second = from_big32(head.y);
  Control control;
  control.opcode = static_cast<std::uint8_t>(first);
  control.index = static_cast<std::uint16_t>(first >> 8);
  control.ds = second & 0x3f;
  control.qpn = second >> 8;
  control.fm_ce_se = static_cast<std::uint8_t>(head.z >> 24);
  if (QueueMachine<GpuEnv>::misplaced(qp, control, index) != Reason::none) return small;
  small.opcode = control.opcode;
  const std::uint8_t mode = control.fm_ce_se & mlx5::kCompletionMask;
  small.completes = mode == mlx5::kCompletionAlways || mode == mlx5::kCompletionAndEvent;
  if (control.opcode == mlx5::kNop) {
    small.good = control.ds <= 4;
    return small;
  }
  if (control.opcode != mlx5::kWrite || control.ds != 3) return small;
  const std::uint32_t count = from_big32(data.x);
  small.bytes = count & mlx5::kByteCountMask;
  if (small.bytes != 8 && small.bytes != 4) return small;
  const Region* remote = env.near(from_big32(target.z));
  if (remote == nullptr || remote->process != qp.peer.process || remote->pd != qp.peer.pd ||
      (remote->access & qp.peer.access & verbs::IBV_ACCESS_REMOTE_WRITE) == 0) {
    return small;
  }
  const auto big64 = [](std::uint32_t high, std::uint32_t low) {
    return std::uint64_t{from_big32(high)} << 32 | from_big32(low);
  };
  std::byte* to = remote->at(big64(target.x, target.y), small.bytes);
  if (to == nullptr || (reinterpret_cast<std::uintptr_t>(to) & (small.bytes - 1)) != 0)
    return small;
  if ((count & mlx5::kInlineFlag) != 0) {
    small.value = data.y | std::uint64_t{data.z} << 32;
  } else {
    const Region* local = env.near(from_big32(data.y));
    if (local == nullptr || local->pd != qp.pd || local->process != env.process()) return small;
    const std::byte* from = local->at(big64(data.z, data.w), small.bytes);
    if (from == nullptr || (reinterpret_cast<std::uintptr_t>(from) & (small.bytes - 1)) != 0) {
      return small;
    }
    small.from = from;
  }
  small.to = to;
  small.good = true;
  return small;
}

/// Smallest or largest value of the lanes.
template <class Better>
__device__ std::uint64_t best(std::uint64_t value, Better&& better) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kAll, value, distance);
    if (better(other, value)) value = other;
  }
  return value;
}

class Worker {
 public:
  __device__ Worker(unsigned warp, unsigned lane) : warp_(warp), lane_(lane) {}

  __device__ void work() {
    std::uint32_t halts = 0;
    std::uint32_t inboxes = volatile_load(the_block().inboxes);
    for (;;) {
      if (!go_on(halts)) return;
      if (from_lane(board_open(), 0)) help_all(lane_);
      const std::uint32_t requests = from_lane(volatile_load(the_block().inboxes), 0);
      const bool answer = requests != inboxes;
      inboxes = requests;
      const std::uint32_t count = from_lane(volatile_load(the_block().queue_count), 0);
      if (from_lane(volatile_load(the_block().stalled), 0) != 0) continue;
      bool active = false;
      for (std::uint32_t first = warp_; first < count; first += kWorkers * 32) {
        active |= look(first, count);
        if (answer) active |= answer_peers(first, count);
      }
      if (active && lane_ == 0) volatile_store(the_block().active, 1u);
    }
  }

 private:
  /// Halts while the manager changes tables. @return false when the block ends
  __device__ bool go_on(std::uint32_t& halts) {
    const std::uint32_t wanted = from_lane(volatile_load(the_block().stop), 0);
    if (wanted == halts) return true;
    halts = wanted;
    if (lane_ == 0) {
      __threadfence_block();
      atomicAdd(&the_block().stopped, 1u);
    }
    for (;;) {
      if (from_lane(volatile_load(the_block().quit), 0) != 0) return false;
      if (from_lane(volatile_load(the_block().go), 0) == wanted) break;
    }
    if (lane_ == 0) __threadfence_block();
    // What the tables said may have changed.
    if (lane_ < kCachedRegions) the_block().cache[warp_][lane_].key = 0;
    if (lane_ == 0) the_block().work[warp_].qpn = 0;
    __syncwarp();
    return true;
  }

  /// Looks at 32 queues' doorbells, a lane each, and serves those that have something to do.
  __device__ bool look(std::uint32_t first, std::uint32_t count) {
    const std::uint32_t index = first + lane_ * kWorkers;
    Hints hints;
    bool due = false;
    if (index < count) {
      const QueuePair& qp = queue_pair(index);
      if (qp.depth != 0 && (qp.state == mlx5::kReadyToSend || qp.state == mlx5::kError)) {
        hints = poll(qp);
        due = changed(qp, hints) || qp.consumer != qp.producer;
      }
    }
    std::uint32_t left = __ballot_sync(kAll, due);
    bool active = false;
    while (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      Hints its;
      its.doorbell = from_lane(hints.doorbell, lane);
      its.other_doorbell = from_lane(hints.other_doorbell, lane);
      its.record = from_lane(hints.record, lane);
      active |= serve(queue_pair(first + lane * kWorkers), its);
    }
    return active;
  }

  __device__ static bool changed(const QueuePair& qp, const Hints& hints) {
    return hints.doorbell != qp.last_doorbell || hints.record != qp.last_record ||
           hints.other_doorbell != qp.last_other_doorbell;
  }

  /// All words with one round trip. The acquire meets the poster's release before its doorbell, so its
  /// WQEs and payload are readable; another word that changed alone is followed by a fence instead.
  __device__ static Hints poll(const QueuePair& qp) {
    Hints hints;
    if (qp.record != nullptr) {
      hints.record = load_relaxed<Scope::system>(&qp.record->send);
    }
    if (qp.other_doorbell != nullptr) {
      hints.other_doorbell = load_relaxed<Scope::system>(qp.other_doorbell);
    }
    if (qp.doorbell != nullptr) {
      hints.doorbell = observe<Scope::system>(qp.doorbell);
    }
    if (hints.doorbell == qp.last_doorbell && changed(qp, hints)) settle<Scope::system>();
    return hints;
  }

  __device__ bool serve(QueuePair& qp, const Hints& hints) {
    if (the_launch().faults.reorder != 0 && from_lane(env().skips_queue(), 0)) return false;
    bool good = true;
    if (lane_ == 0 && !update_producer(qp, hints) && qp.state == mlx5::kReadyToSend) {
      good = false;
      stop_overrun(warp_, qp);
    }
    __syncwarp();
    if (!from_lane(good, 0)) return true;
    bool active = false;
    for (std::uint32_t turns = 0; turns < kTurnWqes;) {
      const std::uint32_t run = serve_small(qp);
      if (run != 0) {
        turns += run;
        active = true;
        continue;
      }
      Turn turn = Turn::idle;
      if (lane_ == 0 && qp.consumer != qp.producer) turn = general_step(warp_, qp);
      turn = static_cast<Turn>(from_lane(static_cast<int>(turn), 0));
      __syncwarp();
      if (turn == Turn::idle) break;
      active = true;
      if (turn == Turn::more) break;
      ++turns;
      if (turn == Turn::copy) copy_now(lane_, warp_);
    }
    return active;
  }

  __device__ GpuEnv env() const { return GpuEnv(warp_); }

  /// A run of small WRITEs at the queue's head, a lane each, with one release for all their completions.
  /// @return how many, 0: the head is none
  __device__ std::uint32_t serve_small(QueuePair& qp) {
    const auto pending = static_cast<std::uint16_t>(qp.producer - qp.consumer);
    if (pending == 0 || qp.state != mlx5::kReadyToSend || qp.stage != QueuePair::Stage::fetch ||
        qp.peer.answer != PeerFacts::connected || the_launch().faults.any != 0) {
      return 0;
    }
    CompletionQueue& cq = *qp.send_cq;
    if (cq.shared != 0 || !cq.overrun_ignored || cq.overrun) return 0;
    Small small;
    if (lane_ < pending) {
      small = small_write(env(), qp, static_cast<std::uint16_t>(qp.consumer + lane_));
    }
    const std::uint32_t bad = __ballot_sync(kAll, !small.good);
    std::uint32_t run = bad == 0 ? 32 : __ffs(static_cast<int>(bad)) - 1;
    if (run == 0) return 0;
    if (run > 1 && in_each_others_way(small, run)) run = 1;
    const bool mine = lane_ < run;
    if (mine && small.to != nullptr) {
      if (small.bytes == 8) {
        if (small.from != nullptr) {
          small.value =
              load_relaxed<Scope::system>(reinterpret_cast<const std::uint64_t*>(small.from));
        }
        store_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(small.to), small.value);
      } else {
        if (small.from != nullptr) {
          small.value =
              load_relaxed<Scope::system>(reinterpret_cast<const std::uint32_t*>(small.from));
        }
        store_relaxed<Scope::system>(reinterpret_cast<std::uint32_t*>(small.to),
                                     static_cast<std::uint32_t>(small.value));
      }
    }
    complete_small(qp, cq, small, mine, run);
    return run;
  }

  /// Whether the order of the lanes' WRITEs matters: two go to one word, or one reads where others write.
  __device__ bool in_each_others_way(const Small& small, std::uint32_t run) const {
    const bool writes = lane_ < run && small.to != nullptr;
    const std::uint64_t to = reinterpret_cast<std::uint64_t>(small.to) >> 3;
    const std::uint64_t from = reinterpret_cast<std::uint64_t>(small.from) >> 3;
    const std::uint32_t same = __match_any_sync(kAll, writes ? to : ~std::uint64_t{lane_});
    const std::uint64_t low =
        best(writes ? to : ~std::uint64_t{0}, [](auto a, auto b) { return a < b; });
    const std::uint64_t high = best(writes ? to : 0, [](auto a, auto b) { return a > b; });
    const bool clash = (same & (same - 1)) != 0 ||
                       (writes && small.from != nullptr && from >= low && from <= high);
    return __any_sync(kAll, clash);
  }

  __device__ void complete_small(QueuePair& qp, CompletionQueue& cq, const Small& small, bool mine,
                                 std::uint32_t run) {
    const bool completes = mine && small.completes;
    const std::uint32_t all = __ballot_sync(kAll, completes);
    if (all != 0) {
      const std::uint32_t number = cq.produced + __popc(all & ((1u << lane_) - 1));
      // A collapsed queue's one entry tells of the last.
      const bool writes = completes && (!cq.collapsed || (all >> lane_) == 1);
      auto* entry =
          reinterpret_cast<std::uint32_t*>(&cq.ring[cq.collapsed ? 0 : number & (cq.entries - 1)]);
      const std::uint32_t owner = cq.collapsed ? 0u : ((number & cq.entries) != 0 ? 1u : 0u);
      if (writes) {
        GpuAccess::store_body(entry, mlx5::to_big32(qp.user_index), 0, 0, 0,
                              mlx5::to_big32(std::uint32_t{small.opcode} << 24 | qp.qpn));
      }
      __syncwarp();  // every lane's release covers the WRITEs of the lanes before it
      if (writes) {
        const auto index = static_cast<std::uint16_t>(qp.consumer + lane_);
        GpuAccess::store_completion(entry + 15,
                                    mlx5::to_big32(std::uint32_t{index} << 16 |
                                                   std::uint32_t{mlx5::kRequester} << 4 | owner));
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      cq.produced += __popc(all);
      if (!cq.failed && all != 0) GpuAccess::store_relaxed(&cq.good, cq.produced);
      QueueMachine<GpuEnv>::retire(qp, run);
    }
    __syncwarp();
  }

  __device__ __noinline__ bool answer_peers(std::uint32_t first, std::uint32_t count) {
    bool active = false;
    for (std::uint32_t i = 0; i < 32 && first + i * kWorkers < count; ++i) {
      QueuePair& qp = queue_pair(first + i * kWorkers);
      if (lane_ == 0 && qp.slot != nullptr && qp.state != mlx5::kReset) {
        active |= serve_inbox(warp_, qp);
      }
    }
    __syncwarp();
    return from_lane(active, 0);
  }

  unsigned warp_;
  unsigned lane_;
};

class Manager {
 public:
  explicit __device__ Manager(unsigned lane) : lane_(lane) {}

  __device__ void work() {
    std::uint64_t done = load_relaxed<Scope::system>(&the_launch().mailbox->done);
    std::uint64_t beat = ~std::uint64_t{0};
    Nanoseconds beat_at = now_ns(), active_at = beat_at, looked_at = beat_at;
    for (;;) {
      help(lane_);
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
          look_around(now);
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
          publish<Scope::system>(Store{&the_launch().mailbox->done, done});
        }
        active_at = now_ns();
      }
      Left left{};
      if (lane_ == 0) {
        if ((command & kQuit) != 0) {
          left = Left::asked;
        } else if (now > active_at && now - active_at > the_launch().idle) {
          left = Left::idle;
        } else if (now > beat_at && now - beat_at > the_launch().heartbeat) {
          left = Left::heartbeat;
        }
      }
      left = static_cast<Left>(from_lane(static_cast<std::uint32_t>(left), 0));
      if (left != Left{}) {
        if (lane_ == 0) volatile_store(the_block().quit, static_cast<std::uint32_t>(left));
        halt();
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
    }
    __syncwarp();
    while (from_lane(volatile_load(the_block().stopped), 0) != kWorkers) help(lane_);
    if (lane_ == 0) __threadfence_block();
    __syncwarp();
  }

  __device__ void look_around(Nanoseconds now) {
    if (volatile_load(the_block().stalled) != 0) {
      const Nanoseconds until = volatile_load(the_launch().tables->stalled_until);
      if (until != ~Nanoseconds{0} && now >= until) {
        volatile_store(the_launch().tables->stalled_until, Nanoseconds{0});
        volatile_store(the_block().stalled, 0u);
      }
    }
    const std::uint64_t rung = load_relaxed<Scope::system>(
        word(the_launch().directory->processes[the_launch().process].inbox_rings));
    if (rung != the_launch().tables->inbox_rings) {
      the_launch().tables->inbox_rings = rung;
      settle<Scope::system>();
      volatile_store(the_block().inboxes, volatile_load(the_block().inboxes) + 1);
    }
  }

  __device__ void words_from_host(void* to, std::uint32_t bytes) const {
    const auto* from = reinterpret_cast<const std::uint64_t*>(the_launch().mailbox->payload);
    for (std::uint32_t i = lane_; i < bytes / 8; i += 32)
      static_cast<std::uint64_t*>(to)[i] = load_relaxed<Scope::system>(from + i);
    __syncwarp();
  }
  __device__ void words_to_host(const void* from, std::uint32_t bytes) const {
    auto* to = reinterpret_cast<std::uint64_t*>(the_launch().mailbox->payload);
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
    Tables& tables = *the_launch().tables;
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

template <class T>
__device__ void copy_table(T* to, const T* from, std::size_t n) {
  static_assert(sizeof(T) % 8 == 0);
  auto* target = reinterpret_cast<std::uint64_t*>(to);
  const auto* source = reinterpret_cast<const std::uint64_t*>(from);
  for (std::size_t i = threadIdx.x; i < n * sizeof(T) / 8; i += blockDim.x) target[i] = source[i];
}

__global__ void __launch_bounds__(kThreads, 1) engine_block(const __grid_constant__ Launch launch) {
  Block& block = the_block();
  Tables& tables = *launch.tables;
  for (std::size_t i = threadIdx.x; i < sizeof(Block) / 8; i += blockDim.x)
    reinterpret_cast<std::uint64_t*>(&block)[i] = 0;
  __syncthreads();
  copy_table(block.queue_pairs, tables.queue_pairs, kHotQueuePairs);
  copy_table(block.completion_queues, tables.completion_queues, kHotCompletionQueues);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    block.launch = launch;
    block.queue_count = launch.queue_pairs;
    block.stalled = tables.stalled_until != 0;
  }
  if (threadIdx.x < kWorkers)
    block.failures[threadIdx.x] =
        load_relaxed<Scope::system>(&launch.mailbox->failures[threadIdx.x]);
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < block.queue_count; i += blockDim.x) {
    QueuePair& qp = queue_pair(i);
    qp.send_cq = &completion_queue(qp.send_index);
    qp.receive_cq = &completion_queue(qp.receive_index);
  }
  __syncthreads();
  if (warp < kWorkers) {
    Worker(warp, lane).work();
  } else {
    manage(lane);
  }
  __syncthreads();
  copy_table(tables.queue_pairs, block.queue_pairs, kHotQueuePairs);
  copy_table(tables.completion_queues, block.completion_queues, kHotCompletionQueues);
  __syncthreads();
  if (threadIdx.x == 0) {
    publish<Scope::system>(Store{&launch.mailbox->left, launch.number << 8 | block.quit});
  }
}

}  // namespace

bool has_block() { return true; }

int prepare_block() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, engine_block);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(engine_block, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(Block));
}

int launch_block(const Launch& launch, void* stream) {
  engine_block<<<1, kThreads, sizeof(Block), static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

}  // namespace marrow::softnic::gpu
