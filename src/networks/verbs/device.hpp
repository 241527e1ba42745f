// SPDX-License-Identifier: Apache-2.0
// One opened RDMA device: context, protection domain, the chosen port and address. A real one through
// libibverbs, or softnic by the same table of functions.
#pragma once

#include <memory>
#include <string>

#include "networks/verbs/options.hpp"
#include "verbs/ports.hpp"
#include "verbs/registration.hpp"
#include "verbs/table.hpp"

namespace marrow::networks::rdma {

class Device {
 public:
  /// @param job  softnic: the job that all ranks open. Empty: real devices only
  /// @return null when it would be softnic and has no job
  /// @throws Error(unsupported) saying for each device why not; Error(invalid_argument) for a name,
  ///         port or GID index that is wrong
  static std::shared_ptr<Device> open(const Options& options, const std::string& job);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const marrow::verbs::Table& table() const { return table_; }
  marrow::verbs::ibv_context* context() const { return context_; }
  marrow::verbs::ibv_pd* pd() const { return pd_; }
  const marrow::verbs::Port& port() const { return port_; }
  const marrow::verbs::ibv_device_attr& attributes() const { return attributes_; }
  const std::string& name() const { return name_; }
  bool emulated() const { return table_.open_device_in_job != nullptr; }
  /// Whether GPU memory can be registered; `why` says why not.
  bool takes_gpu_memory(std::string* why) const;

  /// Empty while the port is active, else what it is: "port 1 is down".
  std::string port_trouble() const;
  /// -1: unknown or none.
  int numa_node() const;

  /// What the last call through the table said; read errno at once.
  std::string failure() const;

 private:
  explicit Device(const marrow::verbs::Table& table) : table_(table) {}
  void use(marrow::verbs::ibv_device* device, const Options& options, const std::string& job,
           int port);

  const marrow::verbs::Table& table_;
  std::string name_;
  marrow::verbs::ibv_context* context_ = nullptr;
  marrow::verbs::ibv_pd* pd_ = nullptr;
  marrow::verbs::Port port_;
  marrow::verbs::ibv_device_attr attributes_{};
};

}  // namespace marrow::networks::rdma
