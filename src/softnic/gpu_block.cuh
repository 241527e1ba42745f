// SPDX-License-Identifier: Apache-2.0
// The engine block's shared memory, the copies that its warps make together, and the Env that
// QueueMachine sees on a GPU.
#pragma once

#include <cstdint>

#include "softnic/gpu_access.cuh"
#include "softnic/gpu_layout.hpp"
#include "softnic/queue_machine.hpp"

namespace marrow::softnic::gpu {

inline constexpr std::uint32_t kCachedRegions = 16;
/// Pieces of a copy that warps take one by one.
inline constexpr std::uint64_t kChunk = 4 * 1024;
static_assert(GpuAccess::kTurnBytes / kChunk < 0x8000);
/// Below it a warp copies alone.
inline constexpr std::uint64_t kTogether = 16 * 1024;
/// For the SM's copy engine: eight stages and their barriers, half of the stages being loaded. As much as there is:
/// 44 KiB on their way at 46 GB/s is 0.96 us.
inline constexpr std::uint32_t kScratchBytes = 8 * 11 * 1024 + 128;

/// A long copy: whoever has nothing else to do takes chunks of it.
struct Board {
  std::uint32_t taken;  ///< 1: one warp's copy stands here
  std::uint32_t done;   ///< chunks
  /// How many chunks << 16 | the next one. One word, so that who takes a chunk knows that it exists; what
  /// describes the copy then stays until that chunk is done.
  std::uint32_t next;
  std::byte* to;
  const std::byte* from;
  std::uint64_t bytes;
};

/// What serving a small WRITE needs to know of a queue, together.
struct alignas(16) FastQueue {
  const std::byte* sq = nullptr;
  mlx5::Cqe* entries = nullptr;
  std::uint32_t mask = 0;
  std::uint32_t entry_mask = 0;
  std::uint32_t lap = 0;     ///< the bit of an entry's number that is its owner bit; 0: collapsed
  std::uint32_t qpn_ds = 0;  ///< second word of a WRITE of one piece
  std::uint32_t user_index = 0;  ///< big endian
  std::uint32_t pd = 0;
  std::uint32_t peer_process = 0;
  std::uint32_t peer_pd = 0;

