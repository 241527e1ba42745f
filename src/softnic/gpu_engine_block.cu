// SPDX-License-Identifier: Apache-2.0
// The NIC as one persistent block on a GPU. All warps but one serve queues (queue i is warp i % kWorkers's), a lane
// looks at one queue's doorbell; WQEs run through QueueMachine, by one lane, except that runs of small WRITEs go a
// WQE a lane, WRITEs of one piece are seen at once, and long copies take the SM's copy engine or all warps that are
// free (gpu_fast_loop.cuh). The last warp, the manager, carries out the host's commands while the others stand
// still, and ends the block when the host says so, when there is nothing to do, or when the host's heartbeat stops.
// All state outlives the block: the host simply starts it again.
#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

#include "softnic/gpu_fast_loop.cuh"

namespace marrow::softnic::gpu {
namespace {

/// WQEs of one queue before the warp looks at its other ones.
constexpr std::uint32_t kTurnWqes = 128;

__device__ __noinline__ void help_all(unsigned lane) { help(lane); }
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

class Worker {
 public:
  __device__ Worker(unsigned warp, unsigned lane) : warp_(warp), lane_(lane) {}

  __device__ void work() {
    std::uint32_t halts = 0;
    std::uint32_t inboxes = volatile_load(the_block().inboxes);
    for (;;) {
      // First what was announced, then what it announces: what comes later ends the fast loop.
      const std::uint32_t seen = from_lane(volatile_load(the_block().attention), 0);
      __threadfence_block();
      if (!go_on(halts)) return;
      if (from_lane(board_open(), 0)) help_all(lane_);
      const std::uint32_t count = from_lane(volatile_load(the_block().queue_count), 0);
      const std::uint32_t requests = from_lane(volatile_load(the_block().inboxes), 0);
      if (requests != inboxes) {
        inboxes = requests;
        bool active = false;
        for (std::uint32_t first = warp_; first < count; first += kWorkers * 32)
          active |= answer_peers(first, count);
        if (active) note_activity();
      }
      if (from_lane(volatile_load(the_block().stalled), 0) != 0) {
        __nanosleep(1000);
        continue;
      }
      const Found found = fast_loop(warp_, lane_, seen, count, count > kFastQueuePairs);
      switch (found.event) {
        case Event::attention: break;
        case Event::far:
          if (look_far(count)) note_activity();
          break;
        case Event::overrun:
          if (lane_ == 0) stop_overrun(warp_, queue_pair(found.index));
          __syncwarp();
          note_activity();
          break;
        case Event::large:
          serve_large(warp_, lane_, queue_pair(found.index));
          note_activity();
          break;
        case Event::work:
          if (serve(queue_pair(found.index))) note_activity();
          break;
      }
    }
  }

 private:
  /// The block does not end soon.
  __device__ void note_activity() const {
    if (lane_ == 0) volatile_store(the_block().active, 1u);
  }

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

  /// The queues that the fast loop has no room for, by the general way.
  __device__ __noinline__ bool look_far(std::uint32_t count) {
    bool active = false;
    for (std::uint32_t first = warp_; first < count; first += kWorkers * 32) {
      const std::uint32_t index = first + lane_ * kWorkers;
      bool due = false;
      if (index < count && index >= kFastQueuePairs) {
        QueuePair& qp = queue_pair(index);
        if (qp.depth != 0 && (qp.state == mlx5::kReadyToSend || qp.state == mlx5::kError)) {
          const Hints hints = load_hints<GpuAccess>(qp);
          if (!update_producer(qp, hints) && qp.state == mlx5::kReadyToSend) {
            stop_overrun(warp_, qp);
          }
          due = qp.consumer != qp.producer;
        }
      }
      std::uint32_t left = __ballot_sync(kAll, due);
      __syncwarp();
      while (left != 0) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        active |= serve(queue_pair(first + lane * kWorkers));
      }
    }
    return active;
  }

  /// One turn of a queue whose doorbell was taken notice of.
  __device__ __noinline__ bool serve(QueuePair& qp) {
    if (the_launch().faults.reorder != 0 && from_lane(GpuEnv(warp_).skips_queue(), 0)) return false;
    bool active = false;
    for (std::uint32_t turns = 0; turns < kTurnWqes; ++turns) {
      Turn turn = Turn::idle;
      __syncwarp();
      if (lane_ == 0) turn = general_step(warp_, qp);
      turn = static_cast<Turn>(from_lane(static_cast<int>(turn), 0));
      __syncwarp();
      if (turn == Turn::idle) break;
      active = true;
      if (turn == Turn::more) break;
      if (turn == Turn::copy) copy_now(lane_, warp_);
    }
    __syncwarp();
    return active;
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
