// SPDX-License-Identifier: Apache-2.0
// What a warp of the engine block does most of the time: looks at doorbells, a lane a queue, and serves WRITEs of a
// word, a lane a WQE. A lone warp needs 4 to 6 cycles an instruction and an L2 trip needs about 500, so this is
// written for few instructions: no calls (what they put on the stack would come from L2 after each acquire, which
// empties L1), hardly a branch, fields compared as they stand in the WQE, how far a queue is in registers of its
// lane, and where its rings lie in shared memory, laid out for 16-byte reads.
#pragma once

#include "softnic/gpu_manager.cuh"

namespace marrow::softnic::gpu {
namespace {

/// WQEs that one look serves: a lane each.
constexpr std::uint32_t kRun = 32;
/// How long a warp rests after so many empty looks in a row: loads that are under way hold up the SM's fences and its
/// copy engine (1 MiB with 128 queue pairs took 33.3 us, with four 28.5). A queue that was idle for milliseconds is seen
/// a microsecond later for that.
__device__ __forceinline__ std::uint32_t rest_after(std::uint32_t empty_looks) {
  return empty_looks > 2048 ? 2000 : empty_looks > 512 ? 500 : empty_looks > 64 ? 100 : 0;
}
/// Every eighth look is at the doorbell records too: they say what doorbells said, but for doorbells that were lost, and
/// each queue's word is a sector of its own on the way to L2.
constexpr std::uint32_t kBetweenRecords = 7;
/// How often a warp with more queues than fit here turns to those.
constexpr std::uint32_t kLooksBeforeFar = 4;

/// One WRITE of one piece, in registers.
struct Plain {
  enum Kind : std::uint32_t {
    other,  ///< not one, or a check fails: QueueMachine's, which also says what is wrong
    small,  ///< an aligned word of 4 or 8 bytes
    large
  };
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  ///< null: `value` is the payload
  std::uint64_t value = 0;
  std::uint32_t bytes = 0;
  bool completes = false;
  Kind kind = other;
};

/// A region as the warp's cache in shared memory has it.
struct Near {
  uint4 head;  ///< key, process, access, pd
  std::uint64_t iova, length, base;