  FastQueue() = default;
  explicit __device__ FastQueue(const QueuePair& qp) {
    const CompletionQueue& cq = *qp.send_cq;
    sq = qp.sq;
    entries = cq.ring;
    mask = qp.depth - 1;
    entry_mask = cq.collapsed ? 0 : cq.entries - 1;
    lap = cq.collapsed ? 0 : cq.entries;
    qpn_ds = mlx5::qpn_ds_word(qp.qpn, 3);
    user_index = mlx5::to_big32(qp.user_index);
    pd = qp.pd;
    peer_process = qp.peer.process;
    peer_pd = qp.peer.pd;
  }
};

struct Block {
  Launch launch;
  Region cache[kWorkers][kCachedRegions];
  FastQueue fast[kFastQueuePairs];
  QueuePair queue_pairs[kHotQueuePairs];
  CompletionQueue completion_queues[kHotCompletionQueues];
  Work work[kWorkers];
  CopyPiece piece[kWorkers];  ///< what QueueMachine or the fast loop wants to have moved
  std::uint32_t
      after[kWorkers];  ///< the lane whose queue had its turn last: those behind it come first
  bool piece_completes[kWorkers];   ///< and what its WQE asks for, for the fast loop
  std::uint64_t request[kWorkers];  ///< for a key, see Mailbox::wanted; 0: none
  std::uint64_t failures[kWorkers];
  Board board;
  // Between the manager and the workers.
  std::uint32_t
      attention;  ///< counted up when a worker should look at stop, inboxes, stalled or the board
  std::uint32_t stop;     ///< number of the halt that the manager wants
  std::uint32_t stopped;  ///< workers that have halted
  std::uint32_t go;       ///< number of the halt that is over
  std::uint32_t quit;     ///< Left, or 0
  std::uint32_t active;   ///< some worker did something
  std::uint32_t stalled;
  std::uint32_t inboxes;  ///< counts requests of peers
  std::uint32_t queue_count;
  std::uint32_t scratch_taken;
  alignas(128) std::byte scratch[kScratchBytes];
};
static_assert(sizeof(Block) <= 227 * 1024);

/// Everything that warps look at often is in shared memory, and reached without a pointer: the acquire load of
/// each doorbell empties L1, so a pointer, a parameter or a spilled register in memory would cost a trip to L2
/// every time.
#if defined(__CUDACC__)
__device__ __forceinline__ Block& the_block() { return *dynamic_shared<Block>(); }
#else
Block& the_block();  // of the emulated GPU (tests/unit/emulated_gpu.hpp)
#endif
__device__ __forceinline__ const Launch& the_launch() { return the_block().launch; }

template <class T>
__device__ T volatile_load(const T& word) {
  return *const_cast<const volatile T*>(&word);
}
template <class T>
__device__ void volatile_store(T& word, T value) {
  *const_cast<volatile T*>(&word) = value;
}

/// Has every worker look at the words between it and the others; the caller has changed one of them.
__device__ inline void call_attention() {
  __threadfence_block();
  atomicAdd(&the_block().attention, 1u);
}

__device__ __forceinline__ QueuePair& queue_pair(std::uint32_t index) {
  return index < kHotQueuePairs ? the_block().queue_pairs[index]
                                : the_launch().tables->queue_pairs[index];
}
__device__ __forceinline__ CompletionQueue& completion_queue(std::uint32_t index) {
  return index < kHotCompletionQueues ? the_block().completion_queues[index]
                                      : the_launch().tables->completion_queues[index];
}

/// Whether there is a chunk to take.
__device__ __forceinline__ bool is_open(std::uint32_t next) { return (next & 0xffff) < next >> 16; }
__device__ __forceinline__ bool board_open() {
  return is_open(volatile_load(the_block().board.next));
}

/// One chunk of a long copy: 8 loads of 16 bytes in flight a lane.
__device__ inline void copy_chunk(std::byte* to, const std::byte* from, std::uint64_t bytes,
                                  unsigned lane) {
#if defined(__CUDACC__)
  const auto either = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  constexpr int kLoads = kChunk / (32 * sizeof(uint4));
  if ((either & 15) == 0 && bytes == kChunk) {
    const auto* source = reinterpret_cast<const uint4*>(from) + lane;
    auto* target = reinterpret_cast<uint4*>(to) + lane;
    __builtin_assume(__isGlobal(source));
    __builtin_assume(__isGlobal(target));
    uint4 value[kLoads];
    MARROW_UNROLL
    for (int i = 0; i < kLoads; ++i) value[i] = source[i * 32];
    MARROW_UNROLL
    for (int i = 0; i < kLoads; ++i) target[i * 32] = value[i];
    return;
  }
#endif
  copy(to, from, bytes, lane, 32);
}

/// Takes chunks of the copy on the board while there are any. By a whole warp.
__device__ inline void help(unsigned lane) {
  Board& board = the_block().board;
  std::uint32_t mine = 0, chunks = 0;
  for (;;) {
    if (lane == 0) mine = board_open() ? atomicAdd(&board.next, 1u) : 0;
    mine = __shfl_sync(0xffffffffu, mine, 0);
    if (!is_open(mine)) break;
    // What describes the copy was written before the word that this chunk came from.
    if (chunks++ == 0) __threadfence_block();
    const std::uint64_t start = (mine & 0xffff) * kChunk;
    const std::uint64_t total = volatile_load(board.bytes);
    const std::uint64_t bytes = total - start < kChunk ? total - start : kChunk;
    copy_chunk(volatile_load(board.to) + start, volatile_load(board.from) + start, bytes, lane);
  }
  __syncwarp();
  if (lane == 0 && chunks != 0) {
    __threadfence_block();  // meets the owner's fence: its completion covers our stores
    atomicAdd(&board.done, chunks);
  }
}

/// Copies by the SM's copy engine, which one lane keeps as busy as all warps would; one copy at a time.
/// By a whole warp. @return whether it did, but for at most 15 bytes at the end
__device__ inline bool copy_by_engine(unsigned lane, const CopyPiece& piece) {
  Block& block = the_block();
  const auto either =
      reinterpret_cast<std::uintptr_t>(piece.to) | reinterpret_cast<std::uintptr_t>(piece.from);
  if ((either & 15) != 0) return false;
  std::uint32_t busy = 0;
  if (lane == 0) busy = atomicCAS(&block.scratch_taken, 0u, 1u);
  if (__shfl_sync(0xffffffffu, busy, 0) != 0) return false;
  if (lane == 0) {
    __threadfence_block();
    bulk_copy(piece.to, piece.from, piece.bytes & ~std::uint64_t{15},
              Scratch{block.scratch, kScratchBytes}, 0, 1);
    __threadfence_block();
    atomicExch(&block.scratch_taken, 0u);
  }
  __syncwarp();
  return true;
}

/// Copies with whoever is free. By a whole warp; complete when it returns.
__device__ inline void copy_together(unsigned lane, const CopyPiece& piece) {
  Board& board = the_block().board;
  if (piece.bytes <= kTogether) {
    copy(piece.to, piece.from, piece.bytes, lane, 32);
    __syncwarp();
    return;
  }
  if (copy_by_engine(lane, piece)) {
    const std::uint64_t done = piece.bytes & ~std::uint64_t{15};
    if (done != piece.bytes) {
      copy(piece.to + done, piece.from + done, piece.bytes - done, lane, 32);
      __syncwarp();
    }
    return;
  }
  for (;;) {
    std::uint32_t busy = 0;
    if (lane == 0) busy = atomicCAS(&board.taken, 0u, 1u);
    if (__shfl_sync(0xffffffffu, busy, 0) == 0) break;
    help(lane);
  }
  const auto chunks = static_cast<std::uint32_t>((piece.bytes + kChunk - 1) / kChunk);
  if (lane == 0) {
    volatile_store(board.to, piece.to);
    volatile_store(board.from, piece.from);
    volatile_store(board.bytes, piece.bytes);
    volatile_store(board.done, 0u);
    __threadfence_block();
    volatile_store(board.next, chunks << 16);
    call_attention();
  }
  __syncwarp();
  help(lane);
  if (lane == 0) {
    while (volatile_load(board.done) != chunks) {
    }
    __threadfence_block();
    atomicExch(&board.taken, 0u);
  }
  __syncwarp();
}

/// Whether small WRITEs of a queue in state ready to send may go a lane each.
__device__ inline bool fast_ready(const QueuePair& qp) {
  const CompletionQueue& cq = *qp.send_cq;
  return qp.stage == QueuePair::Stage::fetch && qp.peer.answer == PeerFacts::connected &&
         (qp.peer.access & verbs::IBV_ACCESS_REMOTE_WRITE) != 0 && cq.shared == 0 &&
         cq.overrun_ignored && !cq.overrun && the_launch().faults.any == 0;
}

/// The surroundings of QueueMachine, for one lane.
class GpuEnv {
 public:
  using Access = GpuAccess;

