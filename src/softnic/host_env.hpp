// SPDX-License-Identifier: Apache-2.0
// The CPU engine's surroundings for QueueMachine: keys and peers straight from the job's tables, real
// faults, real log.
#pragma once

#include <chrono>
#include <cstdint>
#include <unordered_map>

#include "base/log.hpp"
#include "softnic/directory.hpp"
#include "softnic/events.hpp"
#include "softnic/faults.hpp"
#include "softnic/host_access.hpp"
#include "softnic/messages.hpp"
#include "softnic/queue_machine.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class HostEnv {
 public:
  using Access = HostAccess;

  HostEnv(Directory& shared_directory, Regions& all_regions, const Options& chosen)
      : directory(shared_directory), regions(all_regions), options(chosen), faults(chosen) {}

  static Nanoseconds now() {
    return static_cast<Nanoseconds>(
        std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }

  Work& work(QueuePair& qp) { return *qp.work; }
  const Region* local(std::uint32_t key) { return reachable(regions.local(key)); }
  const Region* remote(std::uint32_t key, bool&) { return reachable(regions.remote(key)); }

  PeerFacts peer(const QueuePair& qp) { return peer_facts(directory, qp); }
  bool asks_owner(std::uint32_t key) const { return regions.only_owner_reaches(key); }
  Outcome message(QueuePair& qp, const Operation& op, Nanoseconds time) {
    return messages->advance(qp, op, time);
  }
  QpSlot& peer_slot(const QueuePair& qp) { return directory.qp_slot(qp.remote_qpn); }
  void ring(QpSlot& slot) {
    directory.shared()
        .processes[slot.process.load(std::memory_order_relaxed)]
        .inbox_rings.fetch_add(1, std::memory_order_release);
  }

  CompletionQueue* completion_queue(std::uint32_t cqn) {
    const auto found = completion_queues.find(cqn);
    return found == completion_queues.end() ? nullptr : found->second;
  }
  static bool post(CompletionQueue& cq, const Completion& completion) {
    const bool posted = post_completion<HostAccess>(cq, completion);
    note_events(cq, completion, posted);
    return posted;
  }

  template <class Word, class Update>
  Word update(std::byte* at, Update&& next) {
    if (!options.hca_atomics) return HostAccess::update<Word>(at, next);
    SharedLock lock(directory.shared().atomics);
    return HostAccess::update_unlocked<Word>(at, next);
  }

  template <class Word>
  Word fetch_add(std::byte* at, Word n) {
    return update<Word>(at, [n](Word old) { return static_cast<Word>(old + n); });
  }
  template <class Word>
  Word compare_swap(std::byte* at, Word expected, Word desired) {
    return update<Word>(at, [=](Word old) { return old == expected ? desired : old; });
  }

  static void set_state(QueuePair& qp, mlx5::QpState state) {
    qp.state = state;
    qp.slot->state.store(state, std::memory_order_release);
  }

  Fate next_wqe() { return faults.next_wqe(); }
  Nanoseconds delay() { return faults.delay(); }
  /// Payload that only copies reach is left alone.
  bool corrupts_write() { return FarMemory::active() == nullptr && faults.corrupts_write(); }
  std::uint64_t pick(std::uint64_t bound) { return faults.pick(bound); }
  Nanoseconds retry_limit() const {
    return static_cast<Nanoseconds>(std::chrono::nanoseconds(options.retry).count());
  }
  void stall(Nanoseconds time) {
    stalled_ = true;
    stalled_until_ =
        time + static_cast<Nanoseconds>(std::chrono::nanoseconds(options.stall_time).count());
    MARROW_WARN(softnic, "engine stalled on request (stall=", options.stall, ")");
  }
  bool stalled() const { return stalled_; }
  /// Ends the stall when its time is over.
  bool still_stalled(Nanoseconds time) {
    if (stalled_ && options.stall_time.count() != 0 && time >= stalled_until_) stalled_ = false;
    return stalled_;
  }

  static void failed(const QueuePair& qp, const Control& control, mlx5::Syndrome syndrome) {
    MARROW_INFO(softnic, "QP ", qp.qpn, " to peer QP ", qp.remote_qpn, ", WQE ", qp.consumer,
                ", opcode ", static_cast<int>(control.opcode), ": ", mlx5::syndrome_name(syndrome),
                " (", reason_text(qp.reason), ")");
  }
  static void overran(const QueuePair& qp) {
    MARROW_WARN(softnic, "completion queue ", qp.send_cq->cqn, " overran: QP ", qp.qpn, " stops");
  }

  Directory& directory;
  Regions& regions;
  const Options& options;
  Faults faults;
  Messages* messages = nullptr;  ///< set by the engine, which owns both
  std::unordered_map<std::uint32_t, CompletionQueue*> completion_queues;

 private:
  static const Region* reachable(const Region* region) {
    return region == nullptr || region->gpu_memory != 0 ? nullptr : region;
  }

  bool stalled_ = false;
  Nanoseconds stalled_until_ = 0;
};

}  // namespace marrow::softnic
