// SPDX-License-Identifier: Apache-2.0
// What the machine has, and who can load and store whose memory, with the reason when not. Works on
// a machine with nothing: every list is then empty.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "marrow/place.hpp"

namespace marrow::topology {

struct Gpu {
  int ordinal = 0;             ///< CUDA's number in this process
  std::string name;            ///< e.g. "NVIDIA H200"
  std::string uuid;            ///< "GPU-..." as nvidia-smi prints it
  std::string pci;             ///< "0000:18:00.0"
  int numa = -1;               ///< NUMA node by sysfs; -1: unknown
  int compute_capability = 0;  ///< 90 for 9.0
  int multiprocessors = 0;
  std::uint64_t memory = 0;  ///< bytes
};

struct Nic {
  std::string name;        ///< RDMA device, e.g. "mlx5_0"
  std::string link_layer;  ///< "InfiniBand" or "Ethernet"
  std::string state;       ///< e.g. "4: ACTIVE"
  std::string rate;        ///< e.g. "400 Gb/sec (4X NDR)"
  std::string driver;      ///< kernel driver, e.g. "mlx5_core"; "" for a virtual device (soft-RoCE)
  std::string pci;
  int numa = -1;
};

/// Peer access from GPU `from` to memory of GPU `to`.
struct GpuPair {
  bool access = false;
  bool native_atomics =
      false;           ///< 64-bit atomics over the link; else only add and exchange of 32 bits
  std::string link;    ///< "same GPU", "NVLink", "PCIe" or "unknown"
  std::string reason;  ///< when there is no access: one sentence
};

/// All GPUs this process sees; empty without a driver.
std::vector<Gpu> gpus();
/// PCI address of the place's GPU ("0000:18:00.0"); empty: no GPU, or the driver does not say.
std::string pci_of(const Place& place);
/// All RDMA devices, by sysfs.
std::vector<Nic> nics();
/// @param from, to  CUDA ordinals of this process
GpuPair gpu_pair(int from, int to);
/// NUMA node of a PCI device ("0000:18:00.0"); -1: unknown or one node.
int numa_of_pci(const std::string& pci);

/// Where a rank's kernels run, in terms that mean the same in every process. Sent as bytes.
struct Endpoint {
  std::uint64_t host =
      0;  ///< equal exactly when descriptors can be passed (bootstrap::this_host_id)
  std::uint64_t process = 0;  ///< equal for thread ranks of one process
  std::int32_t device = -1;   ///< CUDA ordinal in its own process; -1: the CPU device
  std::uint32_t reserved = 0;
  std::array<std::uint8_t, 16> uuid{};  ///< of the GPU
};
static_assert(sizeof(Endpoint) == 40);

/// @throws Error(invalid_argument | unsupported) when the place's GPU is not there
Endpoint endpoint(const Place& place, std::uint64_t host, std::uint64_t process);

/// Whether kernels at `me` can load and store memory of `peer`.
struct Reach {
  bool lsa = false;
  bool native_atomics = true;
  std::string link;    ///< "memory" between CPU devices, else GpuPair::link
  std::string reason;  ///< when lsa is false, or when it is true but slow: one sentence
};
Reach reach(const Endpoint& me, const Endpoint& peer);

}  // namespace marrow::topology
