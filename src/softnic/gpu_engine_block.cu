// SPDX-License-Identifier: Apache-2.0
// The NIC as one persistent block on a GPU. 15 warps serve queues (queue i is warp i % 15's), a lane looks at
// one queue's doorbell; WQEs run through QueueMachine, by one lane, except that runs of small WRITEs go a WQE a
// lane and long copies take all warps that are free. The last warp, the manager, carries out the host's
// commands while the others stand still, and ends the block when the host says so, when there is nothing to
// do, or when the host's heartbeat stops. All state outlives the block: the host simply starts it again.
#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

#include "softnic/gpu_manager.cuh"

namespace marrow::softnic::gpu {
namespace {

/// WQEs of one queue before the warp looks at its other ones.
constexpr std::uint32_t kTurnWqes = 128;

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

/// What every lane wants to know of a queue pair, in registers: read once, since each access to memory that
/// others see makes the compiler forget what it has read. The leader writes progress back.
struct Hot {
  const std::byte* sq;
  const mlx5::DoorbellRecord* record;
  const std::uint64_t* doorbell;
  const std::uint64_t* other_doorbell;
  CompletionQueue* send_cq;
  std::uint64_t last_doorbell, last_other_doorbell;
  std::uint32_t last_record, qpn, depth, pd, user_index;
  PeerFacts peer;
  std::uint16_t producer, consumer;
  bool ready, small;  ///< in state ready to send; small WRITEs may go a lane each

  explicit __device__ Hot(const QueuePair& qp)
      : sq(qp.sq),
        record(qp.record),
        doorbell(qp.doorbell),
        other_doorbell(qp.other_doorbell),
        send_cq(qp.send_cq),
        last_doorbell(qp.last_doorbell),
        last_other_doorbell(qp.last_other_doorbell),
        last_record(qp.last_record),
        qpn(qp.qpn),
        depth(qp.depth),
        pd(qp.pd),
        user_index(qp.user_index),
        peer(qp.peer),
        producer(qp.producer),
        consumer(qp.consumer),
        ready(qp.state == mlx5::kReadyToSend),
        small(ready && qp.stage == QueuePair::Stage::fetch &&
              qp.peer.answer == PeerFacts::connected) {}
  __device__ void keep_notice(QueuePair& qp) const {
    qp.producer = producer;
    qp.last_doorbell = last_doorbell;
    qp.last_other_doorbell = last_other_doorbell;
    qp.last_record = last_record;
  }
};

/// What a lane knows of the queue whose doorbell it looks at.
struct Watch {
  const std::uint64_t* doorbell = nullptr;
  const std::uint64_t* other_doorbell = nullptr;
  const std::uint32_t* record = nullptr;
  Hints last;
  bool on = false;
  bool pending = false;  ///< WQEs are known that could not be finished

  Watch() = default;
  explicit __device__ Watch(const QueuePair& qp) {
    on = qp.depth != 0 && (qp.state == mlx5::kReadyToSend || qp.state == mlx5::kError);
    doorbell = qp.doorbell;
    other_doorbell = qp.other_doorbell;
    record = qp.record == nullptr ? nullptr : &qp.record->send;
    last.doorbell = qp.last_doorbell;
    last.other_doorbell = qp.last_other_doorbell;
    last.record = qp.last_record;
    pending = qp.consumer != qp.producer;
  }

  /// Whether there is something to do. All words with one round trip: the acquire meets the poster's release
  /// before its doorbell, so its WQEs and payload are readable. Another word that changed may be of a later post
  /// than the doorbell seen: a fence after its load meets that post's release.
  __device__ bool look(Hints& hints) const {
    if (record != nullptr) hints.record = load_relaxed<Scope::system>(record);
    if (other_doorbell != nullptr)
      hints.other_doorbell = load_relaxed<Scope::system>(other_doorbell);
    if (doorbell != nullptr) hints.doorbell = observe<Scope::system>(doorbell);
    if (hints.record == last.record && hints.other_doorbell == last.other_doorbell) {
      return pending || hints.doorbell != last.doorbell;
    }
    settle<Scope::system>();
    return true;
  }
};

/// Queues whose small WRITEs end with one release.
constexpr int kTogetherQueues = 3;
constexpr std::uint32_t kSkipped = ~0u;

/// What is left to do for a run of small WRITEs.
struct Ending {
  std::uint32_t* entry = nullptr;  ///< this lane's completion entry, null: none
  std::uint32_t word = 0;          ///< its last word
  std::uint32_t run = 0;           ///< how many WRITEs; kSkipped: the queue has no turn
  std::uint32_t produced = 0;
  CompletionQueue* cq = nullptr;
};

/// What every lane wants to know of a completion queue.
struct Entries {
  mlx5::Cqe* ring;
  std::uint32_t count, produced;
  bool collapsed, failed;
  bool simple;  ///< posted to by one queue pair, whose entries may overrun

