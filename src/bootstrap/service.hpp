// SPDX-License-Identifier: Apache-2.0
// The state machine behind Bootstrap. One mutex guards all of it; the service thread holds it except
// while it sleeps in poll and while it runs callbacks, user threads hold it while they hand in work.
//
//   joining      rank 0 collects joins, the others dial it
//   up           star around root_; heartbeats; collectives
//   failing_over the root died: dial the next lowest live rank, or be it
//   closing      the close collective completed: an end of stream is no failure any more
//   ended        nothing is connected
//
// Sources: service_loop.cpp (thread, sockets, timers), service_join.cpp (set-up, failover),
// service_liveness.cpp (states, agreement, revoke), service_admit.cpp (replacements),
// service_collective.cpp.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/channel.hpp"
#include "bootstrap/id.hpp"
#include "bootstrap/sockets.hpp"
#include "marrow/error.hpp"

namespace marrow::bootstrap {

using Clock = base::Deadline::Clock;
using std::chrono::milliseconds;

/// How long a replacement may be ahead of the news that its rank died.
constexpr milliseconds kGrace{1000};

/// What every rank tells about itself when it joins.
struct PeerInfo {
  std::uint64_t host_id = 0;
  std::uint64_t process_id = 0;
  std::int64_t pid = 0;
  std::uint16_t port = 0;
  std::vector<IpAddress> addresses;
  std::string host;

  void write(Writer& out) const;
  static PeerInfo read(Reader& in);
};

/// First word of a join or welcome frame.
enum class JoinKind : std::uint8_t { first = 0, again = 1, give_up = 2, replace = 3 };

/// An error as a piece of a frame.
void write_error(Writer& out, const Error& error);
Error read_error(Reader& in);

enum class Op : std::uint8_t { allgather = 1, barrier = 2, broadcast = 3, close = 4 };
const char* name(Op op) noexcept;

class Bootstrap::Service {
 public:
  Service(const UniqueId& id, int nranks, int rank, Options options);
  ~Service();

  // User threads.
  std::vector<Bytes> collective(Op op, int root, std::span<const std::byte> mine,
                                MaybeDeadline deadline);
  RankSet agree(MaybeDeadline deadline);
  void admit(int rank, MaybeDeadline deadline);
  PeerInfo info(int peer) const;
  void close(MaybeDeadline deadline);
  void abandon(const std::string& sentence);
  void revoke(const std::string& sentence);
  void set_on_change(OnChange callback);
  void set_on_revoke(OnRevoke callback);
  void check_peer(int peer) const;
  base::Deadline deadline_or_default(MaybeDeadline deadline) const;
  /// Throws what a collective would throw now.
  void check_usable();

  /// Runs in a forked child, where the thread is not and locks may be taken for ever.
  bool in_forked_child() const;

  const int rank_;
  const int nranks_;
  const pid_t owner_;

  struct Peer {
    PeerInfo info;
    PeerState state = PeerState::alive;
    bool joined = false;
    bool masked = false;
    std::string sentence;
  };
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  int root_ = 0;
  std::optional<std::pair<int, std::string>> revoked_;

 private:
  enum class Phase { joining, refusing, up, failing_over, closing, ended };

  /// An open connection and what it is for.
  struct Connection {
    enum class Kind {
      incoming,   // accepted, has not said who it is
      held,       // a peer that believes I am the new root; I do not know that yet
      member,     // I am root, this is a member
      root,       // I am a member, this is my root (or who I want as root, until welcome)
      candidate,  // I am root, this process wants to take a failed rank's place
      probe,      // dialled only to see whether the peer lives
      draining    // only what is queued is still sent
    };
    Channel channel;
    Kind kind;
    int rank = -1;
    Clock::time_point opened;
    Clock::time_point last_heard;
    bool join_sent = false;
    bool welcomed = false;
    bool goodbye = false;
    bool drop = false;
    Bytes held_join{};
  };

