// SPDX-License-Identifier: Apache-2.0
// Ranks with nothing but the proxy path: a device communicator put together by hand, so that the path
// is tested below core.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "memory/arena.hpp"
#include "proxy/transport.hpp"
#include "thread_ranks.hpp"

namespace marrow::test {

struct ProxyOptions {
  Requirements requirements{
      .contexts = 2, .signals = 16, .counters = 8, .barriers = 2, .packets = 16};
  std::uint64_t window_bytes = 1 << 16;
  std::uint64_t wait_ns = 20'000'000'000;
  base::Parameters parameters;
  std::function<std::unique_ptr<proxy::CopyEngine>()> make_copy_engine;
};

/// One rank: bootstrap, transport, a window (id 1), a sync window (id 2), a local buffer (id 100).
class ProxyRank {
 public:
  ProxyRank(const UniqueId& id, int nranks, int rank, const ProxyOptions& options)
      : options_(options), bootstrap_(id, nranks, rank, bootstrap_options(options)) {
    arena_ = memory::Arena::create(Place::cpu());
    proxy::Hooks hooks;
    hooks.on_error = [this](int peer, const Error& error) {
      std::lock_guard lock(mutex_);
      errors_.emplace_back(peer, error);
    };
    hooks.make_copy_engine = options.make_copy_engine;
    transport_ = proxy::Transport::open(bootstrap_, options.parameters, Place::cpu(), hooks);
    const Requirements& r = options.requirements;
    DeviceCommunicator& c = comm;
    c.abi = kAbiVersion;
    c.bytes = sizeof(c);
    c.rank = rank;
    c.nranks = nranks;
    c.lsa_size = 1;
    c.lsa_first = rank;
    c.contexts = r.contexts;
    c.signals = r.signals;
    c.counters = r.counters;
    c.barriers = r.barriers;
    c.packets = r.packets;
    c.signal_words = r.signals + r.barriers * nranks;
    c.atomic_path = Path::proxy;
    c.feeds = c.connected = 1 << static_cast<int>(Path::proxy);
    c.sharing = r.sharing;
    c.wait_ns = options.wait_ns;
    const std::vector<std::uint8_t> paths(nranks, static_cast<std::uint8_t>(Path::proxy));
    c.path = arena_->upload(std::span<const std::uint8_t>(paths));
    control_ =
        reinterpret_cast<ControlBlock*>(arena_->allocate(sizeof(ControlBlock), Memory::host).host);
    c.control = control_;
    window = make_window(1, options.window_bytes);
    c.sync[2] = make_window(2, static_cast<std::uint64_t>(c.signal_words) * 8 + 16 +
                                   static_cast<std::uint64_t>(r.packets) * 16);
    local_block = arena_->allocate(options.window_bytes, Memory::host);
    transport_->register_region(100, local_block);
    local.abi = kAbiVersion;
    local.id = 100;
    local.bytes = local_block.bytes;
    local.local = local_block.device;
    local.staged = transport_->staged(100);
    c.signal_base = words(c.signal_words);
    c.signal_shadow = words(c.signal_words);
    c.counter_base = words(r.counters);
    const memory::Block counters =
        arena_->allocate(static_cast<std::uint64_t>(r.counters) * 8 + 8, Memory::host);
    c.counter[2] = reinterpret_cast<std::uint64_t*>(counters.device);
    device_ = transport_->create_device(*arena_, r, counters);
    c.proxy = device_->device();
    bootstrap_.barrier();
  }

  ~ProxyRank() {
    if (!closed_) abandon();
  }

  /// Collective, the normal end.
  void close() {
    closed_ = true;
    bootstrap_.barrier();
    device_->stop();
    bootstrap_.barrier();
    device_.reset();
    transport_->deregister(100);
    transport_->deregister(2);
    transport_->deregister(1);
    transport_.reset();
    bootstrap_.close();
  }
  /// Without the others.
  void abandon() {
    closed_ = true;
    device_.reset();
    transport_.reset();
  }

  /// `as_device`: the CPU may not touch it, only kernels and the copy engine.
  WindowHandle make_window(std::uint32_t id, std::uint64_t bytes, bool as_device = false) {
    memory::Block block = arena_->allocate(bytes, Memory::host);
    if (as_device) block.host = nullptr, block.kind = Memory::device;
    transport_->register_window(id, block, id != 2);
    WindowHandle handle;
    handle.abi = kAbiVersion;
    handle.id = id;
    handle.bytes = bytes;
    handle.local = block.device;
    handle.atomic_path = Path::proxy;
    handle.host_memory = !as_device;
    handle.staged = transport_->staged(id);
    return handle;
  }

  template <class... Parameters, class... Args>
  void run(int grid, int block, void (*kernel)(DeviceCommunicator, Parameters...), Args&&... args) {
    launch(Place::cpu(), grid, block, 0, kernel, comm, std::forward<Args>(args)...);
  }

  std::vector<std::pair<int, Error>> errors() {
    std::lock_guard lock(mutex_);
    return errors_;
  }
  bootstrap::Bootstrap& bootstrap() { return bootstrap_; }
  proxy::Transport& transport() { return *transport_; }
  proxy::Device& device() { return *device_; }
  int rank() const { return comm.rank; }
  int nranks() const { return comm.nranks; }

  DeviceCommunicator comm;
  WindowHandle window;
  LocalBufferHandle local;
  memory::Block local_block;

 private:
  static bootstrap::Options bootstrap_options(const ProxyOptions& options) {
    bootstrap::Options result;
    result.parameters = options.parameters;
    return result;
  }
  std::uint64_t* words(std::uint64_t n) {
    return reinterpret_cast<std::uint64_t*>(arena_->allocate(n * 8 + 8, Memory::device).device);
  }

  ProxyOptions options_;
  bootstrap::Bootstrap bootstrap_;
  std::unique_ptr<memory::Arena> arena_;
  std::mutex mutex_;
  std::vector<std::pair<int, Error>> errors_;
  std::unique_ptr<proxy::Transport> transport_;
  std::unique_ptr<proxy::Device> device_;
  ControlBlock* control_ = nullptr;
  bool closed_ = false;
};

/// Runs body(rank) on n thread ranks; rethrows the first failure.
inline void run_proxy_ranks(int n, const std::function<void(ProxyRank&)>& body,
                            const ProxyOptions& options = {}) {
  run_as_threads(n, [&](int r, const UniqueId& id) {
    ProxyRank rank(id, n, r, options);
    body(rank);
    rank.close();
  });
}

}  // namespace marrow::test
