// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Ranks as processes: data and signals through each other's memory, keys that must not work, peers
// that die, stop or leave, and no file left behind.
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <functional>

#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

using std::chrono::milliseconds;

constexpr int kMost = 4;

/// What the ranks tell each other; in memory shared across fork.
struct Board {
  struct Rank {
    std::atomic<std::uint32_t> qpn[kMost];
    std::atomic<std::uint32_t> lid;
    std::atomic<std::uint32_t> rkey;
    std::atomic<std::uint64_t> address;
  };
  Rank ranks[kMost];
  std::atomic<int> arrived;
  std::atomic<int> flag[8];
};

bool reach(std::atomic<int>& word, int value, milliseconds most = milliseconds(10000)) {
  const auto end = std::chrono::steady_clock::now() + most;
  while (word.load() < value) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

#define CHECK_OR_DIE(condition)                                                   \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "rank %d, line %d: %s\n", rank, __LINE__, #condition); \
      ::_exit(3);                                                                 \
    }                                                                             \
  } while (0)

/// One rank's endpoints (one QP per peer) and its window of 64 KiB.
struct Rank {
  Rank(Board& b, const std::string& job, int r, int n, const char* options = "", QpOptions qp = {},
       bool expose = true)
      : board(b), rank(r), ranks(n), window(1 << 16) {
    for (int peer = 0; peer < n; ++peer) {
      endpoints.push_back(std::make_unique<Endpoint>(job, options, qp));
      board.ranks[r].qpn[peer] = endpoints.back()->qpn;
    }
    // Keys belong to a protection domain: each queue pair gets its own view of the window.
    for (int peer = 0; peer < n; ++peer) {
      if (expose) {
        CHECK_OR_DIE(nic().expose_memory(endpoints[peer]->context, window.data(), 1 << 16,
                                         window.fd.get(), 0) == 0);
      }
    }
    for (int peer = 0; peer < n; ++peer) {
      keys.push_back(endpoints[peer]->region(window.data(), 1 << 16)->rkey);
      locals.push_back(endpoints[peer]->region(&scratch, sizeof scratch)->lkey);
    }
    board.ranks[r].rkey = keys[0];
    board.ranks[r].lid = endpoints[0]->lid();
    board.ranks[r].address = Endpoint::u64(window.data());
    board.arrived.fetch_add(1);
    CHECK_OR_DIE(reach(board.arrived, n));
    for (int peer = 0; peer < n; ++peer) {
      endpoints[peer]->connect(board.ranks[peer].qpn[r],
                               static_cast<std::uint16_t>(board.ranks[peer].lid.load()));
    }
    board.arrived.fetch_add(1);
    CHECK_OR_DIE(reach(board.arrived, 2 * n));
  }
  std::uint64_t signal() const {
    return std::atomic_ref<std::uint64_t>(window.words()[0]).load(std::memory_order_acquire);
  }
  Board& board;
  int rank;
  int ranks;
  SharedMemory window;
  alignas(64) std::uint8_t scratch[8192] = {};
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::vector<std::uint32_t> keys, locals;
};

struct Job {
  explicit Job(const char* name)
      : name(unique_job(name)),
        memory(base::Mapping::anonymous(sizeof(Board), true)),
        board(*memory.as<Board>()) {}
  ::pid_t start(const std::function<void()>& body) {
    const ::pid_t pid = ::fork();
    if (pid == 0) {
      try {
        body();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ::_exit(4);
      }
      ::_exit(::testing::Test::HasFailure() ? 5 : 0);
    }
    return pid;
  }
  bool file_exists() const {
    bool found = false;
    DIR* folder = ::opendir("/dev/shm");
    while (const dirent* entry = ::readdir(folder)) {
      found = found || std::string(entry->d_name).find(name) != std::string::npos;
    }
    ::closedir(folder);
    return found;
  }
  std::string name;
  base::Mapping memory;
  Board& board;
};