  __device__ Near(unsigned warp, std::uint32_t key) {
    static_assert(sizeof(Region) == 48 && offsetof(Region, iova) == 16 &&
                  offsetof(Region, base) == 32);
    const auto* at =
        reinterpret_cast<const uint4*>(&the_block().cache[warp][(key >> 8) % kCachedRegions]);
    head = at[0];
    const uint4 place = at[1], memory = at[2];
    iova = place.x | std::uint64_t{place.y} << 32;
    length = place.z | std::uint64_t{place.w} << 32;
    base = memory.x | std::uint64_t{memory.y} << 32;
  }
  __device__ bool inside(std::uint64_t start, std::uint32_t bytes) const {
    return (start <= length) & (bytes <= length - start);
  }
};

__device__ __forceinline__ std::uint64_t big64(std::uint32_t high, std::uint32_t low) {
  return std::uint64_t{mlx5::from_big32(high)} << 32 | mlx5::from_big32(low);
}

/// Takes a WQE apart. @param there  false: this lane has none
__device__ __forceinline__ Plain plain_write(unsigned warp, const FastQueue& qp,
                                             std::uint32_t index, bool there) {
  using mlx5::from_big32;
  const auto* block =
      reinterpret_cast<const uint4*>(qp.sq + (index & qp.mask) * std::size_t{mlx5::kBlockBytes});
  uint4 head{}, target{}, data{};
  if (there) {
    head = __ldcg(block);
    target = __ldcg(block + 1);
    data = __ldcg(block + 2);
  }
  Plain plain;
  const std::uint32_t rkey = from_big32(target.z), lkey = from_big32(data.y);
  // Both are looked up whatever the keys are: it costs less than to ask first.
  const Near remote(warp, rkey), local(warp, lkey);
  const bool in_line = (data.x & mlx5::to_big32(mlx5::kInlineFlag)) != 0;
  plain.bytes = from_big32(data.x) & mlx5::kByteCountMask;
  const std::uint32_t mode = head.z >> 24 & mlx5::kCompletionMask;
  plain.completes = mode == mlx5::kCompletionAlways || mode == mlx5::kCompletionAndEvent;
  const std::uint64_t there_start = big64(target.x, target.y) - remote.iova;
  const std::uint64_t here_start = big64(data.z, data.w) - local.iova;
  const std::uint64_t to = remote.base + there_start, from = local.base + here_start;
  // Not &&, which would be branches.
  const bool theirs = (remote.head.x == rkey) & (rkey != 0) & (remote.head.y == qp.peer_process) &
                      (remote.head.w == qp.peer_pd) &
                      ((remote.head.z & verbs::IBV_ACCESS_REMOTE_WRITE) != 0) &
                      remote.inside(there_start, plain.bytes);
  const bool ours =
      in_line | ((local.head.x == lkey) & (lkey != 0) & (local.head.w == qp.pd) &
                 (local.head.y == the_launch().process) & local.inside(here_start, plain.bytes));
  const bool good = there & (head.x == from_big32((index & 0xffff) << 8 | mlx5::kWrite)) &
                    (head.y == qp.qpn_ds) & theirs & ours;
  const bool word = (plain.bytes == 8 || plain.bytes == 4) &&
                    ((to | (in_line ? 0 : from)) & (plain.bytes - 1)) == 0;
  plain.to = reinterpret_cast<std::byte*>(to);
  plain.from = in_line ? nullptr : reinterpret_cast<const std::byte*>(from);
  plain.value = data.y | std::uint64_t{data.z} << 32;
  const bool long_one = !in_line && plain.bytes != 0 && plain.bytes <= GpuAccess::kTurnBytes;
  plain.kind = !good ? Plain::other : word ? Plain::small : long_one ? Plain::large : Plain::other;
  return plain;
}

/// Whether the order of the lanes' WRITEs matters: two go to one word, or one reads where others write.
__device__ __forceinline__ bool in_each_others_way(const Plain& plain, std::uint32_t run,
                                                   unsigned lane) {
  const bool inside = lane < run;
  const std::uint64_t to = reinterpret_cast<std::uint64_t>(plain.to) >> 3;
  const std::uint64_t from = reinterpret_cast<std::uint64_t>(plain.from) >> 3;
  // The usual case: each goes further up than the one before, and nobody reads in between.
  const std::uint64_t before = __shfl_sync(kAll, to, lane == 0 ? 0 : static_cast<int>(lane) - 1);
  const std::uint64_t low = from_lane(to, 0), high = from_lane(to, static_cast<int>(run) - 1);
  const bool odd = inside && ((lane != 0 && to <= before) || (from >= low && from <= high));
  if (!__any_sync(kAll, odd)) return false;
  const std::uint32_t same = __match_any_sync(kAll, inside ? to : ~std::uint64_t{lane});
  std::uint64_t least = inside ? to : ~std::uint64_t{0}, most = inside ? to : 0;
  for (int distance = 16; distance > 0; distance /= 2) {
    const std::uint64_t lower = __shfl_xor_sync(kAll, least, distance);
    const std::uint64_t higher = __shfl_xor_sync(kAll, most, distance);
    if (lower < least) least = lower;
    if (higher > most) most = higher;
  }
  const bool clash = (same & (same - 1)) != 0 ||
                     (inside && plain.from != nullptr && from >= least && from <= most);
  return __any_sync(kAll, clash);
}

/// The entry of completion `number`, all but its last word. @return where it is
__device__ __forceinline__ std::uint32_t* begin_entry(const FastQueue& qp, std::uint32_t number) {
  auto* entry = reinterpret_cast<std::uint32_t*>(&qp.entries[number & qp.entry_mask]);
  // The queue's number without ds, behind the opcode.
  GpuAccess::store_good_body(entry, qp.user_index, 0, qp.qpn_ds << 8 | mlx5::kWrite);
  return entry;
}
__device__ __forceinline__ std::uint32_t last_word(const FastQueue& qp, std::uint32_t number,
                                                   std::uint32_t index) {
  return mlx5::to_big32(index << 16 | std::uint32_t{mlx5::kRequester} << 4 |
                        ((number & qp.lap) != 0 ? 1u : 0u));
}

/// How far one queue is, as its lane keeps it.
struct FastLane {
  const std::uint64_t* doorbell;
  const std::uint32_t* record;
  std::uint64_t last_doorbell = 0;
  std::uint32_t last_record = 0, consumer = 0, pending = 0, produced = 0;
  std::uint32_t flags = 0;

  static constexpr std::uint32_t kFast = 1u << 31;  ///< WRITEs of a word may go a lane each
  static constexpr std::uint32_t kCounts = 1u
                                           << 30;  ///< no entry of the completion queue is an error
  static constexpr std::uint32_t kOn = 1, kReady = 2;
  static constexpr std::uint32_t kOther = 4;       ///< there is a second doorbell
  static constexpr std::uint32_t kRecordOnly = 8;  ///< there is no doorbell
  __device__ bool is(std::uint32_t flag) const { return (flags & flag) != 0; }

  /// Looks at words that nobody writes.
  __device__ FastLane()
      : doorbell(&the_launch().tables->quiet),
        record(reinterpret_cast<const std::uint32_t*>(doorbell)) {}
  __device__ void open(const QueuePair& qp, FastQueue& shared) {
    const bool ready = qp.state == mlx5::kReadyToSend;
    if (qp.depth == 0 || (!ready && qp.state != mlx5::kError)) return;  // may never have been put
    const CompletionQueue& cq = *qp.send_cq;
    flags = kOn | (ready ? kReady : 0) | (ready && fast_ready(qp) ? kFast : 0) |
            (cq.failed ? 0 : kCounts) | (qp.other_doorbell != nullptr ? kOther : 0) |
            (qp.doorbell == nullptr ? kRecordOnly : 0);
    if (qp.doorbell != nullptr) {
      doorbell = qp.doorbell;
      last_doorbell = qp.last_doorbell;
    }
    if (qp.record != nullptr) {
      record = &qp.record->send;
      last_record = qp.last_record;
    }
    produced = cq.produced;
    consumer = qp.consumer;
    pending = static_cast<std::uint16_t>(qp.producer - qp.consumer);
    shared = FastQueue(qp);
  }
  __device__ void keep(QueuePair& qp) const {
    if (!is(kOn)) return;
    qp.consumer = static_cast<std::uint16_t>(consumer);
    qp.producer = static_cast<std::uint16_t>(consumer + pending);
    if (qp.doorbell != nullptr) qp.last_doorbell = last_doorbell;
    if (qp.record != nullptr) qp.last_record = last_record;
    if (is(kFast)) qp.send_cq->produced = produced;
  }
  /// As update_producer() does it. @return false on overrun
  __device__ __forceinline__ bool notice(std::uint64_t cell, std::uint32_t word,
                                         const FastQueue& queue) {
    bool good = true;
    const auto advance = [&](std::uint32_t to, bool counts) {
      const std::uint32_t ahead = (to - consumer) & 0xffff;
      const bool news = counts && ahead <= 0x8000 && ahead > pending;
      const bool fits = ahead <= queue.mask + 1;
      pending = news && fits ? ahead : pending;
      good = good && (!news || fits);
    };
    const auto second = static_cast<std::uint32_t>(cell >> 32);
    const std::uint32_t blocks = mlx5::blocks_of(second >> 24 & 0x3f);
    advance((mlx5::from_big32(static_cast<std::uint32_t>(cell)) >> 8) + blocks,
            cell != last_doorbell && ((second ^ queue.qpn_ds) & 0xffffff) == 0);
    advance(mlx5::from_big32(word), word != last_record);
    last_doorbell = cell;
    last_record = word;
    return good;
  }
};

/// Why the fast loop came back.
enum class Event : std::uint32_t { attention, far, overrun, large, work };
struct Found {
  Event event;
  std::uint32_t index;  ///< of the queue pair, for overrun, large and work
};

/// Runs until there is something else to do.
/// @param seen   of Block::attention; what it announced was looked at
/// @param far    there are queues besides those that a lane of this loop looks at
/// Block::after sees to it that a queue that waits (for another queue's completions, say) holds up nobody.
__device__ __forceinline__ Found fast_loop(unsigned warp, unsigned lane, std::uint32_t seen,
                                           std::uint32_t count, bool far) {
  Block& block = the_block();
  Found found{Event::attention, 0};
  const std::uint32_t index = warp + lane * kWorkers;
  const bool ours = index < count;
  FastLane mine;
  if (ours) mine.open(queue_pair(index), block.fast[index]);
  __syncwarp();  // what a lane has laid out is for all of them
  const bool watches = __any_sync(kAll, mine.is(FastLane::kOn));
  const bool others = __any_sync(kAll, mine.is(FastLane::kOther));
  const bool by_record = __any_sync(kAll, mine.is(FastLane::kRecordOnly));
  std::uint32_t empty = 0, looks = 0, turn = 0;
  for (;;) {
    // All words with one round trip; who finds one changed makes it an acquire by a fence.
    const std::uint64_t cell = load_relaxed<Scope::system>(mine.doorbell);
    std::uint32_t word = mine.last_record;
    if (by_record || (++turn & kBetweenRecords) == 0)
      word = load_relaxed<Scope::system>(mine.record);
    std::uint64_t second = 0;
    if (others && mine.is(FastLane::kOther)) {
      second = load_relaxed<Scope::system>(queue_pair(index).other_doorbell);
    }
    const bool called = volatile_load(block.attention) != seen;
    // Not in a register, which would be one too many.
    const std::uint32_t after = volatile_load(block.after[warp]);
    bool due =
        called || cell != mine.last_doorbell || word != mine.last_record || mine.pending != 0;
    if (others && mine.is(FastLane::kOther))
      due = due || second != queue_pair(index).last_other_doorbell;
    const std::uint32_t left = __ballot_sync(kAll, due);
    if (left == 0) {
      if (far && ++looks == kLooksBeforeFar) {
        found.event = Event::far;
        break;
      }
      const std::uint32_t rest = watches ? rest_after(++empty) : 2000;
      if (rest != 0) __nanosleep(rest);
      continue;
    }
    if (__any_sync(kAll, called)) break;
    if (far && ++looks >= kLooksBeforeFar) {
      found.event = Event::far;
      break;
    }
    empty = 0;
    // Meets the posters' releases before the words just seen: their WQEs and payload are readable. Also by the
    // other lanes, once the warp has met.
    GpuAccess::acquire_fence();
    bool good = true;
    if (due) {
      if (others && mine.is(FastLane::kOther)) {
        // Rare (BlueFlame), so by the general way.
        QueuePair& qp = queue_pair(index);
        mine.keep(qp);
        good = update_producer(qp, Hints{cell, second, word});
        mine.pending = static_cast<std::uint16_t>(qp.producer - qp.consumer);
        mine.last_doorbell = qp.doorbell != nullptr ? cell : 0;
        mine.last_record = qp.record != nullptr ? word : 0;
      } else {
        good = mine.notice(cell, word, block.fast[index]);
      }
    }
    const std::uint32_t overrun = __ballot_sync(kAll, !good && mine.is(FastLane::kReady));
    if (overrun != 0) {
      found = {Event::overrun, warp + (__ffs(static_cast<int>(overrun)) - 1) * kWorkers};
      break;
    }
    const std::uint32_t behind = left & ~((2u << after) - 1);
    const int next = __ffs(static_cast<int>(behind != 0 ? behind : left)) - 1;
    if (lane == 0) volatile_store(block.after[warp], static_cast<std::uint32_t>(next));
    const std::uint32_t its = warp + static_cast<std::uint32_t>(next) * kWorkers;
    const std::uint32_t state =
        from_lane((mine.consumer & 0xffff) | (mine.pending < kRun ? mine.pending : kRun) << 16 |
                      (mine.flags & FastLane::kFast),
                  next);
    const std::uint32_t produced = from_lane(mine.produced, next);
    const std::uint32_t pending = state >> 16 & 0xff;
    if (pending == 0) continue;
    if ((state & FastLane::kFast) == 0) {
      found = {Event::work, its};
      break;
    }
    const FastQueue queue = block.fast[its];
    const Plain plain = plain_write(warp, queue, state + lane, lane < pending);
    const std::uint32_t bad = __ballot_sync(kAll, plain.kind != Plain::small);
    std::uint32_t run = bad == 0 ? kRun : __ffs(static_cast<int>(bad)) - 1;
    if (run == 0) {
      found = {from_lane(static_cast<std::uint32_t>(plain.kind), 0) == Plain::large ? Event::large
                                                                                    : Event::work,
               its};
      if (lane == 0) {
        block.piece[warp] = CopyPiece{plain.to, plain.from, plain.bytes};
        block.piece_completes[warp] = plain.completes;
      }
      break;
    }
    bool more = run < pending;
    if (run > 1 && in_each_others_way(plain, run, lane)) {
      run = 1;
      more = false;  // the next one, once this one is done
    }
    const bool mine_too = lane < run;
    // The payload is on its way while the entry's body is written.
    std::uint64_t value = plain.value;
    if (mine_too && plain.from != nullptr) {
      value = plain.bytes == 8
                  ? load_relaxed<Scope::system>(reinterpret_cast<const std::uint64_t*>(plain.from))
                  : load_relaxed<Scope::system>(reinterpret_cast<const std::uint32_t*>(plain.from));
    }
    const bool completes = mine_too && plain.completes;
    const std::uint32_t all = __ballot_sync(kAll, completes);
    const std::uint32_t number = produced + __popc(all & ((1u << lane) - 1));
    std::uint32_t* entry = nullptr;
    // A collapsed queue's one entry tells of the last.
    if (completes && (queue.lap != 0 || (all >> lane) == 1)) entry = begin_entry(queue, number);
    if (mine_too) {
      if (plain.bytes == 8) {
        store_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(plain.to), value);
      } else {
        store_relaxed<Scope::system>(reinterpret_cast<std::uint32_t*>(plain.to),
                                     static_cast<std::uint32_t>(value));
      }
    }
    const std::uint32_t last = last_word(queue, number, (state + lane) & 0xffff);
    __syncwarp();  // every lane's release covers the WRITEs of all lanes
    Publication<Scope::system> out;
    if (entry != nullptr) out.store(entry + 15, last);
    if (static_cast<int>(lane) == next) {
      mine.consumer += run;
      mine.pending -= run;
      mine.produced += __popc(all);
      if (mine.is(FastLane::kCounts)) {
        GpuAccess::store_relaxed(&queue_pair(its).send_cq->good, mine.produced);
      }
      volatile_store(block.active, 1u);
    }
    if (more) {
      found = {Event::work, its};
      break;
    }
  }
  __syncwarp();
  if (ours) mine.keep(queue_pair(index));
  __syncwarp();
  return found;
}

/// The WRITE of one piece at the head of a queue that the fast loop came back with; by the whole warp.
__device__ __noinline__ void serve_large(unsigned warp, unsigned lane, QueuePair& qp) {
  CompletionQueue& cq = *qp.send_cq;
  const FastQueue queue(qp);
  const std::uint32_t number = cq.produced, index = qp.consumer;
  const bool completes = the_block().piece_completes[warp];
  std::uint32_t* entry = nullptr;
  if (lane == 0 && completes) entry = begin_entry(queue, number);
  copy_together(lane, the_block().piece[warp]);
  if (lane == 0) {
    Publication<Scope::system> out;
    if (completes) {
      out.store(entry + 15, last_word(queue, number, index));
      cq.produced = number + 1;
      if (!cq.failed) GpuAccess::store_relaxed(&cq.good, number + 1);
    }
    QueueMachine<GpuEnv>::retire(qp, 1);
  }
  __syncwarp();
}

}  // namespace
}  // namespace marrow::softnic::gpu