  explicit __device__ GpuEnv(unsigned warp) : warp_(warp) {}

  __device__ std::uint32_t process() const { return the_launch().process; }
  __device__ Work& work(QueuePair&) { return the_block().work[warp_]; }

  /// A region of the table by way of this warp's cache. One lane at a time.
  __device__ const Region* find(std::uint32_t key) {
    const std::uint32_t slot = key >> 8;
    if (slot < kFirstRegion || slot >= kMaxRegions) return nullptr;
    Region& near = the_block().cache[warp_][slot % kCachedRegions];
    if (near.key != key) {
      const Region& far = the_launch().tables->regions[slot];
      if (far.key != key) return nullptr;
      near = far;
    }
    return &near;
  }
  /// Only what the cache has: for many lanes at once.
  __device__ const Region* near(std::uint32_t key) const {
    const Region& region = the_block().cache[warp_][(key >> 8) % kCachedRegions];
    return region.key == key && key != 0 ? &region : nullptr;
  }

  __device__ const Region* local(std::uint32_t key) {
    const Region* region = find(key);
    return region != nullptr && region->process == the_launch().process ? region : nullptr;
  }
  /// A key that the table lacks may be of another process, not yet mapped: the host is asked once.
  __device__ const Region* remote(std::uint32_t key, bool& later) {
    if (const Region* region = find(key)) return region;
    const std::uint32_t slot = key >> 8;
    if (slot < kFirstRegion || slot >= kMaxRegions) return nullptr;
    std::uint64_t& request = the_block().request[warp_];
    later = true;
    if ((request & 1ull << 63) != 0) {  // one is under way
      if (GpuAccess::load_acquire(&the_launch().mailbox->answered[warp_]) != request)
        return nullptr;
      const bool ours = static_cast<std::uint32_t>(request) == key;
      request &= ~(1ull << 63);
      if (ours) {
        later = false;
        return find(key);
      }
    }
    request = ((request >> 32) + 1) << 32 | key | 1ull << 63;
    store_relaxed<Scope::system>(&the_launch().tables->replies.wanted[warp_], request);
    return nullptr;
  }

