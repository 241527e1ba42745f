// SPDX-License-Identifier: Apache-2.0
// The machine that `marrow doctor` looks at: this one.
#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/parameters.hpp"
#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "gda/device.hpp"
#include "gda/requirements.hpp"
#include "marrow/error.hpp"
#include "topology/topology.hpp"
#include "verbs/pci.hpp"

namespace marrow::gda {
namespace {

std::string library_of(const void* function) {
  Dl_info info{};
  if (::dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(info.dli_fname, error);
  return error ? std::string(info.dli_fname) : real.string();
}

/// CapEff of /proc/self/status, bit 14.
bool has_ipc_lock() {
  const std::string status = verbs::read_text("/proc/self/status");
  const std::size_t at = status.find("CapEff:");
  if (at == std::string::npos) return false;
  return (std::strtoull(status.c_str() + at + 7, nullptr, 16) >> 14 & 1) != 0;
}

GpuFacts facts_of(const topology::Gpu& gpu) {
  const auto attribute = [&](cuda::DeviceAttribute which) {
    int value = 0;
    return cuda::driver().device_attribute(&value, which, gpu.ordinal) == cuda::Result::success
               ? value
               : 0;
  };
  return {gpu.ordinal,
          gpu.name,
          gpu.pci,
          attribute(cuda::DeviceAttribute::gpu_direct_rdma_supported) != 0,
          attribute(cuda::DeviceAttribute::gpu_direct_rdma_with_vmm) != 0,
          attribute(cuda::DeviceAttribute::dma_buf_supported) != 0,
          attribute(cuda::DeviceAttribute::gpu_direct_rdma_writes_ordering)};
}

std::string map_register(int gpu, void* page) {
  try {
    const auto context = cuda::Context::of(gpu);
    map_register_page(*context, page, /*io_memory=*/true);
    unmap_register_page(*context, page);
    return {};
  } catch (const Error& error) {
    return error.sentence();
  }
}

}  // namespace

Machine this_machine() {
  Machine machine;
  machine.verbs = []() -> const verbs::Table& { return verbs::provider("system"); };
  machine.library_of = library_of;
  machine.can_open = [](const std::string& path) {
    return ::access(path.c_str(), R_OK | W_OK) == 0;
  };
  if (cuda::available(&machine.gpu_reason)) {
    for (const topology::Gpu& gpu : topology::gpus()) machine.gpus.push_back(facts_of(gpu));
  }
  machine.map_register = map_register;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    machine.locked_memory = limit.rlim_cur;
  machine.may_lock = has_ipc_lock();
  machine.depth = static_cast<std::uint32_t>(base::parameter_int("MARROW_GDA_DEPTH"));
  return machine;
}

}  // namespace marrow::gda
