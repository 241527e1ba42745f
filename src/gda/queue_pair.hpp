// SPDX-License-Identifier: Apache-2.0
// One RC queue pair with its completion queue and doorbell register, made and connected with firmware
// commands (DevX): the same bytes go to a ConnectX and to softnic.
#pragma once

#include <cstdint>
#include <memory>

#include "gda/device.hpp"

namespace marrow::gda {

/// A umem that the queues of one connection lie in.
class Umem {
 public:
  Umem(std::shared_ptr<Device> device, void* address, std::size_t bytes);
  ~Umem();
  Umem(const Umem&) = delete;
  Umem& operator=(const Umem&) = delete;
  std::uint32_t id() const { return umem_->umem_id; }

 private:
  std::shared_ptr<Device> device_;
  verbs::mlx5dv_devx_umem* umem_;
};

/// Offsets into the umem, in bytes.
struct QueuePlace {
  std::uint64_t sq = 0;
  std::uint64_t cq = 0;
  std::uint64_t record = 0;  ///< doorbell record, 8 bytes
  std::uint64_t cq_record =
      0;  ///< the completion queue's, 8 bytes; never written: overrun is ignored
};

class QueuePair {
 public:
  /// Creates both queues, in state RESET.
  /// @param first  wanted index of the first WQE, modulo 2^16; a real NIC begins at 0 whatever it says
  /// @param wakes  completions of this queue may wake a WAIT on another one
  /// @throws Error(out_of_memory | network) naming the command and its status
  QueuePair(std::shared_ptr<Device> device, const Umem& umem, const QueuePlace& place,
            std::uint16_t first, bool wakes);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  std::uint32_t number() const { return qpn_; }
  std::uint32_t cq_number() const { return cqn_; }
  /// Index the NIC starts at.
  std::uint16_t first() const { return first_; }
  /// The doorbell register as an address of the executor.
  std::uint64_t* doorbell() const { return doorbell_; }

  /// RESET to ready to send, to one peer.
  void connect(std::uint32_t remote_qpn, const verbs::PortAddress& remote);
  /// To the error state: what is outstanding is flushed. Never throws; failures are logged.
  void stop() noexcept;

 private:
  void create_cq(const Umem& umem, const QueuePlace& place);
  void create_qp(const Umem& umem, const QueuePlace& place, std::uint16_t first, bool wakes);
  void destroy() noexcept;

  std::shared_ptr<Device> device_;
  verbs::mlx5dv_devx_uar* uar_ = nullptr;
  std::uint64_t* doorbell_ = nullptr;
  verbs::mlx5dv_devx_obj* cq_ = nullptr;
  verbs::mlx5dv_devx_obj* qp_ = nullptr;
  std::uint32_t cqn_ = 0;
  std::uint32_t qpn_ = 0;
  std::uint16_t first_ = 0;
};

}  // namespace marrow::gda
