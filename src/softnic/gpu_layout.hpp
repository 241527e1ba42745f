// SPDX-License-Identifier: Apache-2.0
// What the GPU engine's block and its host thread share: a page of pinned host memory (the mailbox) and
// tables in GPU memory. The host writes the tables through commands that the block carries out between
// two steps of any queue, so nothing here needs a lock.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softnic/queues.hpp"
#include "softnic/region.hpp"
#include "softnic/shared_layout.hpp"

namespace marrow::softnic::gpu {

inline constexpr std::uint32_t kWarps = 20;
inline constexpr std::uint32_t kWorkers = kWarps - 1;  ///< the last warp is the manager
inline constexpr std::uint32_t kThreads = kWarps * 32;
inline constexpr std::uint32_t kMaxQueuePairs = 2048;
inline constexpr std::uint32_t kMaxCompletionQueues = 4096;
/// So many of them live in shared memory while the block runs.
inline constexpr std::uint32_t kHotQueuePairs = 128;
inline constexpr std::uint32_t kHotCompletionQueues = 128;
/// So many have their small WRITEs served by the fast loop, a lane each, wherever they live.
inline constexpr std::uint32_t kFastQueuePairs = kWorkers * 32;
/// Doorbell cells, 64 bytes each.
inline constexpr std::uint32_t kCells = 2048;
inline constexpr std::uint32_t kCellBytes = 64;

enum class Command : std::uint32_t {
  none,
  write,           ///< payload to `address`
  put_queue_pair,  ///< payload is queue pair `index` from now on
  get_queue_pair,
  put_completion_queue,
  get_completion_queue,
  set_peer,  ///< payload is what is known of the peer of queue pair `index`
};
/// Command flags for put_queue_pair.
inline constexpr std::uint32_t kPrime = 1;      ///< what record and cell hold now is old
inline constexpr std::uint32_t kClearCell = 2;  ///< empty the cell
/// For get_queue_pair: it is not served until it is put again.
inline constexpr std::uint32_t kFreeze = 4;

/// Host to block, in pinned host memory. The block only reads here: a store of an SM to host memory makes all
/// its later fences of system scope dearer (0.85 us on H200).
struct Mailbox {
  // Looked at every few microseconds, 16 bytes at once.
  alignas(64) std::uint64_t heartbeat;
  std::uint64_t command;  ///< number of the latest command; quit in bit 63
  // The command.
  alignas(64) Command kind;
  std::uint32_t index;
  std::uint32_t flags;
  std::uint32_t bytes;
  std::uint64_t address;
  /// The answer to Replies::wanted: the same value once the host has entered the key or found that nobody has
  /// it.
  alignas(64) std::uint64_t answered[kWarps];
  alignas(64) std::byte payload[1024];
};
inline constexpr std::uint64_t kQuit = std::uint64_t{1} << 63;
static_assert(sizeof(QueuePair) <= sizeof(Mailbox::payload));

/// Block to host, in GPU memory: the host fetches it by copy engine.
struct Replies {
  std::uint64_t done;              ///< number of the latest command carried out
  std::uint64_t failures[kWarps];  ///< queue pairs stopped by an error
  /// A key that a worker needs and the table lacks: request number << 32 | key.
  std::uint64_t wanted[kWarps];
  alignas(64) std::byte payload[1024];
};

struct FaultOptions {
  std::uint64_t seed = 1;
  Nanoseconds delay = 0;
  std::uint64_t drop = 0;
  std::uint64_t corrupt = 0;
  std::uint64_t error_at = 0;
  std::uint64_t stall = 0;
  Nanoseconds stall_time = 0;
  Nanoseconds retry = 0;
  std::uint32_t reorder = 0;
  std::uint32_t any = 0;  ///< some option that counts WQEs or changes their course is set
};

/// In GPU memory; survives the block.
struct Tables {
  // Counters of the faults; a stall outlasts a launch.
  std::uint64_t wqes = 0;
  std::uint64_t writes = 0;
  std::uint64_t random = 0;
  std::uint64_t stalled_until = 0;  ///< 0: not stalled, ~0: until the end
  std::uint64_t executed = 0;       ///< WQEs, for statistics
  std::uint64_t inbox_rings = 0;
  std::uint64_t quiet = 0;  ///< a word that nobody writes
  Replies replies = {};
  QueuePair queue_pairs[kMaxQueuePairs];
  CompletionQueue completion_queues[kMaxCompletionQueues];
  Region regions[kMaxRegions];
  alignas(64) std::byte cells[kCells][kCellBytes];
};

/// The block's parameters.
struct Launch {
  Mailbox* mailbox = nullptr;
  Tables* tables = nullptr;
  SharedDirectory* directory = nullptr;  ///< as the GPU sees it
  std::uint64_t number = 0;
  std::uint32_t queue_pairs = 0;  ///< one more than the highest number in use; commands raise it
  std::uint32_t process = 0;
  Nanoseconds idle = 0;       ///< the block ends after that long without work
  Nanoseconds heartbeat = 0;  ///< and after that long without a sign of its process
  FaultOptions faults;
};

/// The slot of a completion queue's number; a new queue is numbered so that its slot is free.
MARROW_HOST_DEVICE constexpr std::uint32_t completion_queue_slot(std::uint32_t cqn) {
  return cqn & (kMaxCompletionQueues - 1);
}

/// Starts the block on a stream (of the calling thread's current context). @return cudaError_t
int launch_block(const Launch& launch, void* stream);
/// Makes the block's code ready: later launches load nothing. @return cudaError_t
int prepare_block();
/// Whether this library has the block (built with nvcc).
bool has_block();

}  // namespace marrow::softnic::gpu
