// SPDX-License-Identifier: Apache-2.0
// All-to-all, two forms.
//
// small: every 8 bytes travel in a cell {data, epoch} of a receive window, so arrival needs no fence and no
// signal. Cells are double-buffered by epoch: whoever writes a cell of epoch e has finished its kernel of
// e-1, hence has our cells of e-1, which we sent after our kernel of e-2 had read its cells; so nobody still
// reads the set that epoch e overwrites. Load/store peers only.
//
// large: Block puts straight into the peers' output, and one strong signal a block. A rank may overwrite a
// peer's output only after that peer's launch says that the previous contents are no longer needed: a weak
// signal at the start.
#pragma once

#include "cli/kernels/bulk.cuh"

namespace marrow::cli {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

MARROW_DEVICE Status small_all_to_all(const AllToAllArguments& a) {
  const int n = a.comm.nranks;
  const int me = a.comm.rank;
  const Lsa lsa(a.comm);
  const std::uint64_t words = a.chunk / 8;
  const std::uint64_t set = (a.epoch & 1) * static_cast<std::uint64_t>(n) * a.cells_per_peer;
  const std::uint64_t first =
      static_cast<std::uint64_t>(block_index()) * block_size() + thread_index();
  const std::uint64_t stride = static_cast<std::uint64_t>(grid_size()) * block_size();
  const auto* input = reinterpret_cast<const std::uint64_t*>(a.input.local);
  auto* output = reinterpret_cast<std::uint64_t*>(a.output.local);
  // Remote chunks first: they are under way while we copy our own.
  for (int step = 1; step < n; ++step) {
    const int peer = (me + step) % n;
    auto* cells = lsa.pointer<Cell16>(
        a.cells, (set + static_cast<std::uint64_t>(me) * a.cells_per_peer) * 16, peer);
    if (!cells) return Status::invalid;
    for (std::uint64_t i = first; i < words; i += stride) {
      store_cell(cells + i, Cell16{input[static_cast<std::uint64_t>(peer) * words + i], a.epoch});
    }
  }
  const std::uint64_t own = static_cast<std::uint64_t>(me) * words;
  for (std::uint64_t i = first; i < words; i += stride) output[own + i] = input[own + i];
  Status status = Status::ok;
  for (int step = 1; step < n; ++step) {
    const int peer = (me + n - step) % n;
    const auto* cells = reinterpret_cast<const Cell16*>(a.cells.local) + set +
                        static_cast<std::uint64_t>(peer) * a.cells_per_peer;
    for (std::uint64_t i = first; i < words && status == Status::ok; i += stride) {
      Cell16 cell{};
      status = wait_until(
          a.comm, Deadline{},
          [&] {
            cell = load_cell(cells + i);
            return cell.high == a.epoch;
          },
          peer);
      output[static_cast<std::uint64_t>(peer) * words + i] = cell.low;
    }
  }
  return status;
}

/// Signals: ready(s) = 3 + s, landed(s) = 3 + nranks + s.
MARROW_DEVICE Status large_all_to_all(const AllToAllArguments& a) {
  const Gin gin(a.comm, 0);
  const int n = a.comm.nranks;
  const int me = a.comm.rank;
  Status status = Status::ok;
  if (block_index() == 0) {
    for (int p = thread_index(); p < n; p += block_size()) {
      status = worse(status, gin.signal(p, SignalAdd{3 + me, 1, Strength::weak}));
    }
  }
  // Blocks go round the peers so that all links are busy from the start.
  const int slices = n * a.blocks_per_peer;
  for (int slice = block_index(); slice < slices && status == Status::ok; slice += grid_size()) {
    const int peer = (me + 1 + slice % n) % n;
    const Share share = share_of(a.chunk, slice / n, a.blocks_per_peer);
    status = gin.wait_signal(3 + peer, a.epoch, Block{});
    if (status != Status::ok) break;
    status = gin.put(peer, a.output, static_cast<std::uint64_t>(me) * a.chunk + share.offset,
                     a.input, static_cast<std::uint64_t>(peer) * a.chunk + share.offset,
                     share.bytes, SignalAdd{3 + n + me}, Block{});
  }
  status = Block{}.agree(status);
  for (int s = block_index(); s < n && status == Status::ok; s += grid_size()) {
    status = gin.wait_signal(3 + n + s, a.epoch * static_cast<std::uint64_t>(a.blocks_per_peer),
                             Block{});
  }
  // The input may change after the launch.
  if (status == Status::ok) status = gin.flush(Block{});
  return status;
}

MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    all_to_all_kernel(const MARROW_GRID_CONSTANT AllToAllArguments a) {
  begin(a.log);
  finish(a.log, a.small ? small_all_to_all(a) : large_all_to_all(a));
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
