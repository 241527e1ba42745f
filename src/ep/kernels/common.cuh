// SPDX-License-Identifier: Apache-2.0
// What the kernels of ep share: typed places in a window, quads, waiting that gives up, the end of a kernel.
//
// A quad (32 cells) is carried by one warp on a GPU, a cell a lane, and by one thread on the CPU device, where a warp
// may have one lane.
#pragma once

#include "ep/kernels/numbers.cuh"
#include "ep/shape.hpp"
#include "marrow/device.cuh"

// Before loops that are not worth being repeated in the code (a kernel runs through its code about once, so every
// instruction is also one to fetch), and before those whose arrays must stay in registers.
#if defined(__CUDACC__)
#define MARROW_EP_ROLLED _Pragma("unroll 1")
#define MARROW_EP_UNROLLED _Pragma("unroll")
#else
#define MARROW_EP_ROLLED
#define MARROW_EP_UNROLLED
#endif

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

#if defined( \
    MARROW_EP_WARP_QUADS)  // the GPU's division of work on the CPU device, with MARROW_CPU_LANES=32: for tests
inline constexpr bool kWarpQuads = true;
#else
inline constexpr bool kWarpQuads = kOnGpu;
#endif
inline constexpr int kQuadLanes = kWarpQuads ? 32 : 1;
inline constexpr int kCellsPerLane = kQuadCells / kQuadLanes;
/// Quads of a piece: neighbouring ones of a row, which a worker carries together.
inline constexpr int kPiece = kWarpQuads ? kPieceQuads : 1;
MARROW_DEVICE int pieces_of(const Shape& s) { return kWarpQuads ? s.pieces : s.quads; }
MARROW_DEVICE const Divisor& by_pieces(const Shape& s) {
  return kWarpQuads ? s.by_pieces : s.by_quads;
}

struct DispatchArgs {
  const std::byte* rows;
  const std::byte* scales;
  const std::int64_t* ids;
  const float* weights;
  const std::int32_t* device_tokens;
  std::byte* out_rows;
  std::byte* out_scales;
  std::uint64_t handle;  ///< its offset in the window
  std::int32_t tokens;
  std::int32_t send_blocks;   ///< blocks 0 .. send_blocks-1 send; 0: this kernel only receives
  std::uint64_t* times;       ///< see Group::record_times
  std::int32_t receive_from;  ///< blocks from this one on receive; grid: none
  Divisor by_receivers;       ///< how many those are
};

struct CombineArgs {
  const std::byte* rows;
  std::byte* out_rows;
  std::uint64_t* times;
  std::uint64_t handle;
  std::uint8_t exact, weighted, send, receive;
  std::uint8_t from_rows;  ///< far peers' rows are put straight from `rows`
  std::uint8_t reserved[3];
};

