// SPDX-License-Identifier: Apache-2.0
// Bodies of Gin, part 1: what posts. Gin resolves the peer's path, checks, and hands the operation
// to the path body; it also joins an operation with an action that travels on another path.
#pragma once

#include "marrow/device/gin.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

namespace detail {
/// Whether Gin<kOnly...> has path p compiled in.
template <Path... kOnly>
MARROW_HOST_DEVICE constexpr bool compiled_in(Path p) {
  return sizeof...(kOnly) == 0 || ((p == kOnly) || ...);
}
}  // namespace detail

template <Path... kOnly>
MARROW_DEVICE Gin<kOnly...>::Gin(const DeviceCommunicator& comm, Index context, Sharing sharing)
    : comm_(comm), context_{context.value, sharing}, status_(Status::ok), kept_(comm) {
  if (comm.abi != kAbiVersion) {
    // Only the control pointer's place is relied on: it has not moved since ABI 1. (Null: a handle that
    // no host made.)
    if (comm.control)
      store_relaxed<Scope::system>(&comm.control->foreign_abi, std::uint64_t{kAbiVersion});
    status_ = Status::invalid;
  } else if (static_cast<unsigned>(context_.index) >= static_cast<unsigned>(comm.contexts) ||
             sharing != comm.sharing) {
    status_ = detail::violation(comm, context, "Gin", CheckedWhat::context,
                                static_cast<std::uint64_t>(context_.index),
                                static_cast<std::uint64_t>(comm.contexts));
  }
}

namespace detail {
/// A lane of EachLane may be refused alone; then none of them goes on.
template <class Coop>
MARROW_DEVICE Status refused(const Coop& coop, Status status) {
  if constexpr (std::is_same_v<Coop, EachLane>) return coop.agree(status);
  return status;
}
/// What a lane of EachLane may not ask of the gda path: it has one entry. To be agreed on with `refused`.
template <class Coop>
MARROW_DEVICE Status too_long(const Coop&, Path path, std::uint64_t bytes) {
  return std::is_same_v<Coop, EachLane> && path == Path::gda && bytes > gda::kChunkBytes
             ? Status::invalid
             : Status::ok;
}
/// Calls body() by the group's first member, or, of EachLane, by one lane after the other: what is for one
/// thread at a time stays so.
template <class Coop, class Body>
MARROW_DEVICE Status by_one(const Coop& coop, Body&& body) {
  Status status = Status::ok;
  if constexpr (std::is_same_v<Coop, EachLane>) {
    const std::uint32_t mask = full_mask();
    for (std::uint32_t left = mask; left; left &= left - 1) {
      if (lane_index() == lowest_lane(left)) status = body();
      warp_sync(mask);
    }
  } else if (coop.rank() == 0) {
    status = body();
  }
  return status;
}
}  // namespace detail

