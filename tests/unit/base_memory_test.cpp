// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Descriptors, mappings and their passage between processes.
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "base/fd_door.hpp"
#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "base/numa.hpp"
#include "base/random.hpp"
#include "base/unix_fds.hpp"
#include "marrow/error.hpp"
#include "unit/silent_strangers.hpp"

namespace marrow::base {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

Deadline soon() { return Deadline::after(milliseconds(5000)); }

TEST(Fd, OwnsMovesAndDuplicates) {
  std::size_t before = open_descriptors();
  {
    Fd a(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    Fd b = a.dup();
    Fd c = std::move(a);
    EXPECT_FALSE(a.valid());
    EXPECT_TRUE(b.valid());
    b = std::move(c);
    EXPECT_EQ(open_descriptors(), before + 1);
  }
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_THROW(Fd().dup(), Error);
}

TEST(Memfd, IsSharedSparseAndSealed) {
  constexpr std::size_t size = std::size_t{5} << 30;  // sparse: past 4 GiB, next to no memory
  Fd fd = memfd("marrow-test", size);
  EXPECT_EQ(file_size(fd.get()), size);
  EXPECT_TRUE(sealed_against_shrinking(fd.get()));
  EXPECT_NE(::ftruncate(fd.get(), 4096), 0);
  Mapping a = Mapping::of_fd(fd.get(), size);
  Mapping b = Mapping::of_fd(fd.get(), size, 0, Mapping::Access::read_only);
  *a.as<int>(size - 8) = 42;
  EXPECT_EQ(*b.as<int>(size - 8), 42);
  Mapping moved = std::move(a);
  EXPECT_FALSE(a.valid());
  EXPECT_EQ(moved.size(), size);
}

TEST(Mapping, ABadRequestNamesTheValues) {
  try {
    Mapping::of_fd(-1, 4096);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::system);
    EXPECT_THAT(error.what(), HasSubstr("4096 bytes of file descriptor -1"));
  }
}

TEST(Mapping, WhatIsMappedIsKnown) {
  using Access = Mapping::Access;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  Mapping memory = Mapping::anonymous(4 * page);
  auto* at = memory.as<std::byte>();
  ASSERT_EQ(::mprotect(at + page, page, PROT_READ), 0);
  ASSERT_EQ(::mprotect(at + 2 * page, page, PROT_NONE), 0);
  EXPECT_TRUE(is_mapped(at, 2 * page, Access::read_only));  // across two entries
  EXPECT_TRUE(is_mapped(at + 1, page - 1, Access::read_write));
  EXPECT_FALSE(is_mapped(at + 1, page, Access::read_write));
  EXPECT_TRUE(is_mapped(at + page, page, Access::read_only));
  EXPECT_FALSE(is_mapped(at + page, page + 1, Access::read_only));
  EXPECT_FALSE(is_mapped(at, 4 * page, Access::read_only));  // the hole in it
  EXPECT_TRUE(is_mapped(at + 3 * page, page, Access::read_write));
  EXPECT_FALSE(is_mapped(nullptr, 1, Access::read_only));
  EXPECT_FALSE(is_mapped(at, std::size_t{1} << 50, Access::read_only));
  EXPECT_FALSE(is_mapped(at, ~std::size_t{0}, Access::read_only));
  const int here = 0;
  EXPECT_TRUE(is_mapped(&here, sizeof here, Access::read_write));
}

TEST(Deadline, CountsDown) {
  EXPECT_TRUE(Deadline().expired());
  Deadline later = Deadline::after(milliseconds(50));
  EXPECT_FALSE(later.expired());
  EXPECT_GT(later.poll_timeout(), 0);
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_TRUE(later.expired());
  EXPECT_EQ(later.remaining().count(), 0);
}

TEST(UnixFds, PassSharedMemoryToAnotherProcess) {
  std::string name = random_name();
  Fd listener = unix_listen(name);
  pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      Fd socket = unix_connect(name, soon());
      FdMessage message = receive_fds(socket.get(), soon());
      Mapping mapping = Mapping::of_fd(message.fds.at(0).get(), 4096);
      bool payload_ok =
          message.payload.size() == 5 && std::memcmp(message.payload.data(), "hello", 5) == 0;
      *mapping.as<int>() = 77;
      status = payload_ok ? 0 : 2;
    } catch (...) {
    }
    ::_exit(status);
  }
  Fd memory = memfd("marrow-test", 4096);
  Fd socket = unix_accept(listener.get(), soon());
  int fd = memory.get();
  send_fds(socket.get(), std::span(&fd, 1), std::as_bytes(std::span("hello", 5)), soon());
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*Mapping::of_fd(memory.get(), 4096).as<int>(), 77);
}

