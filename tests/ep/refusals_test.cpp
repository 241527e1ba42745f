// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all tsan-all
// What ep::Group refuses, and that every rank is told: none waits for one that was refused.
#include <gmock/gmock.h>

#include <chrono>
#include <functional>
#include <map>

#include "ep/scenario.hpp"
#include "thread_ranks.hpp"

namespace marrow::ep_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Parameters = std::map<std::string, std::string>;

ep::Config small(int ranks) {
  ep::Config c;
  c.experts.assign(static_cast<std::size_t>(ranks), 3);
  c.max_tokens = 4;
  c.hidden = 64;
  c.top_k = 2;
  c.payload = ep::Payload::bf16;
  return c;
}

/// Runs body(communicator) as threads. @return what each threw
std::vector<std::string> refusals(int ranks, const std::function<Parameters(int)>& parameters,
                                  const std::function<void(Communicator&)>& body) {
  return test::as_threads(ranks, [&](int rank, const UniqueId& id) -> std::string {
    Config config;
    config.parameters = parameters(rank);
    config.parameters["MARROW_WAIT_TIMEOUT"] = "20s";
    Communicator comm(id, ranks, rank, config);
    std::string said;
    try {
      body(comm);
    } catch (const Error& error) {
      said = std::to_string(static_cast<int>(error.code())) + " " + error.what();
    }
    comm.barrier();  // the communicator is as good as before
    comm.close();
    return said;
  });
}
std::string coded(Code code) { return std::to_string(static_cast<int>(code)) + " "; }

TEST(EpRefusals, ASettingOutOfRangeIsNamedWithItsValue) {
  struct Case {
    const char* said;
    std::function<void(ep::Config&)> change;
  };
  const std::vector<Case> cases = {
      {"experts.size() is 0", [](auto& c) { c.experts.clear(); }},
      {"experts.size() is 1025", [](auto& c) { c.experts.assign(1025, 1); }},
      {"experts[] is -1", [](auto& c) { c.experts[1] = -1; }},
      {"experts[] is 2049", [](auto& c) { c.experts[0] = 2049; }},
      {"experts (sum) is 0",
       [](auto& c) {
         c.experts = {0, 0};
       }},
      {"experts (sum) is 2050",
       [](auto& c) {
         c.experts = {1025, 1025};
       }},
      {"max_tokens is 0", [](auto& c) { c.max_tokens = 0; }},
      {"max_tokens is 65537", [](auto& c) { c.max_tokens = 65537; }},
      {"hidden is 0", [](auto& c) { c.hidden = 0; }},
      {"hidden is 16392", [](auto& c) { c.hidden = 16392; }},
      {"hidden is 20", [](auto& c) { c.hidden = 20; }},
      {"hidden is 24",
       [](auto& c) {
         c.hidden = 24;
         c.payload = ep::Payload::fp8;
       }},
      {"top_k is 0", [](auto& c) { c.top_k = 0; }},
      {"top_k is 33", [](auto& c) { c.top_k = 33; }},
      {"row_bytes is 24",
       [](auto& c) {
         c.payload = ep::Payload::opaque;
         c.row_bytes = 24;
       }},
      {"row_bytes is 0", [](auto& c) { c.payload = ep::Payload::opaque; }},
      {"scale_bytes is 6",
       [](auto& c) {
         c.payload = ep::Payload::opaque;
         c.row_bytes = 32;
         c.scale_bytes = 6;
       }},
      {"batches_in_flight is 9", [](auto& c) { c.batches_in_flight = 9; }},
      {"capacity is -1", [](auto& c) { c.capacity = -1; }},
      {"capacity is 9", [](auto& c) { c.capacity = 9; }},
      {"handles is 65", [](auto& c) { c.handles = 65; }},
      {"max_sms is -1", [](auto& c) { c.max_sms = -1; }},
      {"threads is 48", [](auto& c) { c.threads = 48; }},
      {"threads is 1024", [](auto& c) { c.threads = 1024; }},
      {"deadline is 0", [](auto& c) { c.deadline = std::chrono::milliseconds(0); }},
  };
  EXPECT_GT(ep::Group::memory_needed(small(2)).total, 0u);
  for (const Case& each : cases) {
    ep::Config config = small(2);
    each.change(config);
    try {
      (void)ep::Group::memory_needed(config);
      ADD_FAILURE() << each.said << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr(std::string("ep::Config::") + each.said), HasSubstr("Next: ")));
    }
  }
}

TEST(EpRefusals, RanksWithDifferentConfigsAreTold) {
  const auto said = refusals(
      3, [](int) { return Parameters{}; },
      [](Communicator& comm) {
        ep::Config config = small(3);
        if (comm.rank() == 2) config.max_tokens = 5;
        ep::Group group(comm, config);
      });
  for (std::size_t r = 0; r < said.size(); ++r) {
    const std::string pair = r == 2 ? "ranks 2 and 0" : "ranks " + std::to_string(r) + " and 2";
    EXPECT_THAT(said[r], AllOf(HasSubstr(coded(Code::mismatch)),
                               HasSubstr(pair + " gave different ep::Configs")));
  }
}

TEST(EpRefusals, WhatOneRankFindsWrongIsToldToAllAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const auto said = refusals(
      3, [](int) { return Parameters{}; },
      [](Communicator& comm) {
        ep::Config config = small(3);
        if (comm.rank() == 1) config.top_k = 33;
        ep::Group group(comm, config);
      });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  for (std::size_t r = 0; r < said.size(); ++r) {
    EXPECT_THAT(said[r], AllOf(HasSubstr(coded(Code::invalid_argument)),
                               HasSubstr("ep::Config::top_k is 33")));
    if (r != 1) {
      EXPECT_THAT(said[r], HasSubstr("rank 1 makes no ep::Group"));
    }
  }
}

TEST(EpRefusals, CellsThatOneDirectionLacksAreRefusedOnAll) {
  const auto start = std::chrono::steady_clock::now();
  const auto said = refusals(
      3,
      [](int rank) {
        return Parameters{{"MARROW_NETWORK", "shm"},
                          {"MARROW_PATH", rank == 1 ? "proxy,lsa,lsa" : "lsa,lsa,lsa"}};
      },
      [](Communicator& comm) {
        ep::Config config = small(3);
        config.protocol = ep::Protocol::cells;
        ep::Group group(comm, config);
      });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  for (const std::string& each : said)
    EXPECT_THAT(each, AllOf(HasSubstr(coded(Code::unsupported)),
                            HasSubstr("rank 1 does not reach rank 0 by load/store")));
}

TEST(EpRefusals, MemoryForCellsIsRefusedWhereThereAreNone) {
  const auto said = refusals(
      2,
      [](int) {
        return Parameters{{"MARROW_NETWORK", "shm"}, {"MARROW_PATH", "proxy"}};
      },
      [](Communicator& comm) {
        ep::Config config = small(2);
        EXPECT_GT(ep::Group::memory_needed(comm, config).staging, 0u);
        config.protocol = ep::Protocol::cells;
        (void)ep::Group::memory_needed(comm, config);
      });
  for (const std::string& each : said) EXPECT_THAT(each, HasSubstr(coded(Code::unsupported)));
}

/// What `call` is refused with.
template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
    return "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
}

TEST(EpRefusals, CallsOutOfTurnAndBadPointersSendNothing) {
  const auto said = refusals(
      1, [](int) { return Parameters{}; },
      [](Communicator& comm) {
        HostMemory memory;
        ep::Group group(comm, small(1));
        const ep::Handle h = group.handle(0);
        auto* rows = static_cast<std::byte*>(memory.allocate(1024));
        const std::vector<std::int64_t> ids(8, 0);
        void* y = memory.allocate(static_cast<std::size_t>(3 * group.capacity()) * 128);
        void* out = memory.allocate(4 * 128);
        const auto send = [&](const void* from, const std::int64_t* which) {
          return refusal(
              [&] { group.dispatch_send({.tokens = 1, .rows = from, .expert_ids = which}, h); });
        };
        EXPECT_THAT(send(nullptr, ids.data()), HasSubstr("DispatchInput::rows is null"));
        EXPECT_THAT(send(rows + 8, ids.data()), HasSubstr("not aligned to 16 bytes"));
        EXPECT_THAT(send(rows, nullptr), HasSubstr("DispatchInput::expert_ids is null"));
        EXPECT_THAT(refusal([&] { group.dispatch_receive({y}, h); }),
                    HasSubstr("dispatch_receive without a batch in flight"));
        EXPECT_EQ(send(rows, ids.data()), "accepted");
        EXPECT_THAT(send(rows, ids.data()),
                    HasSubstr("dispatch_send of one batch more than the 1"));
        EXPECT_THAT(refusal([&] {
                      group.dispatch({.tokens = 1, .rows = rows, .expert_ids = ids.data()}, {y}, h);
                    }),
                    HasSubstr("dispatch with an earlier batch in flight"));
        EXPECT_THAT(refusal([&] { group.dispatch_receive({nullptr}, h); }),
                    HasSubstr("DispatchOutput::rows is null"));
        group.dispatch_receive({y}, h);
        EXPECT_THAT(refusal([&] { group.combine_send({.rows = nullptr}, h); }),
                    HasSubstr("CombineInput::rows is null"));
        EXPECT_THAT(
            refusal([&] { group.combine({.rows = y}, {static_cast<std::byte*>(out) + 4}, h); }),
            HasSubstr("CombineOutput::rows is not aligned"));
        group.combine_send({.rows = y}, h);
        EXPECT_THAT(refusal([&] { group.combine_send({.rows = y}, h); }),
                    HasSubstr("combine_send of one batch more"));
        EXPECT_THAT(refusal([&] { group.combine({.rows = y}, {out}, h); }),
                    HasSubstr("combine with an earlier one in flight"));
        group.combine_receive({out}, h);
        EXPECT_EQ(group.report().status, Status::ok);
        group.close();
        group.close();
        EXPECT_THAT(refusal([&] { group.dispatch_receive({y}, h); }), HasSubstr("is closed"));
        EXPECT_THAT(refusal([&] { (void)group.report(); }), HasSubstr("is closed"));
        EXPECT_THAT(refusal([&] { (void)group.handle(0); }), HasSubstr("is closed"));
      });
  EXPECT_EQ(said[0], "");
}

TEST(EpRefusals, MemoryRegisteredWithAnotherCommunicatorIsRefused) {
  const auto said = refusals(
      1, [](int) { return Parameters{}; },
      [](Communicator& comm) {
        Communicator other(UniqueId::create(), 1, 0, Config{});
        Window theirs = other.allocate(1 << 16);
        ep::Group group(comm, small(1));
        EXPECT_THAT(refusal([&] {
                      group.combine_send({.rows = theirs.data(), .registered = theirs.handle()},
                                         group.handle(0));
                    }),
                    HasSubstr("belongs to another communicator"));
        group.close();
        theirs.close();
        other.close();
      });
  EXPECT_EQ(said[0], "");
}

}  // namespace
}  // namespace marrow::ep_test
