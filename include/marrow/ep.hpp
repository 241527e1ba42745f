// SPDX-License-Identifier: Apache-2.0
// MoE dispatch and combine for decoding: every rank sends each of its tokens to the ranks that own the
// experts its router chose, and gets the experts' outputs back, summed. Kernels only, on the caller's stream:
// no call waits for the GPU (report() and agree() do), so all of it can be captured into a CUDA graph.
//
//   Group group(comm, {.experts = {64, 64, 64, 64}, .max_tokens = 128, .hidden = 7168, .top_k = 8});
//   Handle handle = group.handle(0);
//   group.dispatch({.tokens = T, .rows = x, .expert_ids = ids, .weights = w}, {.rows = y, .scales = s}, handle, stream);
//   ... experts: y [L, capacity, hidden], handle.counts [L] ...
//   group.combine({.rows = z}, {.rows = out}, handle, stream);
//
// Words. R ranks; M = max_tokens; K = top_k; H = hidden; L = experts of this rank; "capacity" C = rows of an
// expert in the output (R*M unless Config says less); G = ceil(H / 128) groups of channels with one scale each.
// Device memory means memory that the communicator's place can read: GPU memory, or any on the CPU device.
//
// On the CPU device the calls run the kernels in the caller and return when they are done: ranks in one
// process need a thread each, and a rank's *_receive waits for the others' *_send.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "marrow/device/status.cuh"
#include "marrow/marrow.hpp"

