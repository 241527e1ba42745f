// SPDX-License-Identifier: Apache-2.0
// Marrow's host API: a communicator of ranks, symmetric windows, and the device communicator that a
// kernel takes by value. Device code is in marrow/device.cuh.
//
// Owners are RAII and movable; handles are trivially copyable. Failures throw marrow::Error. No
// global state: several communicators per process, ranks as processes or as threads. Calls marked
// collective must be made by every live rank in the same order; each is bounded by
// MARROW_BOOTSTRAP_TIMEOUT and names the rank that did not come.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "marrow/abi/device_communicator.h"
#include "marrow/error.hpp"
#include "marrow/place.hpp"
#include "marrow/unique_id.hpp"

namespace marrow {

/// Where a window's memory is. On the CPU device both are host memory.
enum class Memory : std::uint8_t { device, host };

/// How a communicator is made.
struct Config {
  /// Where this rank's kernels run.
  Place place = Place::cpu();
  /// Parameters for this communicator only, by name ("MARROW_PATH" -> "gda"); they win over the environment.
  /// `marrow env` lists all of them.
  std::map<std::string, std::string> parameters;
};

/// What a device communicator should offer.
struct Requirements {
  int contexts = 1;                   ///< independent sets of queues, 1..64
  int signals = 64;                   ///< 0..65536
  int counters = 16;                  ///< 0..65536
  int barriers = 8;                   ///< 0..1024
  int packets = 1024;                 ///< packet slots, 0..2^20
  Sharing sharing = Sharing::device;  ///< who may post on one context at once
  /// Where queue indices start (0: the default). Near 2^16 or 2^32 it tests their wrap.
  std::uint64_t first_index = 0;
};

namespace core {
class CommunicatorState;
class WindowState;
class LocalBufferState;
class DeviceState;
}  // namespace core

/// Symmetric registered memory, one part per rank. Its memory lives until close() or until the
/// communicator closes, whichever is first.
class MARROW_API Window {
 public:
  Window() = default;
  /// For kernels, by value.
  WindowHandle handle() const;
  /// Our part, as the address kernels use.
  void* data() const;
  /// Our part as a host address, or null for device memory.
  void* host() const;
  std::uint64_t bytes() const;
  /// The path that add, fetch_add, compare_swap and SignalAt take on it, for all peers.
  Path atomic_path() const;
  /// Why those four are refused on this window (Status::invalid; check() names the call): its memory is
  /// on a GPU and some pair of ranks is connected by the proxy, whose threads cannot add there; or it is
  /// host memory that several GPUs would add to by lsa. Empty: they work.
  std::string why_no_atomics() const;
  /// Collective: unmaps and frees now.
  void close();

 private:
  friend class Communicator;
  explicit Window(std::shared_ptr<core::WindowState> state) : state_(std::move(state)) {}
  std::shared_ptr<core::WindowState> state_;
};

/// Registered memory of this rank alone: source of puts, target of gets. Deregistered on
/// destruction; flush first. The memory stays the caller's.
class MARROW_API LocalBuffer {
 public:
  LocalBuffer() = default;
  LocalBufferHandle handle() const;

 private:
  friend class Communicator;
  explicit LocalBuffer(std::shared_ptr<core::LocalBufferState> state) : state_(std::move(state)) {}
  std::shared_ptr<core::LocalBufferState> state_;
};

/// Owner of queues, signals, counters, barriers and packet slots. Lives until close() or until the
/// communicator closes.
class MARROW_API DeviceCommunicatorOwner {
 public:
  DeviceCommunicatorOwner() = default;
  /// For kernels, by value.
  DeviceCommunicator handle() const;
  /// Collective: frees it now. No kernel may use it any more.
  void close();

 private:
  friend class Communicator;
  explicit DeviceCommunicatorOwner(std::shared_ptr<core::DeviceState> state)
      : state_(std::move(state)) {}
  std::shared_ptr<core::DeviceState> state_;
};

/// How one peer is reached, and why not better.
struct PeerInfo {
  int rank = 0;
  Path path = Path::lsa;
  std::string transport;              ///< e.g. "load/store", "gda on softnic0", "proxy on shm"
  std::vector<std::string> rejected;  ///< one sentence a better path that was not taken
  bool emulated = false;              ///< softnic or the CPU device does a step
  bool same_host = true;
  bool same_process = false;
};

/// Waiting statistics of one peer.
struct PeerStatistics {
  bool slow = false;  ///< silent for longer than a few heartbeats
  bool failed = false;
  std::uint64_t slow_periods = 0;  ///< how often it fell silent
};

class MARROW_API Communicator {
 public:
  /// Collective: nranks ranks, each with its own number, meet.
  /// @param id      from UniqueId::create() on one rank, given to all by any means
  /// @param nranks  1..1024
  /// @param rank    0..nranks-1
  /// @throws Error(mismatch | timeout | authentication | invalid_argument | unsupported)
  Communicator(const UniqueId& id, int nranks, int rank, Config config = {});

  /// Ranks from torchrun, mpirun, srun or MARROW_RENDEZVOUS (+ MARROW_SECRET_FILE); without any, one rank.
  static Communicator from_environment(Config config = {});

  /// A new process takes the place of `rank`, which the survivors have agreed to have failed: pairs with
  /// their admit(rank). Then make the windows and device communicators that the survivors have open, in
  /// the order in which they made them; with the last of them the survivors' admit() returns. Until then
  /// no other collective is possible. It finds the survivors on its own host, or through rank 0.
  /// @param id      the survivors' id, as they were given it
  /// @throws Error(timeout) when nobody admits it within MARROW_BOOTSTRAP_TIMEOUT; Error(mismatch) when
  ///         the rank is alive, or counts differ; Error(version | authentication)
  static Communicator rejoin(const UniqueId& id, int nranks, int rank, Config config = {});

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  /// close() if it was not called; a failure there is logged, not thrown.
  ~Communicator();

