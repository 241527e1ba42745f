// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// What the engine makes of networks that behave badly, or slowly: a peer given up inside post(), windows that close
// while operations on them wait to be posted.
#include <gmock/gmock.h>

#include <atomic>
#include <set>
#include <thread>

#include "proxy/message.hpp"
#include "unit/proxy_support.hpp"
#include "unit/scripted_network.hpp"

namespace marrow::test {
namespace {

using ::testing::HasSubstr;

ProxyOptions scripted() {
  ProxyOptions options;
  options.parameters.set("MARROW_NETWORK", "scripted");
  return options;
}

// --- the contract of post() -------------------------------------------------------------------------

MARROW_KERNEL put_to_both(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                          Status* out) {
  Gin gin(comm, 0);
  for (int i = 0; i < 8; ++i) {
    (void)gin.put(1, window, 64, local, 0, 64);
    (void)gin.put_value(1, window, 8, 5, SignalAdd{0, 1});
  }
  out[0] = gin.flush(1);
  (void)gin.put(2, window, 64, local, 0, 64);
  (void)gin.put_value(2, window, 8, 5, SignalAdd{0, 1});
  out[1] = gin.flush(2);
}

/// The network says inside post() that rank 1 is down, and takes `took` of what it was given.
void give_up_inside_post(std::uint32_t took) {
  std::atomic<bool> said{false};
  Script::begin().post = [&](void* endpoint, const Script::End& end,
                             const marrow_network_operation* operations, std::uint32_t n) {
    if (end.rank != 0 || operations->peer != 1) {
      return below_script().post(endpoint, operations, n);
    }
    below_script().abort(endpoint, 1);
    if (said.exchange(true)) return below_script().post(endpoint, operations, n);
    end.events.peer_down(end.events.user, 1, "rank 1 is unreachable");
    const std::uint32_t taken = std::min(took, n);
    return taken == 0 ? 0 : below_script().post(endpoint, operations, taken);
  };
  run_proxy_ranks(
      3,
      [&](ProxyRank& rank) {
        if (rank.rank() == 0) {
          Status status[2] = {Status::ok, Status::invalid};
          rank.run(1, 1, put_to_both, rank.window, rank.local, status);
          EXPECT_EQ(status[0], Status::peer_failed);
          EXPECT_EQ(status[1], Status::ok);
          const auto errors = rank.errors();
          ASSERT_FALSE(errors.empty());
          EXPECT_EQ(errors[0].first, 1);
          EXPECT_THAT(errors[0].second.sentence(), HasSubstr("rank 1 is unreachable"));
        }
        rank.bootstrap().barrier();
      },
      scripted());
}

TEST(ProxyEngine, APeerGivenUpInsidePostHarmsNobody) {
  for (const std::uint32_t took : {0u, 1u, 3u, ~0u}) give_up_inside_post(took);
}

// --- windows that close -----------------------------------------------------------------------------

MARROW_KERNEL post_one(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                       int kind) {
  Gin gin(comm, 0);
  switch (kind) {
    case 0: (void)gin.put(1, window, 64, local, 0, 64); return;
    case 1: (void)gin.put_value(1, window, 8, 5); return;
    case 2: (void)gin.put(1, window, 64, local, 0, 64, SignalAdd{0, 1}); return;
    case 3: (void)gin.put_value(1, window, 8, 5, SignalAdd{0, 1}); return;
    case 4: (void)gin.get(1, window, 64, local, 0, 64); return;
  }
}

/// Rank 0's operation waits to be posted (its peer is being connected) when the window it names is closed.
void close_under_way(int kind) {
  std::atomic<bool> hold{true};
  std::atomic<int> waiting{0}, too_late{0};
  std::mutex mutex;
  std::set<void*> released;
  Script& script = Script::begin();
  script.post = [&](void* endpoint, const Script::End& end,
                    const marrow_network_operation* operations, std::uint32_t n) {
    if (end.rank == 0 && operations->peer == 1 && hold) {
      waiting = static_cast<int>(n);
      return 0;
    }
    {
      std::lock_guard lock(mutex);
      for (std::uint32_t i = 0; i < n; ++i) too_late += released.count(operations[i].remote) != 0;
    }
    return too_late ? static_cast<int>(n) : below_script().post(endpoint, operations, n);
  };
  script.release_key = [&](void* remote) {
    std::lock_guard lock(mutex);
    released.insert(remote);
  };
  run_proxy_ranks(
      2,
      [&](ProxyRank& rank) {
        const WindowHandle window = rank.make_window(10, 4096);
        if (rank.rank() == 0) {
          {
            std::lock_guard lock(mutex);
            released.clear();  // addresses of earlier ones are used again
          }
          rank.run(1, 1, post_one, window, rank.local, kind);
          const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
          while (waiting == 0 && std::chrono::steady_clock::now() < late) std::this_thread::yield();
          EXPECT_GT(waiting, 0);
          std::thread connected([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            hold = false;
          });
          rank.transport().deregister(10);
          EXPECT_FALSE(hold) << "the window was given up before what names it was posted";
          connected.join();
        }
        rank.bootstrap().barrier();
        if (rank.rank() == 1) rank.transport().deregister(10);
        EXPECT_EQ(too_late, 0) << "posted with the handle of a closed window";
      },
      scripted());
}

TEST(ProxyEngine, AWindowStaysWhileOperationsOnItWaitToBePosted) {
  for (int kind = 0; kind < 5; ++kind) {
    SCOPED_TRACE(kind);
    close_under_way(kind);
  }
}

// --- peers that are wrong, or gone -------------------------------------------------------------------

MARROW_KERNEL signal_and_flush(DeviceCommunicator comm, WindowHandle window, Status* out) {
  Gin gin(comm, 0);
  *out = worse(gin.put_value(1, window, 8, 5, SignalAdd{0, 1}), gin.flush(1));
}
MARROW_KERNEL await_signal(DeviceCommunicator comm, std::uint64_t count, Status* out) {
  Gin gin(comm, 0);
  *out = gin.wait_signal(0, count);
}

TEST(ProxyEngine, MessagesThatNoRankOfThisVersionSendsAreReportedAndHarmNobody) {
  std::atomic<bool> sent{false};
  Script& script = Script::begin();
  script.message = [&](std::uint32_t rank, const void*, std::uint32_t) {
    if (rank != 1 || sent.exchange(true)) return;
    Script::End end;
    {
      std::lock_guard lock(script.mutex);
      for (const auto& each : script.ends)
        if (each.second.rank == 1) end = each.second;
    }
    end.events.message(end.events.user, 0, "abc", 3);
    for (const proxy::MessageKind kind : {proxy::MessageKind::add, proxy::MessageKind::fetch_add,
                                          proxy::MessageKind::staged_put, proxy::MessageKind{99}}) {
      proxy::Message message{};
      message.kind = kind;
      message.window = 77;
      message.offset = 8;
      end.events.message(end.events.user, 0, &message, sizeof message);
    }
  };
  run_proxy_ranks(
      2,
      [&](ProxyRank& rank) {
        Status status = Status::invalid;
        if (rank.rank() == 0) {
          rank.run(1, 1, signal_and_flush, rank.window, &status);
        } else {
          rank.run(1, 1, await_signal, 1, &status);
          std::string said;
          for (const auto& [peer, error] : rank.errors()) {
            EXPECT_EQ(peer, 0);
            EXPECT_EQ(error.code(), Code::network);
            said += error.what() + std::string("\n");
          }
          EXPECT_THAT(said, HasSubstr("rank 0 sent a message of 3 bytes"));
          EXPECT_THAT(said, HasSubstr("rank 0 sent an add to offset 8 of window 77"));
        }
        EXPECT_EQ(status, Status::ok) << name(status);
        rank.bootstrap().barrier();
      },
      scripted());
  EXPECT_TRUE(sent);
}

MARROW_KERNEL signals_and_adds(DeviceCommunicator comm, WindowHandle window,
                               LocalBufferHandle local) {
  Gin gin(comm, 0);
  for (int i = 0; i < 4; ++i) {
    (void)gin.put(1, window, 64, local, 0, 64, SignalAdd{0, 1});
    (void)gin.put_value(1, window, 8, 5, SignalAdd{0, 1});
    (void)gin.add(1, window, 16, 1);
  }
}

/// Its sequences were given to operations that were never posted; who takes its streams next is not held up.
TEST(ProxyEngine, ADeviceCommunicatorClosedBeforeItsOperationsArePostedHoldsUpNoLaterOne) {
  for (const bool ordered : {true, false}) {
    SCOPED_TRACE(ordered ? "ordered" : "unordered");
    std::atomic<bool> hold{false};
    std::atomic<int> waiting{0};
    Script& script = Script::begin();
    script.properties = [ordered](marrow_network_properties& p) { p.ordered = ordered ? 1 : 0; };
    script.post = [&](void* endpoint, const Script::End& end,
                      const marrow_network_operation* operations, std::uint32_t n) {
      if (end.rank == 0 && operations->peer == 1 && hold) {
        waiting = static_cast<int>(n);
        return 0;
      }
      return below_script().post(endpoint, operations, n);
    };
    ProxyOptions options = scripted();
    options.wait_ns = 5'000'000'000;
    run_proxy_ranks(
        2,
        [&](ProxyRank& rank) {
          const auto arena = memory::Arena::create(Place::cpu());
          const memory::Block counters = arena->allocate(128, Memory::host);
          const auto make = [&] {
            return rank.transport().create_device(*arena, options.requirements, counters);
          };
          auto device = make();
          DeviceCommunicator second = rank.comm;
          second.proxy = device->device();
          rank.bootstrap().barrier();
          if (rank.rank() == 0) {
            hold = true;
            launch(Place::cpu(), 1, 1, 0, signals_and_adds, second, rank.window, rank.local);
            const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
            while (waiting == 0 && std::chrono::steady_clock::now() < late)
              std::this_thread::yield();
            EXPECT_GT(waiting, 0);
          }
          // The peer is connected again when its operations have been dropped.
          std::thread connected([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            if (rank.rank() == 0) hold = false;
          });
          const auto start = std::chrono::steady_clock::now();
          device->stop();
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
          connected.join();
          device = make();
          second.proxy = device->device();
          rank.bootstrap().barrier();
          Status status = Status::invalid;
          if (rank.rank() == 0) {
            launch(Place::cpu(), 1, 1, 0, signal_and_flush, second, rank.window, &status);
          } else {
            launch(Place::cpu(), 1, 1, 0, await_signal, second, std::uint64_t{1}, &status);
          }
          EXPECT_EQ(status, Status::ok) << name(status);
          rank.bootstrap().barrier();
          EXPECT_TRUE(rank.errors().empty());
          device->stop();
        },
        options);
  }
}

// --- sequences --------------------------------------------------------------------------------------

#if !defined(__SANITIZE_THREAD__)  // a million and a half of operations

MARROW_KERNEL put_many_pieces(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                              int puts, std::uint64_t bytes) {
  Gin gin(comm, 0);
  for (int i = 0; i < puts; ++i) (void)gin.put(1, window, 0, local, 0, bytes, SignalAdd{3, 1});
}
MARROW_KERNEL put_elsewhere(DeviceCommunicator comm, WindowHandle window, Status* out) {
  Gin gin(comm, 1);
  for (int i = 0; i < 100 && *out == Status::ok; ++i)
    *out = worse(gin.put_value(2, window, 8, i, SignalAdd{4, 1}), gin.flush(2));
}
MARROW_KERNEL flush_one(DeviceCommunicator comm, Status* out) {
  Gin gin(comm, 0);
  *out = gin.flush(1);
}
MARROW_KERNEL await_puts(DeviceCommunicator comm, int puts, Status* out) {
  Gin gin(comm, 0);
  *out = gin.wait_signal(3, static_cast<std::uint64_t>(puts));
}

TEST(ProxyEngine, OneStreamStaysWithinItsSequencesAndHoldsUpNoOther) {
  constexpr int kPuts = 3;
  constexpr std::uint64_t kBytes = proxy::kMaxUnseen / 2;  // one byte a piece
  std::atomic<bool> hold{true};
  std::atomic<std::uint32_t> most{0};
  Script& script = Script::begin();
  script.properties = [](marrow_network_properties& p) {
    p.ordered = 0;
    p.max_message = 1;
  };
  script.post = [&](void* endpoint, const Script::End& end,
                    const marrow_network_operation* operations, std::uint32_t n) {
    if (end.rank == 0 && operations->peer == 1 && hold) {
      if (n > most) most = n;
      return 0;
    }
    return below_script().post(endpoint, operations, n);
  };
  ProxyOptions options = scripted();
  options.window_bytes = kBytes;
  run_proxy_ranks(
      3,
      [&](ProxyRank& rank) {
        if (rank.rank() == 0) {
          for (std::uint64_t i = 0; i < kBytes; ++i)
            rank.local_block.host[i] = static_cast<std::byte>(i * 7 + i / 256);
          rank.run(1, 1, put_many_pieces, rank.window, rank.local, kPuts, kBytes);
          const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (most < kBytes && std::chrono::steady_clock::now() < late)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          Status status = Status::ok;
          rank.run(1, 1, put_elsewhere, rank.window, &status);
          EXPECT_EQ(status, Status::ok) << "held up by another stream";
          EXPECT_GE(most, kBytes);
          EXPECT_LE(most, proxy::kMaxUnseen) << "an immediate cannot tell so many apart";
          hold = false;
          rank.run(1, 1, flush_one, &status);
          EXPECT_EQ(status, Status::ok);
        }
        if (rank.rank() == 1) {
          Status status = Status::invalid;
          rank.run(1, 1, await_puts, kPuts, &status);
          EXPECT_EQ(status, Status::ok);
          std::uint64_t wrong = 0;
          for (std::uint64_t i = 0; i < kBytes; ++i)
            wrong += rank.window.local[i] != static_cast<std::byte>(i * 7 + i / 256);
          EXPECT_EQ(wrong, 0u);
        }
        rank.bootstrap().barrier();
        EXPECT_TRUE(rank.errors().empty());
      },
      options);
}

#endif

}  // namespace
}  // namespace marrow::test
