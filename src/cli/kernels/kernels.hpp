// SPDX-License-Identifier: Apache-2.0
// The command line's kernels as the host sees them: arguments, and one launch function each, which
// takes the build of the kernel that fits the place (kernels_cpu.cpp by g++, kernels_gpu.cu by nvcc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "marrow/abi/device_communicator.h"
#include "marrow/device/status.cuh"
#include "marrow/place.hpp"

namespace marrow::cli {

/// Grid of a launch.
struct Shape {
  int blocks = 1;
  int threads = 1;
  std::size_t shared = 0;  ///< bytes of dynamic shared memory a block
  bool early = false;      ///< by launch_early
};

/// Where a kernel leaves its result and its times, in its own device's memory: a store to host memory
/// would make every later system fence 0.85 us dearer on a GPU.
struct Log {
  std::uint32_t* status =
      nullptr;  ///< [blocks] Status of the block's last launch that failed; zeroed by the host
  std::uint64_t* start = nullptr;   ///< [blocks] now_ns() at its beginning
  std::uint64_t* end = nullptr;     ///< [blocks] now_ns() at its end
  std::uint64_t* sample = nullptr;  ///< [iterations] ns of one iteration, or null
  std::uint32_t* awaited =
      nullptr;  ///< [blocks] when it failed: 1 + the rank it waited for, 0: unknown
};

/// One wave of the demo. Rows of `row_bytes` floats travel from token owners to experts and back. Our window
/// holds, for each source rank: its row count, the expert of each row, the rows; and for each rank we
/// sent to: the rows that came back. cap: rows a (source, destination) pair can have in a wave.
struct ExchangeArguments {
  DeviceCommunicator comm;
  WindowHandle window;
  LocalBufferHandle tokens;   ///< [local tokens][hidden] float: what we send
  LocalBufferHandle experts;  ///< [nranks][cap] u32: expert of each row we send
  LocalBufferHandle results;  ///< [nranks][cap][hidden] float: what our experts computed
  const std::uint32_t* first =
      nullptr;  ///< [nranks + 1] where each destination's rows begin in `token`
  const std::uint32_t* token = nullptr;  ///< [rows] local token of each row we send
  const std::uint32_t* slot =
      nullptr;  ///< [wave tokens][top_k] destination * cap + slot of each of a token's rows
  const float* weight = nullptr;  ///< [wave tokens][top_k]
  float* output = nullptr;        ///< [wave tokens][hidden]
  std::uint64_t count_at = 0;     ///< byte offsets in the window
  std::uint64_t expert_at = 0;
  std::uint64_t rows_at = 0;
  std::uint64_t return_at = 0;
  std::uint32_t cap = 0;
  std::uint32_t hidden = 0;
  std::uint32_t top_k = 0;
  std::uint32_t wave_tokens = 0;
  std::uint64_t wave = 0;  ///< from 1
  Log log;
};

/// The window's parts for one rank pair, in bytes; all multiples of 16.
constexpr std::uint64_t kCountStride = 64;

/// What ping-pong sends. floor: what put does, by hand and without the library, on the same memory.
enum class Ping : std::uint8_t { put, put_value, signal, packet, floor };

/// Two ranks, one block each: send, wait for the answer.
struct PingPongArguments {
  DeviceCommunicator comm;
  WindowHandle window;
  LocalBufferHandle source;
  std::uint64_t bytes = 0;  ///< packet: bytes / 8 packets
  std::uint32_t iterations = 0;
  std::int32_t peer = 0;
  std::uint64_t round = 0;  ///< rounds played before on this device communicator
  Ping ping = Ping::put;
  bool first = false;  ///< we send first, and our log counts
  Log log;
};

/// Bulk: the initiator moves `bytes` `iterations` times, all blocks share each message, and the target answers
/// when it has seen everything.
struct StreamArguments {
  DeviceCommunicator comm;
  WindowHandle window;
  LocalBufferHandle local;
  std::uint64_t bytes = 0;
  std::uint32_t iterations = 0;
  std::int32_t peer = 0;
  std::uint64_t round = 0;  ///< launches before on this device communicator
  std::uint32_t initiator_blocks = 0;
  bool initiator = false;
  bool get = false;
  Log log;
};

/// One rank alone: get and flush.
struct GetArguments {
  DeviceCommunicator comm;
  WindowHandle window;
  LocalBufferHandle target;
  std::uint64_t bytes = 0;
  std::uint32_t iterations = 0;
  std::int32_t peer = 0;
  Log log;
};

struct BarrierArguments {
  DeviceCommunicator comm;
  std::uint32_t iterations = 0;
  Log log;
};

/// One all-to-all: chunk r of our input becomes chunk `our rank` of rank r's output.
struct AllToAllArguments {
  DeviceCommunicator comm;
  WindowHandle output;      ///< [nranks] chunks; the large form puts straight into it
  WindowHandle cells;       ///< [2][nranks][cells_per_peer] cells of 16 bytes; the small form
  LocalBufferHandle input;  ///< [nranks] chunks
  std::uint64_t chunk = 0;  ///< bytes for each rank
  std::uint64_t epoch =
      0;  ///< 1, 2, ...: launches so far on this device communicator, this one included
  std::uint64_t cells_per_peer = 0;
  std::int32_t blocks_per_peer = 1;  ///< large form: shares of a peer's chunk, one signal each
  std::int32_t own_blocks = 1;       ///< large form: shares of our own chunk
  std::uint32_t scratch = 0;         ///< large form: bytes of shared memory for bulk copies
  bool flush = true;                 ///< large form: some peer is reached by queue
  Log log;
};

/// @throws Error(unsupported) for a GPU place in a build without CUDA
void launch_dispatch(const Place&, Shape, const ExchangeArguments&);
void launch_expert(const Place&, Shape, const ExchangeArguments&);
void launch_combine(const Place&, Shape, const ExchangeArguments&);
/// One thread or one block a rank; lsa: for a peer on that path only.
void launch_ping_pong_thread(const Place&, Shape, const PingPongArguments&);
void launch_ping_pong_block(const Place&, Shape, const PingPongArguments&);
void launch_ping_pong_lsa_thread(const Place&, Shape, const PingPongArguments&);
void launch_ping_pong_lsa_block(const Place&, Shape, const PingPongArguments&);
void launch_floor(const Place&, Shape, const PingPongArguments&);
void launch_stream(const Place&, Shape, const StreamArguments&);
void launch_get(const Place&, Shape, const GetArguments&);
void launch_barrier(const Place&, Shape, const BarrierArguments&);
/// small: cells; lsa and large: puts, to load/store peers only and to any.
void launch_small_all_to_all(const Place&, Shape, const AllToAllArguments&);
void launch_lsa_all_to_all(const Place&, Shape, const AllToAllArguments&);
void launch_large_all_to_all(const Place&, Shape, const AllToAllArguments&);

}  // namespace marrow::cli
