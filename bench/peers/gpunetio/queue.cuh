// SPDX-License-Identifier: Apache-2.0
// A queue of ours in the form that DOCA GPUNetIO's device functions take (open source 2.x; its headers are
// found by -DMARROW_GPUNETIO=PATH and never part of this tree).
#pragma once

#include <doca_gpunetio_device.h>

#include <cstdint>

namespace gpunetio {

/// @param qpn       not swapped
/// @param record    send word of the doorbell record
/// @param cq        completion entry 0
/// @param consumed  index that all completions below have been seen
inline doca_gpu_dev_verbs_qp make_queue(std::uint32_t qpn, std::uint32_t depth, void* sq,
                                        std::uint32_t* record, std::uint64_t* doorbell, void* cq,
                                        std::uint32_t cqn, std::uint64_t first,
                                        std::uint64_t consumed) {
  doca_gpu_dev_verbs_qp q{};
  q.sq_rsvd_index = q.sq_ready_index = q.sq_wqe_pi = first;
  q.sq_num = qpn;
  q.sq_num_shift8 = qpn << 8;
  q.sq_num_shift8_be = __builtin_bswap32(qpn << 8);
  q.sq_num_shift8_be_1ds = __builtin_bswap32(qpn << 8 | 1);
  q.sq_num_shift8_be_2ds = __builtin_bswap32(qpn << 8 | 2);
  q.sq_num_shift8_be_3ds = __builtin_bswap32(qpn << 8 | 3);
  q.sq_num_shift8_be_4ds = __builtin_bswap32(qpn << 8 | 4);
  q.sq_num_shift8_be_5ds = __builtin_bswap32(qpn << 8 | 5);
  q.sq_wqe_num = static_cast<std::uint16_t>(depth);
  q.sq_wqe_mask = static_cast<std::uint16_t>(depth - 1);
  q.sq_wqe_daddr = static_cast<std::uint8_t*>(sq);
  q.sq_dbrec = record;
  q.sq_db = doorbell;
  q.cq_sq.cqe_daddr = static_cast<std::uint8_t*>(cq);
  q.cq_sq.cq_num = cqn;
  q.cq_sq.cqe_num = depth;
  q.cq_sq.cqe_ci = consumed;
  q.cq_sq.cqe_mask = depth - 1;
  q.cq_sq.cqe_size = 64;
  q.cq_sq.cqe_rsvd = 0;
  q.nic_handler = DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB;
  q.mem_type = DOCA_GPUNETIO_VERBS_MEM_TYPE_GPU;
  return q;
}

}  // namespace gpunetio
