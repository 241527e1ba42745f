// SPDX-License-Identifier: Apache-2.0
#include "unit/faulty_verbs.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <vector>

namespace marrow::test::faulty {
namespace {

using namespace verbs;  // NOLINT: types of verbs, twenty names

struct Opened {
  int own_async_fd = -1;  ///< softnic's
  int write_fd = -1;
};

struct State {
  std::mutex mutex;  ///< all below
  Plan plan;
  int calls = 0;
  bool happened = false;
  std::function<void(ibv_wc&)> completion;
  std::function<void(ibv_port_attr&)> port;
  std::function<void(const ibv_qp_attr&, int)> modify;
  std::function<void(const ibv_send_wr&)> post;
  std::vector<ibv_gid_entry> gids;
  int most = 0;
  unsigned random = 1;
  std::map<ibv_context*, Opened> contexts;
  ibv_qp* last_qp = nullptr;
  ibv_cq* last_cq = nullptr;
  std::atomic<int> alive{0};
  // softnic's own
  int (*post_send)(ibv_qp*, ibv_send_wr*, ibv_send_wr**) = nullptr;
  int (*post_recv)(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) = nullptr;
  int (*poll_cq)(ibv_cq*, int, ibv_wc*) = nullptr;
};
State& state() {
  static State the_state;
  return the_state;
}
const Table& soft() { return provider("softnic"); }

/// errno of this call, or 0.
int fails(Call call) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (call != s.plan.call) return 0;
  const int number = s.calls++;
  if (number < s.plan.skip || (s.plan.times >= 0 && number >= s.plan.skip + s.plan.times)) return 0;
  s.happened = true;
  return errno = s.plan.error;
}

/// A function that gives an object, or null.
template <class Object, class Make>
Object* made(Call call, Make&& make) {
  if (fails(call)) return nullptr;
  Object* object = make();
  if (object) ++state().alive;
  return object;
}
/// One that ends it. It does, whatever it says.
template <class End>
int ended(Call call, End&& end) {
  const int error = fails(call);
  const int own = end();
  if (own == 0) --state().alive;
  return error ? (errno = error) : own;
}

ibv_device** get_device_list(int* count) {
  return fails(Call::get_device_list) ? nullptr : soft().get_device_list(count);
}

int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad) {
  State& s = state();
  {
    std::lock_guard lock(s.mutex);
    for (const ibv_send_wr* each = request; s.post && each; each = each->next) s.post(*each);
  }
  const int error = fails(Call::post_send);
  if (!error) return s.post_send(qp, request, bad);
  // Those before the refused one go out, as with a real NIC.
  ibv_send_wr* refused = request;
  ibv_send_wr* before = nullptr;
  for (int i = 0; i < s.plan.bad_request && refused->next; ++i) {
    before = refused;
    refused = refused->next;
  }
  if (before) {
    before->next = nullptr;
    s.post_send(qp, request, bad);
    before->next = refused;
  }
  *bad = refused;
  return error;
}
int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad) {
  if (const int error = fails(Call::post_recv)) {
    *bad = request;
    return error;
  }
  return state().post_recv(qp, request, bad);
}
int poll_cq(ibv_cq* cq, int count, ibv_wc* wc) {
  State& s = state();
  if (const int error = fails(Call::poll_cq)) return -error;
  std::unique_lock lock(s.mutex);
  if (s.most > 0) {
    s.random = s.random * 1103515245u + 12345u;
    if ((s.random >> 16 & 1) != 0) return 0;
    count = std::min(count, s.most);
  }
  const auto change = s.completion;
  lock.unlock();
  const int n = s.poll_cq(cq, count, wc);
  for (int i = 0; change && i < n; ++i) change(wc[i]);
  return n;
}

ibv_context* open_device(ibv_device* device) {
  static const std::string job = "faulty-" + std::to_string(::getpid());
  ibv_context* context = made<ibv_context>(
      Call::open_device, [&] { return soft().open_device_in_job(device, job.c_str(), ""); });
  if (!context) return nullptr;
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.post_send = context->ops.post_send;
  s.post_recv = context->ops.post_recv;
  s.poll_cq = context->ops.poll_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) == 0) {
    s.contexts[context] = {context->async_fd, ends[1]};
    context->async_fd = ends[0];
  }
  return context;
}
int close_device(ibv_context* context) {
  {
    State& s = state();
    std::lock_guard lock(s.mutex);
    const Opened opened = s.contexts[context];
    s.contexts.erase(context);
    ::close(context->async_fd);
    ::close(opened.write_fd);
    context->async_fd = opened.own_async_fd;
  }
  return ended(Call::close_device, [&] { return soft().close_device(context); });
}

int query_device(ibv_context* context, ibv_device_attr* attr) {
  const int error = fails(Call::query_device);
  return error ? error : soft().query_device(context, attr);
}
int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) {
  if (const int error = fails(Call::query_port)) return error;
  const int result = soft().query_port(context, port, attr);
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (!s.gids.empty()) {
    attr->link_layer = kLinkLayerEthernet;
    attr->lid = 0;
    attr->gid_tbl_len = static_cast<int>(s.gids.size());
  }
  if (s.port) s.port(*attr);
  return result;
}
int query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index,
                 ibv_gid_entry* entry, std::uint32_t, std::size_t) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.gids.empty()) {
    *entry = {};
    entry->gid_index = index;
    return soft().query_gid(context, static_cast<std::uint8_t>(port), static_cast<int>(index),
                            &entry->gid);
  }
  if (index >= s.gids.size()) return ENODATA;
  *entry = s.gids[index];
  return 0;
}

