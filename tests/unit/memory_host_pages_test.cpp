// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// Buffers that overlap share registrations: nothing is registered twice or given back too early. A fake
// of CUDA's rules stands in for the driver.
#include "memory/host_pages.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace marrow::memory {
namespace {

/// Registrations as CUDA sees them: pages 0..99, no page twice, a range goes as a whole.
class FakeDriver {
 public:
  HostPages::Register enroll() {
    return [this](std::uintptr_t first, std::uintptr_t end) {
      if (end > 100) throw std::runtime_error("no such memory");
      for (std::uintptr_t page = first; page < end; ++page) {
        if (pages.contains(page)) return false;
      }
      for (std::uintptr_t page = first; page < end; ++page) pages.insert(page);
      ranges[first] = end;
      return true;
    };
  }
  HostPages::Unregister withdraw() {
    return [this](std::uintptr_t first) {
      ASSERT_TRUE(ranges.contains(first));
      for (std::uintptr_t page = first; page < ranges[first]; ++page) pages.erase(page);
      ranges.erase(first);
    };
  }
  bool all(std::uintptr_t first, std::uintptr_t end) const {
    for (std::uintptr_t page = first; page < end; ++page) {
      if (!pages.contains(page)) return false;
    }
    return true;
  }
  std::set<std::uintptr_t> pages;
  std::map<std::uintptr_t, std::uintptr_t> ranges;
};

HostPages::Outcome hold(HostPages& held, FakeDriver& driver, std::uintptr_t first,
                        std::uintptr_t end) {
  return held.hold(first, end, driver.enroll(), driver.withdraw(),
                   [&](std::uintptr_t from, std::uintptr_t to) { return driver.all(from, to); });
}

TEST(HostPages, OverlapsKeepWhatTheOtherNeeds) {
  FakeDriver driver;
  HostPages held;
  EXPECT_EQ(hold(held, driver, 10, 20), HostPages::Outcome::held);
  EXPECT_EQ(hold(held, driver, 15, 30), HostPages::Outcome::held);
  EXPECT_EQ(hold(held, driver, 5, 35), HostPages::Outcome::held);
  held.drop(10, 20, driver.withdraw());
  EXPECT_TRUE(driver.all(5, 35));
  held.drop(5, 35, driver.withdraw());
  EXPECT_TRUE(driver.all(15, 30));
  held.drop(15, 30, driver.withdraw());
  EXPECT_TRUE(driver.pages.empty());
  EXPECT_EQ(held.pieces(), 0u);
}

TEST(HostPages, TheProgramsOwnRegistrationsStayTheirs) {
  FakeDriver driver;
  HostPages held;
  ASSERT_TRUE(driver.enroll()(40, 50));  // the program
  EXPECT_EQ(hold(held, driver, 40, 50), HostPages::Outcome::foreign);
  EXPECT_EQ(hold(held, driver, 20, 30), HostPages::Outcome::held);
  EXPECT_EQ(hold(held, driver, 25, 45), HostPages::Outcome::mixed);
  held.drop(20, 30, driver.withdraw());
  EXPECT_EQ(driver.ranges, (std::map<std::uintptr_t, std::uintptr_t>{{40, 50}}));
}

// Whichever part it is: kernels would fault on the rest.
TEST(HostPages, APartThatTheProgramRegisteredIsFound) {
  using Pages = std::pair<std::uintptr_t, std::uintptr_t>;
  for (const std::vector<Pages>& theirs :
       {std::vector<Pages>{{40, 45}}, {{45, 50}}, {{44, 46}}, {{40, 44}, {46, 50}}, {{30, 45}}}) {
    FakeDriver driver;
    HostPages held;
    for (const auto& [first, end] : theirs) ASSERT_TRUE(driver.enroll()(first, end));
    const auto before = driver.ranges;
    EXPECT_EQ(hold(held, driver, 40, 50), HostPages::Outcome::mixed) << theirs[0].first;
    EXPECT_EQ(driver.ranges, before);
    EXPECT_EQ(held.pieces(), 0u);
    ASSERT_TRUE(driver.enroll()(10, 12));
    ASSERT_TRUE(driver.enroll()(12, 15));
    EXPECT_EQ(hold(held, driver, 10, 15), HostPages::Outcome::foreign);
  }
}

TEST(HostPages, AFailureLeavesNothing) {
  FakeDriver driver;
  HostPages held;
  EXPECT_EQ(hold(held, driver, 90, 95), HostPages::Outcome::held);
  EXPECT_THROW(hold(held, driver, 80, 110), std::runtime_error);
  EXPECT_TRUE(driver.all(90, 95));
  EXPECT_EQ(driver.pages.size(), 5u);
  held.drop(90, 95, driver.withdraw());
  EXPECT_TRUE(driver.pages.empty());
}

TEST(HostPages, RandomHoldersAgainstAPlainCount) {
  FakeDriver driver;
  HostPages held;
  std::mt19937 random(5);
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> open;
  for (int step = 0; step < 20'000; ++step) {
    if (open.empty() || (random() % 2 && open.size() < 12)) {
      const std::uintptr_t first = random() % 99, end = first + 1 + random() % (100 - first);
      ASSERT_EQ(hold(held, driver, first, end), HostPages::Outcome::held);
      open.emplace_back(first, end);
    } else {
      const std::size_t which = random() % open.size();
      held.drop(open[which].first, open[which].second, driver.withdraw());
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
    }
    for (const auto& [first, end] : open) ASSERT_TRUE(driver.all(first, end)) << "step " << step;
    if (open.empty()) {
      ASSERT_TRUE(driver.pages.empty());
    }
  }
}

}  // namespace
}  // namespace marrow::memory
