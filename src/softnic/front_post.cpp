// SPDX-License-Identifier: Apache-2.0
// post_send, post_recv and poll_cq: requests become WQEs, CQEs become completions, as in libmlx5.
// A doorbell carries the first 8 bytes of the last WQE posted, which is libmlx5's convention (GPU
// drivers send the next index instead).
#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "softnic/front_verbs.hpp"

namespace marrow::softnic {
namespace {

using mlx5::kSegmentBytes;
using mlx5::to_big32;
using mlx5::to_big64;
using verbs::ibv_recv_wr;
using verbs::ibv_send_wr;
using verbs::ibv_sge;
using verbs::ibv_wc;

constexpr std::uint32_t kPollsBeforeYield = 32;

/// One WQE while it is put together; kept apart from the ring, which may wrap inside it.
struct Builder {
  alignas(16) std::uint8_t bytes[mlx5::kMaxSegments * kSegmentBytes] = {};
  std::uint32_t ds = 1;
  template <class Segment>
  void add(const Segment& segment) {
    static_assert(sizeof segment % kSegmentBytes == 0);
    std::memcpy(bytes + ds * kSegmentBytes, &segment, sizeof segment);
    ds += sizeof segment / kSegmentBytes;
  }
};

void add_remote(Builder& wqe, std::uint64_t address, std::uint32_t rkey) {
  wqe.add(mlx5::RemoteSegment{to_big64(address), to_big32(rkey), 0});
}

int add_inline(Builder& wqe, const ibv_send_wr& request, std::uint32_t most) {
  std::uint8_t* at = wqe.bytes + wqe.ds * kSegmentBytes;
  std::uint32_t bytes = 0;
  for (int i = 0; i < request.num_sge; ++i) {
    const ibv_sge& sge = request.sg_list[i];
    if (sge.length > most - bytes) return EINVAL;
    std::memcpy(at + 4 + bytes, reinterpret_cast<const void*>(sge.addr), sge.length);
    bytes += sge.length;
  }
  if (bytes == 0) return 0;
  const std::uint32_t head = to_big32(bytes | mlx5::kInlineFlag);
  std::memcpy(at, &head, 4);
  wqe.ds += (bytes + 4 + kSegmentBytes - 1) / kSegmentBytes;
  return 0;
}

void add_buffers(Builder& wqe, const ibv_send_wr& request) {
  for (int i = 0; i < request.num_sge; ++i) {
    const ibv_sge& sge = request.sg_list[i];
    if (sge.length == 0) continue;  // 0 would mean 2^31
    wqe.add(mlx5::DataSegment{to_big32(sge.length), to_big32(sge.lkey), to_big64(sge.addr)});
  }
}

/// @return opcode, or -1 if there is none
int opcode_of(int request) {
  switch (request) {
    case verbs::IBV_WR_RDMA_WRITE: return mlx5::kWrite;
    case verbs::IBV_WR_RDMA_WRITE_WITH_IMM: return mlx5::kWriteImmediate;
    case verbs::IBV_WR_SEND: return mlx5::kSend;
    case verbs::IBV_WR_SEND_WITH_IMM: return mlx5::kSendImmediate;
    case verbs::IBV_WR_RDMA_READ: return mlx5::kRead;
    case verbs::IBV_WR_ATOMIC_CMP_AND_SWP: return mlx5::kCompareSwap;
    case verbs::IBV_WR_ATOMIC_FETCH_AND_ADD: return mlx5::kFetchAdd;
    default: return -1;
  }
}

/// Everything behind the control segment. @return 0 or errno
int build(const VerbsQp& qp, const ibv_send_wr& request, Builder& wqe) {
  const auto& wr = request.wr;
  switch (request.opcode) {
    case verbs::IBV_WR_ATOMIC_CMP_AND_SWP:
    case verbs::IBV_WR_ATOMIC_FETCH_AND_ADD:
      if ((request.send_flags & verbs::IBV_SEND_INLINE) != 0 || request.num_sge != 1) return EINVAL;
      add_remote(wqe, wr.atomic.remote_addr, wr.atomic.rkey);
      if (request.opcode == verbs::IBV_WR_ATOMIC_CMP_AND_SWP) {
        wqe.add(mlx5::AtomicSegment{to_big64(wr.atomic.swap), to_big64(wr.atomic.compare_add)});
      } else {
        wqe.add(mlx5::AtomicSegment{to_big64(wr.atomic.compare_add), 0});
      }
      break;
    case verbs::IBV_WR_RDMA_READ:
      if ((request.send_flags & verbs::IBV_SEND_INLINE) != 0) return EINVAL;
      [[fallthrough]];
    case verbs::IBV_WR_RDMA_WRITE:
    case verbs::IBV_WR_RDMA_WRITE_WITH_IMM:
      add_remote(wqe, wr.rdma.remote_addr, wr.rdma.rkey);
      break;
    default: break;
  }
  if ((request.send_flags & verbs::IBV_SEND_INLINE) != 0) {
    return add_inline(wqe, request, qp.cap.max_inline_data);
  }
  add_buffers(wqe, request);
  return 0;
}

std::uint8_t flags_of(const VerbsQp& qp, const ibv_send_wr& request) {
  std::uint8_t flags = 0;
  if (qp.signal_all || (request.send_flags & verbs::IBV_SEND_SIGNALED) != 0) {
    flags |= mlx5::kCompletionAlways;
  }
  if ((request.send_flags & verbs::IBV_SEND_SOLICITED) != 0) flags |= mlx5::kSolicited;
  if ((request.send_flags & verbs::IBV_SEND_FENCE) != 0) flags |= mlx5::kFence;
  return flags;
}

/// Puts one request into the ring; it stands in `wqe` too. Lock held. @return 0 or errno
int put(VerbsQp& qp, const ibv_send_wr& request, Builder& wqe) {
  const int opcode = opcode_of(request.opcode);
  if (opcode < 0) return EINVAL;
  if (request.num_sge < 0 || static_cast<std::uint32_t>(request.num_sge) > qp.cap.max_send_sge) {
    return ENOMEM;  // what libmlx5 says
  }
  wqe = {};
  if (const int error = build(qp, request, wqe); error != 0) return error;
  const std::uint32_t blocks = mlx5::blocks_of(wqe.ds);
  if (qp.posted - qp.retired.load(std::memory_order_acquire) + blocks > qp.depth) return ENOMEM;
  mlx5::ControlSegment control{};
  control.opmod_index_opcode = mlx5::control_word(static_cast<std::uint8_t>(opcode), qp.producer);
  control.qpn_ds = mlx5::qpn_ds_word(qp.qp_num, wqe.ds);
  control.fm_ce_se = flags_of(qp, request);
  control.immediate = request.imm_data;
  std::memcpy(wqe.bytes, &control, sizeof control);
  const std::uint32_t mask = qp.depth - 1;
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const std::size_t from = std::size_t{i} * mlx5::kBlockBytes;
    std::memcpy(qp.sq + ((qp.producer + i) & mask) * std::size_t{mlx5::kBlockBytes},
                wqe.bytes + from,
                std::min<std::size_t>(mlx5::kBlockBytes, sizeof wqe.bytes - from));
  }
  qp.posted += blocks;
  qp.slots[qp.producer & mask] = {request.wr_id, qp.posted};
  qp.producer = static_cast<std::uint16_t>(qp.producer + blocks);
  return 0;
}

/// Tells the NIC. One small WQE goes into the register as a whole (BlueFlame), of a list only the last
/// one's first 8 bytes do; the two halves of the register are used in turn.
void ring(VerbsQp& qp, const Builder& last, std::uint32_t posted) {
  // Release: the engine's acquire of either word must show it the WQEs.
  std::atomic_ref<std::uint32_t>(qp.record->send)
      .store(mlx5::record_word(qp.producer), std::memory_order_release);
  auto* half = static_cast<std::byte*>(qp.queue.uar->reg_addr) + qp.register_half;
  qp.register_half ^= (1u << mlx5::kLogBlueFlameBytes) / 2;
  if (posted == 1 && mlx5::blocks_of(last.ds) == 1) {
    std::memcpy(half + 8, last.bytes + 8, mlx5::kBlockBytes - 8);
  }
  std::uint64_t doorbell;
  std::memcpy(&doorbell, last.bytes, sizeof doorbell);
  std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(half))
      .store(doorbell, std::memory_order_release);
}