  /// A connect in progress: walks through the addresses of one peer.
  struct Dial {
    int target;
    bool probe;
    std::vector<std::optional<TcpAddress>> candidates;  // nullopt: the Unix socket
    std::size_t next = 0;
    bool refused = false;  // in this round: somebody said that nobody listens there
    base::Fd fd;
    std::string where;
    Clock::time_point attempt_ends;
    Clock::time_point retry_at;
    std::optional<Clock::time_point> refused_since;
    milliseconds backoff{5};
    bool done = false;
  };

  struct Gather {
    Op op{};
    int root = 0;
    int first = -1;  // who contributed first
    std::vector<std::optional<Bytes>> parts;
    std::optional<Bytes> result;  // encoded; set when complete or wrong
  };
  using CallNumber = std::pair<std::uint64_t, std::uint64_t>;  // (agreement epoch, count in it)

  // service.cpp
  base::Deadline setup_deadline() const;
  /// Tells those that set up why this rank cannot take part, leaves, and throws it.
  [[noreturn]] void give_up(const Error& why);
  bool in_range(int rank) const { return rank >= 0 && rank < nranks_; }
  void stop_thread(const std::string& sentence);
  void wake();
  void run_callbacks(std::unique_lock<std::mutex>& lock);

  // service_loop.cpp
  void run();
  void close_listener(bool unix_too);
  void poll_once(std::unique_lock<std::mutex>& lock);
  void accept_from(int listener);
  void serve(Connection& connection, short events);
  void timers();
  void sweep();
  Clock::time_point next_timer() const;
  void on_frame(Connection& connection, Frame& frame);
  void on_lost(Connection& connection, const std::string& why);
  void on_bad_connection(Connection& connection, Code code, const std::string& why);
  void refuse(Connection& connection, const Error& error);
  Connection* find(Connection::Kind kind, int rank = -1);
  Connection* root_connection();
  void send_members(FrameType type, std::span<const std::byte> payload, int except = -1);
  void warn_stranger(const std::string& where, const std::string& why);

  // service_join.cpp
  void start_dial(int target, bool probe, milliseconds pause = milliseconds(0));
  void note_dial_error(Dial& dial, int error);
  void try_next(Dial& dial);
  void on_connected(Dial& dial);
  void on_round_failed(Dial& dial);
  void send_join(Connection& connection);
  void on_join(Connection& connection, std::span<const std::byte> payload);
  void on_give_up(Connection& connection, Reader& in);
  void on_first_join(Connection& connection, int rank, int nranks, Reader& in);
  void on_rejoin(Connection& connection, int rank, std::span<const std::byte> payload);
  void admit_rejoin(Connection& connection, std::span<const std::byte> payload);
  void on_welcome(std::span<const std::byte> payload);
  void on_reject(Connection& connection, std::span<const std::byte> payload);
  void on_status(std::span<const std::byte> payload);
  void fail_setup(const Error& error);
  void setup_complete();
  void remove_rendezvous_file();
  void push_missing();
  void setup_timed_out();
  void become_root();
  void start_failover();
  void write_knowledge(Writer& out) const;
  void read_knowledge(Reader& in, int from);
  void set_broken(Error error);

  // service_liveness.cpp
  void on_state(Connection& connection, std::span<const std::byte> payload);
  void fail_peer(int peer, const std::string& sentence);
  void set_slowness(int peer, bool slow, const std::string& sentence);
  void send_state(Connection& connection, int peer);
  void silence();
  void heartbeat();
  RankSet failed_set() const;
  void adopt_failed(const RankSet& failed, int by);
  void on_agree(int from, Reader in);
  void on_decide(Reader in);
  void check_agreement();
  void adopt_decision(std::uint64_t number, const RankSet& mask);
  void send_decisions();
  void send_vote();
  void on_revoke_frame(Reader in, int from);
  void adopt_revoke(int by, const std::string& sentence, int from);
  void on_leave(Connection& connection, Reader in);
  std::string who(int peer) const;

