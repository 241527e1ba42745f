// SPDX-License-Identifier: Apache-2.0
// The rows, in the order in which a set-up would run into them. Sources: what gpunetio, NCCL and NVSHMEM
// ask for before they let a GPU ring a ConnectX; capability bits are those of QUERY_HCA_CAP.
#include "gda/requirements.hpp"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/random.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "gda/requirements_pci.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "marrow/error.hpp"
#include "verbs/pci.hpp"
#include "verbs/ports.hpp"

namespace marrow::gda {
namespace {

namespace fs = std::filesystem;
using base::cat;
using State = Need::State;

constexpr std::uint64_t kMinimumLocked = std::uint64_t{64} << 20;  // queues of a small job
constexpr std::uint64_t kEnoughLocked = std::uint64_t{8} << 30;
constexpr int kMinimumDriver = 550;  // of CUDA 12.4
constexpr int kOrderedForOwner = 100;

std::string mebibytes(std::uint64_t bytes) { return cat(bytes >> 20, " MiB"); }

/// Rows of one part of the machine.
class Rows {
 public:
  Rows(std::vector<Need>& all, std::string part)
      : all_(all), part_(std::move(part)), first_(all.size()) {}

  void add(const std::string& name, State state, std::string found, std::string needed,
           std::string fix) {
    if (state == State::found) fix.clear();
    all_.push_back({part_, name, state, std::move(found), std::move(needed), std::move(fix)});
    complete_ = complete_ && state != State::missing;
  }
  /// Nothing is missing.
  bool complete() const { return complete_; }

