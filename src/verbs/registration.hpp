// SPDX-License-Identifier: Apache-2.0
// Registering memory with a NIC, whichever way it takes: host memory by its address; GPU memory as a
// dma-buf where kernel and GPU driver know that, else by its address through nvidia_peermem; and for
// softnic, whose engines map memory by its file, with the descriptor told first.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/fd.hpp"
#include "verbs/table.hpp"

namespace marrow::verbs {

/// What is registered.
struct Memory {
  void* address = nullptr;
  std::uint64_t bytes = 0;
  bool gpu = false;             ///< not the host's: `address` is the GPU's
  int fd = -1;                  ///< file that other processes map it by, or -1
  std::uint64_t fd_offset = 0;  ///< of `address` in that file
};

/// Exports GPU memory as a dma-buf: see cuda::dma_buf_of.
using DmaBuf = std::function<base::Fd(void* address, std::uint64_t bytes, std::uint64_t& offset,
                                      std::string& why)>;

struct Registration {
  ibv_mr* region = nullptr;
  /// How: "host memory", "dma-buf", "peer memory", "GPU memory of softnic".
  const char* way = "";
};

/// @param rights  Access bits; IBV_ACCESS_RELAXED_ORDERING is dropped where the library has no call for it
/// @throws Error  out_of_memory: locked memory or the NIC's regions ran out (the sentence has the limit);
///                unsupported: this GPU memory cannot be registered, with the reason of each way;
///                invalid_argument: the memory is not there, or not this process's to use
Registration register_memory(const Table& table, ibv_context* context, ibv_pd* pd,
                             const Memory& memory, unsigned rights, const DmaBuf& dma_buf,
                             const std::string& nic);

/// What the last call through the table said: its own words, else errno's.
std::string last_failure(const Table& table, int error);

/// "locked memory is limited to 64 KiB (ulimit -l)", or "unlimited".
std::string locked_memory_limit();

}  // namespace marrow::verbs