  // service_admit.cpp
  void dial_next_survivor(int after);
  void on_replacement_join(Connection& connection, int rank, int nranks, Reader& in);
  void refuse_candidates_of_the_living();
  void send_admit_vote(std::uint64_t number, bool standing);
  void on_admit(int from, Reader in);
  void check_admission();
  void adopt_admission(std::uint64_t number, int rank, PeerInfo info);
  void on_admitted(Reader in);
  void welcome_replacement(Connection& connection, Reader& in);
  Error not_admitted() const;

  // service_collective.cpp
  void throw_if_unusable(Op op) const;
  void add_contribution(int from, CallNumber number, Op op, int root, Bytes bytes);
  void mismatch(CallNumber number, Gather& gather, const std::string& other, int rank);
  void check_close();
  void finish_gather(CallNumber number, Gather& gather);
  void deliver(std::span<const std::byte> payload);
  void on_query(Connection& connection, Reader in);
  RankSet missing_in(bool agreement, CallNumber number) const;
  std::string ask_missing(std::unique_lock<std::mutex>& lock, bool agreement, CallNumber number);
  std::string list(const RankSet& ranks) const;
  void goodbye();

  const IdContent id_;
  const Options options_;
  base::Deadline setup_deadline_;
  const milliseconds peer_timeout_;
  const milliseconds heartbeat_every_;
  const milliseconds slow_after_;

  std::condition_variable changed_;
  std::mutex call_mutex_;  // one collective at a time
  Phase phase_ = Phase::joining;
  std::optional<Error> broken_;
  std::optional<Error> gave_up_;  // joins only to say this
  bool stop_ = false;
  std::string leave_sentence_;
  Clock::time_point stop_by_{};

  bool am_root_ = false;
  bool closed_ = false;
  PeerInfo self_;
  Listener listener_;
  ForkGuard tcp_guard_;
  ForkGuard unix_guard_;
  base::Fd wake_fd_;
  std::list<Connection> connections_;
  std::list<Dial> dials_;
  std::string last_dial_error_;
  RankSet missing_;  // a member's copy of what rank 0 still waits for
  Clock::time_point missing_pushed_{};
  bool missing_dirty_ = false;
  Clock::time_point refuse_until_{};
  std::optional<Error> refuse_with_;
  int refused_count_ = 0;
  int strangers_ = 0;
  Clock::time_point accept_again_{};
  Clock::time_point next_heartbeat_{};
  Clock::time_point failover_since_{};
  Clock::time_point probe_at_{};
  Clock::time_point last_awake_{};
  bool probing_ = false;

  // Collectives.
  std::map<CallNumber, Gather> gathers_;  // at the root
  std::uint64_t sequence_ = 0;            // calls in this epoch
  CallNumber waiting_for_{0, 0};
  std::optional<Bytes> result_;
  std::optional<Error> mismatch_;  // a bug of the program: every later call says it again
  std::optional<RankSet> status_;

  // Agreement: decision number k leads from epoch k - 1 to k.
  std::uint64_t decided_ = 0;
  std::uint64_t consumed_ = 0;  // decisions the caller has seen
  RankSet decided_mask_;
  bool agreeing_ = false;
  std::map<int, std::uint64_t> votes_;  // at the root: rank -> decision it asks for

  // Admission: a decision too.
  std::optional<int> admitting_;      // who, while admit() waits
  std::optional<int> admitted_late_;  // after admit() had reached its deadline
  std::optional<Error> admit_error_;
  struct AdmitVote {
    std::uint64_t number;  // the decision it asks for
    int whom;
    bool standing;  // false: its caller has reached its deadline
  };
  std::map<int, AdmitVote> admit_votes_;  // at the root

  // Callbacks.
  std::mutex callback_mutex_;  // held while a callback runs; taken before mutex_
  OnChange on_change_;
  OnRevoke on_revoke_;
  struct Event {
    int peer;
    PeerState state;
    std::string sentence;
    bool revoke;
  };
  std::vector<Event> events_;

  std::thread thread_;
};

}  // namespace marrow::bootstrap