/// Calls body(PathX{}) for the peer's path.
template <Path... kOnly>
template <class Body>
MARROW_DEVICE Status Gin<kOnly...>::on_path(Path path, Body&& body) const {
  if constexpr (detail::compiled_in<kOnly...>(Path::lsa)) {
    if (path == Path::lsa) return body(detail::PathLsa{});
  }
  if constexpr (detail::compiled_in<kOnly...>(Path::gda)) {
    if (path == Path::gda) return body(detail::PathGda{});
  }
  if constexpr (detail::compiled_in<kOnly...>(Path::proxy)) {
    if (path == Path::proxy) return body(detail::PathProxy{});
  }
  return Status::invalid;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::resolve(const Index& peer, const Team& team,
                                            const char* operation, int* rank, Path* path) const {
  if (status_ != Status::ok) return status_;
  if (static_cast<unsigned>(peer.value) >= static_cast<unsigned>(team.size)) {
    return detail::violation(comm_, peer, operation, CheckedWhat::peer,
                             static_cast<std::uint64_t>(peer.value),
                             static_cast<std::uint64_t>(team.size));
  }
  *rank = team.world_rank(peer.value);
  const std::uint8_t found = load_cached(comm_.path + *rank);
  if (found == kPathFailed) return Status::peer_failed;
  *path = static_cast<Path>(found);
  if (!detail::compiled_in<kOnly...>(*path)) {
    return detail::violation(comm_, peer, operation, CheckedWhat::path, found, 0);
  }
  return Status::ok;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::check_window(const Index& at, const char* operation,
                                                 const WindowHandle& window, std::uint64_t offset,
                                                 std::uint64_t bytes, std::uint64_t align) const {
  if (window.abi != kAbiVersion) {
    return detail::violation(comm_, at, operation, CheckedWhat::abi, window.abi, kAbiVersion);
  }
  if (align == 8 && window.no_atomics) {
    return detail::violation(comm_, at, operation, CheckedWhat::path,
                             static_cast<std::uint64_t>(window.atomic_path), 0);
  }
  if constexpr (detail::kChecked) {
    if (window.owner != comm_.owner)
      return detail::violation(comm_, at, operation, CheckedWhat::window, window.id, 0);
    if (!detail::inside(offset, bytes, window.bytes)) {
      return detail::violation(comm_, at, operation, CheckedWhat::bounds_destination,
                               offset + bytes, window.bytes);
    }
    if (offset % align)
      return detail::violation(comm_, at, operation, CheckedWhat::alignment, offset, align);
  }
  return Status::ok;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::check_region(const Index& at, const char* operation,
                                                 const Region& region, std::uint64_t offset,
                                                 std::uint64_t bytes) const {
  if (bytes && region.abi != kAbiVersion) {
    return detail::violation(comm_, at, operation, CheckedWhat::abi, region.abi, kAbiVersion);
  }
  if constexpr (detail::kChecked) {
    if (bytes && region.owner != comm_.owner)
      return detail::violation(comm_, at, operation, CheckedWhat::window, region.id, 0);
    if (!detail::inside(offset, bytes, region.bytes)) {
      return detail::violation(comm_, at, operation, CheckedWhat::bounds_source, offset + bytes,
                               region.bytes);
    }
  }
  return Status::ok;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::check_id(const Index& id, int limit, CheckedWhat what,
                                             const char* operation) const {
  if (status_ != Status::ok) return status_;
  if (static_cast<unsigned>(id.value) < static_cast<unsigned>(limit)) return Status::ok;
  return detail::violation(comm_, id, operation, what, static_cast<std::uint64_t>(id.value),
                           static_cast<std::uint64_t>(limit));
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::plan(const Index& at, Path path, const SignalAdd& action,
                                         detail::Then* then, Path* then_path) const {
  if (static_cast<unsigned>(action.id) >= static_cast<unsigned>(comm_.signals)) {
    return detail::violation(comm_, at, "SignalAdd", CheckedWhat::signal,
                             static_cast<std::uint64_t>(action.id),
                             static_cast<std::uint64_t>(comm_.signals));
  }
  *then = {&comm_.sync[static_cast<int>(path)], static_cast<std::uint64_t>(action.id) * 8, action.n,
           action.strength == Strength::strong};
  *then_path = path;
  return Status::ok;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::plan(const Index& at, Path, const SignalAt& action,
                                         detail::Then* then, Path* then_path) const {
  const Status status = check_window(at, "SignalAt", action.window, action.offset, 8, 8);
  if (status != Status::ok) return status;
  *then = {&action.window, action.offset, action.n, action.strength == Strength::strong};
  *then_path = action.window.atomic_path;
  return Status::ok;
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::plan_options(const Index& at, Path path, detail::Then* then,
                                                 Path* then_path, const Options&... options) const {
  static_assert(!(detail::has<SignalAdd, Options...> && detail::has<SignalAt, Options...>),
                "one action an operation: SignalAdd or SignalAt");
  *then_path = path;
  Status status = Status::ok;
  [[maybe_unused]] const auto look = [&](const auto& option) {
    using Option = std::remove_cvref_t<decltype(option)>;
    if constexpr (std::is_same_v<Option, SignalAdd> || std::is_same_v<Option, SignalAt>) {
      status = plan(at, path, option, then, then_path);
    } else if constexpr (std::is_same_v<Option, CounterInc>) {
      const Status counted =
          check_id(option.id, comm_.counters, CheckedWhat::counter, "CounterInc");
      if (counted != Status::ok) status = counted;
    }
  };
  (look(options), ...);
  return status;
}

/// Posts an operation and its action so that the action's promise holds when the two take different
/// paths. post(PathX{}, then, group) posts the operation with an action of its own path.
/// @param kTogether       post wants the whole group on the proxy path, too
/// @param action_counter  what the action counts on when it travels alone; -1: nothing
template <Path... kOnly>
template <bool kTogether, class Coop, class Post>
MARROW_DEVICE Status Gin<kOnly...>::post_then(int peer, Path path, const detail::Then& then,
                                              Path then_path, const detail::Knobs& knobs,
                                              const Coop& coop, Post&& post,
                                              int action_counter) const {
  const bool fused = !then.window || then_path == path;
  if (then.window && fused && then.strong && comm_.atomic_path != path &&
      detail::compiled_in<kOnly...>(comm_.atomic_path)) {
    // Earlier adds to this peer went by the atomic path: complete them before the signal. (A pruned
    // Gin without that path has posted none.)
    coop.sync();
    Status settled = detail::by_one(coop, [&] {
      return on_path(comm_.atomic_path,
                     [&](auto body) { return body.flush_remote(comm_, context_, peer, knobs); });
    });
    settled = coop.agree(settled);
    if (settled != Status::ok) return settled;
  }
  const Status posted = on_path(path, [&](auto body) {
    const detail::Then own = fused ? then : detail::Then{};
    if constexpr (std::is_same_v<Coop, EachLane>) {
      if constexpr (decltype(body)::kPath == Path::gda) {
        return coop.agree(post(body, own, coop));
      } else if constexpr (decltype(body)::kPath == Path::lsa) {
        return coop.agree(post(body, own, Thread{}));
      } else if (context_.sharing != Sharing::thread) {
        return coop.agree(post(body, own, Thread{}));  // one reserve for all lanes
      } else {
        return coop.agree(detail::by_one(coop, [&] { return post(body, own, Thread{}); }));
      }
    } else if constexpr (decltype(body)::kPath == Path::lsa ||
                         (kTogether && decltype(body)::kPath == Path::proxy &&
                          !std::is_same_v<Coop, Thread>)) {
      return post(body, own, coop);
    } else {
      coop.sync();  // the group's stores to the source happen before the post
      Status status = Status::ok;
      if (coop.rank() == 0) status = post(body, own, Thread{});
      return coop.agree(status);
    }
  });
  if (fused || posted != Status::ok) return posted;
  // SignalAt on another path than the data: the data must be there first, strong or weak.
  coop.sync();
  return coop.agree(detail::by_one(coop, [&] {
    const Status status =
        on_path(path, [&](auto body) { return body.flush_remote(comm_, context_, peer, knobs); });
    if (status != Status::ok) return status;
    detail::Knobs alone = knobs;
    alone.counter = action_counter;
    return on_path(then_path,
                   [&](auto body) { return body.add(comm_, context_, peer, then, alone); });
  }));
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::put(Index peer, const WindowHandle& window,
                                        std::uint64_t offset, const Region& source,
                                        std::uint64_t source_offset, std::uint64_t bytes,
                                        const Options&... options) const {
  const detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::CoopOf<Options...>::type coop;
  if constexpr (detail::compiled_in<kOnly...>(Path::lsa) && !detail::kChecked &&
                !detail::has<SignalAt, Options...> && !detail::has<EachLane, Options...>) {
    // The short way to a load/store peer. One thread needs about 2 ns an instruction, so all arguments
    // are checked at once; whatever is unusual takes the long way below.
    const Team team = detail::pick(team_world(comm_), options...);
    const SignalAdd action = detail::pick(SignalAdd{}, options...);
    bool plain = (status_ == Status::ok) &
                 (static_cast<unsigned>(peer.value) < static_cast<unsigned>(team.size)) &
                 (window.abi == kAbiVersion) & (source.abi == kAbiVersion);
    if constexpr (detail::has<SignalAdd, Options...>) {
      plain = plain & (static_cast<unsigned>(action.id) < static_cast<unsigned>(comm_.signals)) &
              (comm_.atomic_path == Path::lsa);
    }
    if constexpr (detail::has<CounterInc, Options...>) {
      plain =
          plain & (static_cast<unsigned>(knobs.counter) < static_cast<unsigned>(comm_.counters));
    }
    const int to = team.world_rank(peer.value);
    const auto place = static_cast<unsigned>(to - comm_.lsa_first);
    plain = plain & (place < static_cast<unsigned>(comm_.lsa_size)) &
            (place < static_cast<unsigned>(kNear));
    // What the loads below need, beside the checks: each read of a parameter takes a lone thread 30 cycles.
    std::uint64_t from_at = reinterpret_cast<std::uint64_t>(source.local) + source_offset;
    std::uint64_t path_at =
        reinterpret_cast<std::uint64_t>(comm_.path) + static_cast<std::uint64_t>(to);
    compute_here(from_at, path_at);
    if (plain) {
      coop.sync();
      const auto* from = reinterpret_cast<const std::byte*>(from_at);
      // The source, when it is a word, and the peer's path: two loads in flight at once. After an acquire
      // each is an access to L2.
      const std::uint8_t path = load_ahead(reinterpret_cast<const std::uint8_t*>(path_at));
      const bool has_value = bytes == 8 && (from_at & 7) == 0;
      std::uint64_t value = 0;
      if (has_value) value = load_data_ahead(reinterpret_cast<const std::uint64_t*>(from));
      // Meanwhile, the addresses.
      std::uint64_t base = window.near[place] + offset;
      std::uint64_t word = 0;
      if constexpr (detail::has<SignalAdd, Options...>) {
        word = comm_.sync[0].near[place] + static_cast<std::uint64_t>(action.id) * 8;
      }
      compute_here(base, word);
      if (path == static_cast<std::uint8_t>(Path::lsa)) {
        detail::PathLsa::put_directly<detail::has<SignalAdd, Options...>>(
            comm_, base, from, bytes, has_value, value, word, action.n, knobs, coop);
        return Status::ok;
      }
    }
  }
  using Coop = typename detail::CoopOf<Options...>::type;
  if constexpr (detail::compiled_in<kOnly...>(Path::gda) && !detail::kChecked &&
                !detail::has<SignalAt, Options...> && !detail::has<CounterInc, Options...> &&
                (std::is_same_v<Coop, Thread> || std::is_same_v<Coop, EachLane>)) {
    // As above: the short way into a NIC queue.
    constexpr bool kActs = detail::has<SignalAdd, Options...>;
    const Team team = detail::pick(team_world(comm_), options...);
    const SignalAdd action = detail::pick(SignalAdd{}, options...);
    bool plain = (status_ == Status::ok) &
                 (static_cast<unsigned>(peer.value) < static_cast<unsigned>(team.size)) &
                 (window.abi == kAbiVersion) & (source.abi == kAbiVersion) &
                 (std::is_same_v<Coop, EachLane> || bytes - 1 < detail::gda::kChunkBytes) &
                 (comm_.connected >> static_cast<int>(Path::gda) & 1);
    if constexpr (kActs) {
      plain = plain & (static_cast<unsigned>(action.id) < static_cast<unsigned>(comm_.signals)) &
              (comm_.atomic_path == Path::gda);
    }
    const Status direct = detail::gda::Operations::put_directly<Coop, kActs>(
        plain, comm_, context_, team.world_rank(peer.value), window, offset,
        source.gda_local + source_offset, source.gda_lkey, bytes,
        comm_.sync[static_cast<int>(Path::gda)], static_cast<std::uint64_t>(action.id) * 8,
        action.n, knobs.doorbell == Doorbell::now);
    if (direct != detail::gda::Operations::kLongWay) {
#if defined(MARROW_ON_SHORT_WAY)
      MARROW_ON_SHORT_WAY();  // a test counts them
#endif
      return direct;
    }
  }
  return put_the_long_way(peer, window, offset, source, source_offset, bytes, options...);
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::put_the_long_way(Index peer, const WindowHandle& window,
                                                     std::uint64_t offset, const Region& source,
                                                     std::uint64_t source_offset,
                                                     std::uint64_t bytes,
                                                     const Options&... options) const {
  const detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::CoopOf<Options...>::type coop;
  int rank = 0;
  Path path = Path::lsa;
  detail::Then then;
  Path then_path = Path::lsa;
  Status status = status_;
  if (status == Status::ok) status = check_window(peer, "put", window, offset, bytes);
  if (status == Status::ok) status = check_region(peer, "put", source, source_offset, bytes);
  status = detail::refused(coop, status);
  if (status != Status::ok) return status;
  coop.sync();  // the source's stores by other members happen before the loads below and the post
  status = resolve(peer, detail::pick(team_world(comm_), options...), "put", &rank, &path);
  if (status == Status::ok) status = plan_options(peer, path, &then, &then_path, options...);
  if (status == Status::ok) status = detail::too_long(coop, path, bytes);
  status = detail::refused(coop, status);
  if (status != Status::ok) return status;
  const detail::PutOp op{rank, window, offset, source, source_offset, bytes};
  return post_then<true>(
      rank, path, then, then_path, knobs, coop,
      [&](auto body, const detail::Then& own, [[maybe_unused]] const auto& group) {
        if constexpr (decltype(body)::kPath != Path::proxy) {
          return body.put(comm_, context_, op, own, knobs, group);
        } else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(group)>, Thread>) {
          return body.put(comm_, context_, op, own, knobs);
        } else {
          return body.put_together(comm_, context_, op, own, knobs, group);
        }
      });
}

template <Path... kOnly>
template <class T, class... Options>
MARROW_DEVICE Status Gin<kOnly...>::put_value(Index peer, const WindowHandle& window,
                                              std::uint64_t offset, const T& value,
                                              const Options&... options) const {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) >= 1 && sizeof(T) <= 24,
                "put_value takes a trivially copyable value of 1 to 24 bytes; use put for more");
  const detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::CoopOf<Options...>::type coop;
  if constexpr (sizeof...(kOnly) == 1 && detail::compiled_in<kOnly...>(Path::proxy) &&
                !detail::kChecked && !detail::has<SignalAt, Options...> &&
                !detail::has<SignalAdd, Options...> && !detail::has<CounterInc, Options...> &&
                !detail::has<Team, Options...> &&
                std::is_same_v<typename detail::CoopOf<Options...>::type, Thread>) {
    // The short way into a ring.
    const bool plain = (status_ == Status::ok) & (context_.sharing == Sharing::thread) &
                       (static_cast<unsigned>(peer.value) < kept_.nranks);
    if (detail::PathProxy::put_value_directly<sizeof(T)>(plain, kept_, context_, peer.value, window,
                                                         offset, &value))
      return Status::ok;
  }
  int rank = 0;
  Path path = Path::lsa;
  detail::Then then;
  Path then_path = Path::lsa;
  Status status =
      resolve(peer, detail::pick(team_world(comm_), options...), "put_value", &rank, &path);
  if (status == Status::ok) status = check_window(peer, "put_value", window, offset, sizeof(T));
  if (status == Status::ok) status = plan_options(peer, path, &then, &then_path, options...);
  status = detail::refused(coop, status);
  if (status != Status::ok) return status;
  return post_then(rank, path, then, then_path, knobs, coop,
                   [&](auto body, const detail::Then& own, const auto& group) {
                     if constexpr (decltype(body)::kPath != Path::proxy) {
                       return body.put_value(comm_, context_, rank, window, offset, &value,
                                             sizeof(T), own, knobs, group);
                     } else {
                       return body.put_value(comm_, context_, rank, window, offset, &value,
                                             sizeof(T), own, knobs);
                     }
                   });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::get(Index peer, const WindowHandle& window,
                                        std::uint64_t offset, const Region& target,
                                        std::uint64_t target_offset, std::uint64_t bytes,
                                        const Options&... options) const {
  static_assert(!detail::has<SignalAdd, Options...> && !detail::has<SignalAt, Options...>,
                "a get has no remote action");
  const detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::CoopOf<Options...>::type coop;
  int rank = 0;
  Path path = Path::lsa;
  detail::Then none;
  Path same = Path::lsa;
  Status status = resolve(peer, detail::pick(team_world(comm_), options...), "get", &rank, &path);
  if (status == Status::ok) status = check_window(peer, "get", window, offset, bytes);
  if (status == Status::ok) status = check_region(peer, "get", target, target_offset, bytes);
  if (status == Status::ok) status = plan_options(peer, path, &none, &same, options...);
  if (status == Status::ok) status = detail::too_long(coop, path, bytes);
  status = detail::refused(coop, status);
  if (status != Status::ok) return status;
  const detail::GetOp op{rank, window, offset, target, target_offset, bytes};
  return post_then(rank, path, none, path, knobs, coop,
                   [&](auto body, const detail::Then&, const auto& group) {
                     if constexpr (decltype(body)::kPath != Path::proxy) {
                       return body.get(comm_, context_, op, knobs, group);
                     } else {
                       return body.get(comm_, context_, op, knobs);
                     }
                   });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::add(Index peer, const WindowHandle& window,
                                        std::uint64_t offset, std::uint64_t n,
                                        const Options&... options) const {
  static_assert(!detail::has<SignalAdd, Options...> && !detail::has<SignalAt, Options...>,
                "an add has no further action");
  const detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::CoopOf<Options...>::type coop;
  int rank = 0;
  Path path = Path::lsa;
  Status status = resolve(peer, detail::pick(team_world(comm_), options...), "add", &rank, &path);
  if (status == Status::ok) status = check_window(peer, "add", window, offset, 8, 8);
  detail::Then none;
  Path same = Path::lsa;
  if (status == Status::ok) status = plan_options(peer, path, &none, &same, options...);
  status = detail::refused(coop, status);
  if (status != Status::ok) return status;
  coop.sync();
  const detail::Then then{&window, offset, n, false};
  if constexpr (detail::compiled_in<kOnly...>(Path::gda) &&
                std::is_same_v<std::remove_cv_t<decltype(coop)>, EachLane>) {
    if (window.atomic_path == Path::gda)
      return coop.agree(detail::PathGda::add(comm_, context_, rank, then, knobs, coop));
  }
  return coop.agree(detail::by_one(coop, [&] {
    return on_path(window.atomic_path,
                   [&](auto body) { return body.add(comm_, context_, rank, then, knobs); });
  }));
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::fetch(const Index& peer, const detail::FetchOp& op,
                                          std::uint64_t* old, const char* operation,
                                          const Options&... options) const {
  static_assert(!detail::has<CounterInc, Options...>,
                "a fetch is complete when it returns: it counts on nothing");
  const detail::Knobs knobs = detail::knobs_of(options...);
  int rank = 0;
  Path path = Path::lsa;
  Status status =
      resolve(peer, detail::pick(team_world(comm_), options...), operation, &rank, &path);
  if (status == Status::ok) status = check_window(peer, operation, op.window, op.offset, 8, 8);
  if (status != Status::ok) return status;
  return on_path(op.window.atomic_path,
                 [&](auto body) { return body.fetch(comm_, context_, rank, op, old, knobs); });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::fetch_add(Index peer, const WindowHandle& window,
                                              std::uint64_t offset, std::uint64_t n,
                                              std::uint64_t* old, const Options&... options) const {
  return fetch(peer, detail::FetchOp{window, offset, false, n, 0}, old, "fetch_add", options...);
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::compare_swap(Index peer, const WindowHandle& window,
                                                 std::uint64_t offset, std::uint64_t expected,
                                                 std::uint64_t desired, std::uint64_t* old,
                                                 const Options&... options) const {
  return fetch(peer, detail::FetchOp{window, offset, true, desired, expected}, old, "compare_swap",
               options...);
}

template <Path... kOnly>
template <class Action, class... Options>
MARROW_DEVICE Status Gin<kOnly...>::signal(Index peer, const Action& action,
                                           const Options&... options) const {
  static_assert(std::is_same_v<Action, SignalAdd> || std::is_same_v<Action, SignalAt>,
                "signal takes SignalAdd or SignalAt");
  const detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::CoopOf<Options...>::type coop;
  int rank = 0;
  Path path = Path::lsa;
  detail::Then then;
  Path then_path = Path::lsa;
  Status status =
      resolve(peer, detail::pick(team_world(comm_), options...), "signal", &rank, &path);
  if (status == Status::ok)
    status = plan_options(peer, path, &then, &then_path, action, options...);
  status = detail::refused(coop, status);
  if (status != Status::ok) return status;
  return post_then(
      rank, path, then, then_path, knobs, coop,
      [&](auto body, const detail::Then& own, const auto& group) {
        if (!own.window) return Status::ok;
        group.sync();
        if constexpr (decltype(body)::kPath == Path::gda) {
          return body.add(comm_, context_, rank, own, knobs, group);
        } else {
          return group.rank() == 0 ? body.add(comm_, context_, rank, own, knobs) : Status::ok;
        }
      },
      knobs.counter);
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::send_packet(Index peer, Index slot, std::uint64_t value,
                                                std::uint64_t epoch) const {
  int rank = 0;
  Path path = Path::lsa;
  if constexpr (detail::compiled_in<kOnly...>(Path::lsa) && !detail::kChecked) {
    // As in put: the short way.
    const auto place = static_cast<unsigned>(peer.value - comm_.lsa_first);
    if ((status_ == Status::ok) & (place < static_cast<unsigned>(comm_.lsa_size)) &
        (place < static_cast<unsigned>(kNear)) &
        (static_cast<unsigned>(slot.value) < static_cast<unsigned>(comm_.packets))) {
      const std::uint8_t path = load_ahead(comm_.path + peer.value);
      std::uint64_t cell = comm_.sync[0].near[place] + detail::packet_offset(comm_, slot.value);
      std::uint64_t low = value;
      compute_here(cell, low);
      if (path == static_cast<std::uint8_t>(Path::lsa)) {
        store_cell(reinterpret_cast<void*>(cell), Cell16{low, epoch});
        return Status::ok;
      }
    }
  }
  Status status = check_id(slot, comm_.packets, CheckedWhat::packet, "send_packet");
  if (status == Status::ok) status = resolve(peer, team_world(comm_), "send_packet", &rank, &path);
  if (status != Status::ok) return status;
  const WindowHandle& sync = comm_.sync[static_cast<int>(path)];
  const std::uint64_t offset = detail::packet_offset(comm_, slot.value);
  return on_path(path, [&](auto body) {
    if constexpr (decltype(body)::kPath == Path::lsa) {
      store_cell(body.address(comm_, sync, rank, offset), Cell16{value, epoch});
      return Status::ok;
    } else {
      // Two 64-bit cells of {32 data, 32 epoch}: each lands whole, the pair need not.
      const Cell16 halves{value << 32 | (epoch & 0xffffffffu),
                          (value & 0xffffffff00000000u) | (epoch & 0xffffffffu)};
      return body.put_value(comm_, context_, rank, sync, offset, &halves, sizeof(halves),
                            detail::Then{}, detail::Knobs{});
    }
  });
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow
