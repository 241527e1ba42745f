// SPDX-License-Identifier: Apache-2.0
// A network that wraps another and behaves worse, by seed: operations start in another order and late, some are
// lost and tried again, some are done and said to be done only later, what arrives is reported late and some of it
// twice. It says it is unordered, and so has only the promises that a datagram fabric has. A plugin like any
// other: it sees marrow/network.h alone.
//
//   MARROW_NETWORK=unordered.so?over=shm&seed=7&delay=200&drop=50&duplicate=50
//
// over       the network below (default shm)
// seed       of all that follows, with the rank (default 1)
// delay      microseconds that an operation, or the report of an arrival, is held back at most (default 100)
// drop       one in so many is lost and tried again after ten times that delay; 0: none (default 0)
// duplicate  one arrival in so many is reported again later; 0: none (default 0)
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "marrow/network.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

std::string& sentence() {
  thread_local std::string text = "no error";
  return text;
}
int fail(int code, const std::string& text) {
  sentence() = text;
  return code;
}

struct Instance {
  const marrow_network_services* services = nullptr;
  const marrow_network* below = nullptr;
  void* instance = nullptr;
  std::uint64_t seed = 1;
  std::uint64_t delay = 100;
  std::uint64_t drop = 0;
  std::uint64_t duplicate = 0;
};

/// Something that happens later; ties in the order of making.
template <class What>
class Later {
 public:
  void add(Clock::time_point when, What what) { queue_.push({when, number_++, std::move(what)}); }
  bool due(Clock::time_point now) const { return !queue_.empty() && queue_.top().when <= now; }
  const What& front() const { return queue_.top().what; }
  void pop() { queue_.pop(); }
  std::size_t size() const { return queue_.size(); }

 private:
  struct Item {
    Clock::time_point when;
    std::uint64_t number;
    What what;
    bool operator<(const Item& other) const {
      return when != other.when ? when > other.when : number > other.number;
    }
  };
  std::priority_queue<Item> queue_;
  std::uint64_t number_ = 0;
};

struct Arrival {
  std::uint32_t peer;
  std::uint32_t bytes;  ///< 0: an immediate
  std::uint32_t immediate;
  std::uint8_t data[MARROW_NETWORK_MAX_MESSAGE];
};
struct Held {
  marrow_network_operation operation;
  bool was_lost;
};
struct Down {
  std::uint32_t peer;
  std::string sentence;
};

struct Endpoint {
  const Instance* made_by;
  const marrow_network* below;
  void* endpoint = nullptr;
  marrow_network_events events;
  std::mt19937_64 random;
  Later<Held> held;
  Later<marrow_network_completion> done;
  Later<Arrival> arrived;
  std::vector<Down> down;

  Clock::time_point soon(Clock::time_point now, std::uint64_t times = 1) {
    return now + microseconds(random() % (made_by->delay + 1) * times);
  }
  bool one_in(std::uint64_t n) { return n != 0 && random() % n == 0; }

  void arrive(Arrival arrival) {
    const auto now = Clock::now();
    if (one_in(made_by->duplicate)) arrived.add(soon(now, 3), arrival);
    arrived.add(soon(now), arrival);
  }
  /// Starts it. False: the network below takes no more now.
  int start(const marrow_network_operation& operation) {
    return below->post(endpoint, &operation, 1);
  }
  int start_due(Clock::time_point now) {
    int started = 0;
    while (held.due(now)) {
      Held it = held.front();
      if (!it.was_lost && one_in(made_by->drop)) {
        held.pop();
        it.was_lost = true;
        held.add(soon(now, 10), it);
        continue;
      }
      const int taken = start(it.operation);
      if (taken < 0) return taken;
      if (taken == 0) break;
      held.pop();
      ++started;
    }
    return started;
  }
};

Endpoint& as_endpoint(void* endpoint) { return *static_cast<Endpoint*>(endpoint); }

int below_error(const marrow_network& below, int code) { return fail(code, below.last_error()); }

int init(const marrow_network_services* services, const char* options, void** instance) {
  auto self = std::make_unique<Instance>();
  self->services = services;
  std::string over = "shm";
  const std::string text = options;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('&', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = end + 1;
    const std::size_t equal = std::min(item.find('='), item.size());
    const std::string key = item.substr(0, equal);
    const std::string value = equal < item.size() ? item.substr(equal + 1) : "";
    const std::uint64_t number = std::strtoull(value.c_str(), nullptr, 10);
    if (key == "over") {
      over = value;
    } else if (key == "seed") {
      self->seed = number;
    } else if (key == "delay") {
      self->delay = number;
    } else if (key == "drop") {
      self->drop = number;
    } else if (key == "duplicate") {
      self->duplicate = number;
    } else {
      return fail(MARROW_NETWORK_INVALID, "network unordered has no option '" + key +
                                              "'; it has over, seed, delay, drop, duplicate");
    }
  }
  self->below = services->find ? services->find(services->user, over.c_str()) : nullptr;
  if (!self->below)
    return fail(MARROW_NETWORK_UNSUPPORTED, "there is no network '" + over + "' to wrap");
  const int made = self->below->init(services, "", &self->instance);
  if (made < 0) return below_error(*self->below, made);
  *instance = self.release();
  return MARROW_NETWORK_OK;
}

void finalize(void* instance) {
  std::unique_ptr<Instance> self(static_cast<Instance*>(instance));
  self->below->finalize(self->instance);
}

int devices(void* instance, std::uint32_t* count) {
  const auto& self = *static_cast<Instance*>(instance);
  const int result = self.below->devices(self.instance, count);
  return result < 0 ? below_error(*self.below, result) : result;
}

int properties(void* instance, std::uint32_t device, marrow_network_properties* out) {
  const auto& self = *static_cast<Instance*>(instance);
  const int result = self.below->properties(self.instance, device, out);
  if (result < 0) return below_error(*self.below, result);
  if (out->immediate_bytes < 4)
    return fail(MARROW_NETWORK_UNSUPPORTED, "the network below carries no 4-byte immediate");
  out->ordered = 0;
  out->max_message =
      std::min<std::uint64_t>(out->max_message, 64 * 1024);  // so that puts come in pieces
  return MARROW_NETWORK_OK;
}

int listen(void* instance, std::uint32_t device, std::uint32_t rank, std::uint32_t nranks,
           const marrow_network_events* events, void** endpoint, marrow_network_address* address) {
  const auto& self = *static_cast<Instance*>(instance);
  auto made = std::make_unique<Endpoint>();
  made->made_by = &self;
  made->below = self.below;
  made->events = *events;
  made->random.seed(self.seed * 1000003 + rank);
  const marrow_network_events ours = {
      made.get(),
      [](void* user, std::uint32_t peer, const void* data, std::uint32_t bytes) {
        Arrival a{peer, bytes, 0, {}};
        std::memcpy(a.data, data, bytes);
        as_endpoint(user).arrive(a);
      },
      [](void* user, std::uint32_t peer, std::uint32_t immediate) {
        as_endpoint(user).arrive({peer, 0, immediate, {}});
      },
      [](void* user, std::uint32_t peer, const char* why) {
        as_endpoint(user).down.push_back({peer, why});
      }};
  const int result =
      self.below->listen(self.instance, device, rank, nranks, &ours, &made->endpoint, address);
  if (result < 0) return below_error(*self.below, result);
  *endpoint = made.release();
  return result;
}

int connect(void* endpoint, const marrow_network_address* addresses, std::uint64_t timeout_ns) {
  Endpoint& e = as_endpoint(endpoint);
  const int result = e.below->connect(e.endpoint, addresses, timeout_ns);
  return result < 0 ? below_error(*e.below, result) : result;
}

void close(void* endpoint) {
  std::unique_ptr<Endpoint> e(&as_endpoint(endpoint));
  e->below->close(e->endpoint);
}

int register_memory(void* endpoint, const marrow_network_memory* memory, void** region, void* key,
                    std::uint32_t* key_bytes) {
  Endpoint& e = as_endpoint(endpoint);
  const int result = e.below->register_memory(e.endpoint, memory, region, key, key_bytes);
  return result < 0 ? below_error(*e.below, result) : result;
}
int deregister_memory(void* endpoint, void* region) {
  Endpoint& e = as_endpoint(endpoint);
  return e.below->deregister_memory(e.endpoint, region);
}
int import_key(void* endpoint, std::uint32_t peer, const void* key, std::uint32_t key_bytes,
               void** remote) {
  Endpoint& e = as_endpoint(endpoint);
  const int result = e.below->import_key(e.endpoint, peer, key, key_bytes, remote);
  return result < 0 ? below_error(*e.below, result) : result;
}
int release_key(void* endpoint, void* remote) {
  Endpoint& e = as_endpoint(endpoint);
  return e.below->release_key(e.endpoint, remote);
}

int post(void* endpoint, const marrow_network_operation* operations, std::uint32_t n) {
  Endpoint& e = as_endpoint(endpoint);
  const auto now = Clock::now();
  std::uint32_t i = 0;
  for (; i < n && e.held.size() < 65536; ++i) e.held.add(e.soon(now), {operations[i], false});
  return static_cast<int>(i);
}

int progress(void* endpoint) {
  Endpoint& e = as_endpoint(endpoint);
  const int moved = e.below->progress(e.endpoint);
  if (moved < 0) return below_error(*e.below, moved);
  const auto now = Clock::now();
  const int started = e.start_due(now);
  if (started < 0) return below_error(*e.below, started);
  marrow_network_completion done[64];
  for (int n; (n = e.below->test(e.endpoint, done, 64)) > 0;) {
    // The report of some is lost: the operation was done, and is said to be done only after a retry.
    for (int i = 0; i < n; ++i)
      e.done.add(e.one_in(e.made_by->drop) ? e.soon(now, 10) : now, done[i]);
  }
  int called = 0;
  for (; e.arrived.due(now); ++called) {
    const Arrival a = e.arrived.front();
    e.arrived.pop();
    if (a.bytes == 0) {
      e.events.immediate(e.events.user, a.peer, a.immediate);
    } else {
      e.events.message(e.events.user, a.peer, a.data, a.bytes);
    }
  }
  if (!e.down.empty() && e.arrived.size() == 0) {
    for (const Down& down : std::exchange(e.down, {}))
      e.events.peer_down(e.events.user, down.peer, down.sentence.c_str());
    ++called;
  }
  return called + started;
}

int test(void* endpoint, marrow_network_completion* completions, std::uint32_t n) {
  Endpoint& e = as_endpoint(endpoint);
  const auto now = Clock::now();
  std::uint32_t i = 0;
  for (; i < n && e.done.due(now); ++i) {
    completions[i] = e.done.front();
    e.done.pop();
  }
  return static_cast<int>(i);
}

int abort(void* endpoint, std::uint32_t peer) {
  Endpoint& e = as_endpoint(endpoint);
  return e.below->abort(e.endpoint, peer);
}

const char* last_error() { return sentence().c_str(); }

constexpr marrow_network kNetwork = {
    MARROW_NETWORK_VERSION,
    sizeof(marrow_network),
    "unordered",
    -1,
    0,
    init,
    finalize,
    devices,
    properties,
    listen,
    connect,
    close,
    register_memory,
    deregister_memory,
    import_key,
    release_key,
    post,
    progress,
    test,
    abort,
    last_error,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const marrow_network* marrow_network_plugin() {
  return &kNetwork;
}
