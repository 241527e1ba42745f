// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// A local step of a collective: what it gives, and who hears of it when it fails.
#include "bootstrap/together.hpp"

#include <gmock/gmock.h>

#include <new>

#include "unit/bootstrap_ranks.hpp"

namespace marrow::bootstrap {
namespace {

using namespace testing;  // NOLINT: the helpers of this test
using ::testing::HasSubstr;

TEST(Together, ResultsComeByRank) {
  const UniqueId id = UniqueId::create();
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    const auto all = gather_together(bootstrap, "counting", [&] {
      return bytes(std::string(static_cast<std::size_t>(rank), 'x'));
    });
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(text(all[static_cast<std::size_t>(r)]),
                std::string(static_cast<std::size_t>(r), 'x'));
    }
    together(bootstrap, "doing nothing", [] {});
    bootstrap.close();
  }));
}

TEST(Together, AFailureIsThrownOnAllWithItsRankAndCode) {
  const UniqueId id = UniqueId::create();
  const auto outcomes = on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    Code code = Code::ok;
    std::string what;
    try {
      together(bootstrap, "making a thing", [&] {
        if (rank == 1) throw Error(Code::system, "the disk is full", "delete something");
      });
    } catch (const Error& error) {
      code = error.code();
      what = error.what();
    }
    bootstrap.barrier();  // all ranks are where they were
    bootstrap.close();
    throw Error(code, what);
  });
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(outcomes[r].code(), Code::system) << r;
    EXPECT_THAT(outcomes[r].what(),
                HasSubstr(r == 1 ? "the disk is full. Next: delete something"
                                 : "making a thing failed on rank 1: the disk is full"));
  }
}

TEST(Together, NoMemoryIsASentenceWithTheSizeOnAll) {
  const UniqueId id = UniqueId::create();
  const auto outcomes = on_threads(2, [&](int rank) {
    Bootstrap bootstrap(id, 2, rank, options());
    together(bootstrap, "allocating a window of 4096 bytes", [&] {
      if (rank == 0) throw std::bad_alloc();
    });
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::out_of_memory);
    EXPECT_THAT(outcome.what(), HasSubstr("allocating a window of 4096 bytes failed"));
    EXPECT_THAT(outcome.what(), HasSubstr("there is no memory left"));
  }
}

}  // namespace
}  // namespace marrow::bootstrap
