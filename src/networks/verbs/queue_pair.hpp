// SPDX-License-Identifier: Apache-2.0
// One RC queue pair to one peer, with the memory that belongs to it: the words through which receives
// are given back, buffers of messages, results of atomics. Made and connected by the connector's
// thread, then used by the progress thread only.
#pragma once

#include <cstddef>
#include <memory>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "networks/verbs/device.hpp"
#include "networks/verbs/wire.hpp"

namespace marrow::networks::rdma {

inline constexpr std::uint32_t kSlotBytes = MARROW_NETWORK_MAX_MESSAGE;
/// Send queue entries beyond Options::depth: for receives given back.
inline constexpr std::uint32_t kReserve = 4;

/// wr_id of a send: the peer and the send's number; of a receive: the peer and the buffer's.
inline constexpr std::uint64_t kReceiveBit = std::uint64_t{1} << 63;
constexpr std::uint64_t work_id(std::uint32_t peer, std::uint32_t number, bool receive) {
  return (receive ? kReceiveBit : 0) | std::uint64_t{peer} << 32 | number;
}
constexpr std::uint32_t peer_of(std::uint64_t id) {
  return static_cast<std::uint32_t>((id & ~kReceiveBit) >> 32);
}

class QueuePair {
 public:
  /// @throws Error naming the peer and what could not be made
  QueuePair(std::shared_ptr<Device> device, marrow::verbs::ibv_cq* cq, const Options& options,
            std::uint32_t peer);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  /// What the peer needs to know.
  const End& end() const { return end_; }
  /// From RESET to ready to send; the receives are posted before the peer can send. @throws Error
  void connect(const End& theirs);
  /// Into the error state: everything posted is flushed. @return false when the NIC refused
  bool stop() noexcept;

  marrow::verbs::ibv_qp* qp() const { return qp_; }
  std::uint32_t number() const { return end_.qpn; }
  const End& theirs() const { return theirs_; }
  std::uint32_t peer() const { return peer_; }
  std::uint32_t max_inline() const { return max_inline_; }
  /// Entries that operations may use; kReserve more are there.
  std::uint32_t depth() const { return depth_; }
  std::uint32_t lkey() const { return region_->lkey; }

  ControlWords& words() const { return *memory_.as<ControlWords>(); }
  /// Where READs of a flush end up; nobody looks.
  std::byte* sink() const { return memory_.as<std::byte>(sizeof(ControlWords)); }
  std::uint64_t* result(std::uint32_t number) const {
    return memory_.as<std::uint64_t>(results_) + number % ring();
  }
  /// Payload of a send that the NIC cannot take along inline.
  std::byte* staging(std::uint32_t number) const {
    return memory_.as<std::byte>(staging_) + std::size_t{number % ring()} * kSlotBytes;
  }
  std::byte* receive_buffer(std::uint32_t slot) const {
    return memory_.as<std::byte>(receives_) + std::size_t{slot} * kSlotBytes;
  }
  /// @return 0 or errno
  int post_receive(std::uint32_t slot);

 private:
  std::uint32_t ring() const { return depth_ + kReserve; }
  void make_memory();
  void make_queues(marrow::verbs::ibv_cq* cq);
  void step(marrow::verbs::ibv_qp_attr& attr, int mask, const char* name);
  void drop() noexcept;

  std::shared_ptr<Device> device_;
  const Options& options_;
  const std::uint32_t peer_;
  std::uint32_t depth_;
  std::uint32_t max_inline_ = 0;
  std::size_t results_ = 0, staging_ = 0, receives_ = 0;
  base::Fd file_;
  base::Mapping memory_;
  marrow::verbs::ibv_mr* region_ = nullptr;
  marrow::verbs::ibv_qp* qp_ = nullptr;
  End end_{};
  End theirs_{};
};

}  // namespace marrow::networks::rdma
