// SPDX-License-Identifier: Apache-2.0
// One opened NIC: context, protection domain, port, and the doorbell registers it hands out.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/driver.hpp"
#include "marrow/place.hpp"
#include "verbs/ports.hpp"
#include "verbs/registration.hpp"
#include "verbs/table.hpp"

namespace marrow::gda {

/// How to make queues; from the parameters.
struct QueueOptions {
  std::uint32_t depth = 1024;
  bool collapsed = false;
  int port = 0;        ///< 0: the first active one
  int gid_index = -1;  ///< -1: by verbs::choose_port's rules
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;
};

/// Makes the page of a doorbell register addressable by a GPU's kernels.
/// @param io_memory  a real NIC's register; softnic's is an ordinary page, which that flag refuses
/// @throws Error(cuda) with what the driver must allow
void map_register_page(const cuda::Context& context, void* register_address, bool io_memory);
void unmap_register_page(const cuda::Context& context, void* register_address) noexcept;

class Device {
 public:
  /// Opens `name` (empty: the usable device nearest to the place's GPU) of a provider.
  /// @param job  softnic: the job all ranks open; empty for real NICs
  /// @throws Error(unsupported) with one sentence why none could be used
  static std::shared_ptr<Device> open(const std::string& provider, const std::string& name,
                                      const std::string& job, const std::string& softnic_options,
                                      const Place& place, const QueueOptions& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const verbs::Table& table() const { return table_; }
  verbs::ibv_context* context() const { return context_; }
  verbs::ibv_pd* pd() const { return pd_; }
  std::uint32_t pdn() const { return pdn_; }
  std::uint32_t eqn() const { return eqn_; }
  const verbs::Port& port() const { return port_; }
  const std::string& name() const { return name_; }
  const Place& place() const { return place_; }
  const QueueOptions& options() const { return options_; }
  /// Emulated: softnic is the NIC, by a CPU thread or a block on our GPU.
  bool emulated() const { return emulated_; }
  /// A block on our GPU executes the queues: they and their doorbells lie in its memory.
  bool on_gpu_engine() const { return on_gpu_engine_; }
  /// Why this NIC cannot use GPU memory; empty if it can.
  const std::string& refuses_gpu_memory() const { return refuses_gpu_memory_; }
  /// Chooses softnic's engine for the queues made from now on. Nothing to choose on a real NIC.
  /// @throws Error(network)
  void choose_engine(bool gpu_memory);
  /// Queue pairs in error that nobody may have looked at; only counted where no CPU reads the queues.
  std::uint64_t failures() const;

  /// The Ethernet address that packets to a peer's RoCE port go to, as the kernel resolves it.
  /// @throws Error(network)
  std::uint64_t mac_of(const verbs::PortAddress& peer) const;
  /// Registers memory, GPU memory as a dma-buf or through peer memory. @throws Error
  verbs::ibv_mr* register_memory(const verbs::Memory& memory, unsigned rights) const;

  /// Why the last call through the table failed, in words.
  std::string failure() const;

  /// Makes a doorbell register's page usable by kernels.
  /// @return the register as an address of the executor
  std::uint64_t* map_doorbell(const verbs::mlx5dv_devx_uar& uar);
  void unmap_doorbell(const verbs::mlx5dv_devx_uar& uar) noexcept;

 private:
  Device(const verbs::Table& table, const Place& place, const QueueOptions& options)
      : table_(table), place_(place), options_(options) {}
  void use(verbs::ibv_device* device, const std::string& job, const std::string& softnic_options);

  const verbs::Table& table_;
  Place place_;
  QueueOptions options_;
  bool emulated_ = false;
  bool on_gpu_engine_ = false;
  std::string refuses_gpu_memory_;
  std::string name_;
  verbs::ibv_context* context_ = nullptr;
  verbs::ibv_pd* pd_ = nullptr;
  std::uint32_t pdn_ = 0;
  std::uint32_t eqn_ = 0;
  verbs::Port port_;
  std::shared_ptr<cuda::Context> cuda_;
  std::mutex mutex_;
  std::map<void*, int> mapped_pages_;  ///< registered with CUDA, and by how many registers
};

}  // namespace marrow::gda
