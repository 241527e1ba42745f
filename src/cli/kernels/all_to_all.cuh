// SPDX-License-Identifier: Apache-2.0
// All-to-all, two forms.
//
// small: every 8 bytes travel in a cell {data, epoch} of a receive window, so arrival needs no fence and no
// signal. Cells are double-buffered by epoch: whoever writes a cell of epoch e has finished its kernel of
// e-1, hence has our cells of e-1, which we sent after our kernel of e-2 had read its cells; so nobody still
// reads the set that epoch e overwrites. Load/store peers only.
//
// large: the first blocks put one share each straight into a peer's output, with one strong signal; the others
// copy our own chunk meanwhile. A rank may overwrite a peer's output only after that peer's launch says that the
// previous contents are no longer needed: a packet at the start. That packet's slot is free again when the peer's
// data of this launch has arrived here, because every block of the peer that sends waits for the packet first.
#pragma once

#include "cli/kernels/bulk.cuh"

namespace marrow::cli {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// @param awaited  gets the peer that was waited for last
MARROW_DEVICE Status small_all_to_all(const AllToAllArguments& a, int* awaited) {
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
    if (status == Status::ok) *awaited = peer;
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

/// The first loads of a share come from L2 then, instead of costing the start a memory latency. Harmless before the
/// previous kernel has ended.
MARROW_DEVICE void prefetch_share(const AllToAllArguments& a) {
  const int n = a.comm.nranks;
  const int work = block_index();
  if (work >= (n - 1) * a.blocks_per_peer) return;
  const int peer = (a.comm.rank + 1 + work % (n - 1)) % n;
  const Share share = share_of(a.chunk, work / (n - 1), a.blocks_per_peer);
  for (std::uint64_t at = static_cast<std::uint64_t>(thread_index()) * 128;
       at < share.bytes && at < 65536; at += static_cast<std::uint64_t>(block_size()) * 128) {
    prefetch(a.input.local + static_cast<std::uint64_t>(peer) * a.chunk + share.offset + at);
  }
}

/// Signal s: rank s's puts have landed. Packet slot s: rank s's launch is ready for ours.
template <class Gin>
MARROW_DEVICE Status large_all_to_all(const AllToAllArguments& a, int* awaited) {
  const Gin gin(a.comm, 0);
  const int n = a.comm.nranks;
  const int me = a.comm.rank;
  const int block = block_index();
  const Scratch scratch{a.scratch ? dynamic_shared<std::byte>() : nullptr, a.scratch};
  Status status = Status::ok;
  if (block == grid_size() - 1) {
    for (int p = thread_index(); p < n; p += block_size()) {
      if (p != me) status = worse(status, gin.send_packet(p, me, 0, a.epoch));
    }
  }
  const int senders = (n - 1) * a.blocks_per_peer;
  // Neighbouring blocks serve different peers, so that all links are busy from the start. A grid smaller than
  // the work goes round it.
  for (int work = block; work < senders + a.own_blocks; work += grid_size()) {
    if (work < senders) {
      const int peer = (me + 1 + work % (n - 1)) % n;
      const Share share = share_of(a.chunk, work / (n - 1), a.blocks_per_peer);
      *awaited = peer;
      if (thread_index() == 0) {
        std::uint64_t nothing;
        status = worse(status, gin.receive_packet(peer, a.epoch, &nothing));
      }
      status = Block{}.agree(status);
      if (status != Status::ok) return status;
      status = gin.put(peer, a.output, static_cast<std::uint64_t>(me) * a.chunk + share.offset,
                       a.input, static_cast<std::uint64_t>(peer) * a.chunk + share.offset,
                       share.bytes, SignalAdd{me}, scratch, Block{});
    } else {
      const Share share = share_of(a.chunk, work - senders, a.own_blocks);
      const std::uint64_t at = static_cast<std::uint64_t>(me) * a.chunk + share.offset;
      status = gin.put(me, a.output, at, a.input, at, share.bytes, scratch, Block{});
    }
    if (status != Status::ok) return status;
  }
  // The last blocks wait: they copied our own chunk and are done first.
  for (int s = grid_size() - 1 - block; s < n && status == Status::ok; s += grid_size()) {
    if (s == me) continue;
    *awaited = s;
    status = gin.wait_signal(s, a.epoch * static_cast<std::uint64_t>(a.blocks_per_peer), Block{});
  }
  // The input may change after the launch.
  if (status == Status::ok && a.flush) {
    status = gin.flush(Block{});
    if (status != Status::ok) *awaited = unflushed(gin, n);
  }
  return status;
}

// Launched early: a kernel's blocks are placed while the previous one ends.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    small_all_to_all_kernel(const MARROW_GRID_CONSTANT AllToAllArguments a) {
  await_previous_kernel();
  let_next_kernel_start();
  begin(a.log);
  int awaited = -1;
  const Status status = small_all_to_all(a, &awaited);
  finish(a.log, status, awaited);
}
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    lsa_all_to_all_kernel(const MARROW_GRID_CONSTANT AllToAllArguments a) {
  prefetch_share(a);
  await_previous_kernel();
  let_next_kernel_start();
  begin(a.log);
  int awaited = -1;
  const Status status = large_all_to_all<Gin<Path::lsa>>(a, &awaited);
  finish(a.log, status, awaited);
}
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    large_all_to_all_kernel(const MARROW_GRID_CONSTANT AllToAllArguments a) {
  prefetch_share(a);
  await_previous_kernel();
  let_next_kernel_start();
  begin(a.log);
  int awaited = -1;
  const Status status = large_all_to_all<Gin<>>(a, &awaited);
  finish(a.log, status, awaited);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
