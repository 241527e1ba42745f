// SPDX-License-Identifier: Apache-2.0
// One line a kernel: the list from which both builds define, and dispatch.cpp chooses, launch functions.
#pragma once

#include "cli/kernels/kernels.hpp"

// X(launch function, kernel, arguments)
#define MARROW_CLI_KERNELS(X)                                                    \
  X(launch_dispatch, dispatch_kernel, ExchangeArguments)                         \
  X(launch_expert, expert_kernel, ExchangeArguments)                             \
  X(launch_combine, combine_kernel, ExchangeArguments)                           \
  X(launch_ping_pong_thread, ping_pong_thread_kernel, PingPongArguments)         \
  X(launch_ping_pong_block, ping_pong_block_kernel, PingPongArguments)           \
  X(launch_ping_pong_lsa_thread, ping_pong_lsa_thread_kernel, PingPongArguments) \
  X(launch_ping_pong_lsa_block, ping_pong_lsa_block_kernel, PingPongArguments)   \
  X(launch_floor, floor_kernel, PingPongArguments)                               \
  X(launch_stream, stream_kernel, StreamArguments)                               \
  X(launch_get, get_kernel, GetArguments)                                        \
  X(launch_barrier, barrier_kernel, BarrierArguments)                            \
  X(launch_small_all_to_all, small_all_to_all_kernel, AllToAllArguments)         \
  X(launch_lsa_all_to_all, lsa_all_to_all_kernel, AllToAllArguments)             \
  X(launch_large_all_to_all, large_all_to_all_kernel, AllToAllArguments)

namespace marrow::cli {
#define MARROW_CLI_DECLARE(function, kernel, Arguments) \
  void function(const Place&, Shape, const Arguments&);
namespace by_gxx {
MARROW_CLI_KERNELS(MARROW_CLI_DECLARE)
}
namespace by_nvcc {
MARROW_CLI_KERNELS(MARROW_CLI_DECLARE)
}
#undef MARROW_CLI_DECLARE
}  // namespace marrow::cli

#define MARROW_CLI_DEFINE(function, kernel, Arguments)                                   \
  void function(const Place& place, Shape shape, const Arguments& arguments) {           \
    if (shape.early) {                                                                   \
      launch_early(place, shape.blocks, shape.threads, shape.shared, kernel, arguments); \
    } else {                                                                             \
      launch(place, shape.blocks, shape.threads, shape.shared, kernel, arguments);       \
    }                                                                                    \
  }
