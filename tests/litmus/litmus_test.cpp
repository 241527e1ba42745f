// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Litmus tests of the platform's ordering on the CPU device: each thread is a block, plain words are what
// must be published. ThreadSanitizer sees a missing edge on any machine; the values show it on weak ones.
// The same shapes on GPUs over NVLink and PCIe are in tests/gpu.
#include <gtest/gtest.h>

#include <memory>

#include "marrow/device.cuh"

namespace marrow {
namespace {

struct Words {
  alignas(64) std::uint64_t data = 0;
  alignas(64) std::uint64_t more = 0;
  alignas(64) std::uint64_t flag = 0;
  alignas(64) std::uint64_t second = 0;
  alignas(64) std::uint64_t done = 0;
  alignas(64) std::uint64_t wrong = 0;
  alignas(64) Cell16 cell{};
};

constexpr std::uint64_t kRounds = 300;

DeviceCommunicator bare(ControlBlock* control) {
  DeviceCommunicator comm;
  comm.abi = kAbiVersion;
  comm.control = control;
  comm.wait_ns = 20'000'000'000;
  return comm;
}
void reach(const DeviceCommunicator& comm, const std::uint64_t* word, std::uint64_t value) {
  (void)wait_until(comm, {}, [&] { return observe<Scope::system>(word) >= value; });
}
void expect(Words* w, std::uint64_t got, std::uint64_t want) {
  if (got != want) fetch_add_relaxed<Scope::system>(&w->wrong, 1);
}

template <void (*kKernel)(DeviceCommunicator, Words*)>
std::uint64_t run(int blocks) {
  auto control = std::make_unique<ControlBlock>();
  auto words = std::make_unique<Words>();
  launch(Place::cpu(), blocks, 1, 0, kKernel, bare(control.get()), words.get());
  return words->wrong;
}

/// Message passing: data, then flag.
void message(DeviceCommunicator comm, Words* w) {
  for (std::uint64_t r = 1; r <= kRounds; ++r) {
    if (block_index() == 0) {
      w->data = r;
      publish_add<Scope::system>(&w->flag, 1);
      reach(comm, &w->done, r);
    } else {
      reach(comm, &w->flag, r);
      expect(w, w->data, r);
      publish<Scope::system>(Store{&w->done, r});
    }
  }
}
TEST(Litmus, MessagePassing) { EXPECT_EQ(run<message>(2), 0u); }

/// Write-to-read causality: the middle thread passes on what it has only seen.
void causality(DeviceCommunicator comm, Words* w) {
  for (std::uint64_t r = 1; r <= kRounds; ++r) {
    if (block_index() == 0) {
      w->data = r;
      publish<Scope::system>(Store{&w->flag, r});
      reach(comm, &w->done, r);
    } else if (block_index() == 1) {
      reach(comm, &w->flag, r);
      publish<Scope::system>(Store{&w->second, r});
      reach(comm, &w->done, r);
    } else {
      reach(comm, &w->second, r);
      expect(w, w->data, r);
      publish<Scope::system>(Store{&w->done, r});
    }
  }
}
TEST(Litmus, CausalityIsCumulative) { EXPECT_EQ(run<causality>(3), 0u); }

/// Two threads add to one flag: the reader of the sum has both threads' data (release sequence), as with a
/// signal of many sources.
void two_adders(DeviceCommunicator comm, Words* w) {
  for (std::uint64_t r = 1; r <= kRounds; ++r) {
    if (block_index() < 2) {
      (block_index() == 0 ? w->data : w->more) = r;
      publish_add<Scope::system>(&w->flag, 1);
      reach(comm, &w->done, r);
    } else {
      reach(comm, &w->flag, 2 * r);
      expect(w, w->data + w->more, 2 * r);
      publish<Scope::system>(Store{&w->done, r});
    }
  }
}
TEST(Litmus, SumOfTwoAddersCoversBoth) { EXPECT_EQ(run<two_adders>(3), 0u); }

/// One publication of several words: each of them carries all that was before.
void several_words(DeviceCommunicator comm, Words* w) {
  for (std::uint64_t r = 1; r <= kRounds; ++r) {
    if (block_index() == 0) {
      w->data = r;
      Publication<Scope::system> out;
      out.store(&w->flag, r);
      out.add(&w->second, 1);
      reach(comm, &w->done, 2 * r);
    } else {
      reach(comm, block_index() == 1 ? &w->flag : &w->second, r);
      expect(w, w->data, r);
      publish_add<Scope::system>(&w->done, 1);
      reach(comm, &w->done, 2 * r);
    }
  }
}
TEST(Litmus, EachWordOfAPublicationReleases) { EXPECT_EQ(run<several_words>(3), 0u); }

/// Cells are whole for every reader, also for one that polls while they are written again and again with the
/// epoch in the high word.
void cells(DeviceCommunicator comm, Words* w) {
  if (block_index() == 0) {
    for (std::uint64_t r = 1; r <= kRounds; ++r) {
      store_cell(&w->cell, Cell16{r * 3, r});
      reach(comm, &w->done, 2 * r);
    }
  } else {
    for (std::uint64_t r = 1; r <= kRounds; ++r) {
      Cell16 seen{};
      (void)wait_until(comm, {}, [&] { return (seen = load_cell(&w->cell)).high >= r; });
      expect(w, seen.low, seen.high * 3);
      publish_add<Scope::system>(&w->done, 1);
    }
  }
}
TEST(Litmus, CellsAreWhole) { EXPECT_EQ(run<cells>(3), 0u); }

}  // namespace
}  // namespace marrow
