// SPDX-License-Identifier: Apache-2.0
// Every rank listens on a fresh abstract Unix socket, tells its name to all, connects to the peers of
// lower rank on its host and accepts those of higher rank. Connecting and sending to a Unix socket
// does not need the other side to act (the kernel queues both), so everybody first sends, then
// receives: no order of ranks can deadlock. Ranks that are threads of one process do the same.
#include <poll.h>

#include <algorithm>

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

void wait_readable(int fd, Deadline deadline) {
  pollfd entry = {fd, POLLIN, 0};
  if (::poll(&entry, 1, deadline.poll_timeout()) == 0) {
    throw Error(Code::timeout, "A rank of this host did not send its file descriptors in time.",
                "see what the other ranks of this host do.");
  }
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
  Fd listener = base::unix_listen(me.name, nranks() + 16);
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
      Deadline slice = Deadline::earliest(deadline, Deadline::after(milliseconds(50)));
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
  auto receive = [&](const Fd& socket) -> std::optional<std::size_t> {
    sliced([&](Deadline slice) { wait_readable(socket.get(), slice); });
    base::FdMessage message = base::receive_fds(socket.get(), deadline);
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
  std::size_t higher = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!wanted[i]) continue;
    if (i > self) {
      ++higher;
      continue;
    }
    Fd socket = sliced([&](Deadline slice) { return base::unix_connect(meetings[i].name, slice); });
    send(socket, i);
    lower.emplace_back(i, std::move(socket));
  }
  while (higher > 0) {
    Fd socket = sliced([&](Deadline slice) { return base::unix_accept(listener.get(), slice); });
    std::optional<std::size_t> from;
    try {
      from = receive(socket);
    } catch (const Error& error) {
      // Who closes before it has said who it is may be anybody. If it was a member, sliced() will name it.
      if (error.code() != Code::network && error.code() != Code::peer_failed) throw;
    }
    if (!from) continue;  // not a member, one that came twice, or noise
    send(socket, *from);
    --higher;
  }
  for (const auto& [peer, socket] : lower) {
    std::optional<std::size_t> from =
        naming(peer, [&receive, &connection = socket] { return receive(connection); });
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