template <class T>
MARROW_DEVICE T* at(std::byte* base, std::uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

/// A peer's part of the window, or null.
MARROW_DEVICE std::byte* peer_base(const DeviceCommunicator& comm, const WindowHandle& window,
                                   int peer) {
  if (peer == comm.rank) return window.local;
  return reinterpret_cast<std::byte*>(detail::lsa_base(comm, window, peer));
}

MARROW_DEVICE std::uint32_t mark_of(const Cell16& cell) {
  return static_cast<std::uint32_t>(cell.high >> 32);
}
/// A value of one word belongs into c, beside the epoch: ptxas (CUDA 13.0) loads only those words of a 128-bit cell that are used, each
/// with an instruction of its own, and words that are not neighbours are then seen half old, half new.
MARROW_DEVICE Cell16 epoch_cell(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                std::uint32_t epoch) {
  return {a | static_cast<std::uint64_t>(b) << 32, c | static_cast<std::uint64_t>(epoch) << 32};
}
MARROW_DEVICE std::uint32_t word_of(const Cell16& cell, int i) {
  return static_cast<std::uint32_t>((i < 2 ? cell.low : cell.high) >> (i % 2 * 32));
}
inline constexpr std::uint64_t kSentinelWord = ~std::uint64_t{0};
MARROW_DEVICE Cell16 sentinel_cell() { return {kSentinelWord, kSentinelWord}; }

/// 16 bytes of the caller's.
MARROW_DEVICE Words16 load_words(const std::byte* p) {
#if defined(__CUDA_ARCH__)
  // No read-only load: a kernel that is launched early starts before the one that writes these.
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
#else
  Words16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
#endif
}
MARROW_DEVICE Cell16 cell_of(const Words16& v) {
  return {v.word[0] | static_cast<std::uint64_t>(v.word[1]) << 32,
          v.word[2] | static_cast<std::uint64_t>(v.word[3]) << 32};
}
MARROW_DEVICE Words16 words_of(const Cell16& c) {
  return {{static_cast<std::uint32_t>(c.low), static_cast<std::uint32_t>(c.low >> 32),
           static_cast<std::uint32_t>(c.high), static_cast<std::uint32_t>(c.high >> 32)}};
}

MARROW_DEVICE int rank_of_expert(const Shape& s, const std::byte* local, int expert) {
  if (s.uniform) return s.by_uniform.quotient(expert);
  return load_cached(reinterpret_cast<const std::uint16_t*>(local + s.expert_rank) + expert);
}

/// One phase of one batch, as every function here needs it.
struct Run {
  const DeviceCommunicator& comm;
  const WindowHandle& window;
  const Shape& s;
  std::byte* local;      ///< our own part of the window
  std::uint64_t handle;  ///< offset of the batch's handle in it
  std::uint64_t batch;
  std::uint64_t start;  ///< when the kernel started, ns
  int set;
  std::uint32_t epoch;
  bool any_failed;  ///< some rank is masked

  MARROW_DEVICE Run(const DeviceCommunicator& c, const WindowHandle& w, const Shape& shape,
                    std::uint64_t handle_at, std::uint64_t number, std::uint64_t now, bool failed)
      : comm(c),
        window(w),
        s(shape),
        local(w.local),
        handle(handle_at),
        batch(number),
        start(now),
        set(static_cast<int>(shape.by_sets.remainder(number))),
        epoch(static_cast<std::uint32_t>(number + 1)),
        any_failed(failed) {}

  MARROW_DEVICE Control* control() const { return at<Control>(local, s.control); }
  template <class T>
  MARROW_DEVICE T* table(std::uint64_t offset) const {
    return at<T>(local, handle + offset);
  }
  MARROW_DEVICE std::byte* peer(int rank) const { return peer_base(comm, window, rank); }
  /// Masked by the survivors. Only the reset kernel changes that, so all threads of a kernel see the same.
  MARROW_DEVICE bool is_failed(int rank) const {
    return any_failed &&
           load_relaxed<Scope::device>(at<std::uint32_t>(local, s.failed) + rank) != 0;
  }
  MARROW_DEVICE void note(Status status) const {
    if (status == Status::ok) return;
    fetch_max_relaxed<Scope::device>(&control()->status, static_cast<std::uint64_t>(status));
  }
  /// This kernel gives up on a source: it counts as giving nothing, and later kernels exchange nothing until the
  /// survivors have agreed. A row that comes late stays where another one's is expected some batches later, and blocks
  /// may have seen different parts of what came; so nothing may build on it.
  MARROW_DEVICE void set_failed(int rank, Status why) const {
    store_relaxed<Scope::device>(at<std::uint32_t>(local, s.given_up) + rank,
                                 static_cast<std::uint32_t>(why));
    fetch_max_relaxed<Scope::device>(&control()->stopped, static_cast<std::uint64_t>(why));
    note(why);
  }
  /// Time left of `deadlines` since the call's first kernel started: all waits of a call together take about that,
  /// however many rows are missing.
  MARROW_DEVICE Deadline time_left(int deadlines = 1) const {
    const std::uint64_t gone = now_ns() - start;
    const std::uint64_t all = s.deadline_ns * static_cast<unsigned>(deadlines);
    return {gone < all ? all - gone : 1};
  }
  /// Statistics of one source, by one thread of the grid. kind: 0 dispatch, 1 combine
  /// @param since  when the thread began to wait for it: what it waited for others before is theirs
  /// @return now
  MARROW_DEVICE std::uint64_t note_wait(int kind, int source, std::uint64_t since) const {
    const std::uint64_t now = now_ns();
    const std::uint64_t ns = now - since;
    std::uint64_t* waited = at<std::uint64_t>(local, s.waited);
    add_relaxed<Scope::device>(waited + (kind * s.ranks + source), ns);
    fetch_max_relaxed<Scope::device>(waited + (2 * s.ranks + source), ns);
    return now;
  }
};

/// The record of an entry. @param origin  looked at only if rows were placed by a kernel of their own
MARROW_DEVICE std::byte* record_at(const Run& r, int entry, Origin origin) {
  return r.local + r.handle + r.s.records +
         static_cast<std::uint64_t>(r.s.place_in_block ? entry : origin.slot(r.s.tokens)) *
             r.s.record_stride;
}

/// A record's rows.
MARROW_DEVICE std::int32_t* rows_of(std::byte* record) {
  return reinterpret_cast<std::int32_t*>(record + sizeof(Record));
}
MARROW_DEVICE const std::int32_t* rows_of(const std::byte* record) {
  return reinterpret_cast<const std::int32_t*>(record + sizeof(Record));
}

/// Waits for something of one source. All blocks of a kernel must judge alike whether a source is in time, since rows are
/// placed by what all sources sent. A block that waited for long, or gives up, writes its verdict, and the first one
/// counts; those that hardly waited need none, as by the deadline everybody sees what they saw.
/// @return whether the source is in time
template <class Ready>
MARROW_DEVICE bool wait_for_source(const Run& r, int source, Ready&& ready) {
  // Most often it comes before a wait's bookkeeping would pay. Who comes late to look asks for the verdict, too.
  MARROW_EP_ROLLED
  for (int i = 0; i < 16; ++i) {
    if (!ready()) continue;
    if ((now_ns() - r.start) * 2 < r.s.deadline_ns) return true;
    break;
  }
  bool decided = false;  // that it is in time: it is here, or about to be
  for (;;) {
    const Status status = wait_until(r.comm, r.time_left(decided ? 2 : 1), ready);
    const std::uint64_t waited = now_ns() - r.start;
    if (status == Status::ok && (decided || waited * 2 < r.s.deadline_ns)) return true;
    std::uint64_t old = 1;
    if (!decided) {
      std::uint64_t* verdict = at<std::uint64_t>(r.local, r.s.verdict) + source;
      const std::uint64_t mine = r.batch * 2 + 2 + (status == Status::ok ? 0 : 1);
      old = load_relaxed<Scope::device>(verdict);
      while (old / 2 != mine / 2) {
        const std::uint64_t seen = compare_swap_relaxed<Scope::device>(verdict, old, mine);
        if (seen == old) {
          old = mine;
          break;
        }
        old = seen;
      }
    }
    if (old & 1) {
      r.set_failed(source, status == Status::ok ? Status::timeout : status);
      return false;
    }
    if (status == Status::ok) return true;
    decided = true;
  }
}

/// Between looks: why one should wait no longer.
MARROW_DEVICE Status impatience(const Run& r) {
  const Status status = control_status(wait_words(r.comm), -1);
  if (status != Status::ok) return status;
  return now_ns() - r.start >= r.s.deadline_ns ? Status::timeout : Status::ok;
}
/// The same for all lanes of a worker that look together.
MARROW_DEVICE Status common_impatience(const Run& r) {
  const Status status = impatience(r);
  if constexpr (!kWarpQuads) return status;
  return static_cast<Status>(warp_shuffle(0xffffffffu, static_cast<std::uint32_t>(status), 0));
}
inline constexpr std::uint32_t kLooksAtOnce = 32;  ///< before that question

/// block_sync for lanes that come one by one, from waits of their own.
MARROW_DEVICE void meet() {
  warp_sync(kWarpQuads ? 0xffffffffu
                       : full_mask());  // whole warps there, which cost one instruction
  block_sync();
}

/// Places in the kernels whose times a build with MARROW_EP_TIMELINE notes, by warp (docs/ep-performance.md).
enum class Point {
  begun,
  numbers_read,
  choices_taken,  ///< of a list
  list_sent,
  lists_sent,
  targets_found,
  rows_sent,
  lists_here,
  lists_of_block_here,
  rows_placed,
  tables_written,
  rows_received,
  count
};
#if defined(MARROW_EP_TIMELINE) && defined(__CUDACC__)
inline constexpr int kTimelineBlocks = 132;
inline constexpr int kTimelineWarps = 16;
__device__ std::uint64_t timeline[kTimelineBlocks][kTimelineWarps][static_cast<int>(Point::count)];
MARROW_DEVICE void note(Point point) {
  if (lane_index() != 0 || block_index() >= kTimelineBlocks) return;
  timeline[block_index()][thread_index() / 32][static_cast<int>(point)] = now_ns();
}
#else
MARROW_DEVICE void note(Point) {}
#endif

/// For Group::record_times, at the end of a kernel.
MARROW_DEVICE void note_times(std::uint64_t* times, std::uint64_t start) {
  if (!times) return;
  meet();
  if (thread_index() != 0) return;
  fetch_max_relaxed<Scope::device>(times, ~start);
  fetch_max_relaxed<Scope::device>(times + 1, now_ns());
}

/// Walks through (number, quad) pairs, `workers` apart.
struct Walk {
  int number;
  int quad;
  int step_number;
  int step_quad;
  int quads;
  MARROW_DEVICE Walk(int worker, int workers, int of_row, const Divisor& by_row)
      : number(by_row.quotient(worker)),
        quad(worker - number * of_row),
        step_number(by_row.quotient(workers)),
        step_quad(workers - step_number * of_row),
        quads(of_row) {}
  MARROW_DEVICE void next() {
    number += step_number;
    quad += step_quad;
    if (quad >= quads) {
      quad -= quads;
      ++number;
    }
  }
};

/// to = from[u + t], from an array that stays in registers; u is a multiple of kStep, and t, known when compiling, below it. A
/// loop over the candidates would be turned into an access by index, which puts the array into local memory.
template <int kStep = 1, int kFirst = 0, class T, int kSize>
MARROW_DEVICE void pick(T& to, const T (&from)[kSize], int u, int t = 0) {
  if constexpr (kFirst < kSize) {
    if (kFirst == 0 || u == kFirst) to = from[kFirst + t];
    pick<kStep, kFirst + kStep>(to, from, u, t);
  }
}

/// Of all lanes of a warp of 32.
MARROW_DEVICE std::uint32_t warp_or(std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  return __reduce_or_sync(0xffffffffu, value);
#else
  for (int step = 1; step < 32; step *= 2)
    value |= warp_shuffle(0xffffffffu, value, lane_index() ^ step);
  return value;
#endif
}
MARROW_DEVICE std::uint32_t warp_and(std::uint32_t value) { return ~warp_or(~value); }

/// Adds to a word of shared memory. (As an instruction for shared memory, not one for any.)
MARROW_DEVICE void add_shared(std::uint32_t* word, std::uint32_t n) {
#if defined(__CUDA_ARCH__)
  atomicAdd(word, n);
#else
  (void)fetch_add_relaxed<Scope::block>(word, n);
#endif
}

/// What a kernel begins with. One thread of a block reads it: all threads of the grid would queue at its lines.
struct Numbers {
  std::uint64_t sent, received;  ///< batches
  std::uint32_t failed;          ///< some rank is masked
  std::uint32_t
      stopped;  ///< Control::stopped: another block may write it meanwhile, so blocks look once
};
static_assert(sizeof(Numbers) <= kNumbersBytes);

/// Reads the numbers; also a block_sync. `meanwhile` is what the other loads of the kernel's start are.
template <class Meanwhile>
MARROW_DEVICE Numbers read_numbers(Control* control, const std::uint64_t* sent,
                                   const std::uint64_t* received, Meanwhile&& meanwhile) {
  auto* shared = dynamic_shared<Numbers>();
  const bool reads = thread_index() == block_size() - 1;
  Numbers mine{};
  if (reads) {
    mine.sent = load_relaxed<Scope::device>(sent);
    mine.received = load_relaxed<Scope::device>(received);
    mine.failed = load_relaxed<Scope::device>(&control->any_failed) != 0;
    mine.stopped = static_cast<std::uint32_t>(load_relaxed<Scope::device>(&control->stopped));
  }
  meanwhile();
  if (reads) *shared = mine;
  meet();
  return *shared;
}

/// The last block that has read the numbers counts on; nobody waits for that, and the next kernel, which starts after this
/// one, reads it. Made after read_numbers; end() at the kernel's end, both by all threads (the block's last one acts).
class Turn {
 public:
  explicit MARROW_DEVICE Turn(std::uint64_t* arrived) : arrived_(arrived) {
    if (acts()) before_ = fetch_add_relaxed<Scope::device>(arrived, std::uint64_t{1});
  }
  template <class Last>
  MARROW_DEVICE void end(Last&& last) {
    if (!acts() || before_ + 1 != static_cast<std::uint64_t>(grid_size())) return;
    store_relaxed<Scope::device>(arrived_, std::uint64_t{0});
    last();
  }

 private:
  static MARROW_DEVICE bool acts() { return thread_index() == block_size() - 1; }
  std::uint64_t* arrived_;
  std::uint64_t before_ = 0;  ///< blocks; not needed, so not waited for, before the end
};

/// Whether kernels may exchange nothing, for kernels that read no Numbers: the same for all threads of the block.
MARROW_DEVICE bool is_stopped(const Control* control) {
  return block_any(load_relaxed<Scope::device>(&control->stopped) != 0);
}

/// Whether a call is out of turn: replays of graphs pass by the host's count.
MARROW_DEVICE bool out_of_turn(const Shape& s, std::uint64_t sent, std::uint64_t received,
                               bool sends, bool receives) {
  const std::uint64_t most = sends && receives ? 1 : static_cast<unsigned>(s.sets) / 2;
  return sends ? sent - received >= most : sent == received;
}
/// By one thread of the grid.
MARROW_DEVICE void stop_as_invalid(Control* control) {
  constexpr auto kInvalid = static_cast<std::uint64_t>(Status::invalid);
  fetch_max_relaxed<Scope::device>(&control->stopped, kInvalid);
  fetch_max_relaxed<Scope::device>(&control->status, kInvalid);
}

/// Exclusive sum over the block's threads. @param memory  block_size()+1 words of shared memory
/// @return sum of the values of lower threads; *total: of all
MARROW_DEVICE std::uint32_t block_sum(std::uint32_t* memory, std::uint32_t value,
                                      std::uint32_t* total) {
  const int t = thread_index();
  const int n = block_size();
  meet();
  memory[t] = value;
  meet();
  for (int step = 1; step < n; step *= 2) {
    const std::uint32_t below = t >= step ? memory[t - step] : 0;
    meet();
    memory[t] += below;
    meet();
  }
  const std::uint32_t sum = memory[t];
  *total = memory[n - 1];
  meet();
  return sum - value;
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
