// SPDX-License-Identifier: Apache-2.0
#include "proxy/progress_thread.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"

namespace marrow::proxy {

ProgressThread::ProgressThread(Engine& engine, Link& link, IdlePolicy policy,
                               const Pinning& pinning, int number, int rank, const Hooks& hooks)
    : engine_(engine),
      link_(link),
      policy_(policy),
      pinning_(pinning),
      number_(number),
      rank_(rank),
      hooks_(hooks),
      thread_(base::start_thread(base::cat("a progress thread of the proxy of rank ", rank),
                                 [this] { run(); })) {}

ProgressThread::~ProgressThread() {
  stop_.store(true, std::memory_order_release);
  thread_.join();
}

void ProgressThread::run() {
  base::log::ThreadRank named(rank_);
  ::pthread_setname_np(::pthread_self(), "marrow-proxy");
  pinning_.pin(number_);
  // The first sleeps of a pause last what they say. The longest may last half as long again: each wake-up costs a virtual
  // machine 4 to 10 us, so that is a third of an idle job's load, and the kernel may join it with other timers.
  const auto exact = std::chrono::nanoseconds(1000),
             loose = std::max(exact, std::chrono::nanoseconds(policy_.sleep) / 2);
  std::chrono::nanoseconds slack{0};
  const auto allow = [&slack](std::chrono::nanoseconds wanted) {
    if (slack == wanted) return;
    slack = wanted;
    ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack.count()), 0UL, 0UL, 0UL);
  };
  try {
    if (link_.copy_engine()) link_.copy_engine()->attach_thread();
    std::uint32_t idle = 0;
    constexpr std::chrono::microseconds kFirstSleep{10};
    std::chrono::microseconds sleep = std::min(kFirstSleep, policy_.sleep);
    while (!stop_.load(std::memory_order_acquire)) {
      if (engine_.step()) {
        idle = 0;
        sleep = std::min(kFirstSleep, policy_.sleep);
        continue;
      }
      ++idle;
      if (idle <= policy_.spins) {
        relax(0);
      } else if (idle <= policy_.spins + policy_.yields) {
        ::sched_yield();
      } else {
        allow(sleep < policy_.sleep ? exact : loose);
        std::this_thread::sleep_for(sleep);
        sleep = std::min(sleep * 2, policy_.sleep);
        idle = policy_.spins + policy_.yields;
      }
    }
  } catch (const std::exception& error) {
    // Waits on this thread's rings now end by their deadlines.
    MARROW_WARN(proxy, "the progress thread of rank ", rank_, " ended: ", error.what());
    if (hooks_.on_error) {
      hooks_.on_error(
          -1, Error(Code::internal, base::cat("the proxy's progress thread ended: ", error.what()),
                    "end the job; operations on the proxy path time out"));
    }
  }
}

}  // namespace marrow::proxy
