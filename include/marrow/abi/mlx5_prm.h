// SPDX-License-Identifier: Apache-2.0
// The control path of an mlx5 NIC as bytes: the firmware commands that create and connect queues.
// A field is {byte, bit from the MSB of that byte, width}; get and set work on raw command buffers,
// so one builder (gda) feeds a real ConnectX and the software NIC, which really parses them.
// Source of offsets: the public interface description of rdma-core and Linux (mlx5_ifc) and the
// PRM.
#pragma once

#include <cstddef>
#include <cstdint>

namespace marrow::mlx5 {

/// A big-endian bit field of a command buffer.
struct Field {
  std::uint32_t byte;   ///< offset from the start of the structure
  std::uint32_t bit;    ///< 0..7, counted from the most significant bit of that byte
  std::uint32_t width;  ///< 1..64 bits
};

/// The field moved `bytes` further: a structure inside a command.
constexpr Field at(std::uint32_t bytes, Field field) {
  return {field.byte + bytes, field.bit, field.width};
}

/// Reads a field. The buffer must hold the bytes it covers.
constexpr std::uint64_t get(const std::uint8_t* base, Field field) {
  std::uint64_t value = 0;
  std::uint32_t left = field.width;
  std::uint32_t byte = field.byte;
  std::uint32_t bit = field.bit;
  while (left > 0) {
    const std::uint32_t here = 8 - bit < left ? 8 - bit : left;
    const std::uint32_t shift = 8 - bit - here;
    value = (value << here) | ((base[byte] >> shift) & ((1u << here) - 1u));
    left -= here;
    bit = 0;
    ++byte;
  }
  return value;
}

/// Writes a field and leaves its neighbours alone. Bits of `value` above the width are dropped.
constexpr void set(std::uint8_t* base, Field field, std::uint64_t value) {
  std::uint32_t left = field.width;
  std::uint32_t byte = field.byte;
  std::uint32_t bit = field.bit;
  while (left > 0) {
    const std::uint32_t here = 8 - bit < left ? 8 - bit : left;
    const std::uint32_t shift = 8 - bit - here;
    const std::uint32_t mask = ((1u << here) - 1u) << shift;
    const auto part = static_cast<std::uint32_t>((value >> (left - here)) << shift) & mask;
    base[byte] = static_cast<std::uint8_t>((base[byte] & ~mask) | part);
    left -= here;
    bit = 0;
    ++byte;
  }
}

/// Command opcodes.
enum Command : std::uint16_t {
  kQueryHcaCap = 0x100,
  kCreateCq = 0x400,
  kDestroyCq = 0x401,
  kQueryCq = 0x402,
  kCreateQp = 0x500,
  kDestroyQp = 0x501,
  kRstToInit = 0x502,
  kInitToRtr = 0x503,
  kRtrToRts = 0x504,
  kRtsToRts = 0x505,
  kToErr = 0x507,
  kToRst = 0x50a,
  kQueryQp = 0x50b,
  kInitToInit = 0x50e,
};

/// Command reply status (status byte of a reply).
enum CommandStatus : std::uint8_t {
  kStatusOk = 0x00,
  kStatusInternal = 0x01,
  kStatusBadOpcode = 0x02,
  kStatusBadParameter = 0x03,
  kStatusBadSystemState = 0x04,
  kStatusBadResource = 0x05,
  kStatusResourceBusy = 0x06,
  kStatusExceedLimit = 0x08,
  kStatusBadResourceState = 0x09,
  kStatusBadIndex = 0x0a,
  kStatusNoResources = 0x0f,
  kStatusBadInputLength = 0x50,
  kStatusBadOutputLength = 0x51,
  kStatusBadQpState = 0x10,
};

/// QP states in qpc::state.
enum QpState : std::uint8_t {
  kReset = 0,
  kInit = 1,
  kReadyToReceive = 2,
  kReadyToSend = 3,
  kSqError = 4,
  kSqDrain = 5,
  kError = 6,
};

/// Fields of every command and reply.
namespace command {
inline constexpr Field opcode{0x00, 0, 16};
inline constexpr Field uid{0x02, 0, 16};
inline constexpr Field op_mod{0x06, 0, 16};
inline constexpr Field object{0x09, 0, 24};  ///< QPN or CQN in modify, query and destroy
inline constexpr Field optional_mask{0x10, 0, 32};
inline constexpr std::size_t kHeaderBytes = 0x10;
}  // namespace command
namespace reply {
inline constexpr Field status{0x00, 0, 8};
inline constexpr Field syndrome{0x04, 0, 32};
inline constexpr Field object{0x09, 0, 24};  ///< QPN or CQN in a create reply
inline constexpr std::size_t kHeaderBytes = 0x10;
}  // namespace reply

/// Address path inside a QP context.
namespace ads {
inline constexpr Field pkey_index{0x02, 0, 16};
inline constexpr Field grh{0x05, 0, 1};
inline constexpr Field mlid{0x05, 1, 7};
inline constexpr Field rlid{0x06, 0, 16};
inline constexpr Field ack_timeout{0x08, 0, 5};  ///< 4.096 us * 2^n; 0 = no timeout
inline constexpr Field src_addr_index{0x09, 0, 8};
inline constexpr Field hop_limit{0x0b, 0, 8};
inline constexpr Field tclass{0x0c, 4, 8};
inline constexpr Field rgid_high{0x10, 0, 64};
inline constexpr Field rgid_low{0x18, 0, 64};
inline constexpr Field dscp{0x21, 2, 6};
inline constexpr Field udp_sport{0x22, 0, 16};
inline constexpr Field eth_priority{0x24, 1, 3};
inline constexpr Field service_level{0x24, 4, 4};
inline constexpr Field port{0x25, 0, 8};
inline constexpr Field rmac_high{0x26, 0, 16};
inline constexpr Field rmac_low{0x28, 0, 32};
inline constexpr std::size_t kBytes = 0x2c;
}  // namespace ads

/// QP context.
namespace qpc {
inline constexpr Field state{0x00, 0, 4};
inline constexpr Field service_type{0x01, 0, 8};    ///< 0 = RC
inline constexpr Field path_migration{0x02, 3, 2};  ///< 3 = migrated, the usual value
inline constexpr Field pd{0x05, 0, 24};
inline constexpr Field mtu{0x08, 0, 3};  ///< 1 = 256 .. 5 = 4096 bytes
inline constexpr Field log_message_max{0x08, 3, 5};
inline constexpr Field log_rq_size{0x09, 1, 4};
inline constexpr Field log_rq_stride{0x09, 5, 3};  ///< stride = 16 << n
inline constexpr Field no_sq{0x0a, 0, 1};
inline constexpr Field log_sq_size{0x0a, 1, 4};
inline constexpr Field uar_page{0x0d, 0, 24};
inline constexpr Field send_record_mode{0x10, 0, 2};  ///< 0 = record used, 1 = no record
inline constexpr Field user_index{0x11, 0, 24};
inline constexpr Field log_page_size{0x14, 3, 5};
inline constexpr Field remote_qpn{0x15, 0, 24};
inline constexpr std::uint32_t kPrimaryPath = 0x18;  ///< ads
inline constexpr Field log_ack_request_frequency{0x70, 0, 4};
inline constexpr Field log_outstanding_reads{0x71, 0, 3};  ///< initiator depth (log_sra_max)
inline constexpr Field retry_count{0x71, 5, 3};
inline constexpr Field rnr_retry{0x72, 0, 3};  ///< 7 = forever
inline constexpr Field next_send_psn{0x79, 0, 24};
inline constexpr Field cqn_send{0x7d, 0, 24};
inline constexpr Field log_responder_reads{0x91, 0, 3};  ///< responder depth (log_rra_max)
inline constexpr Field atomic_mode{0x91, 4, 4};          ///< 1 = IB spec, 3 = up to 8 bytes
inline constexpr Field remote_read_enable{0x92, 0, 1};
inline constexpr Field remote_write_enable{0x92, 1, 1};
inline constexpr Field remote_atomic_enable{0x92, 2, 1};
inline constexpr Field page_offset{0x92, 4, 6};
inline constexpr Field cross_channel_master{0x93, 7, 1};  ///< this queue's CQ wakes WAITs
inline constexpr Field min_rnr_nak{0x94, 3, 5};
inline constexpr Field next_receive_psn{0x95, 0, 24};
inline constexpr Field cqn_receive{0x9d, 0, 24};
inline constexpr Field record_address{0xa0, 0, 64};  ///< offset into the record's umem
inline constexpr Field rq_type{0xac, 5, 3};          ///< 0 = own, 1 = shared, 3 = none
inline constexpr Field srqn{0xad, 0, 24};
/// Indices that the NIC has executed up to, reported by QUERY_QP: 0 for a new queue of a real NIC. In
/// CREATE_QP softnic takes hw_sq_index as the first index (tests of the wrap); a real NIC ignores it.
inline constexpr Field hw_sq_index{0xb4, 0, 16};
inline constexpr Field sw_sq_index{0xb6, 0, 16};
inline constexpr Field hw_rq_index{0xb8, 0, 32};
inline constexpr Field record_umem_valid{0xd0, 3, 1};
inline constexpr Field record_umem_id{0xe4, 0, 32};
inline constexpr std::size_t kBytes = 0xe8;
}  // namespace qpc

inline constexpr std::uint32_t kServiceRc = 0;
inline constexpr std::uint32_t kPathMigrated = 3;
inline constexpr std::uint32_t kRqOwn = 0;
inline constexpr std::uint32_t kRqShared = 1;
inline constexpr std::uint32_t kRqNone = 3;

/// CREATE_QP: header, optional mask, context, then where the ring lies.
namespace create_qp {
inline constexpr std::uint32_t kContext = 0x18;  ///< qpc
inline constexpr Field wq_umem_offset{0x100, 0, 64};
inline constexpr Field wq_umem_id{0x108, 0, 32};
inline constexpr Field wq_umem_valid{0x10c, 0, 1};
inline constexpr std::size_t kInBytes = 0x110;
inline constexpr std::size_t kOutBytes = 0x10;
}  // namespace create_qp

/// RST2INIT, INIT2RTR, RTR2RTS, RTS2RTS, INIT2INIT carry a context; 2ERR and 2RST only the header.
namespace modify_qp {
inline constexpr std::uint32_t kContext = 0x18;  ///< qpc
inline constexpr std::size_t kInBytes = 0x110;
inline constexpr std::size_t kOutBytes = 0x10;
}  // namespace modify_qp

namespace query_qp {
inline constexpr std::size_t kInBytes = 0x10;
inline constexpr std::uint32_t kContext = 0x18;  ///< qpc, in the reply
inline constexpr std::size_t kOutBytes = 0x110;
}  // namespace query_qp

/// CQ context.
namespace cqc {
inline constexpr Field status{0x00, 0, 4};
inline constexpr Field record_umem_valid{0x00, 6, 1};
inline constexpr Field cqe_size{0x01, 0, 3};  ///< 0 = 64 bytes
inline constexpr Field collapsed{0x01, 3, 1};
inline constexpr Field overrun_ignore{0x01, 6, 1};
inline constexpr Field record_umem_id{0x04, 0, 32};
inline constexpr Field log_cq_size{0x0c, 3, 5};
inline constexpr Field uar_page{0x0d, 0, 24};
inline constexpr Field eqn{0x17, 0, 8};
inline constexpr Field log_page_size{0x18, 3, 5};
inline constexpr Field record_address{0x38, 0, 64};
inline constexpr std::size_t kBytes = 0x40;
}  // namespace cqc

namespace create_cq {
inline constexpr std::uint32_t kContext = 0x10;  ///< cqc
inline constexpr Field cq_umem_offset{0x50, 0, 64};
inline constexpr Field cq_umem_id{0x58, 0, 32};
inline constexpr Field cq_umem_valid{0x5c, 0, 1};
inline constexpr std::size_t kInBytes = 0x110;
inline constexpr std::size_t kOutBytes = 0x10;
}  // namespace create_cq

/// QUERY_HCA_CAP. op_mod = capability type << 1 | 1 for the current values.
namespace hca_cap {
inline constexpr std::uint32_t kGeneral = 0x00, kAtomic = 0x03, kRoce = 0x04, kGeneral2 = 0x20;
inline constexpr std::uint32_t kCapability = 0x10;  ///< in the reply
inline constexpr Field general_2_present{0x04, 0, 1};
inline constexpr Field log_max_qp_size{0x11, 0, 8};
inline constexpr Field log_max_qp{0x13, 3, 5};
inline constexpr Field log_max_cq_size{0x19, 0, 8};
inline constexpr Field log_max_cq{0x1b, 3, 5};
inline constexpr Field log_max_initiator_reads{0x29, 2, 6};
inline constexpr Field log_max_responder_reads{0x2b, 2, 6};
inline constexpr Field gid_table_size{0x2e, 0, 16};  ///< 0 = 8 entries
inline constexpr Field port_type{0x36, 6, 2};        ///< 0 InfiniBand, 1 Ethernet
inline constexpr Field port_count{0x37, 0, 8};
inline constexpr Field log_max_message{0x38, 3, 5};
inline constexpr Field cqe_version{0x3f, 4, 4};
inline constexpr Field atomic{0x43, 6, 1};
inline constexpr Field cq_overrun_ignore{0x44, 0, 1};
inline constexpr Field cross_channel{0x45, 4, 1};
inline constexpr Field reliable_connected{0x47, 7, 1};
inline constexpr Field blue_flame{0x4c, 0, 1};
inline constexpr Field log_bf_register_size{0x4d, 3, 5};
inline constexpr Field max_send_wqe_bytes{0x52, 0, 16};
inline constexpr Field max_receive_wqe_bytes{0x56, 0, 16};
/// Of kGeneral2.
inline constexpr Field no_record_mode{0x5c, 1, 1};
/// Of kAtomic: bit mask of operations (1 compare-swap, 2 fetch-add, 4 and 8 masked), and of operand sizes
/// (bit n = 2^n bytes).
inline constexpr Field atomic_operations{0x12, 0, 16};
inline constexpr Field atomic_sizes{0x16, 0, 16};
inline constexpr std::size_t kInBytes = 0x10;
inline constexpr std::size_t kOutBytes = 0x1010;
}  // namespace hca_cap

}  // namespace marrow::mlx5