namespace marrow::ep {

/// What a dispatched row is made of.
enum class Payload : std::uint8_t {
  bf16,    ///< rows are H bf16 and travel as they are; no scales
  fp8,     ///< rows are H bf16; they are quantised while being sent: H e4m3 bytes, G scales
  opaque,  ///< rows are row_bytes bytes and scale_bytes bytes that nobody looks into
};

/// How fp8 scales are made. Per 128 neighbouring channels (the last group may be shorter), in float, each operation rounded to
/// nearest: amax = the largest |x| that is no NaN, at least 1e-4; s = amax * (1 / 448); a channel becomes e4m3(x * (448 / amax)), to
/// nearest even, finite values saturated. NaN becomes 0x7f. In a group with an infinity: s is infinite, infinities become 0x7f, the rest 0.
enum class Scales : std::uint8_t {
  f32,  ///< G floats: s
  power_of_two,  ///< G floats: 2^e, the smallest power of two that is not below s; a channel becomes e4m3(x * 2^-e)
  ue8m0,  ///< the same as exponents: a byte e + 127 each, 4 in a word (the first lowest), ceil(G/4) words, unused bytes 0
};

/// Order of the dispatched rows.
enum class Layout : std::uint8_t {
  /// [L, C, row]: one row for each (token, expert of ours), packed from row 0 of the expert on, in order of
  /// (source rank, token): the same on every run. Rows past counts[l] are not written.
  expert_major,
  /// [R, M, row]: one row for each token that chose any expert of ours, packed from row 0 of its source rank
  /// on, in order of the token. Which experts: Handle::expert_ids.
  rank_major,
};

/// Memory order of the scales of an expert-major (rank-major) output: one row's scales together, [L, C, G], or one
/// group's together, [L, G, C], as TMA-fed matrix kernels want them.
enum class ScaleOrder : std::uint8_t { row_major, column_major };

/// How data crosses to ranks that are reachable by load/store.
enum class Protocol : std::uint8_t {
  /// Cells to load/store peers, else signals. (Between GPUs Path::lsa is taken only where atomics at the peer are native: there 16 bytes
  /// are placed at once, too. Communicator::peers says why a peer is not.)
  automatic,
  cells,  ///< 16-byte cells that carry their own arrival mark: no fence, no signal. Error(unsupported) when they cannot be used
  signals,  ///< rows by put, then one strong signal per (source, batch): every path
};

/// How combine adds up. Both give bf16 [T, H].
enum class CombineMode : std::uint8_t {
  /// Every expert's row travels; the token's owner computes sum = fma(weight_k, row_k, sum) in float, for k = 0 .. K-1 (choices that
  /// were ignored are left out), from sum = 0, and rounds once to bf16: bitwise the same on every run and path.
  exact,
  /// Each rank adds up its experts' rows of the token as above, rounds that to bf16, and one row per (token, rank) travels;
  /// the owner adds those in float in order of the rank and rounds once more: off the sum of exact before its rounding by at
  /// most 1.01 * 2^-7 * sum |weight_k * row_k|.
  fast,
};

/// What a Group is made for. Must agree on all ranks.
struct Config {
  /// Experts of each rank, R numbers, 0 .. 2048 each, their sum 1 .. 2048. Expert ids count through the ranks:
  /// rank r owns the ids from experts[0] + ... + experts[r-1] on.
  std::vector<int> experts;
  int max_tokens = 128;  ///< M: tokens of one rank in one batch, at most; 1 .. 65536
  int hidden =
      7168;  ///< H in elements, 1 .. 16384; a row's bytes must be a multiple of 16: H of 8 for bf16, of 16 for fp8
  int top_k = 8;  ///< K: experts a token chooses, 1 .. 32
  Payload payload = Payload::fp8;
  Scales scales = Scales::f32;  ///< for Payload::fp8
  ScaleOrder scale_order = ScaleOrder::row_major;
  std::uint32_t row_bytes = 0;  ///< for Payload::opaque: a multiple of 16, 16 .. 65536
  std::uint32_t scale_bytes =
      0;  ///< for Payload::opaque: a multiple of 4, 0 .. 8192 (0: no scales)
  Layout layout = Layout::expert_major;
  /// C: rows an expert has room for (expert-major). 0: R*M, which cannot overflow. With less, the rows that do not fit (the last
  /// ones in order) are dropped, counted in Report::overflow, and count as zero rows in combine.
  int capacity = 0;
  int batches_in_flight =
      1;            ///< F: batches sent, not yet received, 1 .. 8; dispatch and combine count apart
  int handles = 0;  ///< Handles there are; 0: 2*F
  int max_sms = 0;  ///< blocks of one kernel, at most; 0: all SMs. On the CPU device: 0 means 1
  int threads = 0;  ///< threads of a block; 0: 512. On the CPU device: 0 means 1
  /// How long a *_receive waits for its sources, all together (twice that at most, when blocks differ). Then it gives those that
  /// are missing up, and this rank's kernels exchange nothing more until agree(): see Group.
  std::chrono::milliseconds deadline{10000};
  Protocol protocol = Protocol::automatic;
  /// Where batch numbers start: a test of their wrap sets it near 2^32.
  std::uint64_t first_batch = 0;
};

/// Bytes that a Group takes on each rank.
struct MARROW_API MemoryNeeded {
  std::uint64_t receive_dispatch = 0;  ///< 2*F sets of [R, M] rows, and what says who chose whom
  std::uint64_t receive_combine = 0;   ///< 2*F sets of [M, K] rows
  std::uint64_t staging = 0;  ///< rows on their way to peers that are not load/store reachable
  std::uint64_t handles = 0;  ///< all Handles
  std::uint64_t control = 0;  ///< batch numbers, statistics, masks
  std::uint64_t total = 0;    ///< all of the above, rounded up to what is allocated
  /// One line for people, e.g. "48.2 MiB: 7.7 receive_dispatch, ...".
  std::string text() const;
};

/// One batch's tables, in device memory of the Group, written by dispatch and read by combine: a view, by value. It is
/// valid until the next dispatch_send with the same Handle.
struct Handle {
  int index = -1;
  /// Rows of each expert (of each source rank in rank-major), at most C (M). [L] or [R]
  const std::int32_t* counts = nullptr;
  /// Where a row came from: source rank * M + token. [L, C] or [R, M]; undefined past counts
  const std::int32_t* source = nullptr;
  /// The router's weight of a row, expert-major [L, C]; in rank-major of each choice, [R, M, K], 0 where it is not ours
  const float* weights = nullptr;
  /// Rank-major only: our experts that the row is for, 0 .. L-1, or -1. [R, M, K]; else null
  const std::int32_t* expert_ids = nullptr;
};

struct DispatchInput {
  int tokens = 0;  ///< T, 0 .. M; may differ on each rank
  /// Device memory, 16-byte aligned: [T, H] bf16, or [T, row_bytes] for Payload::opaque. May be null if tokens == 0.
  const void* rows = nullptr;
  const void* scales = nullptr;  ///< for Payload::opaque: [T, scale_bytes], 4-byte aligned
  /// [T, K] global expert ids, device memory. -1: no choice. Other values outside of 0 .. experts-1, and an id that stands before it in the
  /// same token's list, are ignored and counted (Report).
  const std::int64_t* expert_ids = nullptr;
  /// [T, K], device memory. Those of ignored choices are never looked at. Null: all 1.
  const float* weights = nullptr;
  /// One word in device memory with the number of tokens, read when the kernel runs, or null: for graphs that are replayed with another
  /// number. More than M, or negative: Status::invalid, nothing of this rank is sent but the fact. `tokens` is ignored then.
  const std::int32_t* device_tokens = nullptr;
};

struct DispatchOutput {
  void* rows = nullptr;    ///< device memory, 16-byte aligned: [L, C, row] or [R, M, row]
  void* scales = nullptr;  ///< as Scales and ScaleOrder say; 4-byte aligned. Null if there are none
};

/// Registered memory of this rank that a tensor lies in: Window::handle(), or LocalBuffer::handle(), of the Group's communicator.
struct Registered {
  Registered() = default;
  Registered(const LocalBufferHandle& buffer) : memory(buffer) {}  // NOLINT: implicit by design
  Registered(const WindowHandle& window) {                         // NOLINT: implicit by design
    memory.abi = window.abi;
    memory.id = window.id;
    memory.bytes = window.bytes;
    memory.local = window.local;
    memory.gda_local = window.gda_local;
    memory.gda_lkey = window.gda_lkey;
    memory.host_memory = window.host_memory;
    memory.owner = window.owner;
  }
  LocalBufferHandle memory;  ///< local == nullptr: none
};

struct CombineInput {
  /// Experts' outputs, bf16, device memory, 16-byte aligned, in the order of the dispatch's output: [L, C, H]. Rank-major: [R, M, H], already
  /// summed over our experts by the caller; weights are not applied then.
  const void* rows = nullptr;
  CombineMode mode = CombineMode::exact;
  bool weighted = true;  ///< false: every weight counts as 1
  /// Where the whole tensor `rows` lies, or nothing. Rows of the exact mode, and of rank-major, then go to peers that load/store does not
  /// reach straight from there, without a copy on their way; `rows` may be overwritten by what follows combine_receive in the stream,
  /// not before. (To other peers nothing is copied twice in any case; in fast mode the sums are.)
  Registered registered = {};
};

struct CombineOutput {
  void* rows =
      nullptr;  ///< [T, H] bf16, device memory, 16-byte aligned. Tokens without a choice get zeros
};

/// What happened since the Group was made, or since reset_report.
struct Report {
  /// Worst result of a kernel: timeout: some source did not come in time; peer_failed, aborted: the communicator said so; invalid: device_tokens out of range, or replayed graphs sent more than
  /// batches_in_flight batches or received one that was not sent. While kernels exchange nothing it stays what stopped them, also after reset_report.
  Status status = Status::ok;
  std::vector<bool> failed;      ///< [R] ranks that are masked, or that this rank has given up on
  std::uint64_t dispatches = 0;  ///< batches received
  std::uint64_t combines = 0;
  std::uint64_t duplicates = 0;    ///< choices of this rank's tokens that repeat an expert
  std::uint64_t out_of_range = 0;  ///< choices of this rank's tokens that are no expert
  std::uint64_t overflow = 0;      ///< rows that did not fit into `capacity` here
  std::vector<std::uint64_t>
      dispatch_waited_ns;  ///< [R] how long each source was waited for, in sum
  std::vector<std::uint64_t> combine_waited_ns;  ///< [R]
  std::vector<std::uint64_t> longest_wait_ns;    ///< [R] the longest single wait for it
};

/// Buffers and state for dispatch and combine between the ranks of a communicator. Several Groups may live on one communicator.
/// Calls are not thread-safe. Each is made by all ranks in the same order. Everything of a Group must be
/// ordered: one stream, or streams that the caller orders with events. Groups whose kernels may run at the same time must fit on the GPU
/// together, with whatever else stays resident: their max_sms in sum, each twice where calls are enqueued back to back, since a call's blocks may be
/// placed while the one before runs; else one's blocks may wait for ranks whose own wait for room.
///
/// Once a receive has given a source up (Status timeout, peer_failed, aborted), or a call was invalid by the kernels' count, this rank's
/// kernels exchange nothing until agree(): dispatches give counts of 0, combines give zeros, at once. The outputs of the call that
/// gave up are not to be used: rows of the missing source are zero or absent. Other ranks find this one missing in turn.
class MARROW_API Group {
 public:
  /// What a Group would take. No communication.
  /// @throws Error(invalid_argument) for a Config outside its ranges
  static MemoryNeeded memory_needed(const Communicator& comm,
                                    const Config& config);  // staging: if paths are alike on all
  /// The same for R = config.experts.size() ranks, of which `far` are not load/store reachable from each.
  static MemoryNeeded memory_needed(const Config& config, int far = 0);

