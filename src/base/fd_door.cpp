// SPDX-License-Identifier: Apache-2.0
#include "base/fd_door.hpp"

#include <poll.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "marrow/error.hpp"

namespace marrow::base {

std::optional<FdDoor::Arrival> FdDoor::next(Deadline deadline) {
  std::vector<pollfd> polled;
  do {
    polled.assign({{listener_.get(), POLLIN, 0}});
    for (const Silent& silent : silent_) polled.push_back({silent.socket.get(), POLLIN, 0});
    if (::poll(polled.data(), polled.size(), deadline.poll_timeout()) < 0) {
      if (errno == EINTR) continue;
      throw_errno("polling the Unix sockets of processes that pass descriptors");
    }
    std::size_t i = 1;
    for (auto at = silent_.begin(); at != silent_.end(); ++i) {
      const auto silent = at++;
      if (polled[i].revents == 0) continue;
      Silent one = std::move(*silent);
      silent_.erase(silent);  // first: what is thrown is the end of this one alone
      try {
        if (std::optional<FdMessage> message = one.receiver.take(one.socket.get()))
          return Arrival{std::move(one.socket), std::move(*message)};
      } catch (const Error& error) {
        if (error.code() != Code::network && error.code() != Code::peer_failed) throw;
        MARROW_INFO(bootstrap, "dropped a connection that passed no descriptors: ", error.what());
        continue;
      }
      silent_.insert(at, std::move(one));
    }
    if (polled[0].revents == 0) continue;
    while (Fd fd = unix_accept_waiting(listener_.get())) {
      if (silent_.size() >= most_) {
        MARROW_INFO(bootstrap, "dropped the oldest of ", most_, " connections that say nothing");
        silent_.pop_front();
      }
      silent_.push_back({std::move(fd), {}});
      if (deadline.expired()) break;
    }
  } while (!deadline.expired());
  return std::nullopt;
}

}  // namespace marrow::base
