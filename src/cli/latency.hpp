// SPDX-License-Identifier: Apache-2.0
// The ping-pong between ranks 0 and 1, shared by perf and the demo.
#pragma once

#include <vector>

#include "cli/kernels/kernels.hpp"
#include "cli/run_kernel.hpp"

namespace marrow::cli {

/// Windows, buffers and queues for figures between ranks 0 and 1. Made by all ranks together.
class Bench {
 public:
  /// @param bytes    largest message
  /// @param packets  packet slots
  Bench(Communicator& comm, std::uint64_t bytes, int packets, Memory memory);

  Communicator& comm() const { return comm_; }
  bool plays() const { return comm_.rank() < 2; }
  bool first() const { return comm_.rank() == 0; }
  int peer() const { return comm_.rank() == 0 ? 1 : 0; }
  DeviceCommunicator device() const { return device_.handle(); }
  WindowHandle window() const { return window_.handle(); }
  LocalBufferHandle local() const { return local_.handle(); }
  const Buffer& source() const { return source_; }
  void* window_data() const { return window_.data(); }

  /// Collective. One-way times in us (half of each round trip), on rank 0; empty elsewhere.
  std::vector<double> ping_pong(Ping ping, std::uint64_t bytes, int iterations, int warmup,
                                int threads);

 private:
  Communicator& comm_;
  Window window_;
  DeviceCommunicatorOwner device_;
  Buffer source_;
  LocalBuffer local_;
  std::uint64_t round_ = 0;
  std::uint64_t packet_round_ = 0;
};

}  // namespace marrow::cli