  /// What the ranks met by. A process that is to rejoin() needs it, also where from_environment() made it.
  /// It has the job's secret.
  UniqueId id() const;
  /// Our number, 0..nranks()-1.
  int rank() const;
  /// Ranks the communicator was made with, failed ones included.
  int nranks() const;
  /// Where our kernels run: Config::place.
  Place place() const;

  /// Collective: `bytes` of symmetric memory on every rank, zeroed; bytes must agree.
  /// @param bytes  1 .. 2^46; sparse on the CPU device
  /// @throws Error(mismatch) naming both sizes; Error(unsupported) when a peer's path cannot use such memory; Error(out_of_memory)
  Window allocate(std::uint64_t bytes, Memory memory = Memory::device);

  /// Collective: makes memory that somebody else allocated a window. On a GPU: cudaMalloc or VMM
  /// memory; on the CPU device: a shared mapping whose descriptor is known (MARROW memory or memfd).
  Window register_window(void* pointer, std::uint64_t bytes);

  /// Not collective: source of puts and target of gets for this rank.
  LocalBuffer register_local(void* pointer, std::uint64_t bytes);

  /// Collective: queues and signals for kernels. Requirements must agree.
  DeviceCommunicatorOwner device_communicator(Requirements requirements = {});

  /// Throws what went wrong asynchronously, with the peer's rank, until it is handled; else returns.
  /// Violations that MARROW_CHECKED kernels reported are thrown one a call, each once; the first 32 are
  /// kept until they are read.
  void check();

  /// Aborts: our and all survivors' waits return Status::aborted; their check() has the sentence.
  void revoke(const std::string& why = {});

  /// Collective of the survivors: they agree who failed. Afterwards operations to a failed rank and
  /// waits that name one return peer_failed at once, all others work on.
  /// @return one bool a rank, true: failed; the same on every survivor
  std::vector<bool> agree_failures(std::chrono::milliseconds deadline = std::chrono::seconds(30));

  /// Collective of the survivors and of a new process in the place of `rank` (rejoin()): windows and
  /// device communicators are made again with it, by the paths that are possible now. Afterwards every
  /// handle and LocalBufferHandle must be taken anew (and graphs captured anew): what the old ones point to
  /// is freed. No kernel may use this communicator meanwhile. State afterwards, on every rank: signals,
  /// counters, barriers, packets and queues as in a new device communicator; the windows of the survivors
  /// keep their content, the new rank's are zeroed; the mask of failed ranks lacks `rank`.
  /// @param rank      masked by agree_failures()
  /// @param deadline  for the new process to come; each further step: MARROW_BOOTSTRAP_TIMEOUT
  /// @throws Error(invalid_argument) for a rank that is not masked, Error(timeout) naming who did not come
  ///         or call: nothing has changed then. Error(mismatch | version) when the new process differs,
  ///         Error(peer_failed) when it or a survivor dies: then call agree_failures(), which makes windows
  ///         and device communicators again among the survivors (take handles anew), and try again
  void admit(int rank, std::chrono::milliseconds deadline = std::chrono::seconds(30));

  /// Collective of the ranks that are not masked, after a connection broke between two that live: check() has
  /// thrown an error of the network that names the peer, and agree_failures() masked nobody. Windows and device
  /// communicators are made again with new connections (queue pairs), by the paths that are possible now. As after
  /// admit(), every handle and LocalBufferHandle must be taken anew, and no kernel may use this communicator
  /// meanwhile. Windows keep their content; signals, counters, barriers, packets and queues are as new.
  /// @throws Error(mismatch) when a rank makes another call; Error(peer_failed) when one dies meanwhile: then call
  ///         agree_failures(), which makes them again; Error(unsupported) naming why no path is left
  void reconnect();

  /// Collective, host side: all ranks have arrived.
  void barrier();
  /// Collective, host side: every rank's bytes, by rank.
  std::vector<std::vector<std::byte>> allgather(const void* data, std::size_t bytes);

  /// How each rank, ourselves included, is reached; by rank. @throws Error(invalid_argument) after close()
  std::vector<PeerInfo> peers() const;
  /// What the heartbeat has seen of a peer. @throws Error(invalid_argument) for a rank that is none
  PeerStatistics statistics(int peer) const;

  /// Waits until the place's work is finished: the stream on a GPU, nothing on the CPU device.
  void synchronize();

  /// Host-initiated forms, in the order of the place's stream (on the CPU device: at once). They use
  /// context 0 of the device communicator.
  /// @throws Error(timeout | peer_failed | aborted | invalid_argument) on the CPU device; on a GPU,
  ///         Error(unsupported) when the library was built without CUDA, and failures show in check()
  void put_on_stream(const DeviceCommunicatorOwner& device, int peer, const Window& window,
                     std::uint64_t offset, const LocalBuffer& source, std::uint64_t source_offset,
                     std::uint64_t bytes);
  /// Adds n to the peer's signal; strong.
  void signal_on_stream(const DeviceCommunicatorOwner& device, int peer, int signal,
                        std::uint64_t n = 1);
  /// What follows in the stream runs after our signal is at least `at_least`.
  void wait_on_stream(const DeviceCommunicatorOwner& device, int signal, std::uint64_t at_least);

  /// Collective: all ranks stop, everything is freed. With failed peers: the survivors only.
  void close();

 private:
  explicit Communicator(std::shared_ptr<core::CommunicatorState> state)
      : state_(std::move(state)) {}
  std::shared_ptr<core::CommunicatorState> state_;
};

/// Library version, e.g. "0.1.0".
MARROW_API const char* version();

}  // namespace marrow
