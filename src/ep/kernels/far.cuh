// SPDX-License-Identifier: Apache-2.0
// Peers that cells do not reach: what the sending kernel left in the staging part of the window is put, row by row, and
// one strong signal per (source, batch) follows; before the receiving kernel runs, that signal is waited for. A block
// serves one peer, so its puts and their signal are one thread group's.
#pragma once

#include "ep/kernels/common.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

struct FarArgs {
  std::uint64_t handle;
  std::uint8_t combine, exact;
  std::uint8_t
      from_rows;  ///< combine: rows are put straight from where the caller has them, which is `source` from `offset` on
  std::uint8_t reserved[5];
  Region source;
  std::uint64_t offset;
};

/// Where a put goes from and to, within the window.
MARROW_DEVICE Status far_put(const Run& r, const Gin<>& gin, int peer, std::uint64_t to,
                             std::uint64_t from, std::uint64_t bytes) {
  if (bytes == 0) return Status::ok;
  return gin.put(peer, r.window, to, r.window, from, bytes, Block{}, r.time_left());
}

MARROW_DEVICE Status far_dispatch(const Run& r, const Gin<>& gin, int peer) {
  const Shape& s = r.s;
  const auto tokens = r.table<HandleHead>(0)->tokens;
  const std::uint64_t meta = s.meta_at(r.set, s.rank);
  const std::uint64_t staged = s.stage_meta + static_cast<std::uint64_t>(r.set) * s.meta_stride;
  const std::uint64_t weights = 16 + static_cast<std::uint64_t>(s.tokens) * s.id_cells * 16;
  Status status = far_put(r, gin, peer, meta, staged,
                          16 + static_cast<std::uint64_t>(tokens) * s.id_cells * 16);
  if (status == Status::ok)
    status = far_put(r, gin, peer, meta + weights, staged + weights,
                     static_cast<std::uint64_t>(tokens) * s.weight_cells * 16);
  // Neighbouring tokens go in one put.
  const auto* sorted = r.table<std::int16_t>(s.own_sorted);
  const auto* distinct = r.table<std::int32_t>(s.own_distinct);
  int first = -1;
  for (int token = 0; token <= tokens && status == Status::ok; ++token) {
    bool goes = false;
    if (token < tokens) {
      for (int n = 0; n < distinct[token]; ++n)
        goes |= sorted[static_cast<std::uint64_t>(token) * s.top_k + n] == peer;
    }
    if (goes && first < 0) first = token;
    if (goes || first < 0) continue;
    status = far_put(
        r, gin, peer, s.row_at(r.set, s.rank, first),
        s.stage_rows + (static_cast<std::uint64_t>(r.set) * s.tokens + first) * s.row_stride,
        static_cast<std::uint64_t>(token - first) * s.row_stride);
    first = -1;
  }
  return status;
}

MARROW_DEVICE Status far_combine(const Run& r, const Gin<>& gin, int peer, const FarArgs& a) {
  const Shape& s = r.s;
  const bool by_pair = a.exact && !s.rank_major;
  const auto* head = r.table<HandleHead>(0);
  const int numbers = by_pair ? head->pairs : head->entries;
  Status status = Status::ok;
  for (int number = 0; number < numbers && status == Status::ok; ++number) {
    Origin origin;
    int column;
    std::int64_t row = -1;
    if (by_pair) {
      const Pair pair = r.table<Pair>(s.pairs)[number];
      origin = pair.origin;
      column = pair.k;
      row = pair.row;
      if (row <= -2) row = rows_of(record_at(r, 0, origin))[-2 - row];
    } else {
      origin = r.table<Origin>(s.list)[number];
      const std::byte* record = record_at(r, number, origin);
      column = reinterpret_cast<const Record*>(record)->ordinal;
      row = rows_of(record)[0];
    }
    if (origin.source() != peer) continue;
    const std::uint64_t to = s.combine_at(r.set, origin.token(), column);
    if (a.from_rows && row >= 0) {
      status = gin.put(peer, r.window, to, a.source,
                       a.offset + static_cast<std::uint64_t>(row) * s.combine_stride,
                       s.combine_stride, Block{}, r.time_left());
      continue;
    }
    status = far_put(
        r, gin, peer, to,
        s.stage_combine + (static_cast<std::uint64_t>(r.set) * s.ranks * s.tokens * s.per_token +
                           static_cast<std::uint64_t>(number)) *
                              s.combine_stride,
        s.combine_stride);
  }
  return status;
}

