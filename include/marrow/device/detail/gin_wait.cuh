// SPDX-License-Identifier: Apache-2.0
// Bodies of Gin, part 2: what waits. Each wait is wait_until with a predicate of acquire loads.
#pragma once

#include "marrow/device/gin.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Sum of the words that some path can feed. Each load acquires: it meets the release of the path
/// that added (lsa: publish_add; gda: the NIC's FETCH_ADD after its WRITEs; proxy: the receiver's thread).
template <Path... kOnly>
MARROW_DEVICE std::uint64_t Gin<kOnly...>::raw_signal(int word) const {
  std::uint64_t sum = 0;
  for (int p = 0; p < kPaths; ++p) {
    if (!(comm_.feeds >> p & 1)) continue;
    const auto* words = reinterpret_cast<const std::uint64_t*>(comm_.sync[p].local);
#if defined(MARROW_PLANT_WAIT_SIGNAL)
    sum += load_relaxed<Scope::system>(words + word);  // planted bug: the acquire is missing
#else
    sum += observe<Scope::system>(words + word);
#endif
  }
  return sum;
}

template <Path... kOnly>
MARROW_DEVICE std::uint64_t Gin<kOnly...>::raw_counter(int id) const {
  std::uint64_t sum = 0;
  for (int p = 0; p < kPaths; ++p) {
    if (comm_.connected >> p & 1) sum += observe<Scope::system>(comm_.counter[p] + id);
  }
  return sum;
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::wait_signal(Index id, std::uint64_t at_least,
                                                const Options&... options) const {
  const typename detail::GroupOf<Options...>::type coop;
  Status status = check_id(id, comm_.signals, CheckedWhat::signal, "wait_signal");
  if (status != Status::ok) return status;
  if (coop.rank() == 0) {
    const std::uint64_t target = at_least + comm_.signal_base[id.value];
    const Deadline deadline = detail::pick(Deadline{}, options...);
#if !defined(MARROW_PLANT_WAIT_SIGNAL)
    if (comm_.feeds == 1) {  // one word: nothing between its arrival and our return
      const auto* word = reinterpret_cast<const std::uint64_t*>(comm_.sync[0].local) + id.value;
      status = wait_until(comm_, deadline, [&] {
        return static_cast<std::int64_t>(observe<Scope::system>(word) - target) >= 0;
      });
    } else
#endif
      status = wait_until(comm_, deadline, [&] {
        return static_cast<std::int64_t>(raw_signal(id.value) - target) >= 0;
      });
  }
  return coop.agree(status);
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::test_signal(Index id, std::uint64_t at_least) const {
  const Status status = check_id(id, comm_.signals, CheckedWhat::signal, "test_signal");
  if (status != Status::ok) return status;
  return static_cast<std::int64_t>(read_signal(id) - at_least) >= 0 ? Status::ok : Status::timeout;
}

template <Path... kOnly>
MARROW_DEVICE std::uint64_t Gin<kOnly...>::read_signal(Index id) const {
  if (check_id(id, comm_.signals, CheckedWhat::signal, "read_signal") != Status::ok) return 0;
  return raw_signal(id.value) - comm_.signal_base[id.value];
}

template <Path... kOnly>
MARROW_DEVICE void Gin<kOnly...>::reset_signal(Index id) const {
  if (check_id(id, comm_.signals, CheckedWhat::signal, "reset_signal") != Status::ok) return;
  comm_.signal_base[id.value] = raw_signal(id.value);
  comm_.signal_shadow[id.value] = 0;
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::wait_signal_shadow(Index id, std::uint64_t delta,
                                                       const Options&... options) const {
  const typename detail::GroupOf<Options...>::type coop;
  Status status = check_id(id, comm_.signals, CheckedWhat::signal, "wait_signal_shadow");
  if (status != Status::ok) return status;
  if (coop.rank() == 0) {
    const std::uint64_t target = comm_.signal_shadow[id.value] + delta;
    status = wait_signal(id, target, detail::pick(Deadline{}, options...));
    if (status == Status::ok) comm_.signal_shadow[id.value] = target;
  }
  return coop.agree(status);
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::wait_any(const std::int32_t* ids, const std::uint64_t* at_least,
                                             Index at, int* which, Deadline deadline) const {
  const int count = at.value;
  if (count < 1) {
    if (status_ != Status::ok) return status_;
    return detail::violation(comm_, at, "wait_any", CheckedWhat::size,
                             static_cast<std::uint64_t>(count), 1);
  }
  for (int i = 0; i < count; ++i) {
    const Status status = check_id(ids[i], comm_.signals, CheckedWhat::signal, "wait_any");
    if (status != Status::ok) return status;
  }
  return wait_until(comm_, deadline, [&] {
    for (int i = 0; i < count; ++i) {
      const std::uint64_t value = raw_signal(ids[i]) - comm_.signal_base[ids[i]];
      if (static_cast<std::int64_t>(value - at_least[i]) >= 0) {
        *which = i;
        return true;
      }
    }
    return false;
  });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::wait_counter(Index id, std::uint64_t n,
                                                 const Options&... options) const {
  const typename detail::GroupOf<Options...>::type coop;
  Status status = check_id(id, comm_.counters, CheckedWhat::counter, "wait_counter");
  if (status != Status::ok) return status;
  if (coop.rank() == 0) {
    const std::uint64_t target = n + comm_.counter_base[id.value];
    status = wait_until(comm_, detail::pick(Deadline{}, options...), [&] {
      return static_cast<std::int64_t>(raw_counter(id.value) - target) >= 0;
    });
  }
  return coop.agree(status);
}

template <Path... kOnly>
MARROW_DEVICE std::uint64_t Gin<kOnly...>::read_counter(Index id) const {
  if (check_id(id, comm_.counters, CheckedWhat::counter, "read_counter") != Status::ok) return 0;
  return raw_counter(id.value) - comm_.counter_base[id.value];
}

template <Path... kOnly>
MARROW_DEVICE void Gin<kOnly...>::reset_counter(Index id) const {
  if (check_id(id, comm_.counters, CheckedWhat::counter, "reset_counter") != Status::ok) return;
  comm_.counter_base[id.value] = raw_counter(id.value);
}

/// Calls body(PathX{}, peer) for every connected queue of this context; the group's members share
/// the peers. Queues for one thread at a time are served by member 0 alone.
template <Path... kOnly>
template <class Coop, class Body>
MARROW_DEVICE Status Gin<kOnly...>::each_queue(const Coop& coop, Body&& body) const {
  if (status_ != Status::ok) return status_;
  coop.sync();
  Status status = Status::ok;
  const bool alone = context_.sharing == Sharing::thread;
  const int step = alone ? 1 : coop.size();
  for (int p = 0; p < kPaths; ++p) {
    const Path path = static_cast<Path>(p);
    if (!(comm_.connected >> p & 1) || !detail::compiled_in<kOnly...>(path)) continue;
    if (alone && coop.rank() != 0) continue;
    for (int peer = alone ? 0 : coop.rank(); peer < comm_.nranks; peer += step) {
      if (load_cached(comm_.path + peer) == kPathFailed) continue;
      status = worse(status, on_path(path, [&](auto on) { return body(on, peer); }));
      if (path == Path::lsa) break;  // nothing is queued per peer
    }
  }
  return coop.agree(status);
}

template <Path... kOnly>
template <class... Options>
requires(detail::is_option<Options>&&...)
    MARROW_DEVICE Status Gin<kOnly...>::flush(const Options&... options)
const {
  const typename detail::GroupOf<Options...>::type coop;
  Deadline deadline = detail::pick(Deadline{}, options...);
  return each_queue(coop, [&](auto on, int peer) {
    const detail::Ticket ticket = on.ticket(comm_, context_, peer);
    Status seen = Status::timeout, waited = Status::ok;
    if constexpr (decltype(on)::kPath == Path::gda) {
      waited = on.wait(comm_, context_, peer, ticket, deadline);
      seen = waited;
    } else {
      waited = wait_until(
          comm_, deadline,
          [&] {
            seen = on.test(comm_, context_, peer, ticket);
            return seen != Status::timeout;
          },
          peer);
    }
    if (waited == Status::timeout)
      deadline.ns = 1;  // its time is used up: the other queues get one look
    return waited == Status::ok ? seen : waited;
  });
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::flush(Index peer, const Options&... options) const {
  const typename detail::GroupOf<Options...>::type coop;
  coop.sync();
  Status status = Status::ok;
  if (coop.rank() == 0) {
    Request request;
    status = flush_async(peer, &request);
    if (status == Status::ok) status = wait(request, detail::pick(Deadline{}, options...));
  }
  return coop.agree(status);
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::flush_async(Index peer, Request* request) const {
  int rank = 0;
  Path path = Path::lsa;
  const Status status = resolve(peer, team_world(comm_), "flush_async", &rank, &path);
  if (status != Status::ok) return status;
  request->peer = rank;
  for (int p = 0; p < kPaths; ++p) {
    if (!(comm_.connected >> p & 1) || !detail::compiled_in<kOnly...>(static_cast<Path>(p)))
      continue;
    (void)on_path(static_cast<Path>(p), [&](auto on) {
      request->ticket[p] = on.ticket(comm_, context_, rank);
      return Status::ok;
    });
  }
  return Status::ok;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::test(const Request& request) const {
  if (status_ != Status::ok) return status_;
  if (request.peer < 0 || request.peer >= comm_.nranks) return Status::invalid;
  Status worst = Status::ok;
  for (int p = 0; p < kPaths; ++p) {
    if (!(comm_.connected >> p & 1) || !detail::compiled_in<kOnly...>(static_cast<Path>(p)))
      continue;
    worst = worse(worst, on_path(static_cast<Path>(p), [&](auto on) {
                    return on.test(comm_, context_, request.peer, request.ticket[p]);
                  }));
  }
  return worst;
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::wait(const Request& request, Deadline deadline) const {
  if constexpr (detail::compiled_in<kOnly...>(Path::gda)) {
    std::uint32_t paths = 0;
    for (int p = 0; p < kPaths; ++p) {
      if (detail::compiled_in<kOnly...>(static_cast<Path>(p)))
        paths |= comm_.connected & (std::uint32_t{1} << p);
    }
    constexpr int kGda = static_cast<int>(Path::gda);
    if ((status_ == Status::ok) & (paths == std::uint32_t{1} << kGda) &
        (static_cast<unsigned>(request.peer) < static_cast<unsigned>(comm_.nranks)))
      return detail::PathGda::wait(comm_, context_, request.peer, request.ticket[kGda], deadline);
  }
  Status seen = Status::timeout;
  const Status waited = wait_until(
      comm_, deadline,
      [&] {
        seen = test(request);
        return seen != Status::timeout;
      },
      request.peer);
  return waited == Status::ok ? seen : waited;
}

template <Path... kOnly>
template <class... Options>
MARROW_DEVICE Status Gin<kOnly...>::flush_remote(const Options&... options) const {
  detail::Knobs knobs = detail::knobs_of(options...);
  const typename detail::GroupOf<Options...>::type coop;
  return each_queue(coop, [&](auto on, int peer) {
    const Status status = on.flush_remote(comm_, context_, peer, knobs);
    if (status == Status::timeout) knobs.deadline.ns = 1;  // as in flush
    return status;
  });
}

template <Path... kOnly>
MARROW_DEVICE Status Gin<kOnly...>::receive_packet(Index slot, std::uint64_t epoch,
                                                   std::uint64_t* value, Deadline deadline) const {
  const Status status = check_id(slot, comm_.packets, CheckedWhat::packet, "receive_packet");
  if (status != Status::ok) return status;
  const std::uint64_t offset = detail::packet_offset(comm_, slot.value);
  if (comm_.feeds == 1) {  // one cell: nothing between its arrival and our return
    const std::byte* const at = comm_.sync[0].local + offset;
    return wait_until(comm_, deadline, [&] {
      const Cell16 cell = load_cell(at);
      *value = cell.low;
      return cell.high == epoch;
    });
  }
  return wait_until(comm_, deadline, [&] {
    if (comm_.feeds & 1) {
      const Cell16 cell = load_cell(comm_.sync[0].local + offset);
      if (cell.high == epoch) {
        *value = cell.low;
        return true;
      }
    }
    const auto low_epoch = static_cast<std::uint32_t>(epoch);
    for (int p = 1; p < kPaths; ++p) {
      if (!(comm_.feeds >> p & 1)) continue;
      const auto* half = reinterpret_cast<const std::uint64_t*>(comm_.sync[p].local + offset);
      const std::uint64_t first = observe<Scope::system>(half);
      const std::uint64_t second = observe<Scope::system>(half + 1);
      if (static_cast<std::uint32_t>(first) == low_epoch &&
          static_cast<std::uint32_t>(second) == low_epoch) {
        *value = first >> 32 | (second & 0xffffffff00000000u);
        return true;
      }
    }
    return false;
  });
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow
