// SPDX-License-Identifier: Apache-2.0
// Birth and death of the service; what user threads call apart from collectives.
#include "bootstrap/service.hpp"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"
#include "bootstrap/host.hpp"

namespace marrow::bootstrap {
namespace {

using base::cat;

/// The one address a listener may bind to when the job has no real secret.
std::optional<IpAddress> restriction(const IdContent& id, const base::Parameters& parameters) {
  if (!id.restricted) return std::nullopt;
  if (id.addresses.empty() || is_loopback(id.addresses.front())) return loopback_address();
  return interface_addresses(base::parameter_string("MARROW_SOCKET_IFNAME", parameters)).front();
}

}  // namespace

const char* name(Op op) noexcept {
  switch (op) {
    case Op::allgather: return "allgather";
    case Op::barrier: return "barrier";
    case Op::broadcast: return "broadcast";
    case Op::close: return "close";
  }
  return "unknown";
}

void write_error(Writer& out, const Error& error) {
  out.number(static_cast<std::uint32_t>(error.code())).text(error.sentence());
  out.text(error.next_step());
}

Error read_error(Reader& in) {
  Code code{in.number<std::uint32_t>()};
  std::string sentence = in.text();
  if (code == Code::ok || code > Code::internal) code = Code::network;
  return Error(code, sentence, in.text());
}

void PeerInfo::write(Writer& out) const {
  out.number(host_id).number(process_id).number(pid).number(port);
  out.number(static_cast<std::uint8_t>(addresses.size()));
  for (const IpAddress& address : addresses) out.raw(std::as_bytes(std::span(address)));
  out.text(std::string_view(host).substr(0, 255));
}

PeerInfo PeerInfo::read(Reader& in) {
  PeerInfo out;
  out.host_id = in.number<std::uint64_t>();
  out.process_id = in.number<std::uint64_t>();
  out.pid = in.number<std::int64_t>();
  out.port = in.number<std::uint16_t>();
  auto count = in.number<std::uint8_t>();
  for (std::uint8_t i = 0; i < count; ++i) {
    IpAddress address;
    auto raw = in.take(address.size());
    std::memcpy(address.data(), raw.data(), raw.size());
    out.addresses.push_back(address);
  }
  out.host = in.text();
  return out;
}

base::Deadline Bootstrap::Service::setup_deadline() const {
  const base::Deadline deadline = options_.deadline
                                      ? *options_.deadline
                                      : base::Deadline::after(base::parameter_duration(
                                            "MARROW_BOOTSTRAP_TIMEOUT", options_.parameters));
  // A rank that cannot be has only to tell the others so; if rank 0 is not there it ends by itself.
  return in_range(rank_)
             ? deadline
             : base::Deadline::earliest(deadline, base::Deadline::after(milliseconds(1000)));
}

Bootstrap::Service::Service(const UniqueId& id, int nranks, int rank, Options options)
    : rank_(rank),
      nranks_(nranks),
      owner_(::getpid()),
      peers_(static_cast<std::size_t>(nranks)),
      id_(decode(id)),
      options_(std::move(options)),
      setup_deadline_(setup_deadline()),
      peer_timeout_(base::parameter_duration("MARROW_PEER_TIMEOUT", options_.parameters)),
      heartbeat_every_(std::clamp(peer_timeout_ / 10, milliseconds(10), milliseconds(500))),
      slow_after_(3 * heartbeat_every_),
      missing_(static_cast<std::size_t>(nranks)),
      decided_mask_(static_cast<std::size_t>(nranks)) {
  wake_fd_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd_) base::throw_errno("creating an eventfd");
  if (rank == 0 && !options_.replacement) {
    if (std::optional<Listener> kept = take_listener(id_.credentials.session)) {
      listener_ = std::move(*kept);
      am_root_ = true;
    }
    // Without it this is a second rank 0, or one in the wrong process: dialling the real one tells.
  } else {
    drop_inherited_listener(id_.credentials.session);
  }
  if (!am_root_) {
    std::optional<IpAddress> only = restriction(id_, options_.parameters);
    std::vector<IpAddress> addresses = only ? std::vector{*only}
                                            : interface_addresses(base::parameter_string(
                                                  "MARROW_SOCKET_IFNAME", options_.parameters));
    // A replacement listens under the dead rank's name once it is admitted: until then survivors who
    // look whether that rank lives must find nobody.
    listener_ = open_listener(id_.credentials, rank == 0 || options_.replacement ? -1 : rank,
                              std::move(addresses), only);
  }
  tcp_guard_ = ForkGuard(listener_.tcp.get());
  unix_guard_ = ForkGuard(listener_.unix_socket.get());
  self_ = {this_host_id(), this_process_id(),   ::getpid(),
           listener_.port, listener_.addresses, this_host_name()};
  if (am_root_) {
    peers_[0].info = self_;
    peers_[0].joined = true;
  }
  if (options_.gave_up) give_up(*options_.gave_up);