int status_of(std::uint8_t syndrome) {
  switch (syndrome) {
    case mlx5::kLocalLengthError: return verbs::IBV_WC_LOC_LEN_ERR;
    case mlx5::kLocalQpOperationError: return verbs::IBV_WC_LOC_QP_OP_ERR;
    case mlx5::kLocalProtectionError: return verbs::IBV_WC_LOC_PROT_ERR;
    case mlx5::kFlushError: return verbs::IBV_WC_WR_FLUSH_ERR;
    case mlx5::kMemoryWindowBindError: return verbs::IBV_WC_MW_BIND_ERR;
    case mlx5::kBadResponseError: return verbs::IBV_WC_BAD_RESP_ERR;
    case mlx5::kLocalAccessError: return verbs::IBV_WC_LOC_ACCESS_ERR;
    case mlx5::kRemoteInvalidRequestError: return verbs::IBV_WC_REM_INV_REQ_ERR;
    case mlx5::kRemoteAccessError: return verbs::IBV_WC_REM_ACCESS_ERR;
    case mlx5::kRemoteOperationError: return verbs::IBV_WC_REM_OP_ERR;
    case mlx5::kTransportRetryExceeded: return verbs::IBV_WC_RETRY_EXC_ERR;
    case mlx5::kReceiverNotReadyRetryExceeded: return verbs::IBV_WC_RNR_RETRY_EXC_ERR;
    case mlx5::kRemoteAborted: return verbs::IBV_WC_REM_ABORT_ERR;
    default: return verbs::IBV_WC_GENERAL_ERR;
  }
}

