// SPDX-License-Identifier: Apache-2.0
// What one sleep and wake-up of a thread costs in CPU time, by the way it sleeps: the floor of an idle progress thread,
// which can be no cheaper than a thread that does nothing else. No GPU, no Marrow.
//   marrow_sleep_cost [--seconds S] [--cpu N] [--rounds N]     prints share of a core, ns a wake-up, and how late it woke
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "placement.hpp"

namespace {

std::int64_t now(clockid_t clock) {
  timespec t{};
  ::clock_gettime(clock, &t);
  return t.tv_sec * std::int64_t{1000000000} + t.tv_nsec;
}
timespec spec(std::int64_t ns) { return {ns / 1000000000, ns % 1000000000}; }

struct Way {
  const char* name;
  unsigned long slack_ns;
  int policy;  ///< of the scheduler; -1: as it is
  std::function<void(std::int64_t)> sleep;
};

/// Sleeps again and again on that CPU. Prints one line.
void measure(const Way& way, std::int64_t sleep_ns, int cpu, double seconds) {
  std::thread([&] {
    if (cpu >= 0) placement::pin_self(cpu);
    ::prctl(PR_SET_TIMERSLACK, way.slack_ns, 0UL, 0UL, 0UL);
    if (way.policy >= 0) {
      sched_param parameter{};
      parameter.sched_priority = way.policy == SCHED_FIFO ? 1 : 0;
      if (::sched_setscheduler(0, way.policy, &parameter) != 0) {
        std::printf("%-44s %7ld us: not allowed\n", way.name, static_cast<long>(sleep_ns / 1000));
        return;
      }
    }
    for (int i = 0; i < 20; ++i) way.sleep(sleep_ns);
    const std::int64_t cpu_before = now(CLOCK_THREAD_CPUTIME_ID), from = now(CLOCK_MONOTONIC);
    std::int64_t wakes = 0, passed = 0;
    while (static_cast<double>(passed) < seconds * 1e9) {
      way.sleep(sleep_ns);
      ++wakes;
      passed = now(CLOCK_MONOTONIC) - from;
    }
    const std::int64_t used = now(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
    std::printf("%-44s %7ld us: %7.3f %% of a core, %7.0f ns a wake-up, period %8.1f us\n",
                way.name, static_cast<long>(sleep_ns / 1000),
                100.0 * static_cast<double>(used) / static_cast<double>(passed),
                static_cast<double>(used) / static_cast<double>(wakes),
                static_cast<double>(passed) / static_cast<double>(wakes) / 1e3);
  }).join();
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0.5;
  int cpu = -1, rounds = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--seconds")) seconds = std::atof(argv[i + 1]);
    if (!std::strcmp(argv[i], "--rounds")) rounds = std::atoi(argv[i + 1]);
    if (!std::strcmp(argv[i], "--cpu")) cpu = std::atoi(argv[i + 1]);
  }
  const auto nanosleep_of = [](std::int64_t ns) {
    const timespec t = spec(ns);
    ::clock_nanosleep(CLOCK_MONOTONIC, 0, &t, nullptr);
  };
  static thread_local int timer = -1;  // closed with the process: one a thread
  const auto timer_read = [](std::int64_t ns) {
    if (timer < 0) {
      timer = ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
      const itimerspec every{spec(ns), spec(ns)};
      ::timerfd_settime(timer, 0, &every, nullptr);
    }
    std::uint64_t count = 0;
    (void)!::read(timer, &count, sizeof(count));
  };
  const auto futex = [](std::int64_t ns) {
    static int word = 0;
    const timespec t = spec(ns);
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &t, nullptr, 0);
  };
  const auto poll = [](std::int64_t ns) {
    const timespec t = spec(ns);
    ::ppoll(nullptr, 0, &t, nullptr);
  };
  const Way ways[] = {
      {"nanosleep, slack 1 us", 1000, -1, nanosleep_of},
      {"nanosleep, slack 50 us", 50000, -1, nanosleep_of},
      {"nanosleep, slack half of it", 1, -1, nanosleep_of},
      {"nanosleep, slack all of it", 2, -1, nanosleep_of},
      {"timerfd, periodic", 1000, -1, timer_read},
      {"futex with a timeout", 1000, -1, futex},
      {"ppoll with a timeout", 1000, -1, poll},
      {"nanosleep, SCHED_BATCH", 1000, SCHED_BATCH, nanosleep_of},
      {"nanosleep, SCHED_IDLE", 1000, SCHED_IDLE, nanosleep_of},
  };
  for (int round = 0; round < rounds; ++round)
    for (const std::int64_t us : {100, 1000}) {
      for (Way way : ways) {
        if (way.slack_ns < 3) way.slack_ns *= static_cast<unsigned long>(us) * 500;
        measure(way, us * 1000, cpu, seconds);
      }
    }
  // The same by its length: caches and clocks are colder after a longer one.
  for (const std::int64_t us : {10, 30, 300, 3000, 10000})
    measure(ways[0], us * 1000, cpu, seconds);
  return 0;
}
