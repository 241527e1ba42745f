// SPDX-License-Identifier: Apache-2.0
// Gin: put, signal, wait between ranks. One object per (communicator, context); it holds references
// only, make it where you need it.
//
// What each completion proves (docs/design.md section 5):
//   put returns ok        nothing; two puts may land in any order. timeout: nothing was posted
//   wait_signal sees      strong: that put and every put/put_value/add before it on the same context to
//   a signal              the same peer are visible here. weak: that put only
//   flush                 sources of all earlier operations of this context are reusable, gets readable
//   flush_remote          ... and visible to whoever is signalled afterwards on any context
//   counter reached       that operation's source is reusable
//   receive_packet        its 8 bytes, to its caller
// "Earlier" is the CUDA memory model's happens-before: a block that synchronised and then signals
// covers the stores of its threads.
#pragma once

#include "marrow/device/detail/checked.cuh"
#include "marrow/device/detail/options.cuh"
#include "marrow/device/detail/path_gda.cuh"
#include "marrow/device/detail/path_lsa.cuh"
#include "marrow/device/detail/path_proxy.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// A flush under way for one peer. From flush_async; give it to test or wait.
struct Request {
  std::int32_t peer = -1;
  detail::Ticket ticket[kPaths] = {};
};

namespace detail {
/// What a Gin of one path keeps in registers so that a loop of operations need not read it again: after an
/// operation the compiler takes every word in memory to have changed, parameters of the kernel too.
template <Path... kOnly>
struct Kept {
  MARROW_DEVICE explicit Kept(const DeviceCommunicator&) {}
};
template <>
struct Kept<Path::proxy> {
  MARROW_DEVICE explicit Kept(const DeviceCommunicator& comm)
      : proxy(comm.proxy), path(comm.path), nranks(static_cast<std::uint32_t>(comm.nranks)) {}
  const ProxyDevice* proxy;
  const std::uint8_t* path;
  std::uint32_t nranks;
};
}  // namespace detail

template <Path... kOnly>
class ExclusiveQueue;

/// @tparam kOnly  paths compiled in; none named: all three, chosen per peer at run time. An operation
///                to a peer on another path returns Status::invalid, and a strong signal covers adds
///                to windows (they take WindowHandle::atomic_path) only when that path is among them.
/// Options of operations, in any order: SignalAdd or SignalAt, CounterInc, a coop group (default
/// Thread; EachLane: an operation of each lane), Ordering, Doorbell, Team (peer then counts in that team), Deadline (waiting for queue
/// space; default MARROW_WAIT_TIMEOUT), Scratch (shared memory for bulk copies to load/store peers). All members of a group call together with the same arguments
/// and get the same Status. Offsets and sizes are bytes.
template <Path... kOnly>
class Gin {
 public:
  /// @param comm     from Communicator::device_communicator
  /// @param context  0 .. contexts-1; outside: every operation returns Status::invalid
  MARROW_DEVICE Gin(const DeviceCommunicator& comm, Index context)
      : Gin(comm, context, comm.sharing) {}
  /// @param sharing  what the host asked for; as a constant it leaves out the code of the other modes.
  ///                 Another one than the communicator's: every operation returns Status::invalid
  MARROW_DEVICE Gin(const DeviceCommunicator& comm, Index context, Sharing sharing);

  /// Whether comm's ABI and the context are usable: ok or invalid.
  MARROW_DEVICE Status status() const { return status_; }

  /// Writes `bytes` from our region to the peer's window.
  /// @param peer   rank (of the team, default world); our own is legal
  /// @param bytes  any, 0 included (then only the action happens)
  /// @return ok: posted. timeout: no queue space before the deadline, nothing was posted (except: a
  ///         SignalAt whose window's atomic path is not the peer's path may time out after the data was
  ///         posted; repeat the action alone, with signal). peer_failed, aborted, invalid
  template <class... Options>
  MARROW_DEVICE Status put(Index peer, const WindowHandle& window, std::uint64_t offset,
                           const Region& source, std::uint64_t source_offset, std::uint64_t bytes,
                           const Options&... options) const;

  /// Writes a value of 1..24 bytes, taken at once: its variable may be reused on return.
  /// Aligned 8-byte words of it land whole.
  template <class T, class... Options>
  MARROW_DEVICE Status put_value(Index peer, const WindowHandle& window, std::uint64_t offset,
                                 const T& value, const Options&... options) const;

  /// Reads `bytes` from the peer's window into our region; readable after flush, or when its counter is reached.
  template <class... Options>
  MARROW_DEVICE Status get(Index peer, const WindowHandle& window, std::uint64_t offset,
                           const Region& target, std::uint64_t target_offset, std::uint64_t bytes,
                           const Options&... options) const;

  /// Adds n to an 8-byte aligned 64-bit word of the peer's window. Atomic with every other add,
  /// fetch_add, compare_swap and SignalAt on it; not with load/store. All of them return Status::invalid on
  /// windows whose memory cannot be updated atomically by all who would: with Window::atomic_path proxy, GPU
  /// memory (a CPU thread adds); with lsa, or gda on softnic's GPU engines, host memory of GPUs (PCIe has no
  /// atomics between GPUs). Take the other one.
  template <class... Options>
  MARROW_DEVICE Status add(Index peer, const WindowHandle& window, std::uint64_t offset,
                           std::uint64_t n, const Options&... options) const;

  /// Adds n and waits for the old value. timeout: the add may still happen.
  template <class... Options>
  MARROW_DEVICE Status fetch_add(Index peer, const WindowHandle& window, std::uint64_t offset,
                                 std::uint64_t n, std::uint64_t* old,
                                 const Options&... options) const;

  /// Stores `desired` if the word equals `expected`; waits for the old value.
  template <class... Options>
  MARROW_DEVICE Status compare_swap(Index peer, const WindowHandle& window, std::uint64_t offset,
                                    std::uint64_t expected, std::uint64_t desired,
                                    std::uint64_t* old, const Options&... options) const;

  /// The action alone.
  template <class Action, class... Options>
  MARROW_DEVICE Status signal(Index peer, const Action& action, const Options&... options) const;

  /// Waits until our signal's value is at least `at_least` (rolling 64-bit compare).
  /// @return ok, timeout, peer_failed, aborted, invalid. Everything the seen signals prove is visible to the group.
  template <class... Options>
  MARROW_DEVICE Status wait_signal(Index id, std::uint64_t at_least,
                                   const Options&... options) const;
  /// One look: ok or timeout (not yet).
  MARROW_DEVICE Status test_signal(Index id, std::uint64_t at_least) const;
  /// The value since the last reset: the sum of its per-path words. Acquires.
  MARROW_DEVICE std::uint64_t read_signal(Index id) const;
  /// Makes the value 0 by recording a baseline. May not race with waits or with signals in flight.
  MARROW_DEVICE void reset_signal(Index id) const;
  /// Waits for `delta` more than the shadow and moves the shadow there: for signals nobody resets.
  template <class... Options>
  MARROW_DEVICE Status wait_signal_shadow(Index id, std::uint64_t delta,
                                          const Options&... options) const;
  /// The shadow: what wait_signal_shadow has consumed.
  MARROW_DEVICE std::uint64_t* signal_shadow(Index id) const {
    return comm_.signal_shadow + id.value;
  }
  /// Waits until any of count signals ids[i] is at least at_least[i]; *which gets the first found.
  MARROW_DEVICE Status wait_any(const std::int32_t* ids, const std::uint64_t* at_least, Index count,
                                int* which, Deadline deadline = {}) const;

  /// Waits until our counter is at least n.
  template <class... Options>
  MARROW_DEVICE Status wait_counter(Index id, std::uint64_t n, const Options&... options) const;
  MARROW_DEVICE std::uint64_t read_counter(Index id) const;
  /// Makes the counter 0 by recording a baseline; may not race with operations that count on it.
  MARROW_DEVICE void reset_counter(Index id) const;

  /// Local completion of this context's operations, to all peers or to one: see the table above.
  /// After a timeout they are still outstanding.
  template <class... Options>
  requires(detail::is_option<Options>&&...) MARROW_DEVICE Status flush(const Options&... options)
  const;
  template <class... Options>
  MARROW_DEVICE Status flush(Index peer, const Options&... options) const;
  MARROW_DEVICE Status flush_async(Index peer, Request* request) const;
  /// ok: complete; timeout: not yet.
  MARROW_DEVICE Status test(const Request& request) const;
  MARROW_DEVICE Status wait(const Request& request, Deadline deadline = {}) const;
  /// flush, and the data is visible to whoever is signalled afterwards on any context.
  template <class... Options>
  MARROW_DEVICE Status flush_remote(const Options&... options) const;

