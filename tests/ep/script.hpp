// SPDX-License-Identifier: Apache-2.0
// What every rank sends in a scenario, and the plain arithmetic that outputs are compared with. Everything comes from a
// hash of (seed, batch, rank, token, ...), so each rank can work out what every other one sends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "marrow/ep.hpp"

namespace marrow::ep_test {

struct Scenario {
  ep::Config config;
  std::vector<int>
      tokens;  ///< of each rank; batch b uses tokens[(rank + b) % size] capped at max_tokens
  std::uint64_t seed = 1;
  int batches = 2;
  double absent = 0.1;     ///< share of -1 among the choices
  double duplicate = 0.0;  ///< ... of repetitions
  double foreign = 0.0;    ///< ... of ids that are no expert
  bool hot = false;        ///< everything to expert 0 and 1 first
  bool split = false;      ///< send and receive apart, F batches in flight
  bool weighted = true;
  void* stream = nullptr;
  /// Who chose what, in place of the generator: (rank, batch, token, k).
  std::function<std::int64_t(int, int, int, int)> route;
  /// Called before each call on the Group: (batch, step); steps: 0 send, 1 receive, 2 combine, 3 its receive.
  std::function<void(int, int)> before;
  /// Ranks that the survivors agreed to have failed: nothing comes from them, their experts give nothing.
  std::vector<bool> failed;
  bool combines = true;
  /// Experts' outputs hold infinities, NaNs of every kind, the largest and the smallest numbers and negative zeros.
  bool wild = false;
  /// Experts' outputs lie in windows, and are overwritten as soon as combine's receive has ended.
  bool registered = false;
};

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15ull + b + 0x632be59bd9b4e019ull;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
inline double unit(std::uint64_t x) { return static_cast<double>(x >> 11) * 0x1p-53; }
inline float float_from(std::uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline std::uint32_t bits_from(float f) {
  std::uint32_t b;
  std::memcpy(&b, &f, 4);
  return b;
}
inline float from_bf16(std::uint16_t h) { return float_from(static_cast<std::uint32_t>(h) << 16); }
inline std::uint16_t to_bf16(float f) {
  if (std::isnan(f)) return 0x7fff;
  const std::uint32_t b = bits_from(f);
  const std::uint32_t low = b & 0xffff;
  std::uint32_t high = b >> 16;
  if (low > 0x8000 || (low == 0x8000 && (high & 1))) ++high;
  return static_cast<std::uint16_t>(high);
}
/// A number of about -8 .. 8, some exact zeros.
inline std::uint16_t random_bf16(std::uint64_t x) {
  if ((x & 63) == 0) return 0;
  return to_bf16(static_cast<float>((unit(mix(x, 1)) - 0.5) * 16));
}

inline double e4m3_value(int code) {  // 0 .. 0x7e
  const int exponent = code >> 3;
  const int fraction = code & 7;
  return exponent ? std::ldexp(1.0 + fraction / 8.0, exponent - 7) : std::ldexp(fraction / 8.0, -6);
}
/// By search through all values.
inline std::uint8_t to_e4m3(float x) {
  static const auto kValues = [] {
    std::vector<double> values;
    for (int code = 0; code <= 0x7e; ++code) values.push_back(e4m3_value(code));
    return values;
  }();
  if (std::isnan(x) || std::isinf(x)) return 0x7f;
  const double size = std::fabs(static_cast<double>(x));
  int low = 0;
  int high = 0x7e;
  if (size >= kValues[0x7e]) {
    low = high;
  } else {
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (kValues[middle] <= size ? low : high) = middle;
    }
    const double below = size - kValues[low];
    const double above = kValues[high] - size;
    if (above < below || (above == below && high % 2 == 0)) low = high;
  }
  return static_cast<std::uint8_t>(low | (std::signbit(x) ? 0x80 : 0));
}

/// body(0 .. n-1), by threads if there is much to do. @param each  about how many numbers one of them handles
template <class Body>
void spread(std::size_t n, std::size_t each, Body&& body) {
  const std::size_t wanted = n * each / 200'000;  // a millisecond or so a thread
  const std::size_t threads =
      std::min({n, wanted, static_cast<std::size_t>(std::thread::hardware_concurrency()) / 4});
  const auto part = [&](std::size_t first, std::size_t step) {
    for (std::size_t i = first; i < n; i += step) body(i);
  };
  if (threads < 2) return part(0, 1);
  std::vector<std::thread> pool;
  for (std::size_t t = 0; t < threads; ++t) pool.emplace_back(part, t, threads);
  for (std::thread& thread : pool) thread.join();
}

/// The scenario's script: who sends what to whom, and what must come of it.
class Script {
 public:
  /// @param config  as the Group has it, with defaults filled in
  Script(Scenario scenario, const ep::Config& config) : s_(std::move(scenario)), c_(config) {
    for (int e : c_.experts) {
      first_.push_back(experts_);
      experts_ += e;
    }
    ranks_ = static_cast<int>(c_.experts.size());
    in_row_ =
        c_.payload == ep::Payload::opaque ? c_.row_bytes : static_cast<std::size_t>(c_.hidden) * 2;
    rank_major_ = c_.layout == ep::Layout::rank_major;
  }

