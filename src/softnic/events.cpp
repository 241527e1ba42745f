// SPDX-License-Identifier: Apache-2.0
#include "softnic/events.hpp"

#include <unistd.h>

#include "softnic/host_access.hpp"
#include "verbs/ibverbs_abi.h"

namespace marrow::softnic {
namespace {

// The pipes do not block: when one is full its reader has events enough to find out by polling.
template <class Event>
void send(int fd, const Event& event) {
  [[maybe_unused]] const ssize_t sent = ::write(fd, &event, sizeof event);
}

}  // namespace

void answer_arm(CompletionQueue& cq) {
  Events& events = *cq.events;
  if (events.channel < 0) return;
  const std::uint32_t raw = HostAccess::load_acquire(cq.record + 1);
  if (raw == events.answered) return;
  const std::uint32_t word = mlx5::from_big32(raw);
  const std::uint32_t upto = (word & mlx5::kArmSolicited) != 0 ? events.solicited : cq.produced;
  const std::uint32_t behind = (upto - word) & mlx5::kArmIndexMask;
  if (behind == 0 || behind > mlx5::kArmIndexMask / 2) return;
  events.answered = raw;
  send(events.channel, events.number);
}

void note_events(CompletionQueue& cq, const Completion& completion, bool posted) {
  if (cq.events == nullptr) return;
  Events& events = *cq.events;
  if (!posted) {
    if (events.errors < 0) return;
    verbs::ibv_async_event event{};
    event.element.cq = reinterpret_cast<verbs::ibv_cq*>(events.number);  // the reader looks it up
    event.event_type = verbs::IBV_EVENT_CQ_ERR;
    send(events.errors, event);
    events.errors = -1;  // once
    return;
  }
  if (completion.solicited || completion.syndrome != mlx5::kNoError) events.solicited = cq.produced;
  answer_arm(cq);
}

}  // namespace marrow::softnic
