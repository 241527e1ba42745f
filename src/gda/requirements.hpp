// SPDX-License-Identifier: Apache-2.0
// What the gda path needs of a machine with a real ConnectX, each need as one row: found, needed, how to
// fix. All rows at once, because a set-up that fails at its first missing need takes a day of rounds
// (NVIDIA's users ask for this: aws-ofi-nccl#1369, nccl#2372).
//
// The checks look at a `Machine`, which a test replaces by a folder that plays sysfs and a table that
// plays libibverbs: so every row is tested in both states on a machine that has neither.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "marrow/inventory.hpp"
#include "verbs/table.hpp"

namespace marrow::gda {

/// A GPU as far as a NIC is concerned.
struct GpuFacts {
  int ordinal = 0;
  std::string name;
  std::string pci;  ///< "0000:18:00.0"
  bool rdma_supported = false;
  bool rdma_with_vmm = false;  ///< also memory from cuMemCreate, which windows are made of
  bool dma_buf = false;
  int writes_ordering = 0;  ///< CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: 0, 100, 200
};

/// What the checks look at.
struct Machine {
  std::string root;  ///< stands before /sys, /proc and /dev
  /// libibverbs and libmlx5; throws Error(unsupported) when there are none.
  std::function<const verbs::Table&()> verbs;
  /// File that a function came from, links resolved; empty: unknown.
  std::function<std::string(const void* function)> library_of;
  /// Whether this process may read and write a device node.
  std::function<bool(const std::string& path)> can_open;
  std::vector<GpuFacts> gpus;
  std::string gpu_reason;  ///< why there is none
  /// Maps a doorbell register for a GPU as queues do, and unmaps it. @return why not; empty: it works
  std::function<std::string(int gpu, void* page)> map_register;
  std::optional<std::uint64_t> locked_memory;  ///< limit in bytes; none: unlimited
  bool may_lock = false;                       ///< CAP_IPC_LOCK: the limit does not count
  std::uint32_t depth = 1024;                  ///< MARROW_GDA_DEPTH
};

/// The machine this process runs on.
Machine this_machine();

/// Every row, NIC by NIC. Never throws for what is missing.
/// @param only  the NIC to look at; empty: all
Diagnosis requirements(const Machine& machine, const std::string& only);

/// The rows of softnic, which needs no hardware.
Diagnosis softnic_requirements(const verbs::Table& table);

}  // namespace marrow::gda