/// After the sending kernel: blocks take far peers in turn.
MARROW_KERNEL far_put_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                             const MARROW_GRID_CONSTANT WindowHandle window,
                             const MARROW_GRID_CONSTANT Shape s, FarArgs a) {
  await_previous_kernel();
  auto* control = at<Control>(window.local, s.control);
  if (is_stopped(control)) return;
  const std::uint64_t sent =
      load_relaxed<Scope::device>(a.combine ? &control->combine_sent : &control->dispatch_sent);
  const Run r(comm, window, s, a.handle, sent - 1, now_ns(),
              load_relaxed<Scope::device>(&control->any_failed) != 0);
  const Gin<> gin(comm, 0);
  for (int i = block_index(); i < s.ranks; i += grid_size()) {
    const int peer = (s.rank + 1 + i) % s.ranks;
    if (!s.is_far(peer) || r.is_failed(peer)) continue;
    Status status = a.combine ? far_combine(r, gin, peer, a) : far_dispatch(r, gin, peer);
    if (status == Status::ok)
      status = gin.signal(peer, SignalAdd{(a.combine ? s.ranks : 0) + s.rank, 1}, Block{},
                          r.time_left());
    if (status != Status::ok && thread_index() == 0) r.set_failed(peer, status);
    meet();
  }
}

/// Before the receiving kernel: one block.
MARROW_KERNEL far_wait_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                              const MARROW_GRID_CONSTANT WindowHandle window,
                              const MARROW_GRID_CONSTANT Shape s, FarArgs a) {
  await_previous_kernel();
  auto* control = at<Control>(window.local, s.control);
  if (is_stopped(control)) return;
  const std::uint64_t start = now_ns();
  if (thread_index() == 0) store_relaxed<Scope::device>(&control->started, start);
  const std::uint64_t received = load_relaxed<Scope::device>(
      a.combine ? &control->combine_received : &control->dispatch_received);
  const std::uint64_t from = load_relaxed<Scope::device>(a.combine ? &control->combine_signals_from
                                                                   : &control->signals_from);
  const Run r(comm, window, s, a.handle, received, start,
              load_relaxed<Scope::device>(&control->any_failed) != 0);
  const Gin<> gin(comm, 0);
  std::uint64_t since = start;
  for (int source = thread_index(); source < s.ranks; source += block_size()) {
    if (!s.is_far(source) || r.is_failed(source)) continue;
    Status status =
        gin.wait_signal((a.combine ? s.ranks : 0) + source, received - from + 1, r.time_left());
    // What follows in the stream may overwrite the caller's rows: they have been read.
    if (a.from_rows && status == Status::ok) status = gin.flush(source, r.time_left());
    if (status != Status::ok) r.set_failed(source, status);
    since = r.note_wait(a.combine, source, since);
  }
}

/// Before survivors start anew: what this rank has put and signalled has arrived everywhere, so that nothing of it comes
/// after the peers have emptied their buffers. One block. to: one word in host memory for the Status
MARROW_KERNEL flush_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm, std::uint64_t* to,
                           std::uint64_t deadline_ns) {
  const Gin<> gin(comm, 0);
  const Status status = gin.flush_remote(Block{}, Deadline{deadline_ns});
  if (thread_index() == 0) *to = static_cast<std::uint64_t>(status);
}

