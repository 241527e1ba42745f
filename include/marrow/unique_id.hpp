// SPDX-License-Identifier: Apache-2.0
// The name of a communicator to be: where its rank 0 listens, and the secret that proves who belongs
// to it. Rank 0 makes one, the program hands the 128 bytes to the others (MPI_Bcast, a torch store, a
// file), as NCCL users do with ncclUniqueId.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "marrow/abi/abi.h"

namespace marrow {

/// 128 opaque bytes, trivially copyable: may be broadcast as raw memory. They contain a 256-bit
/// secret: whoever has them can join, so hand them over a channel the job's user trusts.
class MARROW_API UniqueId {
 public:
  static constexpr std::size_t kSize = 128;

  /// All zero: names nothing. Assign from create() or from_bytes().
  UniqueId() = default;

  /// Makes a fresh id and opens the listener of rank 0 in this process. The communicator of rank 0
  /// must be made in this process (or a child forked from it) and takes the listener over (two
  /// descriptors); an id is good for one communicator. An id that will not be used wants discard().
  /// Obeys MARROW_SOCKET_IFNAME.
  /// Throws Error(invalid_argument, out_of_memory or system).
  static UniqueId create();

  /// Closes the listener that create() opened, unless a communicator of rank 0 took it: nobody can
  /// join by this id any more. Nothing for ids made elsewhere.
  void discard() const noexcept;

  /// The bytes to hand to the other ranks.
  std::span<const std::byte, kSize> bytes() const noexcept { return bytes_; }

  /// An id from bytes() of another rank. Throws Error(invalid_argument) when they are not 128 intact
  /// bytes of an id, Error(version) when another version of Marrow made them.
  static UniqueId from_bytes(std::span<const std::byte> bytes);

  bool operator==(const UniqueId&) const = default;

 private:
  std::array<std::byte, kSize> bytes_{};
};

}  // namespace marrow
