// SPDX-License-Identifier: Apache-2.0
// What the processes of one softnic job share: who is there, which QPs exist and what they accept,
// which regions exist and whose descriptor stands behind them. An initiator's engine decides
// everything about an operation from these tables; only receives are left to the owner (Inbox).
// Every field is an atomic: another process may read a slot while its owner recycles it; readers
// check the slot's name again afterwards.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "marrow/abi/abi.h"

namespace marrow::softnic {

inline constexpr std::uint64_t kDirectoryMagic = 0x4d41525257534e31ull;  // "MARRWSN1"
inline constexpr std::uint32_t kDirectoryVersion = 2;
inline constexpr std::uint32_t kMaxProcesses = 256;
/// QPN = generation << 14 | slot; generation 1..1023, so a QPN is never 0 and a stale one is noticed.
inline constexpr std::uint32_t kQpSlotBits = 14;
inline constexpr std::uint32_t kMaxQueuePairs = 1u << kQpSlotBits;
/// Key = slot << 8 | generation. Slots below 16 stay unused: 0 and 0x100 are never valid keys.
inline constexpr std::uint32_t kMaxRegions = 1u << 14;
inline constexpr std::uint32_t kFirstRegion = 16;
/// A slot's name while its owner fills it in.
inline constexpr std::uint32_t kClaimed = 0xffffffffu;

template <class T>
using Shared = std::atomic<T>;
static_assert(Shared<std::uint64_t>::is_always_lock_free);

/// The plain word behind a shared one, for code that brings its own atomic accesses (an engine's Access).
template <class T>
MARROW_HOST_DEVICE T* word(Shared<T>& shared) {
  static_assert(sizeof(Shared<T>) == sizeof(T));
  return reinterpret_cast<T*>(&shared);
}

struct ProcessSlot {
  enum State : std::uint32_t { kFree = 0, kLive = 1 };
  Shared<std::uint32_t> state;
  Shared<std::int32_t> pid;
  Shared<std::uint64_t> start_time;  ///< with pid: names the process for good, pids are reused
  /// Counts inbox requests, so that the owner's engine looks at inboxes only when there are some.
  alignas(64) Shared<std::uint64_t> inbox_rings;
  Shared<std::uint64_t> descriptors;  ///< names the socket of its descriptor server, 0: none
};

/// One request in flight from the one remote QP connected to this one.
struct Inbox {
  enum State : std::uint32_t { kIdle = 0, kRequest = 1, kDone = 2, kNotReady = 3, kFailed = 4 };
  Shared<std::uint32_t> state;  ///< publishes the fields below
  Shared<std::uint32_t> opcode;
  Shared<std::uint32_t> immediate;  ///< as in the WQE, big endian
  Shared<std::uint32_t> bytes;
  Shared<std::uint32_t> source_qpn;
  // a piece of a message (messages.hpp)
  Shared<std::uint32_t> offset;  ///< of the piece in the message
  Shared<std::uint32_t> total;   ///< bytes of the message
  Shared<std::uint32_t> solicited;
  Shared<std::uint32_t> packet_key;  ///< region with the piece's payload
  Shared<std::uint32_t> number;  ///< of the request, and of the one that `state` answers: a request
  Shared<std::uint32_t> answered;  ///< given up by a reset may still be answered later
  Shared<std::uint32_t> syndrome;  ///< answer: what a failed request means to the initiator
  Shared<std::uint32_t> rkey;
  Shared<std::uint32_t> opmod;
  Shared<std::uint32_t> atomic_bytes;
  Shared<std::uint64_t> address;
  Shared<std::uint64_t> operand;  ///< answer of an atomic: the old value
  Shared<std::uint64_t> compare;
  Shared<std::uint64_t> operand_mask;
  Shared<std::uint64_t> compare_mask;
};

struct alignas(64) QpSlot {
  Shared<std::uint32_t> qpn;  ///< 0 = free; published last
  Shared<std::uint32_t> generation;
  Shared<std::uint32_t> process;
  Shared<std::uint32_t> state;  ///< mlx5::QpState
  Shared<std::uint32_t> remote_qpn;
  Shared<std::uint32_t> pd;
  Shared<std::uint32_t> access;  ///< IBV_ACCESS_REMOTE_*
  Inbox inbox;
};

struct alignas(64) RegionSlot {
  Shared<std::uint32_t> key;  ///< 0 = free; published last
  Shared<std::uint32_t> generation;
  Shared<std::uint32_t> process;
  Shared<std::uint32_t> access;
  Shared<std::uint32_t> pd;
  Shared<std::int32_t> fd;  ///< in the owner's table; -1 = only reachable inside the owner
  Shared<std::uint64_t> iova;
  Shared<std::uint64_t> length;
  Shared<std::uint64_t> device;  ///< with inode: what fd must turn out to be
  Shared<std::uint64_t> inode;
  Shared<std::uint64_t> offset;  ///< of the region's first byte in the file or allocation
  /// What the region lies in.
  enum Kind : std::uint32_t {
    kFile = 0,       ///< a file that every process can map
    kGpuMemory = 1,  ///< fd is CUDA's: its owner hands it out (descriptor_server.hpp)
    kGpuIpc = 2      ///< `ipc` is CUDA's handle
  };
  Shared<std::uint32_t> kind;
  Shared<std::uint64_t> ipc[8];
};

struct SharedDirectory {
  Shared<std::uint64_t> magic;  ///< written last by the creator
  Shared<std::uint32_t> version;
  Shared<std::uint32_t> next_qp;  ///< where the search for a free slot starts
  Shared<std::uint32_t> next_region;
  Shared<std::uint32_t> next_pd;
  pthread_mutex_t membership;  ///< robust: joining, and clearing up after the dead
  pthread_mutex_t atomics;     ///< robust: atomics=hca
  ProcessSlot processes[kMaxProcesses];
  QpSlot queue_pairs[kMaxQueuePairs];
  RegionSlot regions[kMaxRegions];
};

}  // namespace marrow::softnic
