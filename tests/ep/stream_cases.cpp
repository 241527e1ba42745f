// SPDX-License-Identifier: Apache-2.0
// Cases of graphs and streams: nothing here lets the host wait between a call and what follows it in the stream.
#include <chrono>
#include <functional>

#include "ep/cases.hpp"

namespace marrow::ep_test {
namespace {

constexpr int kM = 5;
constexpr int kK = 3;
constexpr int kH = 64;

ep::Config config_for_layer(int ranks, int batches_in_flight) {
  ep::Config config;
  config.experts.assign(static_cast<std::size_t>(ranks), 4);
  config.max_tokens = kM;
  config.hidden = kH;
  config.top_k = kK;
  config.payload = ep::Payload::bf16;
  config.batches_in_flight = batches_in_flight;
  config.deadline = std::chrono::seconds(30);
  config.max_sms = sms_of_a_rank();
  return config;
}

/// Tensors of one batch whose experts give their rows back unchanged: out = fma chain of weight * row.
class Layer {
 public:
  Layer(Memory& memory, int rank, int ranks, int capacity)
      : memory_(memory), rank_(rank), experts_(4 * ranks) {
    x = static_cast<std::uint16_t*>(memory.allocate(kRows));
    ids = static_cast<std::int64_t*>(memory.allocate(kM * kK * 8));
    weights = static_cast<float*>(memory.allocate(kM * kK * 4));
    count = static_cast<std::int32_t*>(memory.allocate(4));
    out = static_cast<std::uint16_t*>(memory.allocate(kRows));
    bytes = static_cast<std::size_t>(4 * capacity) * kH * 2;
    y = memory.allocate(bytes);
    z = memory.allocate(bytes);
  }

  ep::DispatchInput input(int tokens) const {
    return {.tokens = tokens,
            .rows = x,
            .expert_ids = ids,
            .weights = weights,
            .device_tokens = tokens < 0 ? count : nullptr};
  }

  /// Other numbers for another batch. @return tokens, 0 .. M, or `fixed`
  int fill(int batch, int fixed = -1) {
    const std::uint64_t seed = mix(mix(99, batch), rank_);
    tokens_ = fixed >= 0 ? fixed : static_cast<int>(seed % (kM + 1));
    rows_.resize(kM * kH);
    chosen_.resize(kM * kK);
    w_.resize(kM * kK);
    for (std::size_t j = 0; j < rows_.size(); ++j) rows_[j] = random_bf16(mix(seed, j));
    for (int t = 0; t < kM; ++t) {
      for (int k = 0; k < kK; ++k) {
        chosen_[t * kK + k] = (static_cast<std::int64_t>(mix(seed, t) % 64) + k * 3) % experts_;
        w_[t * kK + k] = static_cast<float>(unit(mix(seed, 1000 + t * kK + k)));
      }
    }
    memory_.upload(x, rows_.data(), kRows);
    memory_.upload(ids, chosen_.data(), kM * kK * 8);
    memory_.upload(weights, w_.data(), kM * kK * 4);
    memory_.upload(count, &tokens_, 4);
    memory_.poison(out, kRows);
    return tokens_;
  }

  std::string check(int batch) {
    std::vector<std::uint16_t> got(kM * kH);
    memory_.download(got.data(), out, kRows);
    for (int t = 0; t < tokens_; ++t) {
      for (int c = 0; c < kH; ++c) {
        float sum = 0;
        for (int k = 0; k < kK; ++k) {
          bool again = false;
          for (int other = 0; other < k; ++other)
            again |= chosen_[t * kK + other] == chosen_[t * kK + k];
          if (!again) sum = std::fma(w_[t * kK + k], from_bf16(rows_[t * kH + c]), sum);
        }
        if (got[t * kH + c] != to_bf16(sum))
          return "batch " + std::to_string(batch) + " token " + std::to_string(t) + " channel " +
                 std::to_string(c);
      }
    }
    return {};
  }

  static constexpr std::size_t kRows = kM * kH * 2;
  std::uint16_t* x;
  std::int64_t* ids;
  float* weights;
  std::int32_t* count;
  std::uint16_t* out;
  std::size_t bytes;  ///< of y, and of z
  void *y, *z;

 private:
  Memory& memory_;
  int rank_;
  int experts_;
  int tokens_ = 0;
  std::vector<std::uint16_t> rows_;
  std::vector<std::int64_t> chosen_;
  std::vector<float> w_;
};

TEST_P(EpCases, Case14_GraphsReplayedWithOtherInputs) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    ep::Group group(comm, config_for_layer(comm.nranks(), 1));
    Layer l(site.memory(), comm.rank(), comm.nranks(), group.capacity());
    void* const stream = site.stream();
    const auto pair = [&](int tokens) {
      return site.graph([&, tokens] {
        group.dispatch(l.input(tokens), {l.y}, group.handle(0), stream);
        group.combine({.rows = l.y}, {l.out}, group.handle(0), stream);
      });
    };
    const auto flexible = pair(-1);
    const auto fixed = pair(3);
    const int replays = on_gpus() ? 1000 : 60;
    for (int i = 0; i < replays; ++i) {
      // Survivors that agree start at another batch number; graphs do not care.
      if (i == replays / 2) (void)group.agree(std::chrono::seconds(20), stream);
      const bool few = i % 3 == 2;
      l.fill(i, few ? 3 : -1);
      (few ? fixed : flexible)();
      if (std::string wrong = l.check(i); !wrong.empty()) return wrong;
    }
    if (const ep::Report r = group.report(stream); r.status != Status::ok) return name(r.status);
    group.close();
    return {};
  });
}

