// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// A queue in one thread's hold (ExclusiveQueue): every operation, rings that wrap and run full, indices near the wrap
// of 16 and 32 bits, holders one after the other and with a plain Gin in between, errors, a peer that is masked
// meanwhile. In builds with MARROW_CHECKED the short way is closed; there the holder finds out who posts beside it.
#include <atomic>

#include "gda_support.hpp"

namespace marrow {
namespace {

using namespace gda_test;  // NOLINT: the helpers of this test

struct Result {
  Status status[20] = {};
  std::uint64_t value[8] = {};
};

// --- kernels --------------------------------------------------------------------------------------

MARROW_KERNEL all_operations(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle target,
                             Result* out) {
  const Gin<Path::gda> gin(comm, 0);
  auto queue = gin.exclusive((comm.rank + 1) % comm.nranks);
  struct Three {
    std::uint64_t a, b, c;
  };
  Status* s = out->status;
  s[0] = queue.put_value(window, 0, std::uint8_t{0x5a});
  s[1] = queue.put_value(window, 8, Three{1, 2, 3}, SignalAdd{0, 1});
  s[2] = gin.wait_signal(0, 1);
  out->value[0] = load_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(window.local) + 3);
  s[3] = queue.get(window, 0, target, 0, 32);
  s[4] = queue.flush();
  out->value[1] = reinterpret_cast<std::uint64_t*>(target.local)[2];
  s[5] = queue.add(window, 1024, 40);
  s[6] = queue.fetch_add(window, 1024, 2, &out->value[2]);
  s[7] = queue.compare_swap(window, 1024, 42, 7, &out->value[3]);
  s[8] = queue.signal(SignalAt{window, 2048, 5});
  s[9] = queue.send_packet(3, 0x123456789abcdef0ull, 77);
  s[10] = gin.receive_packet(3, 77, &out->value[4]);
  s[11] = queue.put(window, 4096, target, 0, 32, CounterInc{2});
  s[12] = queue.put(window, 4096, target, 0, 0, CounterInc{2});
  s[12] = worse(s[12], gin.wait_counter(2, 2));
  s[13] = queue.put(window, 4096, target, 0, 32);
  s[14] = queue.put(window, 4096, target, 0, 0);  // nothing to do
  s[15] = queue.put(window, 4096, target, 0, 0, SignalAdd{1, 1});
  Request request;
  s[16] = queue.flush_async(&request);
  s[17] = queue.wait(request);
  s[17] = worse(s[17], queue.test(request));
  s[18] = queue.signal(SignalAdd{1, 1});
  s[19] = queue.flush_remote();
  s[19] = worse(s[19], gin.wait_signal(1, 2));
  out->value[5] = gin.read_counter(2);
}

/// Word i of the window gets word i of the source, a few times over, with and without signals and doorbells.
MARROW_KERNEL wraps(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                    int words, std::uint64_t round, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  auto queue = gin.exclusive((comm.rank + 1) % comm.nranks);
  Status worst = Status::ok;
  for (int i = 0; i < words; ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(i) * 8;
    const Doorbell bell = i % 3 == 1 ? Doorbell::deferred : Doorbell::now;
    worst = worse(worst, queue.put(window, at, source, at, 8, bell));
    if (i % 4 == 2)
      worst = worse(worst, queue.put(window, at, source, at, 8, SignalAdd{1, 1}, bell));
    if (i % 16 == 5) worst = worse(worst, queue.add(window, window.bytes - 8, 1, bell));
    if (i % 50 == 11) worst = worse(worst, queue.flush());
  }
  worst = worse(worst, queue.signal(SignalAdd{2, 1}));
  worst = worse(worst, queue.flush());
  *out = worse(worst, gin.wait_signal(2, round));
}

/// Holders that follow each other, a plain Gin between two of them and, told by reload, within one.
MARROW_KERNEL one_after_the_other(DeviceCommunicator comm, WindowHandle window,
                                  LocalBufferHandle source, int rounds, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  Status worst = Status::ok;
  std::uint64_t at = 0;
  const auto put = [&](auto& by, const auto&... options) {
    at += 8;
    worst = worse(worst, by.put(window, at, source, at, 8, options...));
  };
  for (int i = 0; i < rounds; ++i) {
    auto first = gin.exclusive(peer);
    for (int k = 0; k < 5; ++k) put(first);
    auto second = Gin<Path::gda>(comm, 0).exclusive(peer);
    for (int k = 0; k < 3; ++k) put(second, Doorbell::deferred);
    at += 8;
    worst = worse(worst, gin.put(peer, window, at, source, at, 8));
    first.reload();
    put(first, SignalAdd{3, 1});
    // Another peer's queue is another matter.
    worst = worse(worst, gin.put(comm.rank, window, window.bytes - 64, source, 0, 8));
    put(first);
  }
  auto last = gin.exclusive(peer);
  worst = worse(worst, last.signal(SignalAdd{4, 1}));
  worst = worse(worst, gin.flush());
  *out = worse(worst, gin.wait_signal(4, 1));
}

#if defined(MARROW_CHECKED)
MARROW_KERNEL behind_its_back(DeviceCommunicator comm, WindowHandle window,
                              LocalBufferHandle source, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  auto queue = gin.exclusive(peer);
  out[0] = queue.put(window, 0, source, 0, 8);
  out[1] = gin.put(peer, window, 8, source, 8, 8);
  out[2] = queue.put(window, 16, source, 16, 8);
  queue.reload();
  out[3] = queue.put(window, 24, source, 24, 8);
  out[4] = gin.flush();
}
#endif

MARROW_KERNEL refused(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                      Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  auto nobody = gin.exclusive(comm.nranks);
  out[0] = nobody.put(window, 0, source, 0, 8);
  out[1] = Gin<Path::gda>(comm, 99).exclusive(peer).put(window, 0, source, 0, 8);
  auto queue = gin.exclusive(peer);
  WindowHandle foreign = window;
  foreign.abi = 0;
  out[2] = queue.put(foreign, 0, source, 0, 8);
  out[3] = queue.put(window, 0, source, 0, 8, SignalAdd{1000, 1});
  out[4] = queue.put(window, 0, source, 0, 8, SignalAdd{1, 1});
  out[5] = queue.flush();
}

/// Two good puts, one with a bad key, three good ones.
MARROW_KERNEL put_wrong(DeviceCommunicator comm, WindowHandle window, WindowHandle wrong,
                        LocalBufferHandle source, Status* out) {
  if (comm.rank != 0) return;
  auto queue = Gin<Path::gda>(comm, 0).exclusive(1);
  out[0] = Status::ok;
  for (int i = 0; i < 6; ++i)
    out[0] = worse(out[0], queue.put(i == 2 ? wrong : window, 0, source, 0, 8));
  out[1] = queue.flush();
  out[2] = queue.flush();
}

/// Puts until one does not fit.
MARROW_KERNEL fill_ring(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                        Status* out, std::uint64_t* count) {
  if (comm.rank != 0) return;
  auto queue = Gin<Path::gda>(comm, 0).exclusive(1);
  while (*count < 10000) {
    out[0] = queue.put(window, 0, source, 0, 8, SignalAdd{0, 1}, Deadline{20'000'000});
    if (out[0] != Status::ok) break;
    ++*count;
  }
  out[1] = queue.flush();  // takes as long as the stall
  out[2] = queue.put(window, 0, source, 0, 8, SignalAdd{0, 1});
  out[3] = queue.flush();
}

/// Puts until told otherwise, for 10 s at most.
MARROW_KERNEL put_on_and_on(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                            Status* out) {
  auto queue = Gin<Path::gda>(comm, 0).exclusive((comm.rank + 1) % comm.nranks);
  const std::uint64_t start = now_ns();
  *out = Status::ok;
  while (*out == Status::ok && now_ns() - start < 10'000'000'000)
    *out = queue.put(window, 0, source, 0, 8);
}

// --- tests ----------------------------------------------------------------------------------------

class GdaExclusive : public QueueTest {};

TEST_P(GdaExclusive, EachOperationDoesWhatItSays) {
  run_ranks(setting(2), [](Rank& rank) {
    Result out;
    launch(Place::cpu(), 1, 1, 0, all_operations, rank.comm(), rank.window(), rank.local(4096),
           &out);
    for (int i = 0; i < 20; ++i)
      EXPECT_EQ(out.status[i], Status::ok) << i << " " << name(out.status[i]);
    EXPECT_EQ(out.value[0], 3u);
    EXPECT_EQ(out.value[1], 2u);
    EXPECT_EQ(out.value[2], 40u);
    EXPECT_EQ(out.value[3], 42u);
    EXPECT_EQ(out.value[4], 0x123456789abcdef0ull);
    EXPECT_EQ(out.value[5], 2u);
    rank.barrier();
    EXPECT_EQ(rank.words()[128], 7u);
    EXPECT_EQ(rank.words()[256], 5u);
    EXPECT_EQ(rank.words()[512 + 2], 2u);
  });
}

TEST_P(GdaExclusive, WrapsAndRunsFullInOneKernelAfterAnother) {
  static constexpr int kWords = 1500;
  run_ranks(setting(2), [](Rank& rank) {
    const LocalBufferHandle source = rank.local(kWords * 8);
    auto* words = reinterpret_cast<std::uint64_t*>(source.local);
    for (std::uint64_t round = 1; round <= 2; ++round) {
      for (int i = 0; i < kWords; ++i)
        words[i] = round * 1000003 + static_cast<std::uint64_t>(i + rank.rank());
      Status out = Status::invalid;
      launch(Place::cpu(), 1, 1, 0, wraps, rank.comm(), rank.window(), source, kWords, round, &out);
      EXPECT_EQ(out, Status::ok) << name(out);
      rank.barrier();
      int wrong = 0;
      for (int i = 0; i < kWords; ++i)
        wrong +=
            rank.words()[i] != round * 1000003 + static_cast<std::uint64_t>(i + 1 - rank.rank());
      EXPECT_EQ(wrong, 0);
      EXPECT_EQ(rank.words()[rank.window().bytes / 8 - 1], round * ((kWords + 10) / 16));
      EXPECT_EQ(rank.signals()[1], round * ((kWords + 1) / 4));
      rank.barrier();
    }
  });
}

TEST_P(GdaExclusive, HoldersOneAfterTheOther) {
  static constexpr int kRounds = 40;
  run_ranks(setting(2), [](Rank& rank) {
    const LocalBufferHandle source = rank.local(8 + kRounds * 11 * 8);
    auto* words = reinterpret_cast<std::uint64_t*>(source.local);
    for (std::uint64_t i = 0; i <= kRounds * 11; ++i) words[i] = i * 7 + 1;
    Status out = Status::invalid;
    launch(Place::cpu(), 1, 1, 0, one_after_the_other, rank.comm(), rank.window(), source, kRounds,
           &out);
    EXPECT_EQ(out, Status::ok) << name(out);
    rank.barrier();
    int wrong = 0;
    for (std::uint64_t i = 1; i <= kRounds * 11; ++i) wrong += rank.words()[i] != i * 7 + 1;
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(rank.signals()[3], kRounds);
  });
}

TEST_P(GdaExclusive, WhatMayNotBeIsRefused) {
  run_ranks(setting(2), [](Rank& rank) {
    Status out[6];
    launch(Place::cpu(), 1, 1, 0, refused, rank.comm(), rank.window(), rank.local(64), out);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(out[i], Status::invalid) << i << " " << name(out[i]);
    EXPECT_EQ(out[4], Status::ok);
    EXPECT_EQ(out[5], Status::ok);
    rank.barrier();
    EXPECT_EQ(rank.signals()[1], 1u);
  });
}

TEST_P(GdaExclusive, ABadKeyIsInvalidAtTheFlush) {
  run_ranks(setting(2), [](Rank& rank) {
    WindowHandle wrong = rank.window();
    const std::uint32_t keys[2] = {mlx5::to_big32(0x123400), mlx5::to_big32(0x123400)};
    wrong.gda_rkey = keys;
    Status out[3] = {};
    launch(Place::cpu(), 1, 1, 0, put_wrong, rank.comm(), rank.window(), wrong, rank.local(64),
           out);
    if (rank.rank() == 0) {
      EXPECT_EQ(out[0], Status::ok);
      // A collapsed completion queue may have lost the syndrome.
      EXPECT_GT(worse(out[1], out[2]), Status::timeout) << name(out[1]) << name(out[2]);
      if (!GetParam().collapsed) {
        EXPECT_EQ(out[1], Status::invalid) << name(out[1]);
      }
    }
  });
}

TEST_P(GdaExclusive, TimeoutMeansNothingWasPosted) {
  Setting s = setting(2);
  s.faults = "stall=5:400";
  s.depth = 32;
  run_ranks(s, [](Rank& rank) {
    Status out[4] = {};
    std::uint64_t count = 0;
    launch(Place::cpu(), 1, 1, 0, fill_ring, rank.comm(), rank.window(), rank.local(64), out,
           &count);
    if (rank.rank() == 0) {
      EXPECT_EQ(out[0], Status::timeout) << name(out[0]);
      EXPECT_GE(count, 16u);
      EXPECT_LE(count, 20u);
      for (int i = 1; i < 4; ++i) EXPECT_EQ(out[i], Status::ok) << i << " " << name(out[i]);
      rank.count = count + 1;
    }
    rank.barrier();
    const auto counts = rank.bootstrap().allgather(std::as_bytes(std::span(&rank.count, 1)));
    std::uint64_t posted = 0;
    std::memcpy(&posted, counts[0].data(), 8);
    if (rank.rank() == 1) {
      EXPECT_EQ(rank.signals()[0], posted);
    }
  });
}

TEST_P(GdaExclusive, AMaskedPeerStopsItsPuts) {
  run_ranks(setting(2), [](Rank& rank) {
    std::thread host([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      auto& path = const_cast<std::uint8_t&>(rank.comm().path[1 - rank.rank()]);
      std::atomic_ref<std::uint8_t>{path} = kPathFailed;
    });
    Status status = Status::invalid;
    launch(Place::cpu(), 1, 1, 0, put_on_and_on, rank.comm(), rank.window(), rank.local(64),
           &status);
    host.join();
    EXPECT_EQ(status, Status::peer_failed) << name(status);
  });
}

#if defined(MARROW_CHECKED)
TEST_P(GdaExclusive, ACheckedBuildFindsOutWhoPostsBesideIt) {
  run_ranks(setting(2), [](Rank& rank) {
    Status out[5] = {};
    launch(Place::cpu(), 1, 1, 0, behind_its_back, rank.comm(), rank.window(), rank.local(64), out);
    const bool thread = GetParam().sharing == Sharing::thread;
    EXPECT_EQ(out[2], thread ? Status::invalid : Status::ok) << name(out[2]);
    for (const int i : {0, 1, 3, 4}) EXPECT_EQ(out[i], Status::ok) << i << " " << name(out[i]);
    const ControlBlock& control = *rank.comm().control;
    EXPECT_EQ(control.reports, thread ? 1u : 0u);
    if (thread) {
      EXPECT_EQ(control.report[0].what, static_cast<std::uint32_t>(CheckedWhat::held_queue));
    }
  });
}
#endif

INSTANTIATE_TEST_SUITE_P(
    Queues, GdaExclusive,
    ::testing::Values(QueueKind{"ring", Sharing::thread, false, 1024, 0},
                      QueueKind{"small_ring", Sharing::thread, false, 32, 65500},
                      QueueKind{"small_ring_device_scope", Sharing::thread, false, 32, 0xfffffff0,
                                true},
                      QueueKind{"collapsed", Sharing::thread, true, 64, 0},
                      QueueKind{"collapsed_device_scope", Sharing::thread, true, 32, 65500, true},
                      QueueKind{"block_shared", Sharing::block, false, 64, 0},
                      QueueKind{"device_shared", Sharing::device, false, 64, 0, true}),
    kind_name);

}  // namespace
}  // namespace marrow
