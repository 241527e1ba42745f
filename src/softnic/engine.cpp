// SPDX-License-Identifier: Apache-2.0
#include "softnic/engine.hpp"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

namespace marrow::softnic {
namespace {

constexpr std::uint32_t kTurnWqes = 64;
constexpr Nanoseconds kMicrosecond = 1000;
constexpr Nanoseconds kMillisecond = 1000 * kMicrosecond;
constexpr Nanoseconds kSpin = 50 * kMicrosecond;
constexpr Nanoseconds kTidyInterval = 100 * kMillisecond;

}  // namespace

Engine::Engine(Directory& directory, Regions& regions, const Options& options)
    : directory_(directory),
      regions_(regions),
      env_(directory, regions, options),
      machine_(env_),
      messages_(directory, regions, env_, machine_.executor()) {
  env_.messages = &messages_;
  thread_ = std::thread([this] { work(); });
}

Engine::~Engine() {
  {
    ControlLock lock(*this);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Engine::add(QueuePair& qp) {
  // What lies in a new queue's record and cell is from before; only later changes are doorbells.
  const Hints hints = load_hints<HostAccess>(qp);
  qp.last_record = hints.record;
  qp.last_doorbell = hints.doorbell;
  qp.last_other_doorbell = hints.other_doorbell;
  queue_pairs_.push_back(&qp);
  wake_.notify_all();
}

void Engine::remove(QueuePair& qp) { std::erase(queue_pairs_, &qp); }

void Engine::work() {
  ::prctl(PR_SET_NAME, "marrow-softnic");
  ::prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: the short sleeps below mean what they say
  Nanoseconds last_work = HostEnv::now();
  for (;;) {
    bool worked = false;
    {
      std::unique_lock lock(mutex_);
      if (queue_pairs_.empty() && !stop_) {
        wake_.wait(lock, [this] { return stop_ || !queue_pairs_.empty(); });
        last_work = HostEnv::now();
      }
      if (stop_) return;
      worked = pass();
    }
    while (waiting_.load(std::memory_order_relaxed) > 0) ::sched_yield();
    if (worked) {
      last_work = HostEnv::now();
    } else {
      rest(HostEnv::now() - last_work);
    }
  }
}

// Ranks and engines may outnumber the cores: an engine without work yields at once and sleeps soon.
void Engine::rest(Nanoseconds idle) const {
  using std::chrono::microseconds;
  if (idle < kSpin) {
    ::sched_yield();
  } else if (idle < 2 * kMillisecond) {
    std::this_thread::sleep_for(microseconds(10));
  } else if (idle < 50 * kMillisecond) {
    std::this_thread::sleep_for(microseconds(50));
  } else if (idle < 500 * kMillisecond) {
    std::this_thread::sleep_for(microseconds(200));
  } else {
    std::this_thread::sleep_for(microseconds(1000));
  }
}

bool Engine::pass() {
  const Nanoseconds now = HostEnv::now();
  if (env_.still_stalled(now)) return false;
  if (now - tidied_ > kTidyInterval) {
    tidied_ = now;
    regions_.drop_stale();
  }
  bool worked = false;
  const auto& rings = directory_.shared().processes[directory_.self()].inbox_rings;
  const std::uint64_t rung = rings.load(std::memory_order_acquire);
  if (rung != inbox_rings_) {
    inbox_rings_ = rung;
    for (QueuePair* qp : queue_pairs_) worked |= messages_.serve(*qp);
  }
  answer_armed_queues();
  const auto count = static_cast<std::uint32_t>(queue_pairs_.size());
  const std::uint32_t first =
      env_.options.reorder ? env_.faults.first_queue(count) : turn_++ % count;
  for (std::uint32_t i = 0; i < count && !env_.stalled(); ++i) {
    QueuePair& qp = *queue_pairs_[(first + i) % count];
    if (qp.state != mlx5::kReadyToSend && qp.state != mlx5::kError) continue;
    if (qp.state == mlx5::kError) worked |= messages_.flush(qp);
    if (env_.faults.skips_queue()) continue;
    worked |= serve(qp, now);
  }
  return worked;
}

/// A request for an event may come after the entry it asks about.
void Engine::answer_armed_queues() {
  for (const auto& [cqn, cq] : env_.completion_queues) {
    if (cq->events != nullptr) answer_arm(*cq);
  }
}

/// One turn of one queue pair. @return true if anything moved
bool Engine::serve(QueuePair& qp, Nanoseconds now) {
  if (qp.depth == 0) return false;
  if (!machine_.notice(qp, load_hints<HostAccess>(qp))) return true;
  bool worked = false;
  for (std::uint32_t i = 0; i < kTurnWqes; ++i) {
    CopyPiece piece;  // never asked for: HostAccess moves everything itself
    const Turn turn = machine_.advance(qp, now, piece);
    if (turn == Turn::idle) return worked;
    worked = true;
    if (turn == Turn::more) return worked;
  }
  return worked;
}

}  // namespace marrow::softnic
