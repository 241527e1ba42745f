// SPDX-License-Identifier: Apache-2.0
// Takes the bytes of one WQE apart. Pure: no queue, no memory behind keys; so it is tested and fuzzed
// alone, and can run on any processor. What it accepts is what a ConnectX accepts; anything else is
// the syndrome that a ConnectX reports.
#pragma once

#include <cstddef>
#include <cstdint>

#include "marrow/abi/mlx5_wqe.h"

namespace marrow::softnic {

struct Sge {
  std::uint64_t address;  ///< in the key's address space
  std::uint64_t bytes;    ///< 1..2^31
  std::uint32_t lkey;
};

inline constexpr std::uint32_t kMaxSges = mlx5::kMaxSegments - 1;
inline constexpr std::uint32_t kMaxWqeBytes = mlx5::kMaxSegments * mlx5::kSegmentBytes;
/// log2 of the largest message, as QUERY_HCA_CAP and query_port say.
inline constexpr std::uint32_t kLogMaxMessage = 30;

/// Fields of the control segment, before its opcode is looked at.
struct Control {
  std::uint8_t opcode = 0;
  std::uint8_t opmod = 0;
  std::uint8_t fm_ce_se = 0;
  std::uint16_t index = 0;
  std::uint32_t qpn = 0;
  std::uint32_t ds = 0;
  std::uint32_t immediate = 0;  ///< big endian, as posted
};

struct OperationFields {
  Control control;
  std::uint64_t remote_address = 0;
  std::uint32_t rkey = 0;
  bool has_remote = false;
  std::uint32_t sge_count = 0;
  const std::uint8_t* inline_data = nullptr;  ///< into the WQE bytes given to decode
  std::uint64_t bytes = 0;                    ///< payload of all buffers
  std::uint32_t atomic_bytes = 0;             ///< 4 or 8
  std::uint64_t operand = 0;                  ///< add or swap
  std::uint64_t compare = 0;
  std::uint64_t operand_mask = 0;  ///< swap mask, or carry boundary of an add
  std::uint64_t compare_mask = 0;
  std::uint16_t wait_index = 0;
  std::uint32_t wait_cqn = 0;
};

struct Operation : OperationFields {
  Sge sges[kMaxSges];  ///< the first sge_count are set
};

/// Reads the control segment at `wqe` (16 bytes).
Control decode_control(const std::uint8_t* wqe);

/// Decodes a WQE whose ds segments lie contiguously at `wqe`. control.ds must be 1..63.
/// @return mlx5::kNoError, or the syndrome with `operation` partly filled
mlx5::Syndrome decode(const std::uint8_t* wqe, const Control& control, Operation& operation);

}  // namespace marrow::softnic
