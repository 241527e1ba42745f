// SPDX-License-Identifier: Apache-2.0
// The demo's main job: dispatch a wave of tokens to their experts, run a stand-in expert, bring the
// results back and combine them. On the public API only.
//
// What makes it right: rows, their experts and their count go to one peer on one context, so the strong
// signal that follows proves all of them. A wave's slots may be written again when the destination has
// answered, because it answers after it has read them; so no barrier is needed between waves.
#pragma once

#include "cli/kernels/log.cuh"
#include "cli/stand_in.hpp"

namespace marrow::cli {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Signals: source s has dispatched: s. Destination d has answered: nranks + d.
MARROW_DEVICE int dispatched(int source) { return source; }
MARROW_DEVICE int answered(const DeviceCommunicator& comm, int destination) {
  return comm.nranks + destination;
}

/// Each warp puts rows straight from the token buffer; the block then tells the destination.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    dispatch_kernel(const MARROW_GRID_CONSTANT ExchangeArguments a) {
  begin(a.log);
  const Gin gin(a.comm, 0);
  const int me = a.comm.rank;
  const std::uint64_t row = std::uint64_t{a.hidden} * sizeof(float);
  const std::uint64_t pair = std::uint64_t{a.cap} * row;
  const std::uint32_t warp = static_cast<std::uint32_t>(thread_index() / warp_lanes());
  const std::uint32_t warps =
      static_cast<std::uint32_t>((block_size() + warp_lanes() - 1) / warp_lanes());
  Status status = Status::ok;
  int awaited = -1;
  for (int d = block_index(); d < a.comm.nranks && status == Status::ok; d += grid_size()) {
    awaited = d;
    const std::uint32_t first = a.first[d];
    const std::uint32_t rows = a.first[d + 1] - first;
    for (std::uint32_t i = warp; i < rows; i += warps) {
      status = worse(
          status, gin.put(d, a.window, a.rows_at + static_cast<std::uint64_t>(me) * pair + i * row,
                          a.tokens, a.token[first + i] * row, row, Warp{}));
    }
    status = Block{}.agree(status);
    if (thread_index() == 0 && status == Status::ok) {
      const std::uint64_t list = std::uint64_t{a.cap} * sizeof(std::uint32_t);
      status = gin.put(d, a.window, a.expert_at + static_cast<std::uint64_t>(me) * list, a.experts,
                       static_cast<std::uint64_t>(d) * list, rows * sizeof(std::uint32_t));
      status =
          worse(status, gin.put_value(d, a.window,
                                      a.count_at + static_cast<std::uint64_t>(me) * kCountStride,
                                      std::uint64_t{rows}, SignalAdd{dispatched(me)}));
    }
    status = Block{}.agree(status);
  }
  for (int s = block_index(); s < a.comm.nranks && status == Status::ok; s += grid_size()) {
    awaited = s;
    status = gin.wait_signal(dispatched(s), a.wave, Block{});
  }
  finish(a.log, status, awaited);
}

/// Computes the rows of each source and puts them back where that source expects them.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    expert_kernel(const MARROW_GRID_CONSTANT ExchangeArguments a) {
  begin(a.log);
  const Gin gin(a.comm, 0);
  const int me = a.comm.rank;
  const std::uint64_t row = std::uint64_t{a.hidden} * sizeof(float);
  const std::uint64_t pair = std::uint64_t{a.cap} * row;
  Status status = Status::ok;
  int awaited = -1;
  for (int s = block_index(); s < a.comm.nranks && status == Status::ok; s += grid_size()) {
    awaited = s;
    const auto from = static_cast<std::uint64_t>(s);
    std::uint64_t rows =
        *reinterpret_cast<const std::uint64_t*>(a.window.local + a.count_at + from * kCountStride);
    if (rows > a.cap) rows = a.cap;  // the host's check names a wrong count
    const auto* expert =
        reinterpret_cast<const std::uint32_t*>(a.window.local + a.expert_at) + from * a.cap;
    const auto* in = reinterpret_cast<const float*>(a.window.local + a.rows_at + from * pair);
    auto* out = reinterpret_cast<float*>(a.results.local + from * pair);
    for (std::uint64_t i = static_cast<std::uint64_t>(thread_index()); i < rows * a.hidden;
         i += block_size()) {
      out[i] = stand_in_expert(expert[i / a.hidden], in[i]);
    }
    block_sync();
    status = gin.put(s, a.window, a.return_at + static_cast<std::uint64_t>(me) * pair, a.results,
                     from * pair, rows * row, SignalAdd{answered(a.comm, me)}, Block{});
  }
  for (int d = block_index(); d < a.comm.nranks && status == Status::ok; d += grid_size()) {
    awaited = d;
    status = gin.wait_signal(answered(a.comm, d), a.wave, Block{});
  }
  // Sources of puts are reused in the next wave.
  if (status == Status::ok) {
    status = gin.flush(Block{});
    if (status != Status::ok) awaited = unflushed(gin, a.comm.nranks);
  }
  finish(a.log, status, awaited);
}

/// Weighted sum of each token's rows, in the order of its top-k list.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    combine_kernel(const MARROW_GRID_CONSTANT ExchangeArguments a) {
  begin(a.log);
  const auto* back = reinterpret_cast<const float*>(a.window.local + a.return_at);
  const std::uint64_t elements = std::uint64_t{a.wave_tokens} * a.hidden;
  const std::uint64_t stride = static_cast<std::uint64_t>(grid_size()) * block_size();
  for (std::uint64_t i = static_cast<std::uint64_t>(block_index()) * block_size() + thread_index();
       i < elements; i += stride) {
    const std::uint64_t token = i / a.hidden;
    const std::uint64_t at = i % a.hidden;
    float sum = 0;
    for (std::uint32_t k = 0; k < a.top_k; ++k) {
      const std::uint64_t entry = token * a.top_k + k;
      sum = stand_in_combine(a.weight[entry], back[std::uint64_t{a.slot[entry]} * a.hidden + at],
                             sum);
    }
    a.output[i] = sum;
  }
  finish(a.log, Status::ok);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
