// SPDX-License-Identifier: Apache-2.0
// Every rank listens on a fresh abstract Unix socket, tells its name to all, connects to the peers of
// lower rank on its host and accepts those of higher rank. Connecting and sending to a Unix socket
// does not need the other side to act (the kernel queues both), so everybody first sends, then
// receives: no order of ranks can deadlock. Ranks that are threads of one process do the same.
#include <poll.h>

#include <algorithm>

#include "base/fd_door.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "base/unix_fds.hpp"
#include "bootstrap/bootstrap.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {
namespace {

using base::cat;
using base::Deadline;
using base::Fd;

/// First words on each connection: who sends, and the receiver's token, which only members know.
struct Greeting {
  std::int32_t rank;
  std::array<std::byte, 16> token;
};

struct Meeting {
  std::array<std::byte, 16> token{};
  std::string name;
};

std::span<const std::byte> raw(const Greeting& greeting) {
  return std::as_bytes(std::span(&greeting, 1));
}

/// How often a wait looks whether a peer has failed.
constexpr milliseconds kSlice{50};
/// Connections that may say nothing at a time; as many as the service itself bears.
constexpr std::size_t kMostStrangers = 256;

Error late(std::size_t rank) {
  return Error(Code::timeout,
               cat("Rank ", rank, " of this host did not send its file descriptors in time."),
               "see what that rank does, or raise MARROW_BOOTSTRAP_TIMEOUT.");
}

void wait_readable(int fd, Deadline deadline, std::size_t rank) {
  pollfd entry = {fd, POLLIN, 0};
  if (::poll(&entry, 1, deadline.poll_timeout()) == 0) throw late(rank);
}

}  // namespace

std::vector<std::vector<Fd>> Bootstrap::exchange_fds(std::span<const int> mine,
                                                     MaybeDeadline maybe_deadline) {
  const Deadline deadline = service_->deadline_or_default(maybe_deadline);
  const auto count = static_cast<std::size_t>(nranks());
  const auto self = static_cast<std::size_t>(rank());

  Meeting me;
  base::random_bytes(me.token);
  me.name = "marrow-fds-" + base::random_name();
  base::FdDoor door(base::unix_listen(me.name, nranks() + 16), kMostStrangers + count);
  Writer out;
  out.raw(me.token).text(me.name);
  std::vector<Bytes> all = allgather(out.view(), deadline);
  std::vector<Meeting> meetings(count);
  std::vector<bool> wanted(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (all[i].empty() || i == self || !same_host(static_cast<int>(i))) continue;
    Reader in(all[i]);
    auto token = in.take(meetings[i].token.size());
    std::copy(token.begin(), token.end(), meetings[i].token.begin());
    meetings[i].name = in.text();
    wanted[i] = true;
  }

  // Waits in slices, so that a peer's death ends them.
  auto sliced = [&](auto&& action) {
    for (;;) {
      Deadline slice = Deadline::earliest(deadline, Deadline::after(kSlice));
      try {
        return action(slice);
      } catch (const Error& error) {
        if (error.code() == Code::peer_failed) {
          service_->check_usable();  // says which peer
          throw;
        }
        if (error.code() != Code::timeout || deadline.expired()) throw;
      }
      service_->check_usable();
    }
  };
  auto naming = [](std::size_t peer, auto&& action) {
    try {
      return action();
    } catch (const Error& error) {
      if (error.code() != Code::peer_failed) throw;
      throw Error(
          Code::peer_failed, cat("Rank ", peer, ": ", error.sentence()),
          "look for the first error of that rank; if it has ended, call agree_failures() on "
          "the survivors to go on without it.");
    }
  };
  auto send = [&](const Fd& socket, std::size_t peer) {
    Greeting greeting{rank(), meetings[peer].token};
    naming(peer, [&] { base::send_fds(socket.get(), mine, raw(greeting), deadline); });
  };
  std::vector<std::vector<Fd>> received(count);
  auto take = [&](base::FdMessage message) -> std::optional<std::size_t> {
    Greeting greeting{};
    if (message.payload.size() != sizeof(greeting)) return std::nullopt;
    std::memcpy(&greeting, message.payload.data(), sizeof(greeting));
    auto from = static_cast<std::size_t>(greeting.rank);
    bool known = greeting.rank >= 0 && from < count && wanted[from] &&
                 base::constant_time_equal(greeting.token, me.token);
    if (!known) return std::nullopt;
    received[from] = std::move(message.fds);
    wanted[from] = false;
    return from;
  };

  std::vector<std::pair<std::size_t, Fd>> lower;
  for (std::size_t i = 0; i < self; ++i) {
    if (!wanted[i]) continue;
    Fd socket = sliced([&](Deadline slice) { return base::unix_connect(meetings[i].name, slice); });
    send(socket, i);
    lower.emplace_back(i, std::move(socket));
  }
  // Who comes may be anybody of this user: only a member's first message counts, and only it is waited for.
  for (;;) {
    auto due = std::find(wanted.begin() + rank(), wanted.end(), true);
    if (due == wanted.end()) break;
    service_->check_usable();  // says which peer failed
    if (deadline.expired()) throw late(static_cast<std::size_t>(due - wanted.begin()));
    auto arrival = door.next(Deadline::earliest(deadline, Deadline::after(kSlice)));
    if (!arrival) continue;
    if (auto from = take(std::move(arrival->message))) send(arrival->socket, *from);
  }
  for (const auto& [peer, socket] : lower) {
    std::optional<std::size_t> from = naming(peer, [&, rank = peer, fd = socket.get()] {
      sliced([&](Deadline slice) { wait_readable(fd, slice, rank); });
      return take(base::receive_fds(fd, deadline));
    });
    if (from != peer) {
      throw Error(Code::authentication,
                  cat("The file descriptors of rank ", peer, " came with another name."),
                  "see whether all ranks run the same version of Marrow.");
    }
  }
  for (int fd : mine) received[self].push_back(Fd::dup_of(fd));
  return received;
}

}  // namespace marrow::bootstrap
