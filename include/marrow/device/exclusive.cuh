// SPDX-License-Identifier: Apache-2.0
// ExclusiveQueue: one thread's send queue to one peer, its producer index held in registers. A put on a context of
// Sharing::thread reads that index, how far the NIC is, where the ring lies and the peer's path before it can write
// its work-queue entry, since another Gin object may have posted meanwhile and the host may have masked the peer. The
// holder of a queue knows the index, and looks at the rest once in 64 entries: between looks a put is arithmetic,
// three stores of the entry, the release, record and doorbell.
//
// The index is written back with each operation, behind the doorbell, so that a later holder, a plain Gin, or a
// later kernel goes on from there: nothing has to be given back at the end.
#pragma once

#include "marrow/device/gin.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Addresses and keys that an ExclusiveQueue's puts go by: loaded once, in registers from then on.
class RemoteMemory {
 public:
  MARROW_DEVICE RemoteMemory(const WindowHandle* window, std::uint64_t base, std::uint32_t key,
                             bool good)
      : window_(window), base_(base), key_(key), good_(good) {}

 private:
  template <Path...>
  friend class ExclusiveQueue;
  const WindowHandle* window_;
  std::uint64_t base_;
  std::uint32_t key_;
  bool good_;
};
class LocalMemory {
 public:
  MARROW_DEVICE LocalMemory(const Region& region, std::uint64_t base, std::uint32_t key, bool good)
      : region_(region), base_(base), key_(key), good_(good) {}

 private:
  template <Path...>
  friend class ExclusiveQueue;
  Region region_;
  std::uint64_t base_;
  std::uint32_t key_;
  bool good_;
};

/// The operations of Gin to one peer, by one thread, without the peer. From Gin::exclusive:
///
///     auto queue = gin.exclusive(peer);
///     for (int i = 0; i < n; ++i) queue.put(window, at(i), source, from(i), bytes);
///     queue.flush();
///
/// While it is in use (from its making until its last operation) nothing else may post to that peer on that context:
/// not another Gin, not another ExclusiveQueue; a checked build (MARROW_CHECKED) finds out and returns
/// Status::invalid, others would overwrite entries. One after the other is fine: an operation of another object, then
/// `reload` before this one is used again. Waits for signals, counters and packets concern no queue and are Gin's.
///
/// Saves time on contexts of Sharing::thread to peers on the gda path (puts, with or without a SignalAdd); on others
/// it is the same as Gin. What operations take, return and promise is said there; they are of one Thread, so a coop
/// group or a Team is no option here. A running kernel finds out that the host has masked the peer with its 64th put
/// at the latest.
template <Path... kOnly>
class ExclusiveQueue {
 public:
  /// @param peer  rank of the world; outside: every operation returns Status::invalid
  MARROW_DEVICE ExclusiveQueue(const Gin<kOnly...>& gin, Index peer);

  /// A window as the peer has it, and a region as the NIC reads it: what a put looks up each time otherwise. The
  /// window's handle must stay where it is.
  MARROW_DEVICE RemoteMemory remote(const WindowHandle& window) const;
  MARROW_DEVICE LocalMemory local(const Region& region) const;

  template <class... Options>
  MARROW_DEVICE Status put(const RemoteMemory& target, std::uint64_t offset,
                           const LocalMemory& source, std::uint64_t source_offset,
                           std::uint64_t bytes, const Options&... options);
  template <class... Options>
  MARROW_DEVICE Status put(const WindowHandle& window, std::uint64_t offset, const Region& source,
                           std::uint64_t source_offset, std::uint64_t bytes,
                           const Options&... options) {
    return put(remote(window), offset, local(source), source_offset, bytes, options...);
  }
  template <class T, class... Options>
  MARROW_DEVICE Status put_value(const WindowHandle& window, std::uint64_t offset, const T& value,
                                 const Options&... options);
  template <class... Options>
  MARROW_DEVICE Status get(const WindowHandle& window, std::uint64_t offset, const Region& target,
                           std::uint64_t target_offset, std::uint64_t bytes,
                           const Options&... options);
  template <class... Options>
  MARROW_DEVICE Status add(const WindowHandle& window, std::uint64_t offset, std::uint64_t n,
                           const Options&... options);
  template <class... Options>
  MARROW_DEVICE Status fetch_add(const WindowHandle& window, std::uint64_t offset, std::uint64_t n,
                                 std::uint64_t* old, const Options&... options);
  template <class... Options>
  MARROW_DEVICE Status compare_swap(const WindowHandle& window, std::uint64_t offset,
                                    std::uint64_t expected, std::uint64_t desired,
                                    std::uint64_t* old, const Options&... options);
  template <class Action, class... Options>
  MARROW_DEVICE Status signal(const Action& action, const Options&... options);
  MARROW_DEVICE Status send_packet(Index slot, std::uint64_t value, std::uint64_t epoch);

  /// Local completion of this peer's operations.
  template <class... Options>
  MARROW_DEVICE Status flush(const Options&... options);
  MARROW_DEVICE Status flush_async(Request* request);
  MARROW_DEVICE Status test(const Request& request);
  MARROW_DEVICE Status wait(const Request& request, Deadline deadline = {});
  /// As Gin's: of all peers of the context.
  template <class... Options>
  MARROW_DEVICE Status flush_remote(const Options&... options);

  /// Takes over what others posted to the queue since this object's last operation.
  MARROW_DEVICE void reload();

  MARROW_DEVICE const Gin<kOnly...>& gin() const { return gin_; }
  MARROW_DEVICE int peer() const { return peer_.value; }

 private:
  template <class... Options>
  static constexpr bool kOneThread =
      std::is_same_v<typename detail::CoopOf<Options...>::type, Thread> &&
      !detail::has<Team, Options...>;
  /// Whether a put of these options has a short way.
  template <class... Options>
  static constexpr bool kShort = detail::compiled_in<kOnly...>(Path::gda) && !detail::kChecked &&
                                 !detail::has<SignalAt, Options...> &&
                                 !detail::has<CounterInc, Options...>;
  template <bool kActs, bool kWide>
  MARROW_DEVICE bool put_shortly(const RemoteMemory& target, std::uint64_t offset,
                                 const LocalMemory& source, std::uint64_t source_offset,
                                 std::uint64_t bytes, const SignalAdd& action, bool now);
  template <class Body>
  MARROW_DEVICE Status by_gin(const char* operation, Body&& body);

  MARROW_DEVICE void refill();
  MARROW_DEVICE void look();

  static constexpr std::uint32_t kLook = 64;

  Gin<kOnly...> gin_;
  Index peer_;
  std::uint32_t rank_ = 0;  ///< the peer's
  bool has_queue_ = false;  ///< a queue of one thread on the gda path
  GdaQueue* queue_ = nullptr;
  Cell16 hot_{}, where_{};    ///< the queue's constants, see detail::gda::Hot and Bell
  std::uint32_t qpn_ds_ = 0;  ///< second word of a WRITE
  // The next entry's index; where entry 0 would be, were this lap of the ring the first; what the last doorbell said; the
  // index before which the next look is due (wide: of a queue whose release is of system scope).
  std::uint64_t index_ = 0, base_ = 0;
  std::uint32_t bell_ = 0, stop_ = 0, wide_stop_ = 0;
  // Signals' words.
  std::uint64_t word_base_ = 0, sink_ = 0;
  std::uint32_t word_rkey_ = 0, sink_lkey_ = 0;
};

template <Path... kOnly>
MARROW_DEVICE ExclusiveQueue<kOnly...> Gin<kOnly...>::exclusive(Index peer) const {
  return ExclusiveQueue<kOnly...>(*this, peer);
}

template <Path... kOnly>
MARROW_DEVICE ExclusiveQueue<kOnly...>::ExclusiveQueue(const Gin<kOnly...>& gin, Index peer)
    : gin_(gin), peer_(peer) {
  if constexpr (detail::compiled_in<kOnly...>(Path::gda)) {
    const DeviceCommunicator& comm = gin_.comm_;
    has_queue_ = (gin_.status_ == Status::ok) & (gin_.context_.sharing == Sharing::thread) &
                 (static_cast<unsigned>(peer.value) < static_cast<unsigned>(comm.nranks)) &
                 (comm.gda != nullptr);
    rank_ = pin(static_cast<std::uint32_t>(peer.value));
    queue_ = pin(&detail::gda::queue_of(comm, gin_.context_, static_cast<int>(rank_)));
    const auto* words = reinterpret_cast<const Cell16*>(queue_);
    hot_ = load_fixed(has_queue_, words);
    where_ = load_fixed(has_queue_, words + 1);
    constexpr std::uint32_t kSegments = mlx5::to_big32(3);
    qpn_ds_ = pin(static_cast<std::uint32_t>(hot_.high) | kSegments);
    const WindowHandle& sync = comm.sync[static_cast<int>(Path::gda)];
    word_base_ = load_fixed(has_queue_, sync.gda_base + rank_);
    word_rkey_ = load_fixed(has_queue_, sync.gda_rkey + rank_);
    sink_ = load_fixed(has_queue_, &queue_->sink);
    sink_lkey_ = load_fixed(has_queue_, &queue_->sink_lkey);
    reload();
  }
}

template <Path... kOnly>
MARROW_DEVICE void ExclusiveQueue<kOnly...>::reload() {
  if (has_queue_) index_ = queue_->reserved_index;
  look();
}

/// A ring that looks full: one look at whether a quarter of it is free, so that as many puts need none.
template <Path... kOnly>
MARROW_DEVICE void ExclusiveQueue<kOnly...>::refill() {
  const std::uint32_t depth = detail::gda::Hot(hot_).mask() + 1;
  if (index_ >= depth && queue_->completed_index + depth - index_ < 2)
    (void)detail::gda::Consumer<Sharing::thread>::poll(*queue_, index_ - depth + depth / 4);
  look();
}

/// A put of at most 2^30 bytes into the ring. A release takes its time whatever stands before it, so each instruction
/// counts: nothing is read, what was known before the last doorbell is in registers, and what could have changed since
/// is looked at every kLook entries.
/// @return false: nothing has been posted
template <Path... kOnly>
template <bool kActs, bool kWide>
MARROW_DEVICE bool ExclusiveQueue<kOnly...>::put_shortly(
    const RemoteMemory& target, std::uint64_t offset, const LocalMemory& source,
    std::uint64_t source_offset, std::uint64_t bytes, const SignalAdd& action, bool now) {
  using detail::gda::WqeWriter;
  constexpr std::uint32_t kEntries = kActs ? 2 : 1;
  const DeviceCommunicator& comm = gin_.comm_;
  bool plain = target.good_ & source.good_ & (bytes - 1 < detail::gda::kChunkBytes);
  if constexpr (kActs) {
    plain = plain & (static_cast<unsigned>(action.id) < static_cast<unsigned>(comm.signals)) &
            (comm.atomic_path == Path::gda);
  }
  const std::uint32_t stop = kWide ? wide_stop_ : stop_, index = static_cast<std::uint32_t>(index_);
  // Never less than 0 entries are left; kWide or not, stop_ is never behind the index.
  const bool full = kEntries == 1 ? index == stop : stop - index < kEntries;
  if (__builtin_expect(full | !plain, false)) return false;
  constexpr std::uint32_t kWrite = mlx5::control_word(mlx5::kWrite, 0);
  const std::uint64_t block = base_ + (index_ << mlx5::kBlockShift);
  WqeWriter<false>(reinterpret_cast<std::byte*>(block), qpn_ds_)
      .write(bell_ | kWrite, target.base_ + offset, target.key_, source.base_ + source_offset,
             source.key_, static_cast<std::uint32_t>(bytes));
  if constexpr (kActs) {
    const detail::gda::Hot hot(hot_);
    WqeWriter<false>(hot, index_ + 1)
        .fetch_add(word_base_ + static_cast<std::uint64_t>(action.id) * 8, word_rkey_, action.n,
                   sink_, sink_lkey_);
  }
  const std::uint64_t end = index_ + kEntries;
  const std::uint32_t qpn = static_cast<std::uint32_t>(hot_.high);
  bell_ = detail::gda::bell_word(static_cast<std::uint32_t>(end));
  if (__builtin_expect(now || detail::gda::crosses(detail::gda::Hot(hot_).mask(), index_, end),
                       true)) {
    Publication<kWide ? Scope::system : Scope::device> out;
    out.template store<Scope::system>(reinterpret_cast<std::uint32_t*>(where_.high),
                                      detail::gda::record_word(static_cast<std::uint32_t>(end)));
    out.template store<Scope::system>(reinterpret_cast<std::uint64_t*>(where_.low),
                                      std::uint64_t{qpn} << 32 | bell_);
  } else {
    store_plain(&queue_->deferred_index, end);
  }
  // Behind the doorbell: the release need not wait for it.
  store_plain(&queue_->reserved_index, end);
  index_ = end;
  if constexpr (kWide) stop_ = static_cast<std::uint32_t>(end);
  return true;
}

/// What a put has to know besides its arguments, until the ring's end or for kLook entries: how far the NIC is, and
/// whether the host has masked the peer.
template <Path... kOnly>
MARROW_DEVICE void ExclusiveQueue<kOnly...>::look() {
  if constexpr (detail::compiled_in<kOnly...>(Path::gda)) {
    const auto index = static_cast<std::uint32_t>(index_);
    stop_ = wide_stop_ = index;
    if (!has_queue_) return;
    const detail::gda::Hot hot(hot_);
    const std::uint32_t depth = hot.mask() + 1, at = index & hot.mask();
    base_ = reinterpret_cast<std::uint64_t>(hot.sq) + ((at - index_) << mlx5::kBlockShift);
    bell_ = detail::gda::bell_word(index);
    if (load_cached(gin_.comm_.path + rank_) != static_cast<std::uint8_t>(Path::gda)) return;
    const std::uint64_t room = queue_->completed_index + depth - index_;
    std::uint32_t most = depth - at < kLook ? depth - at : kLook;
    if (room < most) most = static_cast<std::uint32_t>(room);
    (hot.wide() ? wide_stop_ : stop_) = index + most;
  }
}

template <Path... kOnly>
MARROW_DEVICE RemoteMemory ExclusiveQueue<kOnly...>::remote(const WindowHandle& window) const {
  const bool good = has_queue_ & (window.abi == kAbiVersion);
  return {&window, load_fixed(good, window.gda_base + rank_),
          load_fixed(good, window.gda_rkey + rank_), good};
}

template <Path... kOnly>
MARROW_DEVICE LocalMemory ExclusiveQueue<kOnly...>::local(const Region& region) const {
  return {region, region.gda_local, region.gda_lkey, region.abi == kAbiVersion};
}

template <Path... kOnly>
template <class Body>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::by_gin(const char* operation, Body&& body) {
  if constexpr (detail::kChecked) {
    if (has_queue_ && queue_->reserved_index != index_) {
      return detail::violation(gin_.comm_, peer_, operation, CheckedWhat::held_queue,
                               queue_->reserved_index, index_);
    }
  }
  const Status status = body();
  reload();
  return status;
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::put(const RemoteMemory& target, std::uint64_t offset,
                                                   const LocalMemory& source,
                                                   std::uint64_t source_offset, std::uint64_t bytes,
                                                   const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  if constexpr (kShort<Options...>) {
    constexpr bool kActs = detail::has<SignalAdd, Options...>;
    const SignalAdd action = detail::pick(SignalAdd{}, options...);
    const bool now = detail::knobs_of(options...).doorbell == Doorbell::now;
    if (put_shortly<kActs, false>(target, offset, source, source_offset, bytes, action, now))
      return Status::ok;
    if (has_queue_) {
      refill();
      if (put_shortly<kActs, false>(target, offset, source, source_offset, bytes, action, now))
        return Status::ok;
      if (put_shortly<kActs, true>(target, offset, source, source_offset, bytes, action, now))
        return Status::ok;
    }
  }
  return by_gin("put", [&] {
    if constexpr (sizeof...(kOnly) == 1 && kShort<Options...>) {
      return gin_.put_the_long_way(peer_, *target.window_, offset, source.region_, source_offset,
                                   bytes, options...);
    } else {
      return gin_.put(peer_, *target.window_, offset, source.region_, source_offset, bytes,
                      options...);
    }
  });
}

template <Path... kOnly>
template <class T, class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::put_value(const WindowHandle& window,
                                                         std::uint64_t offset, const T& value,
                                                         const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("put_value",
                [&] { return gin_.put_value(peer_, window, offset, value, options...); });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::get(const WindowHandle& window, std::uint64_t offset,
                                                   const Region& target,
                                                   std::uint64_t target_offset, std::uint64_t bytes,
                                                   const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("get", [&] {
    return gin_.get(peer_, window, offset, target, target_offset, bytes, options...);
  });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::add(const WindowHandle& window, std::uint64_t offset,
                                                   std::uint64_t n, const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("add", [&] { return gin_.add(peer_, window, offset, n, options...); });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::fetch_add(const WindowHandle& window,
                                                         std::uint64_t offset, std::uint64_t n,
                                                         std::uint64_t* old,
                                                         const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("fetch_add",
                [&] { return gin_.fetch_add(peer_, window, offset, n, old, options...); });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::compare_swap(
    const WindowHandle& window, std::uint64_t offset, std::uint64_t expected, std::uint64_t desired,
    std::uint64_t* old, const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("compare_swap", [&] {
    return gin_.compare_swap(peer_, window, offset, expected, desired, old, options...);
  });
}

template <Path... kOnly>
template <class Action, class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::signal(const Action& action,
                                                      const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("signal", [&] { return gin_.signal(peer_, action, options...); });
}

template <Path... kOnly>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::send_packet(Index slot, std::uint64_t value,
                                                           std::uint64_t epoch) {
  return by_gin("send_packet", [&] { return gin_.send_packet(peer_, slot, value, epoch); });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::flush(const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("flush", [&] { return gin_.flush(peer_, options...); });
}

template <Path... kOnly>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::flush_async(Request* request) {
  return by_gin("flush_async", [&] { return gin_.flush_async(peer_, request); });
}

template <Path... kOnly>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::test(const Request& request) {
  return by_gin("test", [&] { return gin_.test(request); });
}

template <Path... kOnly>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::wait(const Request& request, Deadline deadline) {
  return by_gin("wait", [&] { return gin_.wait(request, deadline); });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status ExclusiveQueue<kOnly...>::flush_remote(const Options&... options) {
  static_assert(kOneThread<Options...>, "an ExclusiveQueue is one thread's, and has its peer");
  return by_gin("flush_remote", [&] { return gin_.flush_remote(options...); });
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow
