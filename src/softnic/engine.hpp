// SPDX-License-Identifier: Apache-2.0
// The thread that is the NIC: one a process and job. It polls doorbells, runs WQEs in order per queue
// pair and in turn between them, and posts completions. It holds the mutex for one pass over the
// queues; the control path takes it with ControlLock, for which the engine steps aside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "softnic/faults.hpp"
#include "softnic/host_env.hpp"
#include "softnic/messages.hpp"
#include "softnic/options.hpp"
#include "softnic/queue_machine.hpp"
#include "softnic/queues.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class Engine {
 public:
  Engine(Directory& directory, Regions& regions, const Options& options);
  /// Stops the thread; queues must have been removed.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // All of these with the lock held.
  void add(QueuePair& qp);
  void remove(QueuePair& qp);
  /// Ends what a queue pair has under way with its peer.
  void forget_messages(QueuePair& qp) { messages_.forget(qp); }
  void add(CompletionQueue& cq) { env_.completion_queues[cq.cqn] = &cq; }
  void remove(CompletionQueue& cq) { env_.completion_queues.erase(cq.cqn); }
  /// Moves a queue pair to a state and tells the other processes.
  static void set_state(QueuePair& qp, mlx5::QpState state) { HostEnv::set_state(qp, state); }

  std::mutex& mutex() { return mutex_; }

  /// Mutual exclusion with the engine, for the control path.
  class ControlLock {
   public:
    explicit ControlLock(Engine& engine) : engine_(engine) {
      engine_.waiting_.fetch_add(1, std::memory_order_relaxed);
      engine_.mutex_.lock();
      engine_.waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    ~ControlLock() { engine_.mutex_.unlock(); }
    ControlLock(const ControlLock&) = delete;
    ControlLock& operator=(const ControlLock&) = delete;

   private:
    Engine& engine_;
  };

 private:
  void work();
  void rest(Nanoseconds idle) const;
  bool pass();
  bool serve(QueuePair& qp, Nanoseconds now);
  void answer_armed_queues();

  Directory& directory_;
  Regions& regions_;
  HostEnv env_;
  QueueMachine<HostEnv> machine_;
  Messages messages_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> waiting_{0};
  bool stop_ = false;
  std::vector<QueuePair*> queue_pairs_;
  std::uint32_t turn_ = 0;
  std::uint64_t inbox_rings_ = 0;
  Nanoseconds tidied_ = 0;
  std::thread thread_;
};

}  // namespace marrow::softnic
