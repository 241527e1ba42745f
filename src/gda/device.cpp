// SPDX-License-Identifier: Apache-2.0
#include "gda/device.hpp"

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "cuda/mappings.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "marrow/error.hpp"
#include "topology/topology.hpp"
#include "verbs/pci.hpp"

namespace marrow::gda {
namespace {

using base::cat;

constexpr std::size_t kPage = 4096;

[[noreturn]] void refuse(const std::string& sentence) { throw Error(Code::unsupported, sentence); }

void* page_of(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) & ~(kPage - 1));
}

}  // namespace

void map_register_page(const cuda::Context& context, void* register_address, bool io_memory) {
  constexpr unsigned kIoMemory = 4;
  const cuda::Current current(context);
  cuda::check(
      cuda::driver().host_register(
          page_of(register_address), kPage,
          cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap | (io_memory ? kIoMemory : 0)),
      cat("mapping a doorbell page for GPU ", context.device()),
      "the driver must allow PeerMappingOverride for a real NIC "
      "(NVreg_RegistryDwords=\"PeerMappingOverride=1;\"); `marrow doctor` checks it");
}

void unmap_register_page(const cuda::Context& context, void* register_address) noexcept {
  try {
    const cuda::Current current(context);
    cuda::check_quietly(cuda::driver().host_unregister(page_of(register_address)),
                        "unmapping a doorbell page");
  } catch (const Error&) {  // the driver has shut down
  }
}

std::shared_ptr<Device> Device::open(const std::string& provider, const std::string& name,
                                     const std::string& job, const std::string& softnic_options,
                                     const Place& place, const QueueOptions& options) {
  const verbs::Table& table = verbs::provider(provider);
  if (!table.has_devx())
    refuse("libmlx5.so.1 is missing or lacks DevX, so no queue can be made for a GPU");
  int count = 0;
  verbs::ibv_device** list = table.get_device_list(&count);
  const auto free_list = [&](verbs::ibv_device** l) {
    if (l) table.free_device_list(l);
  };
  const std::unique_ptr<verbs::ibv_device*, decltype(free_list)> owned(list, free_list);
  std::string tried;
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(table.get_device_name(list[i]));
  for (const int i : verbs::nearest_first("", names, topology::pci_of(place))) {
    const std::string found = table.get_device_name(list[i]);
    if (!name.empty() && found != name) continue;
    if (!table.is_supported(list[i])) {
      tried += cat(tried.empty() ? "" : "; ", found, ": not an mlx5 device");
      continue;
    }
    try {
      std::shared_ptr<Device> device(new Device(table, place, options));
      device->use(list[i], job, softnic_options);
      return device;
    } catch (const Error& error) {
      tried += cat(tried.empty() ? "" : "; ", found, ": ", error.sentence());
    }
  }
  if (tried.empty()) tried = name.empty() ? "no RDMA device" : cat("no RDMA device named ", name);
  refuse(tried);
}

void Device::use(verbs::ibv_device* device, const std::string& job,
                 const std::string& softnic_options) {
  namespace command = mlx5::command;
  namespace hca_cap = mlx5::hca_cap;
  using mlx5::get;
  using mlx5::set;
  emulated_ = table_.open_device_in_job != nullptr;
  name_ = emulated_ ? "softnic0" : table_.get_device_name(device);
  context_ = emulated_ ? table_.open_device_in_job(device, job.c_str(), softnic_options.c_str())
                       : table_.open_device(device);
  if (!context_) refuse(cat("cannot be opened: ", failure()));

  port_ = verbs::choose_port(table_, context_, name_, options_.port, options_.gid_index);
  if (port_.ethernet && (!table_.create_ah || !table_.destroy_ah))
    refuse("this libibverbs has no address handles, which resolve a RoCE peer's Ethernet address");

  std::uint8_t in[hca_cap::kInBytes] = {};
  std::uint8_t out[hca_cap::kOutBytes] = {};
  set(in, command::opcode, mlx5::kQueryHcaCap);
  set(in, command::op_mod, hca_cap::kGeneral << 1 | 1);
  if (table_.devx_general_cmd(context_, in, sizeof in, out, sizeof out) != 0) {
    refuse(cat("DevX commands are refused: ", failure()));
  }
  const std::uint8_t* cap = out + hca_cap::kCapability;
  if (!get(cap, hca_cap::reliable_connected) || !get(cap, hca_cap::atomic))
    refuse("it has no RC queues or no atomics");
  if (!get(cap, hca_cap::cq_overrun_ignore)) refuse("it cannot ignore completion queue overrun");
  if (options_.depth > 1u << get(cap, hca_cap::log_max_qp_size)) {
    refuse(cat("MARROW_GDA_DEPTH=", options_.depth, " is above its limit of ",
               1u << get(cap, hca_cap::log_max_qp_size)));
  }

  pd_ = table_.alloc_pd(context_);
  if (!pd_) refuse(cat("no protection domain: ", failure()));
  verbs::mlx5dv_pd number{};
  verbs::mlx5dv_obj object{};
  object.pd = {pd_, &number};
  if (table_.init_obj(&object, verbs::kObjectPd) != 0)
    refuse(cat("the protection domain has no number: ", failure()));
  pdn_ = number.pdn;
  if (table_.devx_query_eqn(context_, 0, &eqn_) != 0) refuse(cat("no event queue: ", failure()));
  if (place_.on_gpu()) {
    cuda_ = cuda::Context::of(place_.device);
    if (emulated_) {
      if (!table_.accept_gpu) {
        refuses_gpu_memory_ = "this software NIC cannot load or store GPU memory";
      } else if (const char* why = table_.accept_gpu(context_, place_.device)) {
        refuses_gpu_memory_ = why;
      }
    }
  } else {
    refuses_gpu_memory_ = "softnic's engine is a CPU thread, which cannot load or store GPU memory";
  }
}