/// Phases apart: all in one graph, two batches in flight; and each phase in a graph of its own.
TEST_P(EpCases, Case14_PhasesInGraphs) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    ep::Group group(comm, config_for_layer(comm.nranks(), 2));
    Memory& memory = site.memory();
    Layer a(memory, comm.rank(), comm.nranks(), group.capacity());
    Layer b(memory, comm.rank(), comm.nranks(), group.capacity());
    void* const stream = site.stream();
    const auto send = [&](Layer& l, int h) {
      group.dispatch_send(l.input(-1), group.handle(h), stream);
    };
    const auto receive = [&](Layer& l, int h) {
      group.dispatch_receive({l.y}, group.handle(h), stream);
    };
    const auto give = [&](Layer& l, int h) {
      group.combine_send({.rows = l.y}, group.handle(h), stream);
    };
    const auto take = [&](Layer& l, int h) {
      group.combine_receive({l.out}, group.handle(h), stream);
    };
    std::vector<std::vector<std::function<void()>>> ways(2);
    ways[0].push_back(site.graph([&] {
      send(a, 0);
      send(b, 1);
      receive(a, 0);
      receive(b, 1);
      give(a, 0);
      give(b, 1);
      take(a, 0);
      take(b, 1);
    }));
    ways[1].push_back(site.graph([&] { send(a, 0); }));
    ways[1].push_back(site.graph([&] { send(b, 1); }));
    ways[1].push_back(site.graph([&] { receive(a, 0); }));
    ways[1].push_back(site.graph([&] { give(a, 0); }));
    ways[1].push_back(site.graph([&] { receive(b, 1); }));
    ways[1].push_back(site.graph([&] { give(b, 1); }));
    ways[1].push_back(site.graph([&] { take(a, 0); }));
    ways[1].push_back(site.graph([&] { take(b, 1); }));
    const int replays = on_gpus() ? 300 : 30;
    for (int i = 0; i < replays; ++i) {
      if (i == replays / 2) (void)group.agree(std::chrono::seconds(20), stream);
      a.fill(2 * i);
      b.fill(2 * i + 1);
      for (const auto& graph : ways[i / 2 % 2]) graph();
      std::string wrong = a.check(2 * i);
      if (wrong.empty()) wrong = b.check(2 * i + 1);
      if (!wrong.empty()) return wrong;
    }
    if (const ep::Report r = group.report(stream); r.status != Status::ok) return name(r.status);
    group.close();
    return {};
  });
}

/// Inputs are overwritten behind each call in the stream, as memory is that was freed there and given to somebody else; the
/// experts work on another stream, ordered by events; so do half of the combines.
TEST_P(EpCases, Case15_StreamsOrderedByEvents) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    ep::Group group(comm, config_for_layer(comm.nranks(), 2));
    Layer l(site.memory(), comm.rank(), comm.nranks(), group.capacity());
    void* const a = site.stream();
    void* const b = site.other_stream();
    for (int i = 0; i < (on_gpus() ? 300 : 30); ++i) {
      const ep::Handle h = group.handle(i % 4);
      const int tokens = l.fill(i);
      if (i % 2) {
        group.dispatch(l.input(tokens), {l.y}, h, a);
      } else {
        group.dispatch_send(l.input(tokens), h, a);
      }
      site.scribble(a, l.x, Layer::kRows);
      site.scribble(a, l.ids, kM * kK * 8);
      site.scribble(a, l.weights, kM * kK * 4);
      if (i % 2 == 0) group.dispatch_receive({l.y}, h, a);
      site.order(a, b);
      site.copy(b, l.z, l.y, l.bytes);
      site.scribble(b, l.y, l.bytes);
      void* const then = i % 4 < 2 ? a : b;
      if (then == a) site.order(b, a);
      group.combine_send({.rows = l.z}, h, then);
      site.scribble(then, l.z, l.bytes);
      group.combine_receive({l.out}, h, then);
      if (then == b) site.order(b, a);
      if (std::string wrong = l.check(i); !wrong.empty()) return wrong;
    }
    if (const ep::Report r = group.report(a); r.status != Status::ok) return name(r.status);
    group.close();
    return {};
  });
}

}  // namespace
}  // namespace marrow::ep_test