/// Empties the receive buffers and starts counting at `batch`: at the beginning, and when the survivors of a
/// failure start anew. failed: masked ranks, [R] words in host memory, or null; experts: [E] ranks of experts in host memory, or null.
MARROW_KERNEL reset_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                           const MARROW_GRID_CONSTANT WindowHandle window,
                           const MARROW_GRID_CONSTANT Shape s, std::uint64_t batch,
                           const std::uint32_t* failed, const std::uint16_t* experts) {
  std::byte* local = window.local;
  const auto me = static_cast<std::uint64_t>(block_index()) * block_size() + thread_index();
  const auto all = static_cast<std::uint64_t>(grid_size()) * block_size();
  // Lists and hellos: the epoch before the first. Rows: the sentinel.
  const Cell16 before = epoch_cell(0, 0, 0, static_cast<std::uint32_t>(batch));
  const std::uint64_t sets = static_cast<std::uint64_t>(s.sets);
  const auto fill = [&](std::uint64_t offset, std::uint64_t bytes, const Cell16& cell) {
    for (std::uint64_t i = me; i < bytes / 16; i += all) store_cell(local + offset + i * 16, cell);
  };
  fill(s.meta, sets * s.ranks * s.meta_stride, before);
  fill(s.hello, sets * s.ranks * 16, before);
  fill(s.combine, sets * s.tokens * s.top_k * s.combine_stride, sentinel_cell());
  // Extra cells of raw rows hold an epoch.
  const std::uint64_t row_cells = s.row_stride / 16;
  const std::uint64_t cells = sets * s.ranks * s.tokens * row_cells;
  for (std::uint64_t i = me; i < cells; i += all) {
    const bool data = s.fp8 || i % row_cells < static_cast<std::uint64_t>(s.data_cells);
    store_cell(local + s.rows + i * 16, data ? sentinel_cell() : before);
  }
  if (experts)
    for (std::uint64_t i = me; i < static_cast<std::uint64_t>(s.experts); i += all)
      at<std::uint16_t>(local, s.expert_rank)[i] = experts[i];
  for (std::uint64_t i = me; i < static_cast<std::uint64_t>(s.ranks); i += all) {
    store_relaxed<Scope::device>(at<std::uint32_t>(local, s.failed) + i, failed ? failed[i] : 0u);
    store_relaxed<Scope::device>(at<std::uint32_t>(local, s.given_up) + i, 0u);
    store_relaxed<Scope::device>(at<std::uint64_t>(local, s.verdict) + i, std::uint64_t{0});
  }
  if (me != 0) return;
  auto* control = at<Control>(local, s.control);
  control->dispatch_sent = control->dispatch_received = batch;
  control->combine_sent = control->combine_received = batch;
  control->signals_from = control->combine_signals_from = batch;
  control->any_failed = failed != nullptr;
  control->stopped = control->status = 0;
  for (auto& word : control->arrived) word = 0;
  const Gin<> gin(comm, 0);
  for (int i = 0; i < 2 * s.ranks; ++i) gin.reset_signal(i);
}

/// Copies control, failed, verdicts and waits to host memory. One block.
MARROW_KERNEL report_kernel(const MARROW_GRID_CONSTANT WindowHandle window,
                            const MARROW_GRID_CONSTANT Shape s, std::uint64_t* to,
                            std::int32_t clear) {
  auto* from = at<std::uint64_t>(window.local, s.control);
  const int words = static_cast<int>((s.expert_rank - s.control) / 8);
  for (int i = thread_index(); i < words; i += block_size()) to[i] = from[i];
  meet();
  if (!clear) return;
  for (int i = thread_index(); i < 3 * s.ranks; i += block_size())
    at<std::uint64_t>(window.local, s.waited)[i] = 0;
  if (thread_index() != 0) return;
  auto* control = at<Control>(window.local, s.control);
  control->status = control->dispatches = control->combines = 0;
  control->duplicates = control->out_of_range = control->overflow = 0;
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
