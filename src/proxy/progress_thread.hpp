// SPDX-License-Identifier: Apache-2.0
// The OS thread around an Engine. It must be quick while there is work and cost nothing while there is
// none: it spins, then yields, then sleeps. All rings lie in memory that a GPU writes, so nobody can wake
// it; the sleep is the latency of the first operation after a pause.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "proxy/engine.hpp"
#include "proxy/pinning.hpp"

namespace marrow::proxy {

struct IdlePolicy {
  std::uint32_t spins = 64;    ///< passes without a pause after the last work
  std::uint32_t yields = 256;  ///< then passes that give up the core
  std::chrono::microseconds sleep{
      100};  ///< then sleeps that double up to this, the longest up to 1.5 of it
};

class ProgressThread {
 public:
  /// @param number  of the thread, 0 ..
  ProgressThread(Engine& engine, Link& link, IdlePolicy policy, const Pinning& pinning, int number,
                 int rank, const Hooks& hooks);
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

 private:
  void run();

  Engine& engine_;
  Link& link_;
  const IdlePolicy policy_;
  const Pinning pinning_;
  const int number_;
  const int rank_;
  const Hooks& hooks_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace marrow::proxy
