// SPDX-License-Identifier: Apache-2.0
// How fast a CPU is at this moment. In a virtual machine the topology that the kernel shows may be none: two virtual CPUs
// can share a core, one can lie on another socket than the memory, both can be moved. These three numbers tell what a
// rate met: instructions a nanosecond (halves when the core's other hyperthread works), a cache line to another CPU and
// back (tells same core, socket, other socket), and a line of given memory that is in no cache.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "placement.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace placement {

inline std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

/// Independent additions and xors a ns, best of several short loops: what a core's width and clock allow.
inline double operations_a_ns() {
  double best = 0;
  for (int turn = 0; turn < 12; ++turn) {
    std::uint64_t a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
    constexpr int kLoops = 20000;
    const std::int64_t from = now_ns();
    for (int i = 0; i < kLoops; ++i) {
      a += 3;
      b ^= 5;
      c += 7;
      d ^= 9;
      e += 11;
      f ^= 13;
      asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    }
    const auto took = static_cast<double>(now_ns() - from);
    best = std::max(best, 6.0 * kLoops / took);
  }
  return best;
}
/// ns for a line of that memory that no cache has; 0: not known on this processor.
inline double far_line_ns(const void* memory, std::size_t bytes) {
#if defined(__x86_64__)
  const auto* lines = static_cast<const char*>(memory);
  const std::size_t count = bytes / 64;
  if (count < 4096) return 0;
  constexpr int kLines = 512;
  std::size_t at = 0;
  std::int64_t sum = 0;
  for (int i = 0; i < kLines; ++i) {
    at = (at * 1103515245 + 12345) % count;
    const char* line = lines + at * 64;
    _mm_clflush(line);
    _mm_mfence();
    const std::int64_t from = now_ns();
    (void)*static_cast<const volatile char*>(line);
    _mm_lfence();
    sum += now_ns() - from;
  }
  std::int64_t clock = now_ns();
  for (int i = 0; i < kLines; ++i) {
    _mm_lfence();
    (void)now_ns();
  }
  clock = now_ns() - clock;
  return static_cast<double>(sum - clock) / kLines;
#else
  (void)memory, (void)bytes;
  return 0;
#endif
}
/// ns for a line from one CPU to another and back.
inline double line_there_and_back_ns(int a, int b) {
  constexpr int kRounds = 3000;
  std::atomic<int> ball{0};
  std::atomic<bool> over{false};
  std::thread other([&] {
    pin_self(b);
    for (int i = 0; i < kRounds && !over;) {
      int wanted = 2 * i + 1;
      if (ball.compare_exchange_strong(wanted, 2 * i + 2)) ++i;
    }
  });
  double took = 0;
  std::thread([&] {
    pin_self(a);
    const std::int64_t give_up = now_ns() + 200'000'000;
    const std::int64_t from = now_ns();
    for (int i = 0; i < kRounds; ++i) {
      ball.store(2 * i + 1);
      while (ball.load() != 2 * i + 2) {
        if (now_ns() > give_up) {
          over = true;
          return;
        }
      }
    }
    took = static_cast<double>(now_ns() - from) / kRounds;
  }).join();
  over = true;
  other.join();
  return took;
}

/// One line about CPU `cpu`, while `beside` spins and while it does not.
inline std::string probe(int cpu, int beside, const void* memory, std::size_t bytes) {
  double alone = 0, busy = 0, far = 0;
  std::thread([&] {
    pin_self(cpu);
    alone = operations_a_ns();
    far = far_line_ns(memory, bytes);
  }).join();
  std::atomic<bool> over{false};
  std::thread spinner([&] {
    pin_self(beside);
    while (!over.load(std::memory_order_relaxed)) {
    }
  });
  std::thread([&] {
    pin_self(cpu);
    busy = operations_a_ns();
  }).join();
  over = true;
  spinner.join();
  char text[160];
  std::snprintf(text, sizeof(text),
                "CPU %d: %.1f operations/ns, %.1f while CPU %d spins; line to it and back %.0f ns; "
                "memory %.0f ns",
                cpu, alone, busy, beside, line_there_and_back_ns(cpu, beside), far);
  return text;
}

}  // namespace placement
