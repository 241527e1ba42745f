// SPDX-License-Identifier: Apache-2.0
// The thread and its sockets; what is said over them is in connector_handshake.cpp.
#include "networks/verbs/connector.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/sockets.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;

constexpr int kMostStrangers = 64;  // accepted connections that have not said who they are
// A rank says it at once, unless it is stopped for seconds.
constexpr std::chrono::milliseconds kStrangersPatience{8000};
constexpr std::chrono::milliseconds kPause{100};
constexpr const char* kSeeLog = "look at this rank's log and its memory, then start the job again";

base::IpAddress ip_of(const std::uint8_t (&raw)[16]) {
  base::IpAddress ip;
  std::memcpy(ip.data(), raw, sizeof raw);
  return ip;
}

}  // namespace

Connector::Connector(Connectable& owner, std::uint32_t rank, const Options& options,
                     bool reach_others, const std::string& near_ip)
    : owner_(owner), rank_(rank), options_(options) {
  mine_.magic = kAddressMagic;
  mine_.protocol = kProtocol;
  mine_.rank = rank;
  mine_.host = shm::this_process();
  base::random_bytes(std::as_writable_bytes(std::span(mine_.token)));
  const std::string name = "marrow-verbs-" + base::random_name(8);
  name.copy(mine_.socket_name, sizeof mine_.socket_name - 1);
  unix_ = base::listen_unix(name);
  wake_ = base::Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) base::throw_errno("creating an eventfd");
  if (!reach_others) return;
  std::vector<base::IpAddress> ips;
  if (!near_ip.empty() && options.interfaces.empty()) ips = base::resolve(near_ip);
  if (ips.empty()) ips = base::interface_addresses(options.interfaces);
  // One address: only that interface is listened on.
  std::optional<base::IpAddress> only;
  if (ips.size() == 1) only = ips[0];
  tcp_ = base::listen_tcp(only, mine_.tcp_port);
  for (const base::IpAddress& ip : ips) {
    if (mine_.ips == kMostIps) break;
    std::memcpy(mine_.ip[mine_.ips++], ip.data(), ip.size());
  }
}

Connector::~Connector() { stop(); }

void Connector::start(std::vector<Address> peers, std::shared_ptr<Device> device,
                      std::chrono::milliseconds patience) {
  peers_ = std::move(peers);
  device_ = std::move(device);
  patience_ = patience;
  ties_.assign(peers_.size(), Tie::none);
  thread_ = base::start_thread("the verbs network's thread for connections",
                               [this, rank = base::log::thread_rank()] {
                                 base::log::ThreadRank named(rank);
                                 try {
                                   run();
                                 } catch (const std::exception& error) {
                                   ended(error.what());
                                 }
                               });
}

void Connector::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);
  wake();
  thread_.join();
}

void Connector::wake() {
  const std::uint64_t one = 1;
  // A full counter wakes too.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void Connector::want(std::uint32_t peer) {
  std::string over;
  {
    std::lock_guard lock(mutex_);
    over = over_;
    if (over.empty()) wanted_.push_back(peer);
  }
  // The lock orders this behind all that the thread did: owner_ is not called by two at a time.
  if (!over.empty()) return owner_.failed(peer, Error(Code::system, over, kSeeLog));
  wake();
}

/// What is thrown at one connection's work is that connection's alone.
/// @param peer  looked at afterwards: a hello says it. @return whether nothing was thrown
template <typename Work>
bool Connector::guard(const std::int64_t& peer, const Work& work) {
  try {
    work();
    return true;
  } catch (const std::exception& error) {
    if (peer < 0) {
      MARROW_WARN(net, "verbs: a connection that said nothing yet: ", error.what());
      return false;
    }
    const auto r = static_cast<std::uint32_t>(peer);
    give_up(r,
            Error(Code::network, cat("connecting rank ", r, " failed: ", error.what()), kSeeLog));
    return false;
  }
}

void Connector::run() {
  std::vector<pollfd> polled;
  while (!stop_.load(std::memory_order_acquire)) step(polled);
  for (const auto& line : lines_) {
    if (line->stage == Stage::open) send(*line, &kGoodbye, 1);
  }
  lines_.clear();
}

/// The thread ends though nobody asked it to: no connection can be made or watched any more.
void Connector::ended(const char* why) {
  const std::string sentence = cat("the verbs network's thread for connections ended: ", why);
  MARROW_WARN(net, "verbs: ", sentence);
  for (const auto& line : lines_) {
    if (line->stage == Stage::open) send(*line, &kGoodbye, 1);
  }
  lines_.clear();
  for (std::uint32_t r = 0; r < ties_.size(); ++r) {
    if (r == rank_ && ties_[r] == Tie::standing) continue;  // needs no watching
    try {
      give_up(r, Error(Code::system, cat("rank ", r, " is out of reach: ", sentence), kSeeLog));
    } catch (const std::exception& error) {
      MARROW_WARN(net, "verbs: rank ", r, " could not be given up: ", error.what());
    }
  }
  std::lock_guard lock(mutex_);
  over_ = sentence;
}

