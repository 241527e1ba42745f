// SPDX-License-Identifier: Apache-2.0
#include "marrow/inventory.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "gda/requirements.hpp"
#include "marrow/error.hpp"
#include "marrow/marrow.hpp"
#include "proxy/networks.hpp"
#include "topology/topology.hpp"
#include "verbs/table.hpp"

namespace marrow {
namespace {

void add_gpus(Inventory& all) {
  if (!cuda::available(&all.gpu_reason)) return;
  all.gpu_reason.clear();
  int version = 0;
  if (cuda::driver().driver_version(&version) == cuda::Result::success) {
    all.cuda_driver = base::cat(version / 1000, ".", version % 1000 / 10);
  }
  const std::vector<topology::Gpu> gpus = topology::gpus();
  for (const topology::Gpu& gpu : gpus) {
    GpuInfo info{gpu.ordinal, gpu.name,   gpu.pci,
                 gpu.numa,    gpu.memory, base::cat("sm_", gpu.compute_capability),
                 {}};
    for (const topology::Gpu& other : gpus) {
      if (other.ordinal != gpu.ordinal && topology::gpu_pair(gpu.ordinal, other.ordinal).access) {
        info.reaches.push_back(other.ordinal);
      }
    }
    all.gpus.push_back(std::move(info));
  }
}

/// Why libibverbs and libmlx5 cannot drive a ConnectX here; empty: they can.
std::string system_verbs_reason() {
  try {
    return verbs::provider("system").has_devx()
               ? ""
               : "libmlx5 is missing, so its queues cannot be created";
  } catch (const Error& error) {
    return error.sentence();
  }
}

void add_nics(Inventory& all) {
  const std::string missing = system_verbs_reason();
  for (const topology::Nic& nic : topology::nics()) {
    NicInfo info;
    info.name = nic.name;
    const bool mlx5 = nic.driver == "mlx5_core";
    info.kind = mlx5 ? "ConnectX (mlx5)" : nic.driver.empty() ? "virtual (soft-RoCE)" : nic.driver;
    info.state = base::cat(nic.state, nic.rate.empty() ? "" : ", ", nic.rate,
                           nic.link_layer.empty() ? "" : ", ", nic.link_layer);
    info.numa = nic.numa;
    info.reason =
        mlx5 ? missing
             : "the gda path drives mlx5 devices only; the proxy's verbs network may use it";
    info.usable = info.reason.empty();
    all.nics.push_back(std::move(info));
  }
  const std::vector<std::string> providers = verbs::provider_names();
  if (std::find(providers.begin(), providers.end(), "softnic") != providers.end()) {
    NicInfo info;
    info.name = "softnic";
    info.kind = "software ConnectX";
    info.state = "active";
    info.usable = true;
    all.nics.push_back(std::move(info));
  }
}

void add_networks(Inventory& all) {
  for (const marrow_network* network : proxy::registered_networks()) {
    NetworkInfo info;
    info.name = network->name;
    try {
      const proxy::Link link({network, "", nullptr},
                             nullptr);  // asks it for a device, connects nothing
      info.usable = true;
    } catch (const Error& error) {
      info.reason = error.sentence();
    }
    all.networks.push_back(std::move(info));
  }
}

}  // namespace

Inventory inventory() {
  Inventory all;
  all.version = version();
  all.abi = kAbiVersion;
  add_gpus(all);
  add_nics(all);
  add_networks(all);
  return all;
}

const char* name(Need::State state) {
  switch (state) {
    case Need::State::found: return "found";
    case Need::State::missing: return "missing";
    case Need::State::warning: return "warning";
    case Need::State::unknown: return "unknown";
  }
  return "unknown";
}

Diagnosis diagnose(const std::string& nic) {
  if (nic.rfind("softnic", 0) == 0) return gda::softnic_requirements(verbs::provider("softnic"));
  return gda::requirements(gda::this_machine(), nic == "auto" || nic == "none" ? "" : nic);
}

}  // namespace marrow