int kind_of(std::uint8_t send_opcode) {
  switch (send_opcode) {
    case mlx5::kWrite:
    case mlx5::kWriteImmediate: return verbs::IBV_WC_RDMA_WRITE;
    case mlx5::kRead: return verbs::IBV_WC_RDMA_READ;
    case mlx5::kCompareSwap: return verbs::IBV_WC_COMP_SWAP;
    case mlx5::kFetchAdd: return verbs::IBV_WC_FETCH_ADD;
    default: return verbs::IBV_WC_SEND;
  }
}

/// The CQE as the caller gets it. @return false if it belongs to no queue pair (any more)
bool parse(const VerbsCq& cq, const mlx5::Cqe& cqe, ibv_wc& wc) {
  const std::uint32_t opcode_qpn = mlx5::from_big32(cqe.opcode_qpn);
  const auto found = cq.queue_pairs.find(opcode_qpn & 0xffffff);
  if (found == cq.queue_pairs.end()) return false;
  VerbsQp& qp = *found->second;
  const std::uint16_t counter = mlx5::cqe_counter(cqe.counter_owner);
  const std::uint8_t opcode = mlx5::cqe_opcode(cqe.counter_owner);
  std::uint8_t bytes[sizeof cqe];
  std::memcpy(bytes, &cqe, sizeof cqe);
  wc = {};
  wc.qp_num = qp.qp_num;
  wc.byte_len = mlx5::from_big32(cqe.byte_count);
  if (opcode == mlx5::kRequesterError || opcode == mlx5::kResponderError) {
    wc.status = status_of(bytes[mlx5::kSyndromeOffset]);
    wc.vendor_err = bytes[mlx5::kVendorSyndromeOffset];
  }
  if (opcode == mlx5::kRequester || opcode == mlx5::kRequesterError) {
    wc.opcode = kind_of(static_cast<std::uint8_t>(opcode_qpn >> 24));
    const VerbsQp::Slot& slot = qp.slots[counter & (qp.depth - 1)];
    wc.wr_id = slot.wr_id;
    // Whoever posts next may use the blocks of this WQE and of the silent ones before it.
    qp.retired.store(slot.end, std::memory_order_release);
    return true;
  }
  ReceiveRing& ring = qp.receive_ring();
  const std::uint32_t slot = counter & (ring.depth - 1);
  wc.wr_id = ring.wr_ids[slot];
  ring.posted[slot].store(false, std::memory_order_release);
  wc.opcode = opcode == mlx5::kResponderWriteImmediate ? verbs::IBV_WC_RECV_RDMA_WITH_IMM
                                                       : verbs::IBV_WC_RECV;
  if (opcode == mlx5::kResponderWriteImmediate || opcode == mlx5::kResponderSendImmediate) {
    wc.wc_flags = verbs::IBV_WC_WITH_IMM;
    wc.imm_data = cqe.immediate;
  }
  return true;
}

}  // namespace

