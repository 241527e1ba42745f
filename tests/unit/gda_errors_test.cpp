// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// What goes wrong on the gda path arrives as the documented status at the waiting thread and as a
// sentence at the host; nothing hangs, and "timeout" from a put means that nothing was posted.
#include <atomic>
#include <filesystem>
#include <fstream>

#include "gda_support.hpp"

namespace marrow {
namespace {

using namespace gda_test;

struct Outcome {
  Status posted = Status::ok;
  Status flushed = Status::ok;
  Status other = Status::ok;
  std::uint64_t count = 0;
};

/// Two good puts, one as told, three good ones, then a flush.
MARROW_KERNEL put_wrong(DeviceCommunicator comm, WindowHandle window, WindowHandle wrong,
                        LocalBufferHandle source, std::uint64_t offset, std::uint64_t bytes,
                        Outcome* out) {
  if (comm.rank != 0) return;
  const Gin<Path::gda> gin(comm, 0);
  for (int i = 0; i < 6; ++i) {
    const Status s =
        i == 2 ? gin.put(1, wrong, offset, source, 0, bytes) : gin.put(1, window, 0, source, 0, 8);
    out->posted = worse(out->posted, s);
  }
  out->flushed = gin.flush(Index(1));
  if (comm.nranks > 2) out->other = worse(gin.put(2, window, 0, window, 0, 8), gin.flush(Index(2)));
}

MARROW_KERNEL add_misaligned(DeviceCommunicator comm, WindowHandle window, Outcome* out) {
  if (comm.rank != 0) return;
  // Below Gin, whose checked form refuses it before the NIC does.
  const detail::Then then{&window, 4, 1, false};
  out->posted = detail::PathGda::add(comm, {0, comm.sharing}, 1, then, detail::Knobs{});
  out->flushed = Gin<Path::gda>(comm, 0).flush();
}

MARROW_KERNEL fetch_wrong(DeviceCommunicator comm, WindowHandle window, Outcome* out) {
  if (comm.rank != 0) return;
  std::uint64_t old = 0;
  const detail::FetchOp op{window, window.bytes, false, 1, 0};
  out->posted = detail::PathGda::fetch(comm, {0, comm.sharing}, 1, op, &old, detail::Knobs{});
}

/// Puts until one does not fit, with a short deadline.
MARROW_KERNEL fill_ring(DeviceCommunicator comm, WindowHandle window, Outcome* out) {
  if (comm.rank != 0) return;
  const Gin<Path::gda> gin(comm, 0);
  while (out->count < 10000) {
    out->posted = gin.put(1, window, 0, window, 64, 8, SignalAdd{0, 1}, Deadline{20'000'000});
    if (out->posted != Status::ok) break;
    ++out->count;
  }
  std::uint64_t old = 0;
  out->other = gin.fetch_add(1, window, 128, 1, &old, Deadline{5'000'000});
  out->flushed = gin.flush(Deadline{5'000'000});
}
MARROW_KERNEL finish_ring(DeviceCommunicator comm, WindowHandle window, Outcome* out) {
  if (comm.rank != 0) return;
  const Gin<Path::gda> gin(comm, 0);
  out->flushed = gin.flush();
  std::uint64_t old = 0;
  for (int i = 0; i < 40; ++i)
    out->other = worse(out->other, gin.fetch_add(1, window, 136, 1, &old));
  out->count = old;
}

MARROW_KERNEL put_and_flush(DeviceCommunicator comm, WindowHandle window, int peer, bool counted,
                            Outcome* out) {
  const Gin<Path::gda> gin(comm, 0);
  out->posted = counted ? gin.put(peer, window, 0, window, 64, 8, CounterInc{0})
                        : gin.put(peer, window, 0, window, 64, 8);
  out->flushed = gin.flush(Index(peer));
  if (counted) out->other = gin.wait_counter(0, 1, Deadline{1'000'000});
}

struct Mode {
  const char* name;
  Sharing sharing;
  bool collapsed;
};
std::ostream& operator<<(std::ostream& out, const Mode& mode) { return out << mode.name; }

class GdaErrors : public ::testing::TestWithParam<Mode> {
 protected:
  static Setting setting(int ranks = 2, const std::string& faults = "", int depth = 32) {
    Setting s;
    s.ranks = ranks;
    s.sharing = GetParam().sharing;
    s.collapsed = GetParam().collapsed;
    s.first_index = 65533;
    s.depth = depth;
    s.faults = faults;
    return s;
  }
  /// The syndrome is exact on a ring; a collapsed queue promises the queue only.
  static void expect_error(Rank& rank, std::uint8_t syndrome, Code code, int peer = 1) {
    const std::vector<gda::QueueError> errors = rank.queues().errors();
    ASSERT_EQ(errors.size(), 1u);
    EXPECT_EQ(errors[0].peer, peer);
    if (!GetParam().collapsed) {
      EXPECT_EQ(errors[0].syndrome, syndrome) << errors[0].sentence;
      EXPECT_EQ(errors[0].code, code);
      EXPECT_NE(errors[0].sentence.find(mlx5::syndrome_name(syndrome)), std::string::npos)
          << errors[0].sentence;
    }
    EXPECT_NE(errors[0].sentence.find("to rank " + std::to_string(peer)), std::string::npos)
        << errors[0].sentence;
    EXPECT_FALSE(errors[0].next_step.empty());
  }
  static void expect_status(Status seen, Status ring) {
    if (GetParam().collapsed) {
      EXPECT_TRUE(seen == Status::invalid || seen == Status::peer_failed) << name(seen);
    } else {
      EXPECT_EQ(seen, ring) << name(seen);
    }
  }
};

TEST_P(GdaErrors, BadRemoteKey) {
  run_ranks(setting(3), [](Rank& rank) {
    const LocalBufferHandle source = rank.local(4096);
    const std::uint32_t keys[3] = {mlx5::to_big32(0x77700), mlx5::to_big32(0x77700),
                                   mlx5::to_big32(0x77700)};
    WindowHandle wrong = rank.window();
    wrong.gda_rkey = keys;
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, put_wrong, rank.comm(), rank.window(), wrong, source, 0, 64,
           &out);
    if (rank.rank() != 0) return;
    EXPECT_EQ(out.posted, Status::ok);
    expect_status(out.flushed, Status::invalid);
    EXPECT_EQ(out.other, Status::ok);  // another peer's queue works on
    expect_error(rank, mlx5::kRemoteAccessError, Code::network);
    if (!GetParam().collapsed) {
      EXPECT_NE(rank.queues().errors()[0].sentence.find("entry 65535,"), std::string::npos)
          << rank.queues().errors()[0].sentence;
    }
  });
}

TEST_P(GdaErrors, LengthPastTheRegion) {
  run_ranks(setting(), [](Rank& rank) {
    const LocalBufferHandle source = rank.local(4096);
    WindowHandle wide = rank.window();
    wide.bytes += 4096;  // a checked build would refuse it
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, put_wrong, rank.comm(), rank.window(), wide, source,
           rank.window().bytes - 8, 16, &out);
    if (rank.rank() != 0) return;
    expect_status(out.flushed, Status::invalid);
    expect_error(rank, mlx5::kRemoteAccessError, Code::network);
  });
}

TEST_P(GdaErrors, BadSource) {
  run_ranks(setting(), [](Rank& rank) {
    LocalBufferHandle source = rank.local(4096);
    source.gda_local += 1 << 20;
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, put_wrong, rank.comm(), rank.window(), rank.window(), source, 0,
           16, &out);
    if (rank.rank() != 0) return;
    expect_status(out.flushed, Status::invalid);
    expect_error(rank, mlx5::kLocalProtectionError, Code::network);
  });
}

TEST_P(GdaErrors, MisalignedAtomic) {
  run_ranks(setting(), [](Rank& rank) {
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, add_misaligned, rank.comm(), rank.window(), &out);
    if (rank.rank() != 0) return;
    EXPECT_EQ(out.posted, Status::ok);
    expect_status(out.flushed, Status::invalid);
    expect_error(rank, mlx5::kRemoteInvalidRequestError, Code::network);
  });
}

TEST_P(GdaErrors, FetchPastTheRegion) {
  run_ranks(setting(), [](Rank& rank) {
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, fetch_wrong, rank.comm(), rank.window(), &out);
    if (rank.rank() == 0) expect_status(out.posted, Status::invalid);
  });
}

TEST_P(GdaErrors, DroppedPacketIsPeerFailed) {
  run_ranks(setting(2, "drop=3"), [](Rank& rank) {
    const LocalBufferHandle source = rank.local(4096);
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, put_wrong, rank.comm(), rank.window(), rank.window(), source, 0,
           16, &out);
    if (rank.rank() != 0) return;
    expect_status(out.flushed, Status::peer_failed);
    expect_error(rank, mlx5::kTransportRetryExceeded, Code::peer_failed);
  });
}

TEST_P(GdaErrors, PeerThatIsGone) {
  std::atomic<int> gone{0};
  run_ranks(setting(2, "retry=100"), [&](Rank& rank) {
    if (rank.rank() == 1) {
      rank.drop_queues();
      gone = 1;
    }
    rank.barrier();
    if (rank.rank() == 0) {
      Outcome out;
      launch(Place::cpu(), 1, 1, 0, put_and_flush, rank.comm(), rank.window(), 1, false, &out);
      expect_status(out.flushed, Status::peer_failed);
      expect_error(rank, mlx5::kTransportRetryExceeded, Code::peer_failed);
      rank.queues().mask_peer(1);
      EXPECT_TRUE(rank.queues().errors().empty());
      Outcome self;
      launch(Place::cpu(), 1, 1, 0, put_and_flush, rank.comm(), rank.window(), 0, true, &self);
      EXPECT_EQ(worse(self.posted, worse(self.flushed, self.other)), Status::ok);
    }
    rank.barrier();
  });
}

TEST_P(GdaErrors, CounterOfAFailedOperationDoesNotCount) {
  run_ranks(setting(), [](Rank& rank) {
    if (rank.rank() == 1) return;
    const std::uint32_t keys[2] = {mlx5::to_big32(0x77700), mlx5::to_big32(0x77700)};
    WindowHandle wrong = rank.window();
    wrong.gda_rkey = keys;
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, put_and_flush, rank.comm(), wrong, 1, true, &out);
    expect_status(out.flushed, Status::invalid);
    EXPECT_EQ(out.other, Status::timeout);
    expect_error(rank, mlx5::kRemoteAccessError, Code::network);
  });
}

TEST_P(GdaErrors, TimeoutOfAPutMeansNothingWasPosted) {
  run_ranks(setting(2, "stall=5:400"), [](Rank& rank) {
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, fill_ring, rank.comm(), rank.window(), &out);
    Outcome end;
    launch(Place::cpu(), 1, 1, 0, finish_ring, rank.comm(), rank.window(), &end);
    rank.barrier();
    if (rank.rank() == 0) {
      EXPECT_EQ(out.posted, Status::timeout);
      EXPECT_GE(out.count, 16u);
      EXPECT_LE(out.count, 20u);
      EXPECT_EQ(out.other, Status::timeout);
      EXPECT_EQ(out.flushed, Status::timeout);
      EXPECT_EQ(end.flushed, Status::ok);
      EXPECT_EQ(end.other, Status::ok);
      EXPECT_EQ(end.count, 39u);
      // all ranks' threads share this process: the peer's words are read after the barrier
      rank.count = out.count;
    }
    const auto counts = rank.bootstrap().allgather(std::as_bytes(std::span(&rank.count, 1)));
    std::uint64_t posted = 0;
    std::memcpy(&posted, counts[0].data(), 8);
    if (rank.rank() == 1) {
      EXPECT_EQ(rank.signals()[0], posted);
    }
  });
}

TEST_P(GdaErrors, AbortEndsWaits) {
  run_ranks(setting(2, "stall=1"), [](Rank& rank) {
    if (rank.rank() == 1) return;
    std::atomic_ref<std::uint64_t>(rank.comm().control->state).store(kControlAborted);
    Outcome out;
    launch(Place::cpu(), 1, 1, 0, put_and_flush, rank.comm(), rank.window(), 1, false, &out);
    EXPECT_EQ(out.flushed, Status::aborted);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, GdaErrors,
                         ::testing::Values(Mode{"thread_ring", Sharing::thread, false},
                                           Mode{"device_ring", Sharing::device, false},
                                           Mode{"block_collapsed", Sharing::block, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GdaNic, NoneIsRefusedWithASentence) {
  const UniqueId id = UniqueId::create();
  bootstrap::Bootstrap bootstrap(id, 1, 0);
  base::Parameters parameters;
  parameters.set("MARROW_NIC", "none");
  try {
    gda::Nic::open(bootstrap, parameters, Place::cpu());
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_NE(error.sentence().find("MARROW_NIC=none"), std::string::npos);
  }
  parameters.set("MARROW_NIC", "mlx5_77");
  try {
    gda::Nic::open(bootstrap, parameters, Place::cpu());
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_NE(error.sentence().find("a real NIC"), std::string::npos) << error.sentence();
  }
  parameters.set("MARROW_NIC", "softnic");
  parameters.set("MARROW_SOFTNIC", "colour=red");
  try {
    gda::Nic::open(bootstrap, parameters, Place::cpu());
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_EQ(error.sentence().find("MARROW_SOFTNIC: "), 0u) << error.sentence();
    EXPECT_NE(error.sentence().find("colour"), std::string::npos) << error.sentence();
  }
  bootstrap.close();
}

TEST(GdaNic, SoftnicTakesHostMemoryOnly) {
  Setting one;
  one.ranks = 1;
  run_ranks(one, [](Rank& rank) {
    std::string why;
    EXPECT_TRUE(rank.nic().emulated());
    EXPECT_TRUE(rank.nic().can_use(Memory::host));
    EXPECT_FALSE(rank.nic().can_use(Memory::device, &why));
    EXPECT_NE(why.find("CPU thread"), std::string::npos);
    alignas(8) std::byte memory[64];
    memory::Block block;
    block.device = memory;
    block.bytes = sizeof memory;
    block.kind = Memory::device;
    try {
      (void)rank.nic().register_region(block, gda::Access::data);
      ADD_FAILURE() << "registered";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::unsupported);
      EXPECT_NE(std::string(error.what()).find("Memory::host"), std::string::npos) << error.what();
    }
    EXPECT_NE(rank.queues().release_scope().find("system"), std::string::npos);
  });
}

TEST(GdaNic, CyclesLeaveNothing) {
  const auto entries = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder),
                         std::filesystem::directory_iterator());
  };
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int shared = 0;
    for (std::string line; std::getline(maps, line);)
      shared +=
          line.find("memfd:") != std::string::npos || line.find("/dev/shm") != std::string::npos;
    return shared;
  };
  const auto cycle = [] {
    run_ranks(Setting{}, [](Rank& rank) {
      Outcome out;
      launch(Place::cpu(), 1, 1, 0, put_and_flush, rank.comm(), rank.window(), 1 - rank.rank(),
             true, &out);
      EXPECT_EQ(worse(out.posted, worse(out.flushed, out.other)), Status::ok);
    });
  };
  cycle();  // what is kept for the life of the process is there now
  const auto fds = entries("/proc/self/fd");
  const auto threads = entries("/proc/self/task");
  const int before = mappings();
  for (int i = 0; i < 10; ++i) cycle();
  EXPECT_EQ(entries("/proc/self/fd"), fds);
  EXPECT_EQ(entries("/proc/self/task"), threads);
  EXPECT_EQ(mappings(), before);
}

TEST(GdaNic, SettingsMustAgree) {
  const UniqueId id = UniqueId::create();
  std::vector<std::thread> threads;
  std::atomic<int> mismatches{0};
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      bootstrap::Bootstrap bootstrap(id, 2, r);
      base::Parameters parameters;
      parameters.set("MARROW_NIC", "softnic");
      parameters.set("MARROW_GDA_DEPTH", r == 0 ? "64" : "128");
      try {
        gda::Nic::open(bootstrap, parameters, Place::cpu());
      } catch (const Error& error) {
        if (error.code() == Code::mismatch) ++mismatches;
      }
      bootstrap.close();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mismatches, 2);
}

}  // namespace
}  // namespace marrow