  explicit __device__ Entries(const CompletionQueue& cq)
      : ring(cq.ring),
        count(cq.entries),
        produced(cq.produced),
        collapsed(cq.collapsed),
        failed(cq.failed),
        simple(cq.shared == 0 && cq.overrun_ignored && !cq.overrun) {}
};

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
__device__ __forceinline__ Small small_write(const GpuEnv& env, const Hot& qp,
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
    std::uint32_t count = 0;
    Watch nearest;  // of the first 32 queues of this warp: hardly anybody has more
    bool watches = false;
    for (bool first_time = true;; first_time = false) {
      const std::uint32_t seen = halts;
      if (!go_on(halts)) return;
      if (first_time || halts != seen) {
        count = from_lane(volatile_load(the_block().queue_count), 0);
        nearest = watch(warp_, count);
        watches = __any_sync(kAll, nearest.on);
      }
      if (from_lane(board_open(), 0)) help_all(lane_);
      const std::uint32_t requests = from_lane(volatile_load(the_block().inboxes), 0);
      const bool answer = requests != inboxes;
      inboxes = requests;
      if (from_lane(volatile_load(the_block().stalled), 0) != 0) continue;
      bool active = false;
      if (watches) {
        active = look(nearest, warp_);
      } else {
        __nanosleep(200);  // leaves the others the SM
      }
      for (std::uint32_t first = warp_ + kWorkers * 32; first < count; first += kWorkers * 32) {
        Watch other = watch(first, count);
        active |= look(other, first);
      }
      if (answer) {
        for (std::uint32_t first = warp_; first < count; first += kWorkers * 32)
          active |= answer_peers(first, count);
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

  __device__ Watch watch(std::uint32_t first, std::uint32_t count) const {
    const std::uint32_t index = first + lane_ * kWorkers;
    return index < count ? Watch(queue_pair(index)) : Watch();
  }

  /// Looks at 32 queues' doorbells, a lane each, and serves those that have something to do.
  __device__ bool look(Watch& mine, std::uint32_t first) {
    Hints hints;
    const bool due = mine.on && mine.look(hints);
    std::uint32_t left = __ballot_sync(kAll, due);
    if (left == 0) return false;
    bool active = false;
    // The small WRITEs of up to kTogetherQueues queues end with one release.
    while (left != 0) {
      std::uint32_t rest = left;
      Ending endings[kTogetherQueues];
      MARROW_UNROLL
      for (int i = 0; i < kTogetherQueues; ++i) {
        if (rest == 0) continue;
        const int lane = __ffs(static_cast<int>(rest)) - 1;
        rest &= rest - 1;
        endings[i] = begin(queue_pair(first + lane * kWorkers), hints, lane);
      }
      finish(endings);
      MARROW_UNROLL
      for (int i = 0; i < kTogetherQueues; ++i) {
        if (left == 0) continue;
        const int lane = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const std::uint32_t index = first + lane * kWorkers;
        active |= go_on_serving(queue_pair(index), endings[i].run);
        if (static_cast<int>(lane_) == lane) mine = Watch(queue_pair(index));
      }
    }
    return active;
  }

  /// Takes notice of the doorbell and starts with the small WRITEs at the queue's head.
  __device__ Ending begin(QueuePair& qp, const Hints& hints, int lane) {
    Hints its;
    its.doorbell = from_lane(hints.doorbell, lane);
    its.other_doorbell = from_lane(hints.other_doorbell, lane);
    its.record = from_lane(hints.record, lane);
    __syncwarp();
    Ending ending;
    if (the_launch().faults.reorder != 0 && from_lane(env().skips_queue(), 0)) {
      ending.run = kSkipped;
      return ending;
    }
    Hot hot(qp);
    const bool good = update_producer(hot, its);
    __syncwarp();
    if (lane_ == 0) hot.keep_notice(qp);
    if (!good && hot.ready) {
      if (lane_ == 0) stop_overrun(warp_, qp);
      __syncwarp();
      ending.run = kSkipped;
      return ending;
    }
    return begin_small(qp, hot);
  }

  /// The rest of a queue's turn. @param run  what begin() did
  __device__ bool go_on_serving(QueuePair& qp, std::uint32_t run) {
    if (run == kSkipped) return false;
    bool active = run != 0;
    std::uint32_t turns = run;
    while (turns < kTurnWqes) {
      Hot hot(qp);
      if (hot.consumer == hot.producer) break;
      Ending endings[kTogetherQueues];
      if (turns != 0 || run != 0) endings[0] = begin_small(qp, hot);
      if (endings[0].run != 0) {
        finish(endings);
        turns += endings[0].run;
        active = true;
        continue;
      }
      Turn turn = Turn::idle;
      __syncwarp();
      if (lane_ == 0) turn = general_step(warp_, qp);
      turn = static_cast<Turn>(from_lane(static_cast<int>(turn), 0));
      __syncwarp();
      if (turn == Turn::idle) break;
      active = true;
      if (turn == Turn::more) break;
      ++turns;
      if (turn == Turn::copy) copy_now(lane_, warp_);
    }
    __syncwarp();
    return active;
  }

  __device__ GpuEnv env() const { return GpuEnv(warp_); }

  /// A run of small WRITEs at the queue's head, a lane each; what is left is finish().
  __device__ Ending begin_small(QueuePair& qp, const Hot& hot) {
    Ending ending;
    const auto pending = static_cast<std::uint16_t>(hot.producer - hot.consumer);
    if (pending == 0 || !hot.small || the_launch().faults.any != 0) return ending;
    Small small;
    if (lane_ < pending) {
      small = small_write(env(), hot, static_cast<std::uint16_t>(hot.consumer + lane_));
    }
    CompletionQueue& cq = *hot.send_cq;
    const Entries entries(cq);
    if (!entries.simple) return ending;
    const std::uint32_t bad = __ballot_sync(kAll, !small.good);
    std::uint32_t run = bad == 0 ? 32 : __ffs(static_cast<int>(bad)) - 1;
    if (run == 0) return ending;
    if (run > 1 && in_each_others_way(small, run)) run = 1;
    const bool mine = lane_ < run;
    // The payload is on its way while the entry's body is written.
    if (mine && small.from != nullptr) {
      small.value =
          small.bytes == 8
              ? load_relaxed<Scope::system>(reinterpret_cast<const std::uint64_t*>(small.from))
              : load_relaxed<Scope::system>(reinterpret_cast<const std::uint32_t*>(small.from));
    }
    const bool completes = mine && small.completes;
    const std::uint32_t all = __ballot_sync(kAll, completes);
    const std::uint32_t number = entries.produced + __popc(all & ((1u << lane_) - 1));
    // A collapsed queue's one entry tells of the last.
    if (completes && (!entries.collapsed || (all >> lane_) == 1)) {
      ending.entry = reinterpret_cast<std::uint32_t*>(
          &entries.ring[entries.collapsed ? 0 : number & (entries.count - 1)]);
      GpuAccess::store_body(ending.entry, mlx5::to_big32(hot.user_index), 0, 0, 0,
                            mlx5::to_big32(std::uint32_t{small.opcode} << 24 | hot.qpn));
    }
    if (mine && small.to != nullptr) {
      if (small.bytes == 8) {
        store_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(small.to), small.value);
      } else {
        store_relaxed<Scope::system>(reinterpret_cast<std::uint32_t*>(small.to),
                                     static_cast<std::uint32_t>(small.value));
      }
    }
    const std::uint32_t owner = !entries.collapsed && (number & entries.count) != 0 ? 1u : 0u;
    ending.word =
        mlx5::to_big32(std::uint32_t{static_cast<std::uint16_t>(hot.consumer + lane_)} << 16 |
                       std::uint32_t{mlx5::kRequester} << 4 | owner);
    ending.run = run;
    if (all != 0) {
      ending.cq = &cq;
      ending.produced = entries.produced + __popc(all);
    }
    __syncwarp();
    if (lane_ == 0) {
      cq.produced = entries.produced + __popc(all);
      qp.consumer = static_cast<std::uint16_t>(hot.consumer + run);
    }
    __syncwarp();
    return ending;
  }

  /// One release for all that begin_small() stored, then the words that make its entries valid, in order.
  __device__ void finish(const Ending (&endings)[kTogetherQueues]) {
    bool any = false;
    MARROW_UNROLL
    for (const Ending& ending : endings) any = any || ending.run != 0;
    if (!any) return;
    __syncwarp();  // every lane's release covers the WRITEs of all lanes
    Publication<Scope::system> out;
    MARROW_UNROLL
    for (const Ending& ending : endings) {
      if (ending.entry != nullptr) out.store(ending.entry + 15, ending.word);
      if (lane_ == 0 && ending.cq != nullptr && !ending.cq->failed) {
        GpuAccess::store_relaxed(&ending.cq->good, ending.produced);
      }
    }
    __syncwarp();
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
  if (threadIdx.x < kWorkers) block.failures[threadIdx.x] = tables.replies.failures[threadIdx.x];
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
}

}  // namespace

#if defined(__CUDACC__)
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
#endif

}  // namespace marrow::softnic::gpu