int exit_code(::pid_t pid) {
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Keys are per protection domain, so each pair of ranks tells its own; rank 0's are on the board
// through a second word per peer. Two ranks are enough for most tests.
void ping_pong(Board& board, const std::string& job, int rank, const char* options) {
  Rank me(board, job, rank, 2, options);
  const int peer = 1 - rank;
  Endpoint& to = *me.endpoints[peer];
  // The key of my window as seen by the peer's queue pair.
  board.ranks[rank].rkey = me.keys[peer];
  board.flag[0].fetch_add(1);
  CHECK_OR_DIE(reach(board.flag[0], 2));
  const std::uint32_t rkey = board.ranks[peer].rkey;
  const std::uint64_t base = board.ranks[peer].address;
  for (std::uint64_t round = 1; round <= 300; ++round) {
    if (rank == 0) {
      std::memset(me.scratch, static_cast<int>(round), 4096);
      to.write(me.scratch, 4096, me.locals[peer], base + 4096, rkey, kCompletionOnError);
      to.fetch_add(me.scratch + 8184, me.locals[peer], base, rkey, 1);
      CHECK_OR_DIE(to.cq.poll().ok());
    }
    const auto end = std::chrono::steady_clock::now() + milliseconds(10000);
    while (me.signal() < round) {
      CHECK_OR_DIE(std::chrono::steady_clock::now() < end);
      std::this_thread::yield();
    }
    if (rank == 1) {
      for (int i = 0; i < 4096; ++i) {
        CHECK_OR_DIE(std::to_integer<int>(me.window.data()[4096 + i]) == int(round & 0xff));
      }
      to.fetch_add(me.scratch + 8184, me.locals[peer], base, rkey, 1);
      CHECK_OR_DIE(to.cq.poll().ok());
    }
  }
  // Read it back from the other side.
  if (rank == 0) {
    to.read(me.scratch, 4096, me.locals[peer], base + 4096, rkey);
    CHECK_OR_DIE(to.cq.poll().ok());
    for (int i = 0; i < 4096; ++i) CHECK_OR_DIE(me.scratch[i] == (300 & 0xff));
  }
  board.flag[1].fetch_add(1);
  CHECK_OR_DIE(reach(board.flag[1], 2));
}

TEST(SoftnicProcesses, WriteSignalRead) {
  for (const char* options : {"", "atomics=hca,seed=9,delay=20,reorder=1"}) {
    Job job("pingpong");
    const auto one = job.start([&] { ping_pong(job.board, job.name, 1, options); });
    const auto zero = job.start([&] { ping_pong(job.board, job.name, 0, options); });
    EXPECT_EQ(exit_code(zero), 0);
    EXPECT_EQ(exit_code(one), 0);
    EXPECT_FALSE(job.file_exists());
  }
}

void adders(Board& board, const std::string& job, int rank, const char* options) {
  Rank me(board, job, rank, 3, options);
  const int rank_zero = 0;
  if (rank == 0) {
    // One region per adder's queue pair, all over the same word.
    board.ranks[1].rkey = me.keys[1];
    board.ranks[2].rkey = me.keys[2];
  }
  board.flag[0].fetch_add(1);
  CHECK_OR_DIE(reach(board.flag[0], 3));
  constexpr int kAdds = 2000;
  if (rank != 0) {
    Endpoint& to = *me.endpoints[rank_zero];
    for (int i = 0; i < kAdds; ++i) {
      to.fetch_add(me.scratch, me.locals[rank_zero], board.ranks[0].address, board.ranks[rank].rkey,
                   1);
      CHECK_OR_DIE(to.cq.poll().ok());
    }
  }
  board.flag[1].fetch_add(1);
  CHECK_OR_DIE(reach(board.flag[1], 3, milliseconds(30000)));
  if (rank == 0) CHECK_OR_DIE(me.signal() == 2 * kAdds);
}

TEST(SoftnicProcesses, AddsOfTwoProcessesAreExact) {
  for (const char* options : {"", "atomics=hca"}) {
    Job job("adders");
    std::vector<::pid_t> pids;
    for (int rank = 0; rank < 3; ++rank) {
      pids.push_back(job.start([&, rank] { adders(job.board, job.name, rank, options); }));
    }
    for (const auto pid : pids) EXPECT_EQ(exit_code(pid), 0) << options;
  }
}

void immediate(Board& board, const std::string& job, int rank) {
  QpOptions options;
  options.receive_queue = true;
  Rank me(board, job, rank, 2, "", options);
  const int peer = 1 - rank;
  Endpoint& to = *me.endpoints[peer];
  board.ranks[rank].rkey = me.keys[peer];
  if (rank == 1) to.post_receive();
  board.flag[0].fetch_add(1);
  CHECK_OR_DIE(reach(board.flag[0], 2));
  for (std::uint32_t i = 0; i < 50; ++i) {
    if (rank == 0) {
      me.scratch[0] = static_cast<std::uint8_t>(i);
      Endpoint::Wqe w;
      w.add(Endpoint::remote(board.ranks[1].address + 100 + i, board.ranks[1].rkey))
          .add(Endpoint::data(me.scratch, 1, me.locals[peer]));
      to.post(w, kWriteImmediate, kCompletionAlways, 0, i);
      CHECK_OR_DIE(to.cq.poll().ok());
    } else {
      const Completed got = to.receive_cq.poll();
      CHECK_OR_DIE(got.opcode == kResponderWriteImmediate && got.immediate == i);
      CHECK_OR_DIE(std::to_integer<std::uint32_t>(me.window.data()[100 + i]) == i);
      to.post_receive();
    }
  }
  board.flag[1].fetch_add(1);
  CHECK_OR_DIE(reach(board.flag[1], 2));
}

TEST(SoftnicProcesses, WriteImmediate) {
  Job job("imm");
  const auto one = job.start([&] { immediate(job.board, job.name, 1); });
  const auto zero = job.start([&] { immediate(job.board, job.name, 0); });
  EXPECT_EQ(exit_code(zero), 0);
  EXPECT_EQ(exit_code(one), 0);
}

TEST(SoftnicProcesses, KilledPeerIsRetryExceededAndLeavesNothing) {
  Job job("kill");
  const auto victim = job.start([&] {
    const int rank = 1;
    Rank me(job.board, job.name, rank, 2);
    job.board.ranks[1].rkey = me.keys[0];
    job.board.flag[0] = 1;
    for (;;) ::pause();
  });
  const auto survivor = job.start([&] {
    const int rank = 0;
    Rank me(job.board, job.name, rank, 2);
    CHECK_OR_DIE(reach(job.board.flag[0], 1));
    Endpoint& to = *me.endpoints[1];
    to.write(me.scratch, 8, me.locals[1], job.board.ranks[1].address, job.board.ranks[1].rkey);
    CHECK_OR_DIE(to.cq.poll().ok());
    job.board.flag[1] = 1;
    CHECK_OR_DIE(reach(job.board.flag[2], 1));  // killed, not yet waited for: a zombie
    const auto start = std::chrono::steady_clock::now();
    Completed done;
    do {
      to.write(me.scratch, 8, me.locals[1], job.board.ranks[1].address, job.board.ranks[1].rkey);
      done = to.cq.poll();
      CHECK_OR_DIE(done.arrived);
    } while (done.ok() && std::chrono::steady_clock::now() - start < milliseconds(2000));
    CHECK_OR_DIE(done.syndrome == kTransportRetryExceeded);
  });
  ASSERT_TRUE(reach(job.board.flag[1], 1));
  ::kill(victim, SIGKILL);
  std::this_thread::sleep_for(milliseconds(20));
  job.board.flag[2] = 1;
  EXPECT_EQ(exit_code(survivor), 0);
  EXPECT_EQ(exit_code(victim), 128 + SIGKILL);
  EXPECT_FALSE(job.file_exists());
}

TEST(SoftnicProcesses, DirectoryOfAKilledJobIsSweptByTheNext) {
  Job job("allkilled");
  const auto victim = job.start([&] {
    Endpoint a(job.name);
    job.board.flag[0] = 1;
    for (;;) ::pause();
  });
  ASSERT_TRUE(reach(job.board.flag[0], 1));
  EXPECT_TRUE(job.file_exists());
  ::kill(victim, SIGKILL);
  exit_code(victim);
  EXPECT_TRUE(job.file_exists());
  const auto next = job.start([&] { Endpoint other(unique_job("next")); });
  EXPECT_EQ(exit_code(next), 0);
  EXPECT_FALSE(job.file_exists());
}

/// As with a NIC, where the child closes its copy of the descriptor.
TEST(SoftnicProcesses, AForkedChildThatClosesTheDeviceTakesNothingFromItsParent) {
  Pair pair("forked-close");
  std::uint64_t from = 42;
  std::uint64_t to = 0;
  verbs::ibv_mr* local = pair.a.region(&from, sizeof from, 0xf);
  verbs::ibv_mr* remote = pair.b.region(&to, sizeof to, 0xf);
  const ::pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    const bool closed =
        nic().close_device(pair.a.context) == 0 && nic().close_device(pair.b.context) == 0;
    ::_exit(closed ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  pair.a.write(&from, sizeof from, local->lkey, Endpoint::u64(&to), remote->rkey);
  const Completed done = pair.a.cq.poll();
  ASSERT_TRUE(done.arrived);
  EXPECT_EQ(done.opcode, mlx5::kRequester) << int(done.syndrome);
  EXPECT_EQ(to, 42u);
}

TEST(SoftnicProcesses, StoppedPeerLosesNothing) {
  Job job("stop");
  const auto peer = job.start([&] {
    const int rank = 1;
    Rank me(job.board, job.name, rank, 2);
    job.board.ranks[1].rkey = me.keys[0];
    job.board.flag[0] = 1;
    CHECK_OR_DIE(reach(job.board.flag[2], 1));
    CHECK_OR_DIE(me.signal() == 100);
  });
  const auto sender = job.start([&] {
    const int rank = 0;
    Rank me(job.board, job.name, rank, 2);
    CHECK_OR_DIE(reach(job.board.flag[0], 1));
    job.board.flag[1] = 1;
    CHECK_OR_DIE(reach(job.board.flag[3], 1));
    Endpoint& to = *me.endpoints[1];
    for (int i = 0; i < 100; ++i) {
      to.fetch_add(me.scratch, me.locals[1], job.board.ranks[1].address, job.board.ranks[1].rkey,
                   1);
      CHECK_OR_DIE(to.cq.poll().ok());
    }
    job.board.flag[4] = 1;
  });
  ASSERT_TRUE(reach(job.board.flag[1], 1));
  ::kill(peer, SIGSTOP);
  job.board.flag[3] = 1;
  EXPECT_TRUE(reach(job.board.flag[4], 1));
  ::kill(peer, SIGCONT);
  job.board.flag[2] = 1;
  EXPECT_EQ(exit_code(sender), 0);
  EXPECT_EQ(exit_code(peer), 0);
}

// Memory with and without a descriptor is reached; a key taken back is an access error, not a crash.
TEST(SoftnicProcesses, KeysWithoutDescriptorAndStaleKeys) {
  for (const bool exposed : {false, true}) {
    Job job("keys");
    const auto owner = job.start([&] {
      const int rank = 1;
      Rank me(job.board, job.name, rank, 2, "", {}, exposed);
      job.board.ranks[1].rkey = me.keys[0];
      job.board.flag[0] = 1;
      CHECK_OR_DIE(reach(job.board.flag[1], 1));
      auto& mrs = me.endpoints[0]->mrs;
      CHECK_OR_DIE(nic().dereg_mr(mrs[0]) == 0);
      mrs.erase(mrs.begin());
      job.board.flag[2] = 1;
      CHECK_OR_DIE(reach(job.board.flag[3], 1));
    });
    const auto user = job.start([&] {
      const int rank = 0;
      Rank me(job.board, job.name, rank, 2);
      CHECK_OR_DIE(reach(job.board.flag[0], 1));
      Endpoint& to = *me.endpoints[1];
      const auto write = [&] {
        to.write(me.scratch, 8, me.locals[1], job.board.ranks[1].address, job.board.ranks[1].rkey);
        return to.cq.poll();
      };
      const Completed first = write();
      CHECK_OR_DIE(first.ok());
      job.board.flag[1] = 1;
      CHECK_OR_DIE(reach(job.board.flag[2], 1));
      CHECK_OR_DIE(write().syndrome == kRemoteAccessError);
      job.board.flag[3] = 1;
    });
    EXPECT_EQ(exit_code(user), 0);
    EXPECT_EQ(exit_code(owner), 0);
  }
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}
std::size_t count_lines(const char* path) {
  std::size_t lines = 0;
  if (FILE* file = std::fopen(path, "r")) {
    for (int c; (c = std::fgetc(file)) != EOF;) lines += c == '\n';
    std::fclose(file);
  }
  return lines;
}
std::size_t threads() {
  std::size_t count = 0;
  DIR* folder = ::opendir("/proc/self/task");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

TEST(SoftnicProcesses, FiftyCyclesLeakNothing) {
  SharedMemory window(1 << 16);
  std::size_t descriptors = 0, maps = 0, tasks = 0;
  for (int cycle = 0; cycle < 50; ++cycle) {
    {
      Pair pair("cycles");
      ASSERT_EQ(nic().expose_memory(pair.b.context, window.data(), 1 << 16, window.fd.get(), 0), 0);
      auto* remote = pair.b.region(window.data(), 1 << 16);
      auto* local = pair.a.region(window.data(), 1 << 16);
      pair.a.write(window.data(), 64, local->lkey, Endpoint::u64(window.data() + 64), remote->rkey);
      ASSERT_TRUE(pair.a.cq.poll().ok());
    }
    if (cycle == 10) {
      descriptors = open_descriptors();
      maps = count_lines("/proc/self/maps");
      tasks = threads();
    }
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(threads(), tasks);
  EXPECT_LE(count_lines("/proc/self/maps"), maps + 4);  // the allocator's own arenas
}

}  // namespace
}  // namespace marrow::softnic_test
