// SPDX-License-Identifier: Apache-2.0
// The standard verbs as a driver on top of softnic's own commands: rings in this process's memory,
// WQEs built and CQEs parsed the way libmlx5 does. So SEND/RECV programs and their post_send go
// through the same bytes as everybody else's queues.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/mapping.hpp"
#include "marrow/abi/mlx5_wqe.h"
#include "softnic/front.hpp"

namespace marrow::softnic {

struct VerbsQp;

/// A queue object of the driver: its memory, registered, and what the command made of it. Null
/// members are not there yet; the destructor gives back the rest.
struct VerbsObject {
  VerbsObject() = default;
  ~VerbsObject();
  VerbsObject(const VerbsObject&) = delete;
  VerbsObject& operator=(const VerbsObject&) = delete;
  /// @return false with errno
  bool allocate(verbs::ibv_context* context, std::size_t bytes, std::uint32_t uar_kind);

  base::Mapping memory;
  verbs::mlx5dv_devx_umem* umem = nullptr;
  verbs::mlx5dv_devx_uar* uar = nullptr;
  verbs::mlx5dv_devx_obj* object = nullptr;
};

/// Of a shared receive queue: its ring is twice as large, and indices of 16 bits must tell full from empty.
inline constexpr std::uint32_t kMostSharedReceives = 1u << (mlx5::kMaxLogQueue - 1);

struct VerbsChannel : verbs::ibv_comp_channel {
  int write_fd = -1;
};

struct VerbsCq : verbs::ibv_cq {
  std::mutex lock;
  VerbsObject queue;
  std::uint32_t cqn = 0;
  std::uint32_t entries = 0;
  std::uint32_t next = 0;  ///< consumer index
  std::uint32_t arm_sequence = 0;
  std::uint32_t empty_polls = 0;
  std::unordered_map<std::uint32_t, VerbsQp*> queue_pairs;
  std::uint32_t users = 0;
  std::uint32_t events = 0;  ///< handed out by get_cq_event, under the base's mutex

  mlx5::Cqe* ring() const { return queue.memory.as<mlx5::Cqe>(); }
  std::uint32_t* record() const {
    return queue.memory.as<std::uint32_t>(entries * sizeof(mlx5::Cqe));
  }
  /// Takes the unread entries of a queue pair away. Lock held.
  void forget(std::uint32_t qpn);
};

/// A ring of receives, of one queue pair or shared.
struct ReceiveRing {
  std::mutex lock;
  std::byte* ring = nullptr;
  std::uint32_t* record = nullptr;  ///< producer index, BE
  std::uint32_t depth = 0;
  std::uint32_t stride = 0;
  std::uint32_t max_sges = 0;
  std::uint16_t producer = 0;
  std::vector<std::uint64_t> wr_ids;
  std::vector<std::atomic<bool>> posted;  ///< by slot, until its completion was polled

  void size(std::uint32_t requests, std::uint32_t sges);
  std::size_t bytes() const { return std::size_t{depth} * stride; }
  void reset();
  /// As ibv_post_recv.
  int post(verbs::ibv_recv_wr* request, verbs::ibv_recv_wr** bad);
};

struct VerbsSrq : verbs::ibv_srq {
  VerbsObject queue;
  ReceiveRing receives;
  std::uint32_t srqn = 0;
  std::uint32_t users = 0;
};

struct VerbsQp : verbs::ibv_qp {
  VerbsObject queue;
  verbs::ibv_qp_cap cap{};
  bool signal_all = false;
  verbs::ibv_qp_attr attr{};  ///< as last set, for query_qp
  std::uint16_t start = 0;    ///< first send index

  std::mutex send_lock;
  std::byte* sq = nullptr;
  std::uint32_t depth = 0;  ///< blocks
  std::uint16_t producer = 0;
  std::uint32_t posted = 0;                ///< blocks, ever
  std::atomic<std::uint32_t> retired = 0;  ///< blocks whose completion was polled
  struct Slot {
    std::uint64_t wr_id;
    std::uint32_t end;  ///< `posted` behind this WQE
  };
  std::uint32_t register_half = 0;  ///< byte offset of the half to use next
  std::vector<Slot> slots;          ///< by the WQE's first block
  mlx5::DoorbellRecord* record = nullptr;
  ReceiveRing receives;

  VerbsCq* sends_to() const { return static_cast<VerbsCq*>(send_cq); }
  VerbsCq* receives_to() const { return static_cast<VerbsCq*>(recv_cq); }
  VerbsSrq* shared() const { return static_cast<VerbsSrq*>(srq); }
  ReceiveRing& receive_ring() { return srq != nullptr ? shared()->receives : receives; }
  void reset();
};

struct VerbsAh : verbs::ibv_ah {
  verbs::mlx5_wqe_av vector{};
};

/// The MAC behind a GID: what address resolution would answer.
inline std::uint64_t mac_of(const verbs::ibv_gid& gid) {
  std::uint64_t tail = 0;
  for (int i = 12; i < 16; ++i) tail = tail << 8 | gid.raw[i];
  return 0x0200ull << 32 | tail;
}

/// Commands and memory by the same functions that a foreign driver calls.
const verbs::Table& devx();

// front_post.cpp
int post_send(verbs::ibv_qp* qp, verbs::ibv_send_wr* request, verbs::ibv_send_wr** bad);
int post_recv(verbs::ibv_qp* qp, verbs::ibv_recv_wr* request, verbs::ibv_recv_wr** bad);
int post_srq_recv(verbs::ibv_srq* srq, verbs::ibv_recv_wr* request, verbs::ibv_recv_wr** bad);
int poll_cq(verbs::ibv_cq* cq, int count, verbs::ibv_wc* completions);

// front_events.cpp
int req_notify_cq(verbs::ibv_cq* cq, int solicited_only);
/// Opens and closes the pipe behind async_fd. @return false with errno
bool open_events(Context& context);
void close_events(Context& context);
/// A new queue may be named by events; an ended one is named by none, those in the pipes included.
void begin_events(VerbsCq& cq);
void end_events(VerbsCq& cq);
void set_event_functions(verbs::Table& table);

// front_queues.cpp, front_connect.cpp, front_receive.cpp
void set_queue_functions(verbs::Table& table);
void set_connection_functions(verbs::Table& table);
void set_shared_receive_functions(verbs::Table& table);

}  // namespace marrow::softnic
