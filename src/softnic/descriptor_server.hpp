// SPDX-License-Identifier: Apache-2.0
// Hands the descriptors of this process's GPU memory to the engines of the job's other processes. A CUDA
// descriptor cannot be opened again through /proc as a file's can; it has to be passed.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "base/fd.hpp"
#include "base/fd_door.hpp"
#include "softnic/directory.hpp"
#include "softnic/engine.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class DescriptorServer {
 public:
  /// @throws Error(system)
  DescriptorServer(Directory& directory, Regions& regions, Engine& lock);
  ~DescriptorServer();
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;

 private:
  void serve();
  void answer(base::FdDoor::Arrival& asked);

  Directory& directory_;
  Regions& regions_;
  Engine& lock_;
  const std::uint64_t number_;  ///< names the socket
  base::FdDoor door_;           ///< the thread's own
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// The descriptor of the GPU memory that a region of another process lies in.
/// @throws Error(peer_failed | timeout | system)
base::Fd fetch_descriptor(Directory& directory, std::uint32_t process, std::uint32_t key);

}  // namespace marrow::softnic
