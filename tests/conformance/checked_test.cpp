// SPDX-License-Identifier: Apache-2.0
// MARROW_CHECKED: each mistake of a kernel is refused, touches nothing, and is reported by check() with
// the file and line of the call. This file is always compiled with the checks on.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "marrow/device.cuh"
#include "marrow/marrow.hpp"

#if !defined(MARROW_CHECKED)
#error "compile with MARROW_CHECKED"
#endif

namespace marrow {
namespace {

struct Mistake {
  Status status = Status::ok;
  int line = 0;
};

constexpr std::uint64_t kBytes = 4096;

// One mistake each; `line` is that of the call, the line before.
void mistake(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local, int which,
             Mistake* out) {
  const Gin gin(comm, 0);
  std::uint64_t word = 0;
  switch (which) {
    case 0:
      out->status = gin.put(0, window, kBytes - 8, window, 0, 16);
      out->line = __LINE__ - 1;
      break;
    case 1:
      out->status = gin.put(0, window, 0, window, kBytes - 8, 16);
      out->line = __LINE__ - 1;
      break;
    case 2:
      out->status = gin.put(0, window, ~std::uint64_t{0} - 3, window, 0, 8);
      out->line = __LINE__ - 1;
      break;
    case 3:
      out->status = gin.put(0, window, 0, local, 60, 8);
      out->line = __LINE__ - 1;
      break;
    case 4:
      out->status = gin.get(0, window, 0, local, 0, 65);
      out->line = __LINE__ - 1;
      break;
    case 5:
      out->status = gin.put_value(0, window, kBytes - 4, word);
      out->line = __LINE__ - 1;
      break;
    case 6:
      out->status = gin.add(0, window, 12, 1);
      out->line = __LINE__ - 1;
      break;
    case 7:
      out->status = gin.fetch_add(0, window, kBytes, 1, &word);
      out->line = __LINE__ - 1;
      break;
    case 8:
      out->status = gin.compare_swap(0, window, 4, 0, 1, &word);
      out->line = __LINE__ - 1;
      break;
    case 9:
      out->status = gin.signal(0, SignalAt{window, 20});
      out->line = __LINE__ - 1;
      break;
    case 10:
      out->status = gin.put(7, window, 0, window, 0, 8);
      out->line = __LINE__ - 1;
      break;
    case 11:
      out->status = gin.signal(0, SignalAdd{1000});
      out->line = __LINE__ - 1;
      break;
    case 12:
      out->status = gin.wait_signal(-1, 1);
      out->line = __LINE__ - 1;
      break;
    case 13:
      out->status = gin.wait_counter(99, 1);
      out->line = __LINE__ - 1;
      break;
    case 14:
      out->status = gin.send_packet(0, 1 << 20, 1, 1);
      out->line = __LINE__ - 1;
      break;
    case 15:
      out->status = Gin<>(comm, 5).status();
      out->line = __LINE__ - 1;
      break;
    case 16:
      out->status = Gin<Path::proxy>(comm, 0).put(0, window, 0, window, 0, 8);
      out->line = __LINE__ - 1;
      break;
    case 17: {
      int which_one = 0;
      out->status = gin.wait_any(nullptr, nullptr, 0, &which_one);
      out->line = __LINE__ - 1;
      break;
    }
    case 18:
      out->status = Barrier(comm, team_world(comm), 0).sync(Thread{}, Contexts{0, 0});
      out->line = __LINE__ - 1;
      break;
    case 19:
      out->status = Barrier(comm, team_world(comm), 0).sync(Thread{}, Contexts{0, 3});
      out->line = __LINE__ - 1;
      break;
    case 20:
      window.owner += 1;
      out->status = gin.put(0, window, 0, local, 0, 8);
      out->line = __LINE__ - 1;
      break;
    case 21:
      local.owner += 1;
      out->status = gin.put(0, window, 0, local, 0, 8);
      out->line = __LINE__ - 1;
      break;
    default: break;
  }
}

struct Expectation {
  const char* operation;
  std::vector<const char*> words;  ///< what the sentence must say
};

class Checked : public testing::TestWithParam<int> {};

const Expectation kExpectations[] = {
    {"put", {"4104"}},
    {"put", {"4104"}},
    {"put", {}},
    {"put", {"68", "64"}},
    {"get", {"65", "64"}},
    {"put_value", {"4100"}},
    {"add", {"12"}},
    {"fetch_add", {"4104"}},
    {"compare_swap", {"4"}},
    {"SignalAt", {"20"}},
    {"put", {"7"}},
    {"SignalAdd", {"1000"}},
    {"wait_signal", {}},
    {"wait_counter", {"99"}},
    {"send_packet", {"1048576"}},
    {"Gin", {"5"}},
    {"put", {"path"}},
    {"wait_any", {"size"}},
    {"Barrier", {"size"}},
    {"Barrier", {"context"}},
    {"put", {"does not belong"}},
    {"put", {"does not belong"}},
};

TEST_P(Checked, IsReportedWithFileAndLine) {
  Config config;
  config.parameters["MARROW_PATH"] = "lsa";
  Communicator comm(UniqueId::create(), 1, 0, config);
  Window window = comm.allocate(kBytes);
  alignas(64) std::byte memory[64] = {};
  LocalBuffer local = comm.register_local(memory, sizeof memory);
  DeviceCommunicatorOwner device =
      comm.device_communicator({.contexts = 1, .signals = 4, .counters = 2});
  comm.check();
  Mistake seen;
  launch(comm.place(), 1, 1, 0, mistake, device.handle(), window.handle(), local.handle(),
         GetParam(), &seen);
  EXPECT_EQ(seen.status, Status::invalid);
  for (std::uint64_t i = 0; i < kBytes; ++i)
    ASSERT_EQ(static_cast<std::byte*>(window.host())[i], std::byte{0});
  std::string what;
  try {
    comm.check();
  } catch (const Error& error) {
    what = error.what();
  }
  const Expectation& want = kExpectations[GetParam()];
  const std::string where = "checked_test.cpp:" + std::to_string(seen.line);
  EXPECT_NE(what.find(where), std::string::npos) << "wanted " << where << " in: " << what;
  EXPECT_NE(what.find(want.operation), std::string::npos) << what;
  for (const char* word : want.words)
    EXPECT_NE(what.find(word), std::string::npos) << word << " in: " << what;
  local = {};
}

INSTANTIATE_TEST_SUITE_P(Mistakes, Checked,
                         testing::Range(0, static_cast<int>(std::size(kExpectations))));

void many(DeviceCommunicator comm, WindowHandle window, int count) {
  const Gin gin(comm, 0);
  for (int i = 0; i < count; ++i)
    (void)gin.put(0, window, kBytes + static_cast<std::uint64_t>(i), window, 0, 8);
}

/// What check() throws, or nothing.
std::string complaint(Communicator& comm) {
  try {
    comm.check();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(CheckedReports, EachIsThrownOnceAndTheSlotsServeAgain) {
  Communicator comm(UniqueId::create(), 1, 0);
  Window window = comm.allocate(kBytes);
  DeviceCommunicatorOwner device = comm.device_communicator();
  for (int round = 0; round < 3; ++round) {
    launch(comm.place(), 1, 1, 0, many, device.handle(), window.handle(), 3);
    for (int i = 0; i < 3; ++i) {
      EXPECT_NE(complaint(comm).find("value " + std::to_string(kBytes + 8 + i)), std::string::npos)
          << "round " << round << ", report " << i;
    }
    EXPECT_EQ(complaint(comm), "");
  }
  // More than are kept: those that are kept, then silence, then new ones.
  launch(comm.place(), 1, 1, 0, many, device.handle(), window.handle(), kCheckedReports + 9);
  for (int i = 0; i < kCheckedReports; ++i) EXPECT_NE(complaint(comm), "") << i;
  EXPECT_EQ(complaint(comm), "");
  launch(comm.place(), 1, 1, 0, many, device.handle(), window.handle(), 1);
  EXPECT_NE(complaint(comm), "");
  EXPECT_EQ(complaint(comm), "");
}

TEST(CheckedReports, GoToTheFileAlsoWhenNobodyAsks) {
  const std::string file = testing::TempDir() + "marrow-checked-" + std::to_string(getpid());
  {
    Config config;
    config.parameters["MARROW_CHECKED_REPORT"] = file;
    Communicator comm(UniqueId::create(), 1, 0, config);
    Window window = comm.allocate(kBytes);
    DeviceCommunicatorOwner device = comm.device_communicator();
    launch(comm.place(), 1, 1, 0, many, device.handle(), window.handle(), 3);
    EXPECT_NE(complaint(comm), "");
  }
  std::ifstream in(file);
  std::string line;
  int lines = 0;
  while (std::getline(in, line)) {
    EXPECT_NE(line.find("checked_test.cpp:"), std::string::npos) << line;
    ++lines;
  }
  EXPECT_EQ(lines, 3);
  std::remove(file.c_str());
}

// A report that can go nowhere else goes to the log.
TEST(CheckedReports, GoToTheLogWhenTheFileCannotBeWritten) {
  for (const char* file : {"/nonexistent/marrow-checked", "/dev/full"}) {
    testing::internal::CaptureStderr();
    {
      Config config;
      config.parameters["MARROW_CHECKED_REPORT"] = file;
      Communicator comm(UniqueId::create(), 1, 0, config);
      Window window = comm.allocate(kBytes);
      DeviceCommunicatorOwner device = comm.device_communicator();
      launch(comm.place(), 1, 1, 0, many, device.handle(), window.handle(), 2);
    }
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find(std::string(file) + " cannot be written"), std::string::npos) << log;
    for (const std::uint64_t value : {kBytes + 8, kBytes + 9})
      EXPECT_NE(log.find("value " + std::to_string(value)), std::string::npos) << log;
  }
}

void use(DeviceCommunicator comm, WindowHandle window, Status* out) {
  *out = Gin(comm, 0).put(0, window, 0, window, 8, 8);
}

TEST(CheckedReports, AnotherCommunicatorsWindowIsRefused) {
  Communicator first(UniqueId::create(), 1, 0), second(UniqueId::create(), 1, 0);
  Window window = first.allocate(kBytes);
  DeviceCommunicatorOwner own = first.device_communicator(), other = second.device_communicator();
  Status status = Status::invalid;
  launch(first.place(), 1, 1, 0, use, own.handle(), window.handle(), &status);
  EXPECT_EQ(status, Status::ok);
  launch(first.place(), 1, 1, 0, use, other.handle(), window.handle(), &status);
  EXPECT_EQ(status, Status::invalid);
  EXPECT_EQ(complaint(first), "");
  EXPECT_NE(complaint(second).find("does not belong to this communicator"), std::string::npos);
}

void foreign(DeviceCommunicator comm, WindowHandle window, Status* out) {
  comm.abi += 1;
  const Gin gin(comm, 0);
  *out = gin.put(0, window, 0, window, 0, 8);
}

TEST(CheckedAbi, KernelOfAnotherAbiIsRefusedAndNamed) {
  Communicator comm(UniqueId::create(), 1, 0);
  Window window = comm.allocate(kBytes);
  DeviceCommunicatorOwner device = comm.device_communicator();
  Status status = Status::ok;
  launch(comm.place(), 1, 1, 0, foreign, device.handle(), window.handle(), &status);
  EXPECT_EQ(status, Status::invalid);
  try {
    comm.check();
    FAIL() << "check() threw nothing";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::version) << error.what();
    EXPECT_NE(std::string(error.what()).find("ABI"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace marrow