  /// Collective of the ranks that are not masked; masked ones are left out. memory_needed says what will be taken. `comm` must outlive
  /// the Group and stay where it is: it may not be moved meanwhile.
  /// @throws Error(invalid_argument), Error(mismatch) when ranks disagree, Error(out_of_memory), Error(unsupported)
  Group(Communicator& comm, Config config);
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  ~Group();  ///< close() if it was not called; its failures are dropped: call close() to see them

  const Config& config() const;  ///< with defaults filled in
  const MemoryNeeded& memory() const;
  int local_experts() const;          ///< L
  int first_expert() const;           ///< global id of our first one
  int capacity() const;               ///< C
  std::uint32_t row_bytes() const;    ///< of a dispatched row
  std::uint32_t scale_bytes() const;  ///< of a dispatched row's scales; 0: none
  /// Whether each peer is reached by cells (else by puts and signals). [R]
  std::vector<bool> cells() const;
  /// @param index  0 .. config().handles-1
  Handle handle(int index) const;

  /// Sends this batch. Returns when the kernel is enqueued; no SM waits for a transfer in it. `input`'s memory may be overwritten by what
  /// follows in the stream.
  /// @param stream  cudaStream_t, null: the place's stream. Ignored on the CPU device
  /// @throws Error(invalid_argument): more than M tokens, more than F batches in flight, a bad pointer: nothing was sent; Error(cuda).
  /// Once a call was captured into a graph, the kernels alone count batches in flight: Status::invalid
  void dispatch_send(const DispatchInput& input, const Handle& handle, void* stream = nullptr);
  /// Receives the oldest batch in flight; `handle` as in its send.
  void dispatch_receive(const DispatchOutput& output, const Handle& handle, void* stream = nullptr);
  /// Both; faster than the two apart.
  void dispatch(const DispatchInput& input, const DispatchOutput& output, const Handle& handle,
                void* stream = nullptr);