ibv_pd* alloc_pd(ibv_context* context) {
  return made<ibv_pd>(Call::alloc_pd, [&] { return soft().alloc_pd(context); });
}
int dealloc_pd(ibv_pd* pd) {
  return ended(Call::dealloc_pd, [&] { return soft().dealloc_pd(pd); });
}
ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t bytes, int access) {
  return made<ibv_mr>(Call::reg_mr, [&] { return soft().reg_mr(pd, address, bytes, access); });
}
int dereg_mr(ibv_mr* mr) {
  return ended(Call::dereg_mr, [&] { return soft().dereg_mr(mr); });
}
ibv_cq* create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel* channel,
                  int vector) {
  ibv_cq* cq = made<ibv_cq>(
      Call::create_cq, [&] { return soft().create_cq(context, entries, user, channel, vector); });
  if (cq) state().last_cq = cq;
  return cq;
}
int destroy_cq(ibv_cq* cq) {
  return ended(Call::destroy_cq, [&] { return soft().destroy_cq(cq); });
}
ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  ibv_qp* qp = made<ibv_qp>(Call::create_qp, [&] { return soft().create_qp(pd, attr); });
  if (qp) state().last_qp = qp;
  return qp;
}
int destroy_qp(ibv_qp* qp) {
  return ended(Call::destroy_qp, [&] { return soft().destroy_qp(qp); });
}
int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const Call call = attr->qp_state == IBV_QPS_INIT  ? Call::to_init
                    : attr->qp_state == IBV_QPS_RTR ? Call::to_rtr
                    : attr->qp_state == IBV_QPS_RTS ? Call::to_rts
                                                    : Call::to_err;
  if (const int error = fails(call)) return error;
  {
    State& s = state();
    std::lock_guard lock(s.mutex);
    if (s.modify) s.modify(*attr, mask);
  }
  ibv_qp_attr own = *attr;
  if (own.ah_attr.dlid == 0) own.ah_attr.dlid = 1;  // softnic's port is InfiniBand
  return soft().modify_qp(qp, &own, mask);
}

int get_async_event(ibv_context* context, ibv_async_event* event) {
  return ::read(context->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}

const Table& table() {
  static const Table the_table = [] {
    Table t;
    t.name = "faulty";
    t.get_device_list = get_device_list;
    t.free_device_list = [](ibv_device** list) { soft().free_device_list(list); };
    t.get_device_name = [](ibv_device* device) { return soft().get_device_name(device); };
    t.open_device = open_device;
    t.close_device = close_device;
    t.query_device = query_device;
    t.query_port = query_port;
    t.query_gid = [](ibv_context* c, std::uint8_t port, int index, ibv_gid* gid) {
      return soft().query_gid(c, port, index, gid);
    };
    t.query_gid_ex = query_gid_ex;
    t.alloc_pd = alloc_pd;
    t.dealloc_pd = dealloc_pd;
    t.reg_mr = reg_mr;
    t.dereg_mr = dereg_mr;
    t.create_cq = create_cq;
    t.destroy_cq = destroy_cq;
    t.create_qp = create_qp;
    t.destroy_qp = destroy_qp;
    t.modify_qp = modify_qp;
    t.get_async_event = get_async_event;
    t.ack_async_event = [](ibv_async_event*) {};
    return t;
  }();
  return the_table;
}
[[maybe_unused]] const bool registered = register_provider(&table());

}  // namespace

const char* name(Call call) {
  constexpr const char* kNames[] = {
      "none",      "get_device_list", "open_device", "close_device", "query_device", "query_port",
      "alloc_pd",  "dealloc_pd",      "reg_mr",      "dereg_mr",     "create_cq",    "destroy_cq",
      "create_qp", "destroy_qp",      "to_init",     "to_rtr",       "to_rts",       "to_err",
      "post_send", "post_recv",       "poll_cq"};
  return kNames[static_cast<int>(call)];
}

void set(const Plan& plan) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.plan = plan;
  s.calls = 0;
  s.happened = false;
}
bool happened() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.happened;
}
void on_completion(std::function<void(ibv_wc&)> change) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.completion = std::move(change);
}
void short_polls(int most) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.most = most;
}
void on_port(std::function<void(ibv_port_attr&)> change) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.port = std::move(change);
}
void on_modify(std::function<void(const ibv_qp_attr&, int)> look) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.modify = std::move(look);
}
void on_post(std::function<void(const ibv_send_wr&)> look) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.post = std::move(look);
}
void set_gids(std::vector<ibv_gid_entry> gids) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.gids = std::move(gids);
}
void deliver(int type, int port) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  ibv_async_event event{};
  event.event_type = type;
  switch (type) {
    case IBV_EVENT_CQ_ERR: event.element.cq = s.last_cq; break;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER: event.element.port_num = port; break;
    default: event.element.qp = s.last_qp;
  }
  for (const auto& [context, opened] : s.contexts) {
    [[maybe_unused]] const ssize_t sent = ::write(opened.write_fd, &event, sizeof event);
  }
}
int alive() { return state().alive; }

void reset() {
  set({});
  on_completion({});
  on_port({});
  on_modify({});
  on_post({});
  short_polls(0);
  set_gids({});
}

}  // namespace marrow::test::faulty
