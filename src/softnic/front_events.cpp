// SPDX-License-Identifier: Apache-2.0
// Events: a completion channel and the asynchronous event queue are pipes, so that programs may poll
// their descriptors. An event is a number (channel) or a struct (asynchronous), smaller than a pipe's
// atomic write. It names its queue by a number, not by address: the queue may end before it is read.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "base/fd.hpp"
#include "base/text.hpp"
#include "softnic/front_verbs.hpp"

namespace marrow::softnic {
namespace {

using verbs::ibv_async_event;
using verbs::ibv_comp_channel;
using verbs::ibv_context;
using verbs::ibv_cq;

/// Reads one event. Waits as long as the descriptor does. @return 0 or -1 with errno
template <class Event>
int read_event(int fd, Event& event) {
  for (;;) {
    const ssize_t bytes = ::read(fd, &event, sizeof event);
    if (bytes == static_cast<ssize_t>(sizeof event)) return 0;
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes == 0) errno = EBADF;  // closed at the other end
    return -1;
  }
}

std::uint64_t number_in(std::uint64_t event) { return event; }
std::uint64_t number_in(const ibv_async_event& event) {
  return reinterpret_cast<std::uintptr_t>(event.element.cq);
}

/// Takes the events of one queue out of a pipe, so that nobody is woken for them. By a description of its
/// own, which does not wait when another reader was faster.
template <class Event>
void take_back(int fd, int write_fd, std::uint64_t number) {
  const std::string path = base::cat("/proc/self/fd/", fd);
  const base::Fd own(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!own) return;  // readers drop them
  std::vector<Event> others;
  Event event;
  while (::read(own.get(), &event, sizeof event) == static_cast<ssize_t>(sizeof event)) {
    if (number_in(event) != number) others.push_back(event);
  }
  for (const Event& other : others) {
    [[maybe_unused]] const ssize_t sent = ::write(write_fd, &other, sizeof other);
  }
}

ibv_comp_channel* create_comp_channel(ibv_context* context) {
  return guarded<ibv_comp_channel*>(nullptr, [&]() -> ibv_comp_channel* {
    auto channel = std::make_unique<VerbsChannel>();
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return nullptr;
    channel->context = context;
    channel->fd = ends[0];
    channel->refcnt = 0;
    channel->write_fd = ends[1];
    ::fcntl(ends[1], F_SETFL, O_NONBLOCK);  // the engine never waits for a reader
    return channel.release();
  });
}

int destroy_comp_channel(ibv_comp_channel* raw) {
  auto* channel = static_cast<VerbsChannel*>(raw);
  {
    Engine::ControlLock lock(of(channel->context).job->engine());
    if (channel->refcnt != 0) return failed(EBUSY, "the channel has completion queues");
  }
  ::close(channel->write_fd);
  ::close(channel->fd);
  delete channel;
  return 0;
}

int get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  for (;;) {
    std::uint64_t number = 0;
    if (read_event(channel->fd, number) != 0) return -1;
    Context& context = of(channel->context);
    std::lock_guard lock(context.event_lock);
    const auto found = context.event_queues.find(number);
    if (found == context.event_queues.end()) continue;  // its queue ended as it was read
    VerbsCq* from = found->second;
    ::pthread_mutex_lock(&from->mutex);
    ++from->events;
    ::pthread_mutex_unlock(&from->mutex);
    *cq = from;
    *cq_context = from->cq_context;
    return 0;
  }
}

void ack_cq_events(ibv_cq* cq, unsigned count) {
  ::pthread_mutex_lock(&cq->mutex);
  cq->comp_events_completed += count;
  ::pthread_cond_signal(&cq->cond);
  ::pthread_mutex_unlock(&cq->mutex);
}

/// Every event is one of a completion queue.
int get_async_event(ibv_context* raw, ibv_async_event* event) {
  for (;;) {
    if (read_event(raw->async_fd, *event) != 0) return -1;
    Context& context = of(raw);
    std::lock_guard lock(context.event_lock);
    const auto found = context.event_queues.find(number_in(*event));
    if (found == context.event_queues.end()) continue;
    event->element.cq = found->second;
    return 0;
  }
}

void ack_async_event(ibv_async_event*) {}

}  // namespace

/// Arms the queue as libmlx5 does: {sequence, solicited or all, consumer index} in the second word of
/// its record. The engine answers each sequence once, as soon as an entry lies behind the index.
int req_notify_cq(ibv_cq* raw, int solicited_only) {
  auto& cq = *static_cast<VerbsCq*>(raw);
  std::lock_guard lock(cq.lock);
  cq.arm_sequence = (cq.arm_sequence + 1) & 3;
  const std::uint32_t word = cq.arm_sequence << mlx5::kArmSequenceShift |
                             (solicited_only != 0 ? mlx5::kArmSolicited : 0u) |
                             (cq.next & mlx5::kArmIndexMask);
  std::atomic_ref<std::uint32_t>(cq.record()[1])
      .store(mlx5::to_big32(word), std::memory_order_release);
  return 0;
}

void begin_events(VerbsCq& cq) {
  static std::atomic<std::uint64_t> last = 0;
  Context& context = of(cq.context);
  Events& events = static_cast<CqObject*>(cq.queue.object)->events;
  events.number = ++last;
  std::lock_guard lock(context.event_lock);
  context.event_queues[events.number] = &cq;
}

void end_events(VerbsCq& cq) {
  Context& context = of(cq.context);
  Events& events = static_cast<CqObject*>(cq.queue.object)->events;
  {
    Engine::ControlLock lock(context.job->engine());
    events.channel = events.errors = -1;  // the engine sends no more
  }
  std::lock_guard lock(context.event_lock);
  context.event_queues.erase(events.number);
  take_back<ibv_async_event>(context.async_fd, context.async_write_fd, events.number);
  if (cq.channel == nullptr) return;
  auto* channel = static_cast<VerbsChannel*>(cq.channel);
  take_back<std::uint64_t>(channel->fd, channel->write_fd, events.number);
}

bool open_events(Context& context) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
  context.async_fd = ends[0];
  context.async_write_fd = ends[1];
  return true;
}

// The writing end first: a thread that waits in get_async_event then returns.
void close_events(Context& context) {
  if (context.async_write_fd >= 0) ::close(context.async_write_fd);
  if (context.async_fd >= 0) ::close(context.async_fd);
  context.async_fd = context.async_write_fd = -1;
}

void set_event_functions(verbs::Table& t) {
  t.create_comp_channel = create_comp_channel;
  t.destroy_comp_channel = destroy_comp_channel;
  t.get_cq_event = get_cq_event;
  t.ack_cq_events = ack_cq_events;
  t.get_async_event = get_async_event;
  t.ack_async_event = ack_async_event;
}

}  // namespace marrow::softnic