TEST(UnixFds, ManyDescriptorsTakeSeveralPackets) {
  std::size_t before = open_descriptors();
  {
    auto [a, b] = unix_pair();
    Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    std::vector<int> fds(300, null.get());
    std::thread sender([&a = a, &fds] { send_fds(a.get(), fds, {}, soon()); });
    FdMessage message = receive_fds(b.get(), soon());
    sender.join();
    EXPECT_EQ(message.fds.size(), 300u);
    EXPECT_TRUE(message.payload.empty());
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(UnixFds, WaitsEndAtTheDeadlineAndAtTheOtherEndsClose) {
  auto [a, b] = unix_pair();
  try {
    receive_fds(b.get(), Deadline::after(milliseconds(30)));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::timeout);
  }
  a.close();
  try {
    receive_fds(b.get(), soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::peer_failed);
  }
  try {
    send_fds(b.get(), {}, {}, soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::peer_failed);
  }
}

TEST(UnixFds, AMalformedMessageIsRefusedAndLeaksNothing) {
  auto [a, b] = unix_pair();
  std::size_t before = open_descriptors();
  ASSERT_EQ(::write(a.get(), "garbage garbage garbage", 23), 23);
  try {
    receive_fds(b.get(), soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::network);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(UnixFds, APacketThatBringsNothingIsMalformed) {
  auto [a, b] = unix_pair();
  const std::array<std::uint32_t, 4> header = {0x4d464453, 300, 0, 0};
  ASSERT_EQ(::write(a.get(), header.data(), sizeof header), ssize_t{sizeof header});
  try {
    receive_fds(b.get(), soon());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::network);
  }
}

TEST(FdDoor, WhoSaysNothingIsNotWaitedFor) {
  const std::string name = random_name();
  FdDoor door(unix_listen(name), 100);
  EXPECT_FALSE(door.next(Deadline::after(milliseconds(10))));
  const std::vector<Fd> strangers = test::silent_strangers(name);
  Fd closes = unix_connect(name, soon());
  closes.close();
  Fd lies = unix_connect(name, soon());
  ASSERT_EQ(::write(lies.get(), "garbage garbage garbage", 23), 23);
  Fd speaks = unix_connect(name, soon());
  const std::vector<int> fds(300, STDIN_FILENO);  // two packets
  send_fds(speaks.get(), fds, std::as_bytes(std::span("hello", 5)), soon());
  const auto start = std::chrono::steady_clock::now();
  auto arrival = door.next(soon());
  ASSERT_TRUE(arrival);
  EXPECT_EQ(arrival->message.fds.size(), 300u);
  EXPECT_EQ(arrival->message.payload.size(), 5u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(500));
  EXPECT_FALSE(door.next(Deadline::after(milliseconds(20))));
}

TEST(FdDoor, TheOldestSilentOneMakesRoom) {
  const std::string name = random_name();
  FdDoor door(unix_listen(name), 3);
  std::vector<Fd> all;
  for (int i = 0; i < 4; ++i) all.push_back(unix_connect(name, soon()));
  EXPECT_FALSE(door.next(Deadline::after(milliseconds(20))));
  EXPECT_THROW(send_fds(all[0].get(), {}, {}, soon()), Error);
  for (std::size_t i = 1; i < all.size(); ++i) {
    send_fds(all[i].get(), {}, {}, soon());
    EXPECT_TRUE(door.next(soon())) << i;
  }
}

TEST(UnixFds, AnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  std::string name = random_name();
  Fd listener = unix_listen(name);
  pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(3);
    try {
      Fd socket = unix_connect(name, soon());
    } catch (const Error& error) {
      ::_exit(error.code() == Code::authentication ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = -1;
  EXPECT_THROW(unix_accept(listener.get(), Deadline::after(milliseconds(300))), Error);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

/// Policy of this thread (MPOL_DEFAULT is 0, MPOL_PREFERRED 1); -1: the kernel has no NUMA.
int memory_policy() {
  int policy = -1;
  return ::syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) == 0 ? policy : -1;
}

TEST(PreferNode, HoldsForItsLifeAndNotOverTheUsersOwn) {
  if (memory_policy() != 0) GTEST_SKIP() << "no NUMA here, or a policy is set (numactl)";
  {
    const PreferNode near(0);
    ASSERT_TRUE(near.active());
    EXPECT_EQ(memory_policy(), 1);
    const PreferNode another(0);
    EXPECT_FALSE(another.active()) << "a policy stands already";
    const Fd fd = memfd("near", 1 << 16);
    const Mapping pages = Mapping::of_fd(fd.get(), 1 << 16);
    std::memset(pages.data(), 1, pages.size());
    void* page = pages.data();
    int node = -1;
    if (::syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &node, 0) == 0) {
      EXPECT_EQ(node, 0);
    }
  }
  EXPECT_EQ(memory_policy(), 0);
  EXPECT_FALSE(PreferNode(-1).active());
  EXPECT_FALSE(PreferNode(1 << 20).active());
  EXPECT_EQ(memory_policy(), 0);
}

}  // namespace
}  // namespace marrow::base
