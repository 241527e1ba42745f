// SPDX-License-Identifier: Apache-2.0
#include "networks/verbs/device.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "marrow/error.hpp"
#include "networks/guarded.hpp"
#include "verbs/pci.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;
using marrow::verbs::Table;
namespace v = marrow::verbs;

constexpr const char* kNext =
    "`ibv_devinfo` and `rdma link` show what there is; MARROW_NIC=softnic emulates one on one host";

/// What queue pairs of this network need; empty when all is there.
std::string lacks(const Table& t) {
  std::string names;
  const auto need = [&](bool has, const char* name) {
    if (!has) names += cat(names.empty() ? "" : ", ", name);
  };
  need(t.create_cq && t.destroy_cq, "completion queues");
  need(t.create_qp && t.modify_qp && t.destroy_qp, "queue pairs");
  return names;
}

}  // namespace

std::string Device::failure() const { return v::last_failure(table_, errno); }

void Device::use(v::ibv_device* device, const Options& options, const std::string& job, int port) {
  name_ = emulated() ? "softnic0" : table_.get_device_name(device);
  errno = 0;
  context_ = emulated() ? table_.open_device_in_job(device, job.c_str(), options.softnic.c_str())
                        : table_.open_device(device);
  if (!context_) {
    const int error = errno;
    const std::string words = failure();
    // softnic answers EINVAL to bad options.
    throw Error(emulated() && error == EINVAL ? Code::invalid_argument : Code::unsupported,
                cat(name_, " cannot be opened: ", words),
                emulated() ? "correct MARROW_SOFTNIC"
                           : "check the rights of /dev/infiniband/uverbs*; containers: "
                             "--device=/dev/infiniband");
  }
  port_ = v::choose_port(table_, context_, name_, port, options.gid_index);
  if (table_.query_device(context_, &attributes_) != 0)
    throw Error(Code::unsupported, cat(name_, " does not answer: ", failure()), kNext);
  errno = 0;
  pd_ = table_.alloc_pd(context_);
  if (!pd_) {
    throw Error(Code::out_of_memory, cat(name_, " gives no protection domain: ", failure()),
                "close other users of the device");
  }
  MARROW_INFO(net, "verbs: ", name_, " ", v::describe(port_));
}

Device::~Device() {
  if (pd_ && table_.dealloc_pd(pd_) != 0)
    MARROW_WARN(net, "verbs: ", name_, ": freeing the protection domain: ", failure());
  if (context_ && table_.close_device(context_) != 0)
    MARROW_WARN(net, "verbs: closing ", name_, ": ", failure());
}

std::shared_ptr<Device> Device::open(const Options& options, const std::string& job) {
  if (options.nic == "none")
    throw Error(Code::unsupported, "no NIC for the verbs network: MARROW_NIC=none", kNext);
  const bool automatic = options.provider.empty() && options.nic == "auto";
  std::string tried;
  const auto from = [&](const std::string& provider,
                        const v::NicName& wanted) -> std::shared_ptr<Device> {
    const Table& table = v::provider(provider);
    if (table.open_device_in_job && job.empty()) return nullptr;
    const std::string missing = lacks(table);
    if (!missing.empty())
      throw Error(Code::unsupported, cat("provider ", provider, " has no ", missing), kNext);
    int count = 0;
    errno = 0;
    v::ibv_device** list = table.get_device_list(&count);
    if (!list) {
      throw Error(Code::unsupported,
                  cat("RDMA devices cannot be listed: ", v::last_failure(table, errno)), kNext);
    }
    const auto free_list = [&](v::ibv_device** l) { table.free_device_list(l); };
    const std::unique_ptr<v::ibv_device*, decltype(free_list)> owned(list, free_list);
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i) names.emplace_back(table.get_device_name(list[i]));
    for (const int i : v::nearest_first(options.sysfs, names, options.gpu)) {
      const std::string found = table.get_device_name(list[i]);
      if (!wanted.device.empty() && found != wanted.device) continue;
      try {
        std::shared_ptr<Device> device(new Device(table));
        device->use(list[i], options, job, wanted.port);
        return device;
      } catch (const Error& error) {
        if (error.code() == Code::invalid_argument) throw;
        tried += cat(tried.empty() ? "" : "; ", one_sentence(error));
      }
    }
    if (tried.empty()) {
      tried = wanted.device.empty() ? "there is no RDMA device"
                                    : cat("there is no RDMA device named ", wanted.device);
    }
    throw Error(Code::unsupported, tried, kNext);
  };
  if (!options.provider.empty()) {
    const bool any = options.nic == "auto" || options.nic == "softnic";
    return from(options.provider, any ? v::NicName{} : v::parse_nic(options.nic));
  }
  if (options.nic.starts_with("softnic")) return from("softnic", {});
  try {
    return from("system", automatic ? v::NicName{} : v::parse_nic(options.nic));
  } catch (const Error& error) {
    const std::vector<std::string> known = v::provider_names();
    const bool fallback = automatic && error.code() != Code::invalid_argument &&
                          std::find(known.begin(), known.end(), "softnic") != known.end();
    if (!fallback) throw;
    MARROW_INFO(net, "verbs: no real NIC (", error.sentence(), "), so softnic");
  }
  tried.clear();
  return from("softnic", {});
}

bool Device::takes_gpu_memory(std::string* why) const {
  std::string reason;
  if (emulated()) {
    reason = "softnic's engine is a CPU thread, which cannot load or store GPU memory";
  } else if (!cuda::available(&reason)) {
    // reason is set
  } else if (::access("/sys/module/nvidia_peermem", F_OK) != 0 && !table_.reg_dmabuf_mr) {
    reason = "neither nvidia_peermem is loaded nor does libibverbs know dma-buf";
  }
  if (why) *why = reason;
  return reason.empty();
}

std::string Device::port_trouble() const {
  v::ibv_port_attr attributes{};
  if (table_.query_port(context_, port_.number, &attributes) != 0) return "the device is gone";
  if (attributes.state == v::kPortActive) return {};
  return cat("port ", int{port_.number}, " is ", v::port_state_name(attributes.state));
}

int Device::numa_node() const {
  int node = -1;
  std::ifstream(cat("/sys/class/infiniband/", name_, "/device/numa_node")) >> node;
  return node;
}

}  // namespace marrow::networks::rdma