 private:
  std::vector<Need>& all_;
  std::string part_;
  std::size_t first_;
  bool complete_ = true;
};

std::string version_of(const Machine& machine, const void* function) {
  const std::string file = machine.library_of ? machine.library_of(function) : "";
  return file.empty() ? "loaded" : file;
}

/// @return the table, or null
const verbs::Table* check_libraries(Rows& rows, const Machine& machine) {
  const verbs::Table* table = nullptr;
  std::string reason;
  try {
    table = &machine.verbs();
  } catch (const Error& error) {
    reason = error.sentence();
  }
  rows.add(
      "libibverbs", table ? State::found : State::missing,
      table ? version_of(machine, reinterpret_cast<const void*>(table->get_device_list)) : reason,
      "libibverbs.so.1", "install rdma-core (Debian: libibverbs1 ibverbs-providers) or MOFED");
  const bool devx = table && table->has_devx();
  rows.add("libmlx5", devx ? State::found : State::missing,
           devx ? version_of(machine, reinterpret_cast<const void*>(table->devx_obj_create))
                : "no libmlx5.so.1 with the DevX functions",
           "libmlx5.so.1 with DevX (rdma-core 22 or later)",
           "install ibverbs-providers of rdma-core, or MOFED");
  return devx ? table : nullptr;
}

void check_kernel(Rows& rows, const Machine& machine, const verbs::Table* table) {
  const fs::path modules = fs::path(machine.root) / "sys/module";
  const bool mlx5 = fs::exists(modules / "mlx5_ib");
  rows.add("mlx5 driver", mlx5 ? State::found : State::missing,
           mlx5 ? "mlx5_ib is loaded" : "mlx5_ib is not loaded", "kernel module mlx5_ib",
           "modprobe mlx5_ib (with MOFED: /etc/init.d/openibd start)");
  const bool peermem = fs::exists(modules / "nvidia_peermem");
  bool dma_buf = false;
  for (const GpuFacts& gpu : machine.gpus) dma_buf = dma_buf || gpu.dma_buf;
  dma_buf = dma_buf && table && table->reg_dmabuf_mr;
  rows.add("peer memory", peermem || dma_buf ? State::found : State::missing,
           dma_buf   ? cat("dma-buf", peermem ? ", and nvidia_peermem is loaded" : "")
           : peermem ? "nvidia_peermem is loaded"
                     : "neither dma-buf nor nvidia_peermem",
           "dma-buf (ibv_reg_dmabuf_mr, a GPU driver that exports it) or kernel module "
           "nvidia_peermem, so that the NIC can register GPU memory",
           "modprobe nvidia-peermem; after an update of MOFED, reinstall the NVIDIA driver first");
  const bool unlimited = !machine.locked_memory || machine.may_lock;
  const std::uint64_t limit = machine.locked_memory.value_or(0);
  rows.add("locked memory",
           unlimited || limit >= kEnoughLocked ? State::found
           : limit >= kMinimumLocked           ? State::warning
                                               : State::missing,
           !machine.locked_memory ? "unlimited"
           : machine.may_lock     ? cat(mebibytes(limit), ", but CAP_IPC_LOCK lifts it")
                                  : mebibytes(limit),
           "windows, queues and rings must fit: unlimited is best",
           "ulimit -l unlimited (memlock in /etc/security/limits.conf; docker run --ulimit "
           "memlock=-1)");
}

void check_driver(Rows& rows, const Machine& machine) {
  const std::string version = verbs::read_text(machine.root + "/sys/module/nvidia/version");
  const int major = std::atoi(version.c_str());
  rows.add("NVIDIA driver",
           version.empty()           ? State::missing
           : major >= kMinimumDriver ? State::found
                                     : State::missing,
           version.empty() ? "not loaded" : version, cat(kMinimumDriver, " or later (CUDA 12.4)"),
           "install a newer driver");
  rows.add("GPU", machine.gpus.empty() ? State::missing : State::found,
           machine.gpus.empty() ? machine.gpu_reason : cat(machine.gpus.size(), " visible"),
           "a GPU this process can use",
           "check nvidia-smi and CUDA_VISIBLE_DEVICES (containers: --gpus all)");
}

void check_gpu(Rows& rows, const GpuFacts& gpu) {
  rows.add("GPUDirect RDMA",
           gpu.rdma_supported && gpu.rdma_with_vmm ? State::found : State::missing,
           !gpu.rdma_supported  ? "not supported"
           : !gpu.rdma_with_vmm ? "supported, but not for memory from cuMemCreate"
                                : "supported, also for memory from cuMemCreate",
           "a NIC may read and write its memory, windows included",
           "use a GPU of the data-centre or workstation line with a current driver");
  const bool ordered = gpu.writes_ordering >= kOrderedForOwner;
  rows.add("writes ordering", ordered ? State::found : State::missing,
           gpu.writes_ordering >= 200 ? "for all devices"
           : ordered                  ? "for the owner"
                                      : "none",
           "a NIC's writes become visible to this GPU's kernels in their order "
           "(GPU_DIRECT_RDMA_WRITES_ORDERING of at least owner)",
           "use the proxy path: on this platform each signal would need a flush that Marrow does "
           "not issue");
}

/// The registry key lets a GPU write to another device's registers; whether it does is seen below.
void check_override(Rows& rows, const Machine& machine, bool works) {
  const std::string parameters = verbs::read_text(machine.root + "/proc/driver/nvidia/params");
  const bool set = parameters.find("PeerMappingOverride=1") != std::string::npos;
  rows.add("PeerMappingOverride", set || works ? State::found : State::warning,
           set     ? "set"
           : works ? "not set, and not needed: a register could be mapped"
                   : "not set",
           "GPU kernels write to the NIC's doorbell register",
           "echo 'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' > "
           "/etc/modprobe.d/nvidia-gda.conf, then rebuild the initramfs and reboot");
}

void check_node(Rows& rows, const Machine& machine, const std::string& nic) {
  std::error_code ignored;
  std::string node;
  for (const auto& entry :
       fs::directory_iterator(machine.root + "/sys/class/infiniband_verbs", ignored)) {
    if (verbs::read_text(entry.path() / "ibdev") == nic)
      node = "/dev/infiniband/" + entry.path().filename().string();
  }
  const bool may = !node.empty() && machine.can_open(machine.root + node);
  rows.add("device node", may ? State::found : State::missing,
           node.empty() ? "no uverbs device"
           : may        ? node
                        : node + " cannot be opened for reading and writing",
           "/dev/infiniband/uverbsN, readable and writable",
           node.empty() ? "modprobe ib_uverbs"
                        : "containers: --device=/dev/infiniband; else: chmod 666 " + node +
                              " or join the group rdma");
}

std::string last_failure(const verbs::Table& table) {
  const int error = errno;
  const char* words = table.last_error ? table.last_error() : "";
  return *words ? std::string(words) : base::errno_text(error);
}

void check_port(Rows& rows, const Machine& machine, const verbs::Table& table,
                verbs::ibv_context* context, const std::string& nic) {
  verbs::ibv_port_attr port{};
  const bool asked = table.query_port(context, 1, &port) == 0;
  const bool active = asked && port.state == verbs::kPortActive;
  rows.add(
      "link", active ? State::found : State::missing,
      !asked   ? cat("port 1 cannot be queried: ", last_failure(table))
      : active ? "port 1 is active"
               : cat("port 1 is in state ", port.state),
      "port 1 active (state 4)",
      "check the cable and the switch; InfiniBand also needs a subnet manager (ibstat, ip link)");
  if (!asked) return;
  const bool ethernet = port.link_layer == verbs::kLinkLayerEthernet;
  const bool resolves = table.create_ah && table.destroy_ah;
  rows.add("addressing", !ethernet || resolves ? State::found : State::missing,
           !ethernet  ? cat("InfiniBand, LID ", port.lid)
           : resolves ? "Ethernet (RoCE)"
                      : "Ethernet (RoCE), without address handles",
           "InfiniBand; RoCE needs libibverbs' address handles, which resolve Ethernet addresses",
           "install rdma-core (libibverbs1)");
  if (ethernet) {
    const std::vector<verbs::Gid> gids = verbs::gids_of(table, context, nic, 1, port, machine.root);
    const verbs::Gid* best = verbs::best_gid(gids);
    const bool routed = best && best->kind != verbs::GidKind::roce_v1;
    rows.add("GID",
             !best    ? State::missing
             : routed ? State::found
                      : State::warning,
             best ? cat("index ", best->index, ": ", verbs::to_text(best->gid), ", ",
                        verbs::name(best->kind))
                  : "none",
             "a RoCE v2 GID of port 1, the same kind on every host (MARROW_GID_INDEX chooses)",
             "give the network interface an IP address");
  } else {
    rows.add("LID", port.lid != 0 ? State::found : State::missing, cat(port.lid),
             "a local identifier from the subnet manager", "start a subnet manager (opensm)");
  }
}

void check_capabilities(Rows& rows, const verbs::Table& table, verbs::ibv_context* context,
                        std::uint32_t depth) {
  namespace command = mlx5::command;
  namespace hca_cap = mlx5::hca_cap;
  using mlx5::get;
  std::uint8_t in[hca_cap::kInBytes] = {};
  std::uint8_t out[hca_cap::kOutBytes] = {};
  mlx5::set(in, command::opcode, mlx5::kQueryHcaCap);
  mlx5::set(in, command::op_mod, hca_cap::kGeneral << 1 | 1);
  const bool allowed = table.devx_general_cmd(context, in, sizeof in, out, sizeof out) == 0;
  rows.add("DevX", allowed ? State::found : State::missing,
           allowed ? "commands are taken" : cat("QUERY_HCA_CAP is refused: ", last_failure(table)),
           "the firmware takes DevX commands from this process",
           "mlxconfig -d <pci> set UCTX_EN=1, then reset the NIC; in containers add CAP_NET_RAW");
  if (!allowed) return;
  const std::uint8_t* cap = out + hca_cap::kCapability;
  std::string lacks;
  const auto want = [&](bool has, const std::string& what) {
    if (!has) lacks += (lacks.empty() ? "" : ", ") + what;
  };
  want(get(cap, hca_cap::reliable_connected) != 0, "RC queue pairs");
  want(get(cap, hca_cap::atomic) != 0, "atomics");
  want(get(cap, hca_cap::cq_overrun_ignore) != 0, "completion queues without a consumer index");
  want(get(cap, hca_cap::cross_channel) != 0, "WAIT entries (counters)");
  want(get(cap, hca_cap::cqe_version) == 1, "completion entries of version 1");
  const std::uint64_t deepest = std::uint64_t{1} << get(cap, hca_cap::log_max_qp_size);
  want(deepest >= depth, cat("queues of ", depth, " entries (its limit is ", deepest, ")"));
  rows.add("capabilities", lacks.empty() ? State::found : State::missing,
           lacks.empty() ? cat("all, queues up to ", deepest) : "lacks " + lacks,
           "RC, atomics, overrun ignore, WAIT, completion entries of version 1, depth",
           "update the firmware (ConnectX-5 or later has all of them); MARROW_GDA_DEPTH sets the "
           "depth");
}

/// Opens the NIC and looks. @return whether it is complete
bool check_nic(std::vector<Need>& all, const Machine& machine, const verbs::Table& table,
               verbs::ibv_device* device, const std::vector<const GpuFacts*>& good_gpus,
               bool* register_mapped) {
  const std::string nic = table.get_device_name(device);
  Rows rows(all, "NIC " + nic);
  const bool soft = table.open_device_in_job != nullptr;
  const bool mlx5 = table.is_supported(device);
  rows.add("device", mlx5 ? State::found : State::missing, mlx5 ? "mlx5" : "not an mlx5 device",
           "a ConnectX (mlx5)", "use the proxy path: its verbs network takes any RDMA device");
  if (!mlx5) return false;
  if (!soft) check_node(rows, machine, nic);
  verbs::ibv_context* context =
      soft ? table.open_device_in_job(device, ("doctor-" + base::random_name(8)).c_str(), "")
           : table.open_device(device);
  rows.add("opens", context ? State::found : State::missing, context ? "yes" : last_failure(table),
           "the device can be opened",
           "see the device node above; another container may own the device exclusively");
  if (!context) return false;
  const auto close = [&](verbs::ibv_context* c) { table.close_device(c); };
  const std::unique_ptr<verbs::ibv_context, decltype(close)> owned(context, close);
  verbs::ibv_device_attr attributes{};
  if (table.query_device(context, &attributes) == 0) {
    attributes.fw_ver[sizeof attributes.fw_ver - 1] = 0;
    rows.add("firmware", State::found, attributes.fw_ver, "any that has the capabilities below",
             "");
  }
  check_capabilities(rows, table, context, machine.depth);
  check_port(rows, machine, table, context, nic);

  verbs::mlx5dv_devx_uar* uar = nullptr;  // in the order in which queues ask
  for (const std::uint32_t kind :
       {verbs::kUarNonCachedDedicated, verbs::kUarNonCached, verbs::kUarBlueFlame}) {
    if (!uar) uar = table.devx_alloc_uar(context, kind);
  }
  rows.add("doorbell register", uar ? State::found : State::missing,
           uar ? "allocated" : last_failure(table), "a UAR of the NIC",
           "close other users of the device, or raise the number of UARs in the firmware");
  if (!uar || soft) {
    if (uar) table.devx_free_uar(uar);
    return rows.complete();
  }
  const std::string nic_pci = verbs::pci_of_nic(machine.root, nic);
  bool pair_complete = false;
  for (const GpuFacts& gpu : machine.gpus) {
    Rows pair(all, cat("GPU ", gpu.ordinal, " to ", nic));
    const std::string why = machine.map_register(gpu.ordinal, uar->reg_addr);
    *register_mapped = *register_mapped || why.empty();
    pair.add("register mapping", why.empty() ? State::found : State::missing,
             why.empty() ? "mapped" : why, "the doorbell register mapped into the GPU's addresses",
             "set PeerMappingOverride (above); turn the IOMMU to pass-through (iommu=pt)");
    const verbs::PciDistance distance = verbs::pci_distance(machine.root, gpu.pci, nic_pci);
    pair.add("distance", distance.near ? State::found : State::warning, distance.words,
             "one PCIe switch; anything else works, slower",
             "let each GPU use the NIC below its own switch (MARROW_NIC)");
    const AcsState acs = acs_state(machine.root, gpu.pci, nic_pci);
    pair.add("ACS",
             acs == AcsState::off        ? State::found
             : acs == AcsState::redirect ? State::warning
                                         : State::unknown,
             acs == AcsState::off        ? "does not redirect"
             : acs == AcsState::redirect ? "redirects peer traffic through the root complex"
                                         : "the bridges' configuration cannot be read",
             "peer-to-peer traffic stays below the switch",
             acs == AcsState::unknown
                 ? "run marrow doctor as root"
                 : "turn ACS off on the bridges in between (setpci -s <bridge> ECAP_ACS+6.w=0)");
    for (const GpuFacts* good : good_gpus)
      pair_complete = pair_complete || (good == &gpu && pair.complete());
  }
  table.devx_free_uar(uar);
  return rows.complete() && pair_complete;
}

void check_devices(Diagnosis& out, const Machine& machine, const verbs::Table& table,
                   const std::string& only, const std::vector<const GpuFacts*>& good_gpus,
                   bool shared_complete, bool* register_mapped) {
  int count = 0;
  verbs::ibv_device** list = table.get_device_list(&count);
  const auto free_list = [&](verbs::ibv_device** l) {
    if (l) table.free_device_list(l);
  };
  const std::unique_ptr<verbs::ibv_device*, decltype(free_list)> owned(list, free_list);
  bool any = false;
  for (int i = 0; list && i < count; ++i) {
    const std::string name = table.get_device_name(list[i]);
    if (!only.empty() && name != only) continue;
    any = true;
    const bool complete = check_nic(out.needs, machine, table, list[i], good_gpus, register_mapped);
    if (complete && shared_complete && out.nic.empty()) out.nic = name;
  }
  if (any) return;
  Rows(out.needs, "NIC")
      .add("device", State::missing,
           only.empty() ? "no RDMA device" : cat("no RDMA device named ", only),
           "a ConnectX (mlx5)",
           "check lspci and `rdma link`; MARROW_NIC=softnic emulates one on one host");
}

}  // namespace

Diagnosis requirements(const Machine& machine, const std::string& only) {
  Diagnosis out;
  Rows libraries(out.needs, "libraries");
  const verbs::Table* table = check_libraries(libraries, machine);
  Rows kernel(out.needs, "kernel");
  check_kernel(kernel, machine, table);
  Rows driver(out.needs, "GPU driver");
  check_driver(driver, machine);
  const std::size_t at_override = out.needs.size();
  std::vector<const GpuFacts*> good_gpus;
  for (const GpuFacts& gpu : machine.gpus) {
    Rows rows(out.needs, cat("GPU ", gpu.ordinal));
    check_gpu(rows, gpu);
    const IommuState iommu = iommu_state(machine.root, gpu.pci);
    rows.add("IOMMU",
             iommu == IommuState::off || iommu == IommuState::pass_through ? State::found
             : iommu == IommuState::translating                            ? State::warning
                                                                           : State::unknown,
             iommu == IommuState::off            ? "off"
             : iommu == IommuState::pass_through ? "pass-through"
             : iommu == IommuState::translating  ? "translates this GPU's addresses"
                                                 : "its mode cannot be read",
             "off or pass-through: translation slows or stops peer-to-peer traffic",
             "boot with iommu=pt");
    if (rows.complete()) good_gpus.push_back(&gpu);
  }
  const bool shared = libraries.complete() && kernel.complete() && driver.complete();
  bool register_mapped = false;
  if (table) check_devices(out, machine, *table, only, good_gpus, shared, &register_mapped);
  // Its row stands with the driver's, and is only a warning: the mapping itself was tried.
  std::vector<Need> override_row;
  Rows last(override_row, "GPU driver");
  if (!machine.gpus.empty()) check_override(last, machine, register_mapped);
  out.needs.insert(out.needs.begin() + static_cast<std::ptrdiff_t>(at_override),
                   override_row.begin(), override_row.end());
  out.usable = !out.nic.empty();
  return out;
}

Diagnosis softnic_requirements(const verbs::Table& table) {
  Diagnosis out;
  out.emulated = true;
  Rows(out.needs, "libraries")
      .add("softnic", State::found, "built in: needs no library, driver or device", "nothing", "");
  Machine machine;
  bool ignored = false;
  check_devices(out, machine, table, "", {}, true, &ignored);
  out.usable = !out.nic.empty();
  return out;
}

}  // namespace marrow::gda
