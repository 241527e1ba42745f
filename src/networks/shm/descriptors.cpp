// SPDX-License-Identifier: Apache-2.0
#include "networks/shm/descriptors.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"
#include "base/unix_fds.hpp"
#include "marrow/error.hpp"

namespace marrow::networks::shm {
namespace {

constexpr std::uint32_t kMagic = 0x4d465231;
// A client has read its last answer when it asks again; this only bounds a malicious one of our own user.
constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::milliseconds kPause{100};

struct Request {
  std::uint32_t magic;
  std::uint32_t reserved;
  std::uint64_t id;
};
struct Reply {
  std::uint32_t magic;
  std::uint32_t found;
  std::uint64_t offset;
  std::uint64_t bytes;
};

template <class T>
bool read_payload(const std::vector<std::byte>& payload, T* value) {
  if (payload.size() != sizeof(T)) return false;
  std::memcpy(value, payload.data(), sizeof(T));
  return value->magic == kMagic;
}

}  // namespace

DescriptorServer::DescriptorServer()
    : name_("marrow-shm-" + base::random_name()),
      listener_(base::unix_listen(name_)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) base::throw_errno("creating an eventfd");
}

DescriptorServer::~DescriptorServer() {
  stop_.store(true, std::memory_order_release);
  wake();
  if (thread_.joinable()) thread_.join();
}

void DescriptorServer::start() {
  thread_ =
      base::start_thread("shm's thread for descriptors", [this, rank = base::log::thread_rank()] {
        base::log::ThreadRank named(rank);
        run();
      });
}

void DescriptorServer::wake() {
  const std::uint64_t one = 1;
  // A full counter wakes too.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void DescriptorServer::offer(std::uint64_t id, Offer offer) {
  std::lock_guard lock(mutex_);
  offers_[id] = std::move(offer);
}

void DescriptorServer::withdraw(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  offers_.erase(id);
}

void DescriptorServer::watch(int socket, std::function<void()> closed) {
  {
    std::lock_guard lock(mutex_);
    watched_.emplace_back(socket, std::move(closed));
  }
  wake();
}

void DescriptorServer::run() {
  std::vector<pollfd> polled;
  base::Deadline accept_again;  // not just after it failed: poll would come back at once, for ever
  while (!stop_.load(std::memory_order_acquire)) {
    const bool accepting = accept_again.expired();
    polled.assign({{wake_.get(), POLLIN, 0}, {accepting ? listener_.get() : -1, POLLIN, 0}});
    for (const Client& client : clients_) polled.push_back({client.socket.get(), POLLIN, 0});
    const std::size_t first_watched = polled.size();
    {
      std::lock_guard lock(mutex_);
      for (const auto& [socket, closed] : watched_) polled.push_back({socket, POLLRDHUP, 0});
    }
    const int timeout = accepting ? -1 : accept_again.poll_timeout();
    if (::poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) {
      MARROW_WARN(net, "shm: waiting for descriptor requests failed: ", base::errno_text(errno));
      return;
    }
    if (polled[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof(count));
    }
    for (std::size_t i = first_watched; i < polled.size(); ++i) {
      if ((polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) continue;
      std::function<void()> closed;
      {
        std::lock_guard lock(mutex_);
        const auto at = std::find_if(watched_.begin(), watched_.end(),
                                     [&](const auto& w) { return w.first == polled[i].fd; });
        if (at == watched_.end()) continue;
        closed = std::move(at->second);
        watched_.erase(at);
      }
      closed();
    }
    std::vector<Client> kept;
    for (std::size_t i = 2; i < first_watched; ++i) {
      Client& client = clients_[i - 2];
      try {
        if (polled[i].revents != 0) answer(client);
        kept.push_back(std::move(client));
      } catch (const Error& error) {
        MARROW_TRACE(net, "shm: a descriptor connection ended: ", error.what());
      }
    }
    clients_ = std::move(kept);
    if (polled[1].revents != 0) {
      try {
        while (base::Fd socket = base::unix_accept_waiting(listener_.get()))
          clients_.push_back({std::move(socket), {}});
      } catch (const Error& error) {
        accept_again = base::Deadline::after(kPause);
        MARROW_TRACE(net, "shm: a descriptor connection was refused: ", error.what());
      }
    }
  }
}

void DescriptorServer::answer(Client& client) {
  const std::optional<base::FdMessage> message = client.receiver.take(client.socket.get());
  if (!message) return;  // not whole yet
  Request request;
  if (!read_payload(message->payload, &request)) {
    throw Error(Code::network, "a malformed request for a descriptor");
  }
  Reply reply{kMagic, 0, 0, 0};
  base::Fd fd;
  {
    std::lock_guard lock(mutex_);
    const auto found = offers_.find(request.id);
    if (found != offers_.end()) {
      reply = {kMagic, 1, found->second.offset, found->second.bytes};
      fd = found->second.fd.dup();
    }
  }
  const int raw = fd.get();
  base::send_fds(client.socket.get(), std::span(&raw, reply.found),
                 std::as_bytes(std::span(&reply, 1)), base::Deadline::after(kPatience));
}

DescriptorClient::DescriptorClient(const std::string& socket_name, base::Deadline deadline)
    : socket_(base::unix_connect(socket_name, deadline)) {}

Offer DescriptorClient::ask(std::uint64_t id, base::Deadline deadline) {
  std::lock_guard lock(mutex_);
  const Request request{kMagic, 0, id};
  base::send_fds(socket_.get(), {}, std::as_bytes(std::span(&request, 1)), deadline);
  base::FdMessage message = base::receive_fds(socket_.get(), deadline);
  Reply reply;
  if (!read_payload(message.payload, &reply) || message.fds.size() != reply.found) {
    throw Error(Code::network, "a malformed answer to a request for a descriptor",
                "run the same version of Marrow on every rank");
  }
  if (reply.found == 0) {
    throw Error(Code::invalid_argument, base::cat("the peer has no region ", id),
                "windows are registered and closed by all ranks in the same order");
  }
  return {std::move(message.fds[0]), reply.offset, reply.bytes};
}

}  // namespace marrow::networks::shm