/// Whether to look at the listeners: not just after one failed (poll would come back at once, for ever), and
/// not while as many as kMostStrangers have not said who they are.
bool Connector::listens() {
  if (!accept_again_.expired()) return false;
  const auto strangers = std::count_if(lines_.begin(), lines_.end(), [](const auto& line) {
    return line->stage == Stage::awaits_hello && !line->dead;
  });
  return strangers < kMostStrangers;
}

void Connector::step(std::vector<pollfd>& polled) {
  const int events = device_->table().get_async_event ? device_->context()->async_fd : -1;
  const bool listening = listens();
  polled.assign({{wake_.get(), POLLIN, 0},
                 {listening ? unix_.get() : -1, POLLIN, 0},
                 {listening ? tcp_.get() : -1, POLLIN, 0},
                 {events, POLLIN, 0}});
  int timeout = -1;
  const auto earlier = [&timeout](const base::Deadline& deadline) {
    const int left = deadline.poll_timeout() + 1;
    timeout = timeout < 0 ? left : std::min(timeout, left);
  };
  if (!accept_again_.expired()) earlier(accept_again_);
  for (const auto& [peer, deadline] : theirs_due_) earlier(deadline);
  for (const auto& line : lines_) {
    polled.push_back({line->fd.get(),
                      static_cast<short>(line->stage == Stage::connecting ? POLLOUT : POLLIN), 0});
    if (line->stage != Stage::open) earlier(line->deadline);
    if (line->stage == Stage::pauses) earlier(line->again);
  }
  if (::poll(polled.data(), polled.size(), timeout) < 0) {
    if (errno != EINTR) base::throw_errno("waiting for connections");
    return;
  }
  if (polled[0].revents != 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof(count));
  }
  const std::size_t known = lines_.size();  // advance may add lines behind
  for (std::size_t i = 0; i < known; ++i) {
    Line& line = *lines_[i];
    if (polled[4 + i].revents == 0 || line.dead) continue;
    if (!guard(line.peer, [&] { advance(line, polled[4 + i].revents); })) line.dead = true;
  }
  if (polled[3].revents != 0) read_device_events();
  if (polled[1].revents != 0) accept(unix_.get());
  if (polled[2].revents != 0) accept(tcp_.get());
  std::vector<std::uint32_t> wanted;
  {
    std::lock_guard lock(mutex_);
    wanted.swap(wanted_);
  }
  for (const std::uint32_t peer : wanted) guard(peer, [&] { begin(peer); });
  expire();
  dial_again();
  std::erase_if(lines_, [](const auto& line) { return line->dead; });
}

void Connector::accept(int listener) {
  try {
    // All who wait: poll comes again only for new ones.
    while (listens()) {
      base::Fd fd = base::accept_one(listener);
      if (!fd) return;
      auto line = std::make_unique<Line>();
      line->fd = std::move(fd);
      line->stage = Stage::awaits_hello;
      line->deadline = base::Deadline::after(std::min(patience_, kStrangersPatience));
      lines_.push_back(std::move(line));
    }
  } catch (const std::exception& error) {
    accept_again_ = base::Deadline::after(kPause);
    if (!std::exchange(accept_failed_, true)) {
      MARROW_WARN(net, "verbs: connections cannot be accepted for now: ", error.what());
    }
  }
}

std::string Connector::where(std::uint32_t peer, std::size_t tries) const {
  const Address& theirs = peers_[peer];
  if (mine_.host.cannot_share_with(theirs.host).empty())
    return cat("process ", theirs.host.pid, " of this host");
  if (tries >= theirs.ips) return "no address";
  return base::to_text(base::TcpAddress{ip_of(theirs.ip[tries]), theirs.tcp_port});
}

