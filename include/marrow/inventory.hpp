// SPDX-License-Identifier: Apache-2.0
// What this machine offers Marrow: GPUs, NICs and networks, and why some of them cannot be used.
// For people (`marrow info`) and for schedulers; nothing here opens a queue or allocates on a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "marrow/abi/abi.h"

namespace marrow {

struct GpuInfo {
  int ordinal = 0;           ///< CUDA's number
  std::string name;          ///< e.g. "NVIDIA H200"
  std::string pci;           ///< e.g. "0000:19:00.0"
  int numa = -1;             ///< NUMA node, -1: unknown
  std::uint64_t memory = 0;  ///< bytes
  std::string architecture;  ///< e.g. "sm_90"
  std::vector<int> reaches;  ///< ordinals whose memory it can load and store
};

struct NicInfo {
  std::string name;     ///< e.g. "mlx5_0", "softnic"
  std::string kind;     ///< e.g. "ConnectX (mlx5)", "soft-RoCE (rxe)", "software ConnectX"
  std::string state;    ///< e.g. "active, 400 Gb/s, InfiniBand", or empty
  int numa = -1;        ///< NUMA node, -1: unknown
  bool usable = false;  ///< the gda path can drive it
  std::string reason;   ///< why not; empty when usable
};

struct NetworkInfo {
  std::string name;  ///< e.g. "shm"
  bool usable = false;
  std::string reason;  ///< why not; empty when usable
};

struct Inventory {
  std::string version;      ///< of Marrow
  std::uint32_t abi = 0;    ///< kAbiVersion of the library
  std::string cuda_driver;  ///< e.g. "13.0"; empty: none
  std::string gpu_reason;   ///< why there is no GPU; empty when there is one
  std::vector<GpuInfo> gpus;
  std::vector<NicInfo> nics;
  std::vector<NetworkInfo> networks;
};

/// Never throws for hardware that is missing: its reason says so.
MARROW_API Inventory inventory();

/// One thing the gda path needs of a machine with a real ConnectX (`marrow doctor`).
struct Need {
  enum class State : std::uint8_t {
    found,    ///< as needed
    missing,  ///< the gda path does not work without it
    warning,  ///< it works, but slower or not everywhere
    unknown   ///< could not be looked at, e.g. for lack of rights
  };
  std::string part;  ///< what it is a property of: "libraries", "NIC mlx5_0", "GPU 0 to mlx5_0"
  std::string name;  ///< e.g. "DevX"
  State state = State::unknown;
  std::string found;   ///< what is there
  std::string needed;  ///< what has to be there
  std::string fix;     ///< what to do; empty when found
};
/// Stable lower-case name, e.g. "missing".
MARROW_API const char* name(Need::State state);

/// All needs at once, and whether the gda path can run: nothing is missing in what all NICs share nor in
/// one NIC and one GPU with it.
struct Diagnosis {
  std::string nic;  ///< the NIC that can be used; empty: none
  bool usable = false;
  bool emulated = false;  ///< looked at softnic, not at hardware
  std::vector<Need> needs;
};

/// Looks; changes nothing. Opens each NIC and maps one of its registers for a GPU for a moment.
/// @param nic  as MARROW_NIC: "auto" (all real ones), a device name, or "softnic"
MARROW_API Diagnosis diagnose(const std::string& nic = "auto");

}  // namespace marrow
