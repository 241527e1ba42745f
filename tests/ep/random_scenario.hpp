// SPDX-License-Identifier: Apache-2.0
// A scenario drawn from its seed: sizes that nobody would choose, where quads, words, blocks and rounds do not come out even.
#pragma once

#include "ep/scenario.hpp"

namespace marrow::ep_test {

/// @param ranks   of the communicator
/// @param blocks  most blocks of a kernel
/// @param threads  of a block
inline Scenario random_scenario(std::uint64_t seed, int ranks, int blocks, int threads) {
  std::uint64_t state = seed;
  const auto pick = [&state](int from, int to) {
    state = mix(state, 1);
    return from + static_cast<int>(state % static_cast<unsigned>(to - from + 1));
  };
  const auto chance = [&](int of) { return pick(1, of) == 1; };
  Scenario s;
  s.seed = seed;
  ep::Config& c = s.config;
  int experts = 0;
  for (int r = 0; r < ranks; ++r) {
    c.experts.push_back(chance(5) ? 0 : pick(1, chance(4) ? 40 : 6));
    experts += c.experts.back();
  }
  if (experts == 0) c.experts[0] = 3;
  if (chance(2)) c.experts.assign(static_cast<std::size_t>(ranks), pick(1, 33));
  static constexpr int kTokens[] = {1, 3, 17, 31, 32, 33, 40, 65};
  c.max_tokens = kTokens[pick(0, 7)];
  static constexpr int kTopK[] = {1, 2, 5, 6, 7, 8, 30, 31, 32};
  c.top_k = kTopK[pick(0, 8)];
  c.payload = static_cast<ep::Payload>(pick(0, 2));
  c.scales = static_cast<ep::Scales>(pick(0, 2));
  c.scale_order = static_cast<ep::ScaleOrder>(pick(0, 1));
  c.layout = static_cast<ep::Layout>(pick(0, 1));
  c.hidden = (chance(3) ? pick(1, 130) : pick(1, 20)) * (c.payload == ep::Payload::fp8 ? 16 : 8);
  c.row_bytes = static_cast<std::uint32_t>(chance(3) ? pick(1, 80) : pick(1, 9)) * 16;
  c.scale_bytes = static_cast<std::uint32_t>(chance(3) ? 0 : pick(1, 150)) * 4;
  c.batches_in_flight = pick(1, 3);
  if (chance(3)) c.capacity = pick(1, ranks * c.max_tokens);
  const int most_tokens = c.max_tokens;
  if (threads == 1 && chance(4)) {  // placed by a kernel of its own
    c.max_tokens = 7000;
    c.hidden = 32;
    c.row_bytes = 48;
    c.scale_bytes = std::min(c.scale_bytes, 20u);
    c.batches_in_flight = 1;
    c.capacity = pick(1, ranks * most_tokens);
  }
  c.max_sms = pick(1, blocks);
  c.threads = threads;
  c.deadline = std::chrono::seconds(40);
  for (int r = 0; r < ranks + 1; ++r) s.tokens.push_back(chance(4) ? 0 : pick(1, most_tokens));
  s.batches = 2 * c.batches_in_flight + 1;
  s.absent = chance(2) ? 0.0 : 0.3;
  s.duplicate = chance(3) ? 0.3 : 0.0;
  s.foreign = chance(3) ? 0.2 : 0.0;
  s.hot = chance(4);
  s.split = chance(2);
  s.weighted = !chance(4);
  s.wild = chance(4);
  s.registered = chance(4);
  return s;
}

}  // namespace marrow::ep_test