void Connector::dial(std::uint32_t peer, std::size_t tries, base::Deadline deadline) {
  const Address& theirs = peers_[peer];
  const bool near = mine_.host.cannot_share_with(theirs.host).empty();
  int error = EADDRNOTAVAIL;
  for (; tries < (near ? std::size_t{1} : std::size_t{theirs.ips}); ++tries) {
    base::Connecting attempt =
        near ? base::connect_unix(theirs.socket_name)
             : base::connect_tcp(base::TcpAddress{ip_of(theirs.ip[tries]), theirs.tcp_port});
    error = attempt.error;
    if (error != 0 && error != EINPROGRESS && error != EAGAIN) continue;
    // A Unix socket says EAGAIN when too many wait there already; nothing is under way then.
    const bool full = error == EAGAIN;
    auto line = std::make_unique<Line>();
    if (!full) line->fd = std::move(attempt.fd);
    line->stage = full ? Stage::pauses : Stage::connecting;
    if (full) line->again = base::Deadline::after(kPause);
    line->peer = peer;
    line->ours = true;
    line->tries = tries;
    line->deadline = deadline;
    lines_.push_back(std::move(line));
    return;
  }
  const bool full = error == EMFILE || error == ENFILE;
  give_up(peer, Error(full ? Code::out_of_memory : Code::peer_failed,
                      cat("connecting to rank ", peer, " at ", where(peer, tries ? tries - 1 : 0),
                          ": ", base::errno_text(error)),
                      full ? "raise `ulimit -n`"
                           : "look for the first error of that rank; MARROW_SOCKET_IFNAME chooses "
                             "the interface"));
}

void Connector::advance(Line& line, short events) {
  if (line.stage != Stage::connecting) return read(line);
  const int error = base::connect_error(line.fd.get());
  if (error == 0 && (events & POLLOUT) != 0) return connected(line);
  line.dead = true;
  const auto peer = static_cast<std::uint32_t>(line.peer);
  if (ties_[peer] == Tie::starting) dial(peer, line.tries + 1, line.deadline);
}

bool Connector::send(Line& line, const void* data, std::size_t bytes) {
  // Frames are much smaller than a fresh socket's buffer: nothing is left over.
  return ::send(line.fd.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes);
}

void Connector::read(Line& line) {
  std::byte buffer[sizeof(Frame)];
  for (;;) {
    const ssize_t got = ::recv(line.fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) return lost(line);
    line.received.insert(line.received.end(), buffer, buffer + got);
    consume(line);
    if (line.dead) return;
    if (line.received.size() > sizeof(Frame)) {  // nobody of ours says so much
      MARROW_TRACE(net, "verbs: a stranger's connection is closed");
      return lost(line);
    }
  }
}

void Connector::expire() {
  for (const auto& line : lines_) {
    if (line->dead || line->stage == Stage::open || !line->deadline.expired()) continue;
    line->dead = true;
    if (line->peer < 0) continue;  // a stranger who says nothing
    const auto peer = static_cast<std::uint32_t>(line->peer);
    give_up(peer, Error(Code::timeout,
                        cat("rank ", peer, " at ", where(peer, line->tries),
                            " did not answer within ", patience_.count(), " ms of connecting"),
                        "it may be stopped, or a firewall drops packets; MARROW_PEER_TIMEOUT is "
                        "how long to wait"));
  }
  for (auto at = theirs_due_.begin(); at != theirs_due_.end();) {
    const auto [peer, deadline] = *at;
    if (!deadline.expired()) {
      ++at;
      continue;
    }
    at = theirs_due_.erase(at);
    give_up(peer, Error(Code::timeout,
                        cat("rank ", peer, " began to connect and did not finish within ",
                            patience_.count(), " ms"),
                        "it may be stopped"));
  }
}

void Connector::dial_again() {
  const std::size_t known = lines_.size();  // dial adds behind
  for (std::size_t i = 0; i < known; ++i) {
    Line& line = *lines_[i];
    if (line.dead || line.stage != Stage::pauses || !line.again.expired()) continue;
    line.dead = true;
    const auto peer = static_cast<std::uint32_t>(line.peer);
    if (ties_[peer] != Tie::starting) continue;  // theirs came meanwhile
    guard(peer, [&] { dial(peer, line.tries, line.deadline); });
  }
}

void Connector::give_up(std::uint32_t peer, const Error& error) {
  theirs_due_.erase(peer);
  for (const auto& line : lines_) {
    if (line->peer == peer) line->dead = true;
  }
  if (ties_[peer] == Tie::over) return;
  ties_[peer] = Tie::over;
  owner_.failed(peer, error);
}

void Connector::read_device_events() {
  const marrow::verbs::Table& table = device_->table();
  pollfd fd{device_->context()->async_fd, POLLIN, 0};
  // Bounded: a NIC that never stops must not keep connections waiting.
  for (int i = 0; i < 64 && ::poll(&fd, 1, 0) > 0 && (fd.revents & POLLIN) != 0; ++i) {
    marrow::verbs::ibv_async_event event{};
    if (table.get_async_event(device_->context(), &event) != 0) return;
    owner_.device_event(event);
    if (table.ack_async_event) table.ack_async_event(&event);
  }
}

}  // namespace marrow::networks::rdma