  /// Sends the experts' rows of the handle's batch back to the tokens' owners. A handle may be combined any number of times. `input`'s rows
  /// may be overwritten by what follows in the stream, unless they are registered.
  /// @throws Error(invalid_argument), also when the tensor does not lie in its registered memory
  void combine_send(const CombineInput& input, const Handle& handle, void* stream = nullptr);
  /// `mode`, `weighted` and `handle` as in the send of the oldest combine in flight. The number of tokens is that of the handle's dispatch.
  void combine_receive(const CombineOutput& output, const Handle& handle, void* stream = nullptr);
  void combine(const CombineInput& input, const CombineOutput& output, const Handle& handle,
               void* stream = nullptr);

  /// Waits for the stream and reads what the kernels have left.
  Report report(void* stream = nullptr);
  void reset_report(void* stream = nullptr);

  /// Collective of the survivors, after a report with a status other than ok: waits for the stream, calls Communicator::agree_failures, waits until
  /// what was sent has arrived, empties what is in flight, and makes all survivors start anew with the same batch number. Ranks that were only slow are not skipped any more; failed ranks
  /// stay skipped: nothing is sent to them, and their experts' rows count as zero.
  /// @throws Error(timeout) on all when a rank's puts did not end: call it again; Error(peer_failed | aborted)
  /// To take a replacement in: Communicator::admit, then make a new Group on all ranks.
  /// @return [R] true: failed; the same on every survivor
  std::vector<bool> agree(std::chrono::milliseconds deadline = std::chrono::seconds(30),
                          void* stream = nullptr);

  /// For measuring: two words in device memory, or null to stop. Every later dispatch and combine kernel raises
  /// times[0] to the complement of when its first block started and times[1] to when its last block ended, both in ns of the global timer.
  void record_times(std::uint64_t* times);

  /// Collective: frees everything. The stream must be idle.
  void close();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace marrow::ep