  /// Memory that only its owner can touch, and SEND: CPU engines only.
  __device__ bool asks_owner(std::uint32_t) const { return false; }
  __device__ Outcome message(QueuePair&, const Operation&, Nanoseconds) const {
    return {Outcome::failed, mlx5::kLocalQpOperationError, Reason::not_on_this_engine};
  }
  __device__ const PeerFacts& peer(const QueuePair& qp) const { return qp.peer; }
  __device__ QpSlot& peer_slot(const QueuePair& qp) const { return *qp.peer_slot; }
  __device__ void ring(QpSlot& slot) const {
    const std::uint32_t process = GpuAccess::load_relaxed(word(slot.process)) % kMaxProcesses;
    auto* rings = word(the_launch().directory->processes[process].inbox_rings);
    atomicAdd_system(reinterpret_cast<unsigned long long*>(rings), 1ull);
  }

  __device__ CompletionQueue* completion_queue(std::uint32_t cqn) const {
    CompletionQueue& found = gpu::completion_queue(completion_queue_slot(cqn));
    return cqn != 0 && found.cqn == cqn ? &found : nullptr;
  }
  __device__ bool post(CompletionQueue& cq, const Completion& completion) const {
    if (volatile_load(cq.shared) == 0) return post_completion<GpuAccess>(cq, completion);
    while (atomicCAS(&cq.lock, 0u, 1u) != 0) {
    }
    __threadfence_block();
    const bool good = post_completion<GpuAccess>(cq, completion);
    __threadfence_block();
    atomicExch(&cq.lock, 0u);
    return good;
  }

  template <class Word, class Update>
  __device__ Word update(std::byte* at, Update&& next) const {
    auto* word = reinterpret_cast<Word*>(at);
    Word old = load_relaxed<Scope::system>(word);
    for (;;) {
      const Word seen = GpuAccess::compare_swap(word, old, next(old));
      if (seen == old) return old;
      old = seen;
    }
  }
  template <class Word>
  __device__ Word fetch_add(std::byte* at, Word n) const {
    return GpuAccess::fetch_add(reinterpret_cast<Word*>(at), n);
  }
  template <class Word>
  __device__ Word compare_swap(std::byte* at, Word expected, Word desired) const {
    return GpuAccess::compare_swap(reinterpret_cast<Word*>(at), expected, desired);
  }

  __device__ void set_state(QueuePair& qp, mlx5::QpState state) const {
    qp.state = state;
    // Release: who learns of the failure finds its completion entry.
    GpuAccess::store_release(word(qp.slot->state), state);
    if (state == mlx5::kError) {
      publish<Scope::system>(
          Store{&the_launch().tables->replies.failures[warp_], ++the_block().failures[warp_]});
    }
  }

  // --- faults: as class Faults, with counters that all warps share -----------------------------------

  __device__ Fate next_wqe() const {
    const FaultOptions& f = the_launch().faults;
    if (f.any == 0) return Fate::normal;
    const std::uint64_t number = count(the_launch().tables->wqes);
    if (number == f.drop) return Fate::dropped;
    if (number == f.error_at) return Fate::failed;
    if (number == f.stall) return Fate::stalled;
    return Fate::normal;
  }
  __device__ Nanoseconds delay() const {
    const Nanoseconds most = the_launch().faults.delay;
    return most == 0 ? 0 : pick(most + 1);
  }
  __device__ bool corrupts_write() const {
    return the_launch().faults.corrupt != 0 &&
           count(the_launch().tables->writes) == the_launch().faults.corrupt;
  }
  __device__ std::uint64_t pick(std::uint64_t bound) const {
    std::uint64_t z = atomicAdd(reinterpret_cast<unsigned long long*>(&the_launch().tables->random),
                                0x9e3779b97f4a7c15ull) +
                      the_launch().faults.seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (z ^ (z >> 31)) % bound;
  }
  __device__ bool skips_queue() const { return the_launch().faults.reorder != 0 && pick(4) == 0; }
  __device__ Nanoseconds retry_limit() const { return the_launch().faults.retry; }
  __device__ void stall(Nanoseconds now) const {
    volatile_store(the_launch().tables->stalled_until, the_launch().faults.stall_time == 0
                                                           ? ~Nanoseconds{0}
                                                           : now + the_launch().faults.stall_time);
    __threadfence_block();
    volatile_store(the_block().stalled, 1u);
    call_attention();
  }
  __device__ bool stalled() const { return volatile_load(the_block().stalled) != 0; }

  __device__ void failed(const QueuePair&, const Control&, mlx5::Syndrome) const {}
  __device__ void overran(const QueuePair&) const {}

 private:
  static __device__ std::uint64_t count(std::uint64_t& counter) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(&counter), 1ull) + 1;
  }

  unsigned warp_;
};

}  // namespace marrow::softnic::gpu
