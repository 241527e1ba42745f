// SPDX-License-Identifier: Apache-2.0
// Around a kernel launch: logs in the kernel's own memory, its status as an error, and which devices
// do the work behind a figure.
#pragma once

#include <string>
#include <vector>

#include "cli/kernels/kernels.hpp"
#include "cli/memory.hpp"
#include "cli/result.hpp"

namespace marrow::cli {

class KernelLog {
 public:
  KernelLog(const Place& place, int blocks, std::size_t samples = 0);
  Log log() const;
  /// Waits for the kernel. @throws what the communicator knows, else Error(timeout | peer_failed | aborted |
  /// internal) naming `what`, the rank, the block and the rank that was waited for
  void finish(Communicator& comm, const std::string& what) const;
  /// First start to last end of the last launch, ns. After finish().
  std::uint64_t elapsed_ns() const;
  std::vector<std::uint64_t> samples(std::size_t first, std::size_t count) const;

 private:
  int blocks_;
  Buffer status_, start_, end_, sample_, awaited_;
};

/// How this rank reaches `peer`: path, network and every device that does a step.
struct PathUse {
  std::string path, network;
  std::vector<DeviceUse> devices;
};
PathUse path_use(const Communicator& comm, int peer);

/// A row of this path with its only possible kind.
Row make_row(const PathUse& use, std::string what, std::string unit);

/// Memory that windows and registered buffers of this path need: a CPU engine or proxy thread that moves the
/// data reads host memory only.
Memory default_memory(const Place& place, Path path);

}  // namespace marrow::cli