  // Signals are the program's business: the service thread takes none.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = base::start_thread(cat("the bootstrap thread of rank ", rank_), [this] { run(); });
  } catch (const Error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    give_up(error);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);

  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return phase_ == Phase::up || broken_.has_value(); });
  if (phase_ != Phase::up) {
    Error error = *broken_;
    lock.unlock();
    stop_thread("gave up during set-up: " + error.sentence());
    throw error;
  }
  MARROW_INFO(bootstrap, "rank ", rank_, " of ", nranks_, " is connected; root is rank ", root_);
}

/// Does without a thread: what is missing may be one.
void Bootstrap::Service::give_up(const Error& why) {
  gave_up_ =
      Error(why.code(), cat("Rank ", rank_, " of ", nranks_, " could not start: ", why.sentence()),
            why.next_step());
  setup_deadline_ =
      base::Deadline::earliest(setup_deadline_, base::Deadline::after(milliseconds(2000)));
  if (am_root_) fail_setup(*gave_up_);
  run();
  throw Error(why);
}

Bootstrap::Service::~Service() {
  stop_thread("left without close(): its communicator was destroyed, probably after an error.");
}

bool Bootstrap::Service::in_forked_child() const { return owner_ != ::getpid(); }

void Bootstrap::Service::stop_thread(const std::string& sentence) {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    leave_sentence_ = sentence;
    stop_by_ = Clock::now() + milliseconds(500);
  }
  wake();
  thread_.join();
}

void Bootstrap::Service::wake() {
  std::uint64_t one = 1;
  // A full counter (EAGAIN) wakes as well.
  [[maybe_unused]] ssize_t ignored = ::write(wake_fd_.get(), &one, sizeof(one));
}

void Bootstrap::Service::check_peer(int peer) const {
  if (peer < 0 || peer >= nranks_) {
    throw Error(Code::invalid_argument,
                cat("There is no rank ", peer, "; ranks are 0 to ", nranks_ - 1, "."),
                "pass a rank of this communicator.");
  }
}

base::Deadline Bootstrap::Service::deadline_or_default(MaybeDeadline deadline) const {
  if (deadline) return *deadline;
  return base::Deadline::after(
      base::parameter_duration("MARROW_BOOTSTRAP_TIMEOUT", options_.parameters));
}

void Bootstrap::Service::set_on_change(OnChange callback) {
  std::lock_guard calls(callback_mutex_);
  std::lock_guard lock(mutex_);
  on_change_ = std::move(callback);
  if (!on_change_) return;
  for (int i = 0; i < nranks_; ++i) {
    const Peer& peer = peers_[static_cast<std::size_t>(i)];
    if (peer.state != PeerState::alive) events_.push_back({i, peer.state, peer.sentence, false});
  }
  wake();
}

void Bootstrap::Service::set_on_revoke(OnRevoke callback) {
  std::lock_guard calls(callback_mutex_);
  std::lock_guard lock(mutex_);
  on_revoke_ = std::move(callback);
  if (on_revoke_ && revoked_) {
    events_.push_back({revoked_->first, PeerState::alive, revoked_->second, true});
    wake();
  }
}

void Bootstrap::Service::run_callbacks(std::unique_lock<std::mutex>& lock) {
  std::vector<Event> events = std::move(events_);
  events_.clear();
  if (events.empty()) return;
  lock.unlock();
  {
    std::lock_guard calls(callback_mutex_);
    for (const Event& event : events) {
      try {
        if (event.revoke && on_revoke_) on_revoke_(event.peer, event.sentence);
        if (!event.revoke && on_change_) on_change_(event.peer, event.state, event.sentence);
      } catch (const std::exception& error) {
        MARROW_WARN(bootstrap, "a callback about rank ", event.peer, " threw: ", error.what());
      }
    }
  }
  lock.lock();
}

}  // namespace marrow::bootstrap