  /// Sends 8 bytes that carry their own arrival flag to the peer's packet slot. One sender a slot;
  /// a slot may be sent again once its receiver has said (by other means) that it took the last one.
  /// @param epoch  not the slot's previous one; on gda and proxy the low 32 bits count. Never 0 (unsent slots hold 0)
  MARROW_DEVICE Status send_packet(Index peer, Index slot, std::uint64_t value,
                                   std::uint64_t epoch) const;
  /// Waits for the packet of exactly this epoch. Orders nothing else.
  MARROW_DEVICE Status receive_packet(Index slot, std::uint64_t epoch, std::uint64_t* value,
                                      Deadline deadline = {}) const;

  /// This thread's hold of its queue to one peer (device/exclusive.cuh): cheaper puts on contexts of
  /// Sharing::thread, and nobody else may post there meanwhile.
  MARROW_DEVICE ExclusiveQueue<kOnly...> exclusive(Index peer) const;

  MARROW_DEVICE const DeviceCommunicator& communicator() const { return comm_; }
  MARROW_DEVICE int context() const { return context_.index; }

 private:
  template <class Body>
  MARROW_DEVICE Status on_path(Path path, Body&& body) const;
  template <class Coop, class Body>
  MARROW_DEVICE Status each_queue(const Coop& coop, Body&& body) const;
  MARROW_DEVICE Status resolve(const Index& peer, const Team& team, const char* operation,
                               int* rank, Path* path) const;
  MARROW_DEVICE Status check_window(const Index& at, const char* operation,
                                    const WindowHandle& window, std::uint64_t offset,
                                    std::uint64_t bytes, std::uint64_t align = 1) const;
  MARROW_DEVICE Status check_region(const Index& at, const char* operation, const Region& region,
                                    std::uint64_t offset, std::uint64_t bytes) const;
  MARROW_DEVICE Status check_id(const Index& id, int limit, CheckedWhat what,
                                const char* operation) const;
  MARROW_DEVICE Status plan(const Index& at, Path path, const SignalAdd& action, detail::Then* then,
                            Path* then_path) const;
  MARROW_DEVICE Status plan(const Index& at, Path path, const SignalAt& action, detail::Then* then,
                            Path* then_path) const;
  template <class... Options>
  MARROW_DEVICE Status plan_options(const Index& at, Path path, detail::Then* then, Path* then_path,
                                    const Options&... options) const;
  template <bool kTogether = false, class Coop, class Post>
  MARROW_DEVICE Status post_then(int peer, Path path, const detail::Then& then, Path then_path,
                                 const detail::Knobs& knobs, const Coop& coop, Post&& post,
                                 int action_counter = -1) const;
  template <class... Options>
  MARROW_DEVICE Status put_the_long_way(Index peer, const WindowHandle& window,
                                        std::uint64_t offset, const Region& source,
                                        std::uint64_t source_offset, std::uint64_t bytes,
                                        const Options&... options) const;
  template <class... Options>
  MARROW_DEVICE Status fetch(const Index& peer, const detail::FetchOp& op, std::uint64_t* old,
                             const char* operation, const Options&... options) const;
  MARROW_DEVICE std::uint64_t raw_signal(int word) const;
  MARROW_DEVICE std::uint64_t raw_counter(int id) const;

  friend class Barrier;
  friend class ExclusiveQueue<kOnly...>;

  const DeviceCommunicator& comm_;
  detail::Context context_;
  Status status_;
  [[no_unique_address]] detail::Kept<kOnly...> kept_;
};

template <class C, class I>
Gin(const C&, I) -> Gin<>;
template <class C, class I>
Gin(const C&, I, Sharing) -> Gin<>;

}  // namespace cpu_device / gpu_device
}  // namespace marrow

#include "marrow/device/detail/gin_post.cuh"
#include "marrow/device/detail/gin_wait.cuh"
#include "marrow/device/exclusive.cuh"