void Device::choose_engine(bool gpu_memory) {
  if (!emulated_ || !place_.on_gpu() || !table_.choose_engine) return;
  const int chosen = table_.choose_engine(context_, gpu_memory ? 1 : 0);
  if (chosen < 0) {
    throw Error(Code::network,
                cat("starting softnic's engine on GPU ", place_.device, ": ", failure()),
                "MARROW_SOFTNIC=engine=cpu takes a CPU thread, for windows in host memory");
  }
  on_gpu_engine_ = chosen == 1;
  if (!on_gpu_engine_ && refuses_gpu_memory_.empty()) {
    refuses_gpu_memory_ =
        "softnic's engine is a CPU thread, which cannot load or store GPU memory; it was chosen "
        "because the "
        "first device communicator was made when no window lay in GPU memory";
  }
}

std::uint64_t Device::mac_of(const verbs::PortAddress& peer) const {
  verbs::ibv_ah_attr path =
      verbs::path_to(port_, peer, options_.service_level, options_.traffic_class);
  verbs::ibv_ah* handle = table_.create_ah(pd_, &path);
  if (!handle) {
    throw Error(Code::network,
                cat(name_, " ", verbs::describe(port_), " cannot resolve ",
                    verbs::to_text(path.grh.dgid), ": ", failure()),
                "check that the peer's address answers (ping), and MARROW_GID_INDEX");
  }
  verbs::mlx5dv_ah out{};
  verbs::mlx5dv_obj object{};
  object.ah = {handle, &out};
  std::uint64_t mac = 0;
  const bool known = table_.init_obj(&object, verbs::kObjectAh) == 0 && out.av;
  for (int i = 0; known && i < 6; ++i) mac = mac << 8 | out.av->rmac[i];
  table_.destroy_ah(handle);
  if (mac == 0) {
    throw Error(Code::network,
                cat(name_, " tells no Ethernet address of ", verbs::to_text(path.grh.dgid)),
                "update the kernel: its mlx5 driver must answer address handles (4.11 or later)");
  }
  return mac;
}

verbs::ibv_mr* Device::register_memory(const verbs::Memory& memory, unsigned rights) const {
  return verbs::register_memory(table_, context_, pd_, memory, rights, cuda::dma_buf_of, name_)
      .region;
}

std::uint64_t Device::failures() const {
  return on_gpu_engine_ && table_.failures ? table_.failures(context_) : 0;
}

Device::~Device() {
  for (const auto& [page, users] : mapped_pages_) unmap_register_page(*cuda_, page);
  if (pd_ && table_.dealloc_pd(pd_) != 0)
    MARROW_WARN(gda, name_, ": freeing the protection domain: ", failure());
  if (context_ && table_.close_device(context_) != 0)
    MARROW_WARN(gda, name_, ": closing: ", failure());
}

std::string Device::failure() const {
  const int error = errno;
  const char* words = table_.last_error ? table_.last_error() : "";
  return *words ? std::string(words) : base::errno_text(error);
}

std::uint64_t* Device::map_doorbell(const verbs::mlx5dv_devx_uar& uar) {
  auto* host = static_cast<std::byte*>(uar.reg_addr);
  if (!place_.on_gpu() || on_gpu_engine_) return reinterpret_cast<std::uint64_t*>(host);
  void* page = page_of(host);
  const std::lock_guard lock(mutex_);
  const cuda::Current current(*cuda_);
  const auto found = mapped_pages_.find(page);
  if (found == mapped_pages_.end()) {
    map_register_page(*cuda_, page, !emulated_);
    mapped_pages_[page] = 1;
  } else {
    ++found->second;
  }
  cuda::DevicePointer at{};
  cuda::check(cuda::driver().host_device_pointer(&at, page, 0),
              cat("address of a doorbell page for GPU ", place_.device));
  return reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(at) +
                                          (host - static_cast<std::byte*>(page)));
}

void Device::unmap_doorbell(const verbs::mlx5dv_devx_uar& uar) noexcept {
  if (!place_.on_gpu() || on_gpu_engine_) return;
  void* page = page_of(uar.reg_addr);
  const std::lock_guard lock(mutex_);
  const auto found = mapped_pages_.find(page);
  if (found == mapped_pages_.end() || --found->second > 0) return;
  mapped_pages_.erase(found);
  unmap_register_page(*cuda_, page);
}

}  // namespace marrow::gda
