// SPDX-License-Identifier: Apache-2.0
#include "softnic/engine.hpp"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

#include "base/log.hpp"

namespace marrow::softnic {
namespace {

constexpr std::uint32_t kTurnWqes = 64;
constexpr auto kSpin = std::chrono::microseconds(50);
/// How soon a receiver that was not ready is asked again.
constexpr auto kReceiverNotReadyPause = std::chrono::microseconds(200);

}  // namespace

Engine::Engine(Directory& directory, Regions& regions, const Options& options)
    : directory_(directory),
      regions_(regions),
      options_(options),
      faults_(options),
      executor_(directory, regions, faults_, options),
      thread_([this] { work(); }) {}

Engine::~Engine() {
  {
    ControlLock lock(*this);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Engine::add(QueuePair& qp) {
  queue_pairs_.push_back(&qp);
  wake_.notify_all();
}

void Engine::remove(QueuePair& qp) { std::erase(queue_pairs_, &qp); }

void Engine::set_state(QueuePair& qp, mlx5::QpState state) {
  qp.state = state;
  qp.slot->state.store(state, std::memory_order_release);
}

void Engine::work() {
  ::prctl(PR_SET_NAME, "marrow-softnic");
  ::prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: the short sleeps below mean what they say
  Clock::time_point last_work = Clock::now();
  for (;;) {
    bool worked = false;
    {
      std::unique_lock lock(mutex_);
      if (queue_pairs_.empty() && !stop_) {
        wake_.wait(lock, [this] { return stop_ || !queue_pairs_.empty(); });
        last_work = Clock::now();
      }
      if (stop_) return;
      worked = pass();
    }
    while (waiting_.load(std::memory_order_relaxed) > 0) ::sched_yield();
    if (worked) {
      last_work = Clock::now();
    } else {
      rest(Clock::now() - last_work);
    }
  }
}

// Ranks and engines may outnumber the cores: an engine without work yields at once and sleeps soon.
void Engine::rest(Clock::duration idle) const {
  using std::chrono::microseconds;
  using std::chrono::milliseconds;
  if (idle < kSpin) {
    ::sched_yield();
  } else if (idle < milliseconds(2)) {
    std::this_thread::sleep_for(microseconds(10));
  } else if (idle < milliseconds(50)) {
    std::this_thread::sleep_for(microseconds(50));
  } else if (idle < milliseconds(500)) {
    std::this_thread::sleep_for(microseconds(200));
  } else {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

bool Engine::pass() {
  const Clock::time_point now = Clock::now();
  if (stalled_) {
    if (options_.stall_time.count() == 0 || now < stalled_until_) return false;
    stalled_ = false;
  }
  if (now - tidied_ > std::chrono::milliseconds(100)) {
    tidied_ = now;
    regions_.drop_stale();
  }
  bool worked = false;
  const auto& rings = directory_.shared().processes[directory_.self()].inbox_rings;
  const std::uint64_t rung = rings.load(std::memory_order_acquire);
  if (rung != inbox_rings_) {
    inbox_rings_ = rung;
    for (QueuePair* qp : queue_pairs_) worked |= serve_inbox(*qp);
  }
  const auto count = static_cast<std::uint32_t>(queue_pairs_.size());
  const std::uint32_t first = options_.reorder ? faults_.first_queue(count) : turn_++ % count;
  for (std::uint32_t i = 0; i < count && !stalled_; ++i) {
    QueuePair& qp = *queue_pairs_[(first + i) % count];
    if (qp.state != mlx5::kReadyToSend && qp.state != mlx5::kError) continue;
    if (faults_.skips_queue()) continue;
    worked |= serve(qp, now);
  }
  return worked;
}

/// One turn of one queue pair. @return true if anything moved
bool Engine::serve(QueuePair& qp, Clock::time_point now) {
  if (qp.depth == 0) return false;
  if (!update_producer<HostAccess>(qp) && qp.state == mlx5::kReadyToSend) {
    qp.producer = qp.consumer;  // nothing in the ring can be trusted
    qp.operation.control = {};
    fail(qp, mlx5::kLocalQpOperationError, "more WQEs were announced than the ring holds");
    return true;
  }
  bool worked = false;
  for (std::uint32_t i = 0; i < kTurnWqes && qp.consumer != qp.producer; ++i) {
    if (qp.state != mlx5::kReadyToSend) {
      flush(qp);
      worked = true;
      continue;
    }
    if (qp.not_before > now) return worked;
    if (qp.stage == QueuePair::Stage::fetch && !fetch(qp, now)) {
      if (stalled_) return worked;
      worked = true;
      continue;  // failed, or delayed: the loop's head sees which
    }
    const Outcome outcome = step(qp, now);
    if (outcome.step == Outcome::parked) return worked;
    worked = true;
    if (outcome.step == Outcome::more) return worked;  // a long transfer lets others in between
    if (outcome.step == Outcome::failed) {
      fail(qp, outcome.syndrome, outcome.reason);
    } else {
      complete(qp);
    }
  }
  return worked;
}

/// Reads and decodes the next WQE. @return true if it may run now
bool Engine::fetch(QueuePair& qp, Clock::time_point now) {
  const std::uint32_t mask = qp.depth - 1;
  const auto block = [&](std::uint32_t i) {
    return qp.sq + ((qp.consumer + i) & mask) * std::size_t{mlx5::kBlockBytes};
  };
  HostAccess::read(qp.wqe, block(0), mlx5::kBlockBytes);
  const Control control = decode_control(qp.wqe);
  qp.operation.control = control;
  const char* reason = nullptr;
  const auto announced = static_cast<std::uint16_t>(qp.producer - qp.consumer);
  if (control.ds == 0) {
    reason = "ds is 0";
  } else if (mlx5::blocks_of(control.ds) > announced) {
    reason = "the WQE is longer than what the doorbell announced";
  } else if (control.index != qp.consumer) {
    reason = "the WQE's index is not its place in the queue";
  } else if (control.qpn != qp.qpn) {
    reason = "the WQE names another queue pair";
  }
  if (reason != nullptr) {
    fail(qp, mlx5::kLocalQpOperationError, reason);
    return false;
  }
  const Faults::Fate fate = faults_.next_wqe();
  if (fate == Faults::Fate::stalled) {
    stalled_ = true;
    stalled_until_ = now + options_.stall_time;
    MARROW_WARN(softnic, "engine stalled on request (stall=", options_.stall, ")");
    return false;
  }
  for (std::uint32_t i = 1; i < mlx5::blocks_of(control.ds); ++i) {
    HostAccess::read(qp.wqe + i * std::size_t{mlx5::kBlockBytes}, block(i),
                     std::min<std::size_t>(mlx5::kBlockBytes,
                                           kMaxWqeBytes - i * std::size_t{mlx5::kBlockBytes}));
  }
  const mlx5::Syndrome syndrome = decode(qp.wqe, control, qp.operation);
  if (syndrome != mlx5::kNoError) {
    fail(qp, syndrome, "the WQE's segments do not fit its opcode");
    return false;
  }
  if (fate == Faults::Fate::dropped) {
    fail(qp, mlx5::kTransportRetryExceeded, "dropped on request (drop=N)");
    return false;
  }
  if (fate == Faults::Fate::failed) {
    fail(qp, mlx5::kRemoteOperationError, "failed on request (error_at=N)");
    return false;
  }
  qp.stage = QueuePair::Stage::run;
  qp.done_bytes = 0;
  qp.rnr_attempts = 0;
  qp.give_up = {};
  const std::uint64_t delay = faults_.delay_us();
  if (delay != 0) {
    qp.not_before = now + std::chrono::microseconds(delay);
    return false;
  }
  return true;
}

Outcome Engine::step(QueuePair& qp, Clock::time_point now) {
  const std::uint8_t opcode = qp.operation.control.opcode;
  if (opcode == mlx5::kWait) return wait_for_completions(qp.operation);
  if (qp.stage == QueuePair::Stage::run) {
    const Outcome outcome = executor_.run(qp, now);
    if (outcome.step != Outcome::done || opcode != mlx5::kWriteImmediate) return outcome;
  }
  return ask_responder(qp, now);
}

// Errors do not count: a counter behind this WAIT then says only what really arrived.
Outcome Engine::wait_for_completions(const Operation& operation) const {
  const auto found = completion_queues_.find(operation.wait_cqn);
  if (found == completion_queues_.end()) {
    return {Outcome::failed, mlx5::kLocalQpOperationError, "WAIT names no completion queue"};
  }
  const auto last = static_cast<std::uint16_t>(found->second->good - 1);
  return {mlx5::counter_reached(last, operation.wait_index) ? Outcome::done : Outcome::parked,
          mlx5::kNoError, ""};
}

/// WRITE_IMM after its data: the peer's engine must consume a receive and write its completion.
Outcome Engine::ask_responder(QueuePair& qp, Clock::time_point now) {
  Outcome outcome;
  QpSlot* slot = executor_.peer(qp, now, outcome);
  if (slot == nullptr) return outcome;
  Inbox& inbox = slot->inbox;
  const auto ring = [&] {
    inbox.state.store(Inbox::kRequest, std::memory_order_release);
    directory_.shared()
        .processes[slot->process.load(std::memory_order_relaxed)]
        .inbox_rings.fetch_add(1, std::memory_order_release);
    return Outcome{Outcome::parked, mlx5::kNoError, ""};
  };
  if (qp.stage == QueuePair::Stage::run) {
    qp.stage = QueuePair::Stage::responder;
    inbox.opcode.store(qp.operation.control.opcode, std::memory_order_relaxed);
    inbox.immediate.store(qp.operation.control.immediate, std::memory_order_relaxed);
    inbox.bytes.store(static_cast<std::uint32_t>(qp.operation.bytes), std::memory_order_relaxed);
    inbox.source_qpn.store(qp.qpn, std::memory_order_relaxed);
    return ring();
  }
  switch (inbox.state.load(std::memory_order_acquire)) {
    case Inbox::kDone: inbox.state.store(Inbox::kIdle, std::memory_order_relaxed); return {};
    case Inbox::kFailed:
      inbox.state.store(Inbox::kIdle, std::memory_order_relaxed);
      return {Outcome::failed, mlx5::kRemoteOperationError,
              "the peer could not post its completion"};
    case Inbox::kNotReady:
      if (qp.rnr_retry != 7 && qp.rnr_attempts >= qp.rnr_retry) {
        inbox.state.store(Inbox::kIdle, std::memory_order_relaxed);
        return {Outcome::failed, mlx5::kReceiverNotReadyRetryExceeded,
                "the peer posted no receive"};
      }
      ++qp.rnr_attempts;
      qp.not_before = now + kReceiverNotReadyPause;
      return ring();
    default: return {Outcome::parked, mlx5::kNoError, ""};
  }
}

/// Serves a request of the remote queue pair. @return true if there was one
bool Engine::serve_inbox(QueuePair& qp) {
  Inbox& inbox = qp.slot->inbox;
  if (inbox.state.load(std::memory_order_acquire) != Inbox::kRequest) return false;
  if (qp.state != mlx5::kReadyToReceive && qp.state != mlx5::kReadyToSend) return false;
  std::uint16_t posted = qp.rq_consumer;
  if (qp.rq_depth != 0 && qp.record != nullptr) {
    posted =
        static_cast<std::uint16_t>(mlx5::from_big32(HostAccess::load_acquire(&qp.record->receive)));
  }
  const auto available = static_cast<std::uint16_t>(posted - qp.rq_consumer);
  if (available == 0 || available > qp.rq_depth) {
    inbox.state.store(Inbox::kNotReady, std::memory_order_release);
    return true;
  }
  Completion completion;
  completion.opcode = mlx5::kResponderWriteImmediate;
  completion.qpn = qp.qpn;
  completion.user_index = qp.user_index;
  completion.counter = qp.rq_consumer;
  completion.bytes = inbox.bytes.load(std::memory_order_relaxed);
  completion.immediate = inbox.immediate.load(std::memory_order_relaxed);
  ++qp.rq_consumer;
  const bool posted_one = post_completion<HostAccess>(*qp.receive_cq, completion);
  inbox.state.store(posted_one ? Inbox::kDone : Inbox::kFailed, std::memory_order_release);
  if (!posted_one) set_state(qp, mlx5::kError);
  return true;
}

void Engine::retire(QueuePair& qp, std::uint32_t blocks) {
  qp.consumer = static_cast<std::uint16_t>(qp.consumer + blocks);
  qp.stage = QueuePair::Stage::fetch;
}

void Engine::complete(QueuePair& qp) {
  const Operation& op = qp.operation;
  const std::uint8_t mode = op.control.fm_ce_se & mlx5::kCompletionMask;
  const std::uint16_t index = qp.consumer;
  retire(qp, mlx5::blocks_of(op.control.ds));
  if (mode != mlx5::kCompletionAlways && mode != mlx5::kCompletionAndEvent) return;
  Completion completion;
  completion.qpn = qp.qpn;
  completion.user_index = qp.user_index;
  completion.counter = index;
  completion.send_opcode = op.control.opcode;
  const bool returns_data = op.control.opcode == mlx5::kRead || op.atomic_bytes != 0;
  completion.bytes = returns_data ? static_cast<std::uint32_t>(op.bytes) : 0;
  if (!post_completion<HostAccess>(*qp.send_cq, completion)) {
    MARROW_WARN(softnic, "completion queue ", qp.send_cq->cqn, " overran: QP ", qp.qpn, " stops");
    set_state(qp, mlx5::kError);
  }
}

/// An error always writes an entry and stops the queue pair; what follows is flushed.
void Engine::fail(QueuePair& qp, mlx5::Syndrome syndrome, const char* reason) {
  const Control& control = qp.operation.control;
  MARROW_INFO(softnic, "QP ", qp.qpn, " to peer QP ", qp.remote_qpn, ", WQE ", qp.consumer,
              ", opcode ", static_cast<int>(control.opcode), ": ", mlx5::syndrome_name(syndrome),
              " (", reason, ")");
  qp.reason = reason;
  Completion completion;
  completion.opcode = mlx5::kRequesterError;
  completion.qpn = qp.qpn;
  completion.user_index = qp.user_index;
  completion.counter = qp.consumer;
  completion.send_opcode = control.opcode;
  completion.syndrome = syndrome;
  post_completion<HostAccess>(*qp.send_cq, completion);
  const auto announced = static_cast<std::uint16_t>(qp.producer - qp.consumer);
  const std::uint32_t blocks = std::max(1u, mlx5::blocks_of(control.ds));
  retire(qp, std::min<std::uint32_t>(blocks, announced));
  qp.not_before = {};
  set_state(qp, mlx5::kError);
}

void Engine::flush(QueuePair& qp) {
  const std::byte* at = qp.sq + (qp.consumer & (qp.depth - 1)) * std::size_t{mlx5::kBlockBytes};
  std::uint8_t head[mlx5::kSegmentBytes];
  HostAccess::read(head, at, sizeof head);
  const Control control = decode_control(head);
  Completion completion;
  completion.opcode = mlx5::kRequesterError;
  completion.qpn = qp.qpn;
  completion.user_index = qp.user_index;
  completion.counter = qp.consumer;
  completion.send_opcode = control.opcode;
  completion.syndrome = mlx5::kFlushError;
  post_completion<HostAccess>(*qp.send_cq, completion);
  const auto announced = static_cast<std::uint16_t>(qp.producer - qp.consumer);
  retire(qp, std::min<std::uint32_t>(std::max(1u, mlx5::blocks_of(control.ds)), announced));
}

}  // namespace marrow::softnic
