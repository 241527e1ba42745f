// SPDX-License-Identifier: Apache-2.0
// Teams: which ranks an index counts. Lsa teams are consecutive ranks of one size; a rail is the
// ranks with the same index in each lsa team.
#pragma once

#include "marrow/abi/device_communicator.h"

namespace marrow {

/// Ranks first, first + stride, ...; `rank` is the caller's index among them.
struct Team {
  std::int32_t size = 0;
  std::int32_t rank = 0;
  std::int32_t first = 0;
  std::int32_t stride = 1;
  /// World rank of member `index` (0 .. size-1).
  MARROW_HOST_DEVICE constexpr int world_rank(int index) const { return first + index * stride; }
};

MARROW_HOST_DEVICE constexpr Team team_world(const DeviceCommunicator& comm) {
  return {comm.nranks, comm.rank, 0, 1};
}
/// Ranks that load/store each other.
MARROW_HOST_DEVICE constexpr Team team_lsa(const DeviceCommunicator& comm) {
  return {comm.lsa_size, comm.lsa_rank, comm.lsa_first, 1};
}
/// Ranks with our index in their lsa team. Lsa teams have one size when rails are used.
MARROW_HOST_DEVICE constexpr Team team_rail(const DeviceCommunicator& comm) {
  const int size = comm.lsa_size > 0 ? comm.lsa_size : 1;
  return {comm.nranks / size, comm.rank / size, comm.lsa_rank, size};
}

}  // namespace marrow