  Scenario& scenario() { return s_; }

  int tokens(int rank, int batch) const {
    if (lost(rank)) return 0;
    const int n = s_.tokens[static_cast<std::size_t>(rank + batch) % s_.tokens.size()];
    return std::min(n, c_.max_tokens);
  }
  std::int64_t raw_id(int rank, int batch, int token, int k) const {
    if (s_.route) return s_.route(rank, batch, token, k);
    const std::uint64_t x = mix(mix(mix(mix(s_.seed, batch), rank), token), k + 100);
    const double dice = unit(x);
    if (dice < s_.absent) return -1;
    if (dice < s_.absent + s_.foreign) return x & 1 ? experts_ + static_cast<int>(x >> 1 & 7) : -2;
    if (k > 0 && dice < s_.absent + s_.foreign + s_.duplicate) return raw_id(rank, batch, token, 0);
    if (s_.hot && k < 2) return k;
    return static_cast<std::int64_t>(mix(x, 5) % static_cast<unsigned>(experts_));
  }
  /// Without ignored choices. (Random ids may repeat by chance, too.)
  std::vector<int> ids(int rank, int batch, int token) const {
    std::vector<int> ids;
    for (int k = 0; k < c_.top_k; ++k) {
      const std::int64_t id = raw_id(rank, batch, token, k);
      bool good = id >= 0 && id < experts_;
      for (int other = 0; other < k && good; ++other)
        good = raw_id(rank, batch, token, other) != id;
      ids.push_back(good ? static_cast<int>(id) : -1);
    }
    return ids;
  }
  float weight(int rank, int batch, int token, int k) const {
    return static_cast<float>(unit(mix(mix(mix(mix(s_.seed, batch), rank), token), k + 500)));
  }
  std::uint64_t row_seed(int rank, int batch, int token) const {
    return mix(mix(mix(s_.seed + 7, batch), rank), token);
  }
  std::vector<std::uint16_t> row(int rank, int batch, int token) const {
    std::vector<std::uint16_t> row(in_row_ / 2);
    const std::uint64_t seed = row_seed(rank, batch, token);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::uint64_t x = mix(seed, i);
      row[i] = c_.payload == ep::Payload::opaque ? static_cast<std::uint16_t>(x) : random_bf16(x);
      // Words that end a cell and look like "nothing here" must pass.
      if (c_.payload != ep::Payload::fp8 && i % 8 >= 6 && (seed + i / 8) % 3 == 0) row[i] = 0xffff;
    }
    if (c_.payload == ep::Payload::fp8 && row.size() >= 256 && token % 5 == 1) {
      for (std::size_t i = 0; i < 128; ++i) row[i] = 0;  // a group of zeros
      row[130] = 0x7fc1;                                 // NaN
      if (token % 2) row[131] = 0x7f80;                  // infinity
    }
    return row;
  }
  std::vector<std::uint8_t> opaque_scales(int rank, int batch, int token) const {
    std::vector<std::uint8_t> bytes(c_.payload == ep::Payload::opaque ? c_.scale_bytes : 0);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::uint8_t>(
          mix(row_seed(rank, batch, token) + 99, i) % 5 ? mix(i, rank) : 0xff);
    return bytes;
  }
  /// The row that expert `id` (rank-major: its rank) gives back for slot.
  std::vector<std::uint16_t> output_row(int id, int batch, int slot) const {
    std::vector<std::uint16_t> row(static_cast<std::size_t>(c_.hidden));
    const std::uint64_t expert = mix(mix(s_.seed + 31, id * 1000 + batch), slot);
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = random_bf16(mix(expert, i));
      // Words that end a cell and look like "nothing here": NaNs that must arrive as NaNs.
      if (i % 8 == 7 && mix(expert, i / 8) % 41 == 0) row[i] = row[i - 1] = 0xffff;
      if (!s_.wild) continue;
      static constexpr std::uint16_t kWild[] = {0x7f80, 0xff80, 0x7f81, 0xff81, 0x7fc0, 0xffc1,
                                                0x7f7f, 0xff7f, 0x0001, 0x8001, 0x007f, 0x8000};
      const std::uint64_t x = mix(expert, i + 77777);
      if (x % 3 == 0) row[i] = kWild[(x >> 8) % std::size(kWild)];
    }
    return row;
  }

  int rank_of(int id) const {
    int rank = ranks_ - 1;
    while (first_[rank] > id) --rank;
    while (c_.experts[rank] == 0 || id >= first_[rank] + c_.experts[rank]) --rank;
    return rank;
  }

  /// Whether a row of expert `id` found room. Only for capacity < R*M.
  bool fits(int id, int batch, int slot) const {
    if (c_.capacity >= ranks_ * c_.max_tokens || rank_major_) return true;
    int before = 0;
    for (int from = 0; from < ranks_; ++from) {
      for (int token = 0; token < tokens(from, batch); ++token) {
        if (from * c_.max_tokens + token >= slot) return before < c_.capacity;
        for (int other : ids(from, batch, token)) before += other == id;
      }
    }
    return before < c_.capacity;
  }

  /// A row as it must come out, and its scales.
  void expected_row(int source, int batch, int token, std::vector<std::uint8_t>* out,
                    std::vector<std::uint32_t>* scales) const {
    const std::vector<std::uint16_t> in = row(source, batch, token);
    out->clear();
    scales->clear();
    if (c_.payload != ep::Payload::fp8) {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(in.data());
      out->assign(bytes, bytes + in_row_);
      const std::vector<std::uint8_t> sc = opaque_scales(source, batch, token);
      scales->resize(sc.size() / 4);
      if (!sc.empty()) std::memcpy(scales->data(), sc.data(), sc.size());
      return;
    }
    std::vector<std::uint32_t> powers;
    for (std::size_t group = 0; group < in.size(); group += 128) {
      const std::size_t end = std::min(in.size(), group + 128);
      float amax = 1e-4f;
      for (std::size_t i = group; i < end; ++i) amax = std::fmax(amax, std::fabs(from_bf16(in[i])));
      float scale = amax * (1.0f / 448.0f);
      float factor = 448.0f / amax;
      if (c_.scales != ep::Scales::f32) {
        int e = 0;
        const float fraction = std::isinf(scale) ? 0 : std::frexp(scale, &e);  // 0.5 .. 1
        if (fraction == 0.5f) --e;
        scale = std::isinf(scale) ? scale : std::ldexp(1.0f, e);
        factor = std::isinf(scale) ? 0.0f : std::ldexp(1.0f, -e);
        powers.push_back(std::isinf(scale) ? 255 : static_cast<std::uint32_t>(e + 127));
      }
      for (std::size_t i = group; i < end; ++i) out->push_back(to_e4m3(from_bf16(in[i]) * factor));
      scales->push_back(bits_from(scale));
    }
    if (c_.scales == ep::Scales::ue8m0) {
      scales->assign((powers.size() + 3) / 4, 0);
      for (std::size_t g = 0; g < powers.size(); ++g) (*scales)[g / 4] |= powers[g] << (g % 4 * 8);
    }
  }

  /// Token `token` of rank me after combine. @param bound  how far fast may be from `exact`; empty unless asked for
  std::vector<float> combined(int me, int batch, int token, ep::CombineMode mode,
                              std::vector<float>* exact, std::vector<double>* bound) const {
    const auto H = static_cast<std::size_t>(c_.hidden);
    const std::vector<int> list = ids(me, batch, token);
    const int slot = me * c_.max_tokens + token;
    const auto weight_of = [&](int k) { return s_.weighted ? weight(me, batch, token, k) : 1.0f; };
    std::vector<float> sum(H, 0.0f);
    exact->assign(H, 0.0f);
    bound->assign(H, 0.0);
    const auto add = [&](std::vector<float>& to, const std::vector<std::uint16_t>& row, float w) {
      for (std::size_t i = 0; i < H; ++i) to[i] = std::fma(w, from_bf16(row[i]), to[i]);
    };
    std::vector<std::vector<std::uint16_t>> rows(list.size());
    for (int k = 0; k < c_.top_k && !rank_major_; ++k) {
      if (list[k] < 0 || lost(rank_of(list[k])) || !fits(list[k], batch, slot)) continue;
      rows[k] = output_row(list[k], batch, slot);
      add(*exact, rows[k], weight_of(k));
      for (std::size_t i = 0; i < H; ++i)
        (*bound)[i] += 0x1p-7 * 1.01 * std::fabs(weight_of(k) * from_bf16(rows[k][i]));
    }
    if (!rank_major_ && mode == ep::CombineMode::exact) return *exact;
    for (int r = 0; r < ranks_; ++r) {
      std::vector<float> part(H, 0.0f);
      bool any = false;
      for (int k = 0; k < c_.top_k; ++k) {
        if (list[k] < 0 || rank_of(list[k]) != r || lost(r)) continue;
        if (rank_major_ && !any) add(part, output_row(r, batch, slot), 1.0f);
        if (!rows[k].empty()) add(part, rows[k], weight_of(k));
        any = true;
      }
      if (!any) continue;
      for (std::size_t i = 0; i < H; ++i) sum[i] += from_bf16(to_bf16(part[i]));
    }
    return sum;
  }

 protected:
  bool lost(int rank) const { return !s_.failed.empty() && s_.failed[rank]; }

  Scenario s_;
  ep::Config c_;
  std::vector<int> first_;
  int experts_ = 0;
  int ranks_ = 0;
  bool rank_major_ = false;
  std::size_t in_row_ = 0;
};

}  // namespace marrow::ep_test
