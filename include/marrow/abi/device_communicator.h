// SPDX-License-Identifier: Apache-2.0
// What the host hands to a kernel by value: the device communicator, windows and local buffers.
// Both sides read these, so each has its size asserted and carries the ABI number.
// A pointer here is an address the executor (GPU or CPU device) can dereference.
#pragma once

#include "marrow/abi/abi.h"

namespace marrow {

/// How a peer is reached. Ordered from the strongest to the weakest.
enum class Path : std::uint8_t { lsa = 0, gda = 1, proxy = 2 };
inline constexpr int kPaths = 3;
/// In DeviceCommunicator::path: the survivors agreed that this rank failed.
inline constexpr std::uint8_t kPathFailed = 0xff;

MARROW_HOST_DEVICE constexpr const char* name(Path path) {
  return path == Path::lsa ? "lsa" : path == Path::gda ? "gda" : "proxy";
}

/// Who may post on one context's queues at once. thread: one thread at a time (no atomics).
enum class Sharing : std::uint8_t { thread = 0, block = 1, device = 2 };

/// Members of our lsa team whose addresses travel in the handle itself: a kernel's parameters are read
/// at no cost, while a table in memory costs an access to L2 after each acquire.
inline constexpr int kNear = 8;

/// A registered memory region of every rank, by value. 144 bytes.
struct WindowHandle {
  std::uint32_t abi = 0;       ///< kAbiVersion of the host that made it
  std::uint32_t id = 0;        ///< index in the communicator's table; what proxy descriptors carry
  std::uint64_t bytes = 0;     ///< size on every rank
  std::byte* local = nullptr;  ///< this rank's own memory
  const std::uint64_t* lsa =
      nullptr;  ///< [nranks] peers' memory as addresses of ours; 0: not load/store reachable
  const std::uint64_t* gda_base =
      nullptr;  ///< [nranks] remote virtual address (iova) of byte 0, or null
  const std::uint32_t* gda_rkey =
      nullptr;                  ///< [nranks] remote keys, big endian as a WQE wants them, or null
  std::uint64_t gda_local = 0;  ///< iova of our own byte 0
  std::uint32_t gda_lkey = 0;   ///< local key, big endian
  Path atomic_path =
      Path::lsa;  ///< the one path that add, fetch_add, compare_swap and SignalAt take
  std::uint8_t host_memory = 0;  ///< 1: the memory is host memory
  /// 1: add, fetch_add, compare_swap and SignalAt return Status::invalid, because the memory cannot be updated
  /// atomically by all who would: host memory by several GPUs (lsa), GPU memory by a CPU thread (proxy)
  std::uint8_t no_atomics = 0;
  /// 1: the proxy's network cannot read it, so small puts from it are written to a staging slot by the kernel
  std::uint8_t staged = 0;
  std::uint64_t owner = 0;  ///< DeviceCommunicator::owner of its communicator
  std::uint64_t reserved1 = 0;
  std::uint64_t near[kNear] =
      {};  ///< lsa[lsa_first + i] for the first members of our lsa team; 0: look in lsa
};
static_assert(sizeof(WindowHandle) == 144);

/// Memory of this rank alone: source of puts, target of gets. 48 bytes.
struct LocalBufferHandle {
  std::uint32_t abi = 0;
  std::uint32_t id = 0;  ///< index in the communicator's region table (shared with windows)
  std::uint64_t bytes = 0;
  std::byte* local = nullptr;
  std::uint64_t gda_local = 0;
  std::uint32_t gda_lkey = 0;
  std::uint8_t host_memory = 0;
  std::uint8_t staged = 0;  ///< as in WindowHandle
  std::uint8_t reserved0[2] = {};
  std::uint64_t owner = 0;  ///< DeviceCommunicator::owner of its communicator
};
static_assert(sizeof(LocalBufferHandle) == 48);

/// One violation seen by a MARROW_CHECKED kernel.
struct CheckedReport {
  char operation[24];
  char file[104];
  std::uint32_t line;
  std::int32_t block;
  std::int32_t thread;
  std::uint32_t what;  ///< CheckedWhat
  std::uint64_t value;
  std::uint64_t limit;
};
static_assert(sizeof(CheckedReport) == 160);

enum class CheckedWhat : std::uint32_t {
  peer = 1,
  signal,
  counter,
  context,
  packet,
  barrier,
  bounds_destination,
  bounds_source,
  alignment,
  size,
  path,
  abi,
  window,
  held_queue
};

inline constexpr int kCheckedReports = 32;
inline constexpr int kMaxRanks = 1024;

/// The words a waiting kernel looks at, in memory that host and executor share (pinned host memory).
/// The host writes state and failed; a kernel writes the rest.
struct ControlBlock {
  /// ControlState bits. Looked at every ~10 us of waiting.
  alignas(64) std::uint64_t state;
  /// Bit r: rank r is in the mask the survivors agreed on (Communicator::agree_failures).
  std::uint64_t failed[kMaxRanks / 64];
  /// Kernel's ABI number when it differs from the handle's; 0: none seen.
  alignas(64) std::uint64_t foreign_abi;
  std::uint64_t reports;  ///< violations counted; the first kCheckedReports are kept
  std::uint64_t
      stream_status;  ///< worst Status of the host-initiated stream operations since check()
  CheckedReport report[kCheckedReports];
};

enum ControlState : std::uint64_t {
  kControlOk = 0,
  kControlAborted = 1,  ///< revoked: every wait returns aborted
  kControlPeerFailed =
      2,  ///< a rank failed and the survivors have not agreed yet: every wait returns peer_failed
  kControlMasked = 4,  ///< at least one bit of failed[] is set
};

struct GdaDevice;    // abi/gda_queue.h
struct ProxyDevice;  // abi/proxy_ring.h

/// The device communicator, by value. Sync memory (signals, barrier words, packet slots) is three
/// internal windows, one per path, because a 64-bit word may have one kind of adder only: a signal
/// is the sum of its words. Layout of each: signal_words x u64, then packets x 16 bytes.
struct DeviceCommunicator {
  std::uint32_t abi = 0;
  std::uint32_t bytes = 0;  ///< sizeof(DeviceCommunicator) of the host
  std::int32_t rank = 0;
  std::int32_t nranks = 0;
  std::int32_t lsa_rank = 0;  ///< index in our lsa team
  std::int32_t lsa_size = 0;  ///< ranks that load/store each other; lsa teams are consecutive ranks
  std::int32_t lsa_first = 0;  ///< world rank of our lsa team's first member
  std::int32_t contexts = 0;
  std::int32_t signals = 0;  ///< user signals: ids 0 .. signals-1
  std::int32_t counters = 0;
  std::int32_t barriers = 0;
  std::int32_t packets = 0;       ///< packet slots
  std::int32_t signal_words = 0;  ///< signals + barriers * nranks
  Path atomic_path = Path::lsa;   ///< weakest path any pair of ranks needs
  std::uint8_t feeds =
      0;  ///< bit p: some rank reaches us by path p, so word p of our signals can change
  std::uint8_t connected = 0;  ///< bit p: path p is connected to every peer
  Sharing sharing = Sharing::device;
  std::uint64_t wait_ns = 0;           ///< default deadline of a device wait
  const std::uint8_t* path = nullptr;  ///< [nranks] Path to each peer, ourselves included
  ControlBlock* control = nullptr;
  WindowHandle sync[kPaths];  ///< sync memory by path
  std::uint64_t* signal_base =
      nullptr;  ///< [signal_words] baseline, set by reset_signal; barrier words: arrivals sent; ours alone
  std::uint64_t* signal_shadow =
      nullptr;  ///< [signal_words] what a *_shadow wait has consumed; barrier words: calls
  std::uint64_t* counter[kPaths] =
      {};  ///< [counters] local completions by path; the value is the sum
  std::uint64_t* counter_base = nullptr;  ///< [counters] baseline, set by reset_counter
  const GdaDevice* gda = nullptr;
  const ProxyDevice* proxy = nullptr;
  /// [2] ours alone, in device memory: when (ns) some waiter last read control->state, and what it
  /// found. Thousands of waiters share one read of host memory every ~10 us. null: each reads itself.
  std::uint64_t* look = nullptr;
  /// Which communicator of this process it is: MARROW_CHECKED kernels refuse another's windows.
  std::uint64_t owner = 0;
  std::uint64_t reserved[2] = {};
};
static_assert(sizeof(DeviceCommunicator) == 56 + 8 + 8 + 8 + 3 * 144 + 8 + 8 + 24 + 8 + 8 + 8 + 32);

}  // namespace marrow