int post_send(verbs::ibv_qp* raw, ibv_send_wr* request, ibv_send_wr** bad) {
  VerbsQp& qp = *static_cast<VerbsQp*>(raw);
  std::lock_guard lock(qp.send_lock);
  int error = 0;
  std::uint32_t posted = 0;
  Builder wqe;
  for (; request != nullptr; request = request->next) {
    if (qp.state != verbs::IBV_QPS_RTS && qp.state != verbs::IBV_QPS_ERR) error = EINVAL;
    if (error == 0) error = put(qp, *request, wqe);
    if (error != 0) {
      *bad = request;
      break;
    }
    ++posted;
  }
  if (posted != 0) ring(qp, wqe, posted);
  return error;
}

void ReceiveRing::size(std::uint32_t requests, std::uint32_t sges) {
  max_sges = sges;
  stride = std::bit_ceil(sges * kSegmentBytes);
  depth = std::max(4u, std::bit_ceil(requests));  // 64 bytes at least: the send ring follows
  wr_ids.assign(depth, 0);
  posted = std::vector<std::atomic<bool>>(depth);
}

void ReceiveRing::reset() {
  std::lock_guard guard(lock);
  producer = 0;
  for (auto& each : posted) each.store(false, std::memory_order_relaxed);
  std::atomic_ref<std::uint32_t>(*record).store(0);
}

int ReceiveRing::post(ibv_recv_wr* request, ibv_recv_wr** bad) {
  std::lock_guard guard(lock);
  int error = 0;
  for (; request != nullptr; request = request->next) {
    const std::uint32_t slot = producer & (depth - 1);
    if (depth == 0 || posted[slot].load(std::memory_order_acquire)) {
      error = ENOMEM;
    } else if (request->num_sge < 0 || static_cast<std::uint32_t>(request->num_sge) > max_sges) {
      error = EINVAL;
    }
    if (error != 0) {
      *bad = request;
      break;
    }
    std::byte* at = ring + slot * std::size_t{stride};
    std::uint32_t segments = 0;
    const auto add = [&](const mlx5::DataSegment& segment) {
      std::memcpy(at + std::size_t{segments++} * kSegmentBytes, &segment, sizeof segment);
    };
    for (int i = 0; i < request->num_sge; ++i) {
      const ibv_sge& sge = request->sg_list[i];
      if (sge.length == 0) continue;
      add({to_big32(sge.length), to_big32(sge.lkey), to_big64(sge.addr)});
    }
    if (segments < stride / kSegmentBytes) add({0, to_big32(mlx5::kInvalidLkey), 0});
    wr_ids[slot] = request->wr_id;
    posted[slot].store(true, std::memory_order_relaxed);
    ++producer;
  }
  std::atomic_ref<std::uint32_t>(*record).store(to_big32(producer), std::memory_order_release);
  return error;
}

int post_recv(verbs::ibv_qp* raw, ibv_recv_wr* request, ibv_recv_wr** bad) {
  VerbsQp& qp = *static_cast<VerbsQp*>(raw);
  if (qp.srq != nullptr || qp.receives.depth == 0 || qp.state == verbs::IBV_QPS_RESET) {
    *bad = request;
    return EINVAL;
  }
  return qp.receives.post(request, bad);
}

int post_srq_recv(verbs::ibv_srq* srq, ibv_recv_wr* request, ibv_recv_wr** bad) {
  return static_cast<VerbsSrq*>(srq)->receives.post(request, bad);
}

int poll_cq(verbs::ibv_cq* raw, int count, ibv_wc* completions) {
  VerbsCq& cq = *static_cast<VerbsCq*>(raw);
  std::lock_guard lock(cq.lock);
  const std::uint32_t first = cq.next;
  int found = 0;
  while (found < count) {
    mlx5::Cqe& cqe = cq.ring()[cq.next & (cq.entries - 1)];
    // Acquire: meets the engine's last store of the entry, after all that the operation did.
    const std::uint32_t mark =
        std::atomic_ref<std::uint32_t>(cqe.counter_owner).load(std::memory_order_acquire);
    if (!mlx5::cqe_valid(mark, cq.next, cq.entries)) break;
    if (parse(cq, cqe, completions[found])) ++found;
    ++cq.next;
  }
  if (cq.next == first) {
    // The NIC is a thread here: a caller that only polls must leave it a core.
    if (++cq.empty_polls % kPollsBeforeYield == 0) ::sched_yield();
  } else {
    cq.empty_polls = 0;
    std::atomic_ref<std::uint32_t>(cq.record()[0])
        .store(to_big32(cq.next & 0xffffff), std::memory_order_release);
  }
  return found;
}

}  // namespace marrow::softnic
