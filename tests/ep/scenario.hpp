// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine against a plain reference, bit for bit, on whatever memory the place has: one body for the
// CPU device's tests and the GPU's. Inputs come from a hash of (seed, batch, rank, token, ...), so each rank can work out what
// every other one sends.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "marrow/ep.hpp"

namespace marrow::ep_test {

/// Memory that the place's kernels can use.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  ///< lives as long as this object
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
};

class HostMemory : public Memory {
 public:
  void* allocate(std::size_t bytes) override {
    blocks_.emplace_back((bytes + 31) / 16);
    return blocks_.back().data();
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    if (bytes) std::memcpy(to, from, bytes);
  }
  void download(void* to, const void* from, std::size_t bytes) override { upload(to, from, bytes); }

 private:
  struct alignas(16) Wide {
    std::byte bytes[16];
  };
  std::vector<std::vector<Wide>> blocks_;
};

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
  if (std::isnan(x) || std::isinf(x)) return 0x7f;
  const double size = std::fabs(static_cast<double>(x));
  int low = 0;
  int high = 0x7e;
  if (size >= e4m3_value(high)) {
    low = high;
  } else {
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (e4m3_value(middle) <= size ? low : high) = middle;
    }
    const double below = size - e4m3_value(low);
    const double above = e4m3_value(high) - size;
    if (above < below || (above == below && high % 2 == 0)) low = high;
  }
  return static_cast<std::uint8_t>(low | (std::signbit(x) ? 0x80 : 0));
}

class Checker {
 public:
  Checker(Communicator& comm, Scenario scenario, Memory& memory)
      : s_(std::move(scenario)),
        comm_(comm),
        group_(comm, s_.config),
        c_(group_.config()),
        memory_(memory) {
    const std::size_t M = static_cast<std::size_t>(c_.max_tokens);
    const std::size_t K = static_cast<std::size_t>(c_.top_k);
    for (int e : c_.experts) {
      first_.push_back(experts_);
      experts_ += e;
    }
    ranks_ = static_cast<int>(c_.experts.size());
    in_row_ =
        c_.payload == ep::Payload::opaque ? c_.row_bytes : static_cast<std::size_t>(c_.hidden) * 2;
    rank_major_ = c_.layout == ep::Layout::rank_major;
    out_rows_ = rank_major_ ? static_cast<std::size_t>(ranks_) * M
                            : static_cast<std::size_t>(group_.local_experts()) * group_.capacity();
    const int lanes = c_.batches_in_flight;
    for (int f = 0; f < lanes; ++f) {
      Buffers b;
      b.rows = memory.allocate(M * in_row_);
      b.scales = memory.allocate(M * c_.scale_bytes + 4);
      b.ids = static_cast<std::int64_t*>(memory.allocate(M * K * 8));
      b.weights = static_cast<float*>(memory.allocate(M * K * 4));
      b.y = memory.allocate(out_rows_ * group_.row_bytes() + 16);
      b.ys = memory.allocate(out_rows_ * group_.scale_bytes() + 16);
      b.z = memory.allocate(out_rows_ * static_cast<std::size_t>(c_.hidden) * 2 + 16);
      b.out = memory.allocate(M * static_cast<std::size_t>(c_.hidden) * 2 + 16);
      buffers_.push_back(b);
    }
  }

  ep::Group& group() { return group_; }

  Scenario& scenario() { return s_; }

  /// All batches. @return what is wrong first, or nothing
  std::string run() { return run(0, s_.batches); }
  /// Batches begin .. end-1.
  std::string run(int begin, int end) {
    const int lanes = s_.split ? c_.batches_in_flight : 1;
    for (int from = begin; from < end; from += lanes) {
      const int n = std::min(lanes, end - from);
      for (int i = 0; i < n; ++i) send(from + i, i);
      for (int i = 0; i < n; ++i) {
        step(from + i, 1);
        if (s_.split)
          group_.dispatch_receive({buffers_[i].y, buffers_[i].ys}, handle(from + i), s_.stream);
      }
      if (const ep::Report r = group_.report(s_.stream); r.status != Status::ok)
        return "status " + std::string(name(r.status));
      for (int i = 0; i < n; ++i) {
        if (std::string wrong = check_dispatch(from + i, i); !wrong.empty()) return wrong;
        fill_outputs(from + i, i);
      }
      if (!s_.combines) continue;
      for (const ep::CombineMode mode : {ep::CombineMode::exact, ep::CombineMode::fast}) {
        for (int i = 0; i < n; ++i) {
          step(from + i, 2);
          poison(buffers_[i].out, static_cast<std::size_t>(c_.max_tokens) * c_.hidden * 2);
          const ep::CombineInput in{.rows = buffers_[i].z, .mode = mode, .weighted = s_.weighted};
          if (s_.split) {
            group_.combine_send(in, handle(from + i), s_.stream);
          } else {
            group_.combine(in, {buffers_[i].out}, handle(from + i), s_.stream);
          }
        }
        for (int i = 0; i < n; ++i) {
          step(from + i, 3);
          if (s_.split) group_.combine_receive({buffers_[i].out}, handle(from + i), s_.stream);
        }
        if (const ep::Report r = group_.report(s_.stream); r.status != Status::ok)
          return "combine status " + std::string(name(r.status));
        for (int i = 0; i < n; ++i) {
          if (std::string wrong = check_combine(from + i, i, mode); !wrong.empty()) return wrong;
        }
      }
    }
    return {};
  }

  // What rank r's router chose and what is in its rows.
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
  /// What expert `id` makes of a token: channel i.
  std::uint16_t expert_output(int id, int batch, int slot, int i) const {
    const std::uint64_t expert = mix(mix(s_.seed + 31, id * 1000 + batch), slot);
    // Words that end a cell and look like "nothing here": NaNs that must arrive as NaNs.
    if (i % 8 >= 6 && mix(expert, i / 8) % 41 == 0) return 0xffff;
    return random_bf16(mix(expert, i));
  }

  struct Buffers {
    void *rows, *scales, *y, *ys, *z, *out;
    std::int64_t* ids;
    float* weights;
  };
  const Buffers& buffers(int lane) const { return buffers_[static_cast<std::size_t>(lane)]; }

 private:
  bool lost(int rank) const { return !s_.failed.empty() && s_.failed[rank]; }
  void step(int batch, int which) {
    if (s_.before) s_.before(batch, which);
  }

  ep::Handle handle(int batch) const { return group_.handle(batch % c_.handles); }

  void poison(void* at, std::size_t bytes) {
    const std::vector<std::uint8_t> ones(bytes, 0xff);
    memory_.upload(at, ones.data(), bytes);
  }

  void send(int batch, int lane) {
    const Buffers& b = buffers_[lane];
    const int rank = comm_.rank();
    const int T = tokens(rank, batch);
    std::vector<std::int64_t> all_ids;
    std::vector<float> all_weights;
    std::vector<std::uint8_t> rows;
    std::vector<std::uint8_t> scales;
    for (int t = 0; t < T; ++t) {
      const std::vector<std::uint16_t> r = row(rank, batch, t);
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(r.data());
      rows.insert(rows.end(), bytes, bytes + in_row_);
      const std::vector<std::uint8_t> sc = opaque_scales(rank, batch, t);
      scales.insert(scales.end(), sc.begin(), sc.end());
      const std::vector<int> good = ids(rank, batch, t);
      for (int k = 0; k < c_.top_k; ++k) {
        all_ids.push_back(raw_id(rank, batch, t, k));
        // A weight that must not be looked at is a NaN.
        all_weights.push_back(good[k] >= 0 ? weight(rank, batch, t, k) : float_from(0x7fc00000));
      }
    }
    memory_.upload(b.rows, rows.data(), rows.size());
    memory_.upload(b.scales, scales.data(), scales.size());
    memory_.upload(b.ids, all_ids.data(), all_ids.size() * 8);
    memory_.upload(b.weights, all_weights.data(), all_weights.size() * 4);
    poison(b.y, out_rows_ * group_.row_bytes());
    poison(b.ys, out_rows_ * group_.scale_bytes());
    const ep::DispatchInput in{
        .tokens = T, .rows = b.rows, .scales = b.scales, .expert_ids = b.ids, .weights = b.weights};
    step(batch, 0);
    if (s_.split) {
      group_.dispatch_send(in, handle(batch), s_.stream);
    } else {
      group_.dispatch(in, {b.y, b.ys}, handle(batch), s_.stream);
    }
  }

  template <class T>
  std::vector<T> fetch(const T* from, std::size_t n) {
    std::vector<T> values(n);
    memory_.download(values.data(), from, n * sizeof(T));
    return values;
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

 public:
  /// Ranges of bytes of a row that are not as expected.
  static std::string wrong_bytes(const std::vector<std::uint8_t>& y, std::size_t index,
                                 const std::vector<std::uint8_t>& expected) {
    std::string text;
    std::size_t from = expected.size();
    for (std::size_t i = 0; i <= expected.size() && text.size() < 100; ++i) {
      const bool wrong = i < expected.size() && y[index * expected.size() + i] != expected[i];
      if (wrong && from > i) from = i;
      if (wrong || from >= i) continue;
      text += " " + std::to_string(from) + "-" + std::to_string(i - 1);
      from = expected.size();
    }
    return text;
  }

  std::string check_dispatch(int batch, int lane) {
    const ep::Handle h = handle(batch);
    const int me = comm_.rank();
    const int L = group_.local_experts();
    const auto C = static_cast<std::size_t>(group_.capacity());
    const int M = c_.max_tokens;
    const auto y =
        fetch(static_cast<const std::uint8_t*>(buffers_[lane].y), out_rows_ * group_.row_bytes());
    const auto ys = fetch(static_cast<const std::uint32_t*>(buffers_[lane].ys),
                          out_rows_ * group_.scale_bytes() / 4);
    const auto counts = fetch(h.counts, static_cast<std::size_t>(rank_major_ ? ranks_ : L));
    const auto source = fetch(h.source, out_rows_);
    const auto weights =
        fetch(h.weights, rank_major_ ? out_rows_ * static_cast<std::size_t>(c_.top_k) : out_rows_);
    std::vector<std::int32_t> choices;
    if (rank_major_) choices = fetch(h.expert_ids, out_rows_ * static_cast<std::size_t>(c_.top_k));
    const std::string where =
        "rank " + std::to_string(me) + " batch " + std::to_string(batch) + ": ";
    std::vector<std::uint8_t> bytes;
    std::vector<std::uint32_t> scales;
    const auto check_row = [&](std::size_t index, int from, int token) -> std::string {
      if (source[index] != from * M + token)
        return where + "row " + std::to_string(index) + " comes from slot " +
               std::to_string(source[index]) + ", expected " + std::to_string(from * M + token);
      expected_row(from, batch, token, &bytes, &scales);
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (y[index * bytes.size() + i] != bytes[i])
          return where + "row " + std::to_string(index) + " of slot " +
                 std::to_string(source[index]) + " byte " + std::to_string(i) + " is " +
                 std::to_string(y[index * bytes.size() + i]) + ", expected " +
                 std::to_string(bytes[i]) + "; wrong bytes: " + wrong_bytes(y, index, bytes);
      }
      const std::size_t per = rank_major_ ? static_cast<std::size_t>(M) : C;
      for (std::size_t g = 0; g < scales.size(); ++g) {
        const std::size_t at = c_.scale_order == ep::ScaleOrder::column_major
                                   ? (index / per * scales.size() + g) * per + index % per
                                   : index * scales.size() + g;
        if (ys[at] != scales[g])
          return where + "row " + std::to_string(index) + " scale " + std::to_string(g) + " is " +
                 std::to_string(ys[at]) + ", expected " + std::to_string(scales[g]);
      }
      return {};
    };
    std::vector<std::size_t> next(static_cast<std::size_t>(std::max(L, ranks_)), 0);
    for (int from = 0; from < ranks_; ++from) {
      for (int token = 0; token < tokens(from, batch); ++token) {
        const std::vector<int> list = ids(from, batch, token);
        std::size_t row_index = 0;
        bool any = false;
        for (int k = 0; k < c_.top_k; ++k) {
          const int l = list[k] - first_[me];
          if (l < 0 || l >= L) continue;
          if (rank_major_) {
            if (!any) row_index = static_cast<std::size_t>(from) * M + next[from]++;
            any = true;
            continue;
          }
          const std::size_t i = next[l]++;
          if (i >= C) continue;
          const std::size_t index = static_cast<std::size_t>(l) * C + i;
          if (std::string wrong = check_row(index, from, token); !wrong.empty()) return wrong;
          if (weights[index] != weight(from, batch, token, k)) return where + "a wrong weight";
        }
        if (!any) continue;
        if (std::string wrong = check_row(row_index, from, token); !wrong.empty()) return wrong;
        for (int k = 0; k < c_.top_k; ++k) {
          const int l = list[k] - first_[me];
          const bool ours = l >= 0 && l < L;
          const std::size_t at = row_index * static_cast<std::size_t>(c_.top_k) + k;
          if (choices[at] != (ours ? l : -1)) return where + "a wrong local expert";
          if (weights[at] != (ours ? weight(from, batch, token, k) : 0.0f))
            return where + "a wrong weight of a choice";
        }
      }
    }
    for (std::size_t l = 0; l < counts.size(); ++l) {
      const std::size_t want = rank_major_ ? next[l] : std::min(next[l], C);
      if (static_cast<std::size_t>(counts[l]) != want)
        return where + "count " + std::to_string(l) + " is " + std::to_string(counts[l]) +
               ", expected " + std::to_string(want);
    }
    return {};
  }

 private:
  /// The row that expert `id` (rank-major: its rank) gives back for slot.
  std::vector<std::uint16_t> output_row(int id, int batch, int slot) const {
    std::vector<std::uint16_t> row(static_cast<std::size_t>(c_.hidden));
    for (int i = 0; i < c_.hidden; ++i) row[i] = expert_output(id, batch, slot, i);
    return row;
  }

  void fill_outputs(int batch, int lane) {
    const ep::Handle h = handle(batch);
    const int L = group_.local_experts();
    const auto H = static_cast<std::size_t>(c_.hidden);
    const int columns = rank_major_ ? ranks_ : L;
    const std::size_t per = rank_major_ ? static_cast<std::size_t>(c_.max_tokens)
                                        : static_cast<std::size_t>(group_.capacity());
    const auto counts = fetch(h.counts, static_cast<std::size_t>(columns));
    const auto source = fetch(h.source, out_rows_);
    for (int l = 0; l < columns; ++l) {
      for (int i = 0; i < counts[l]; ++i) {
        const std::size_t index = static_cast<std::size_t>(l) * per + static_cast<std::size_t>(i);
        const int id = rank_major_ ? comm_.rank() : first_[comm_.rank()] + l;
        const auto row = output_row(id, batch, source[index]);
        memory_.upload(static_cast<std::byte*>(buffers_[lane].z) + index * H * 2, row.data(),
                       H * 2);
      }
    }
  }

  int rank_of(int id) const {
    int rank = ranks_ - 1;
    while (first_[rank] > id) --rank;
    while (c_.experts[rank] == 0 || id >= first_[rank] + c_.experts[rank]) --rank;
    return rank;
  }

  /// Whether a row of expert `id` found room. Only for capacity < R*M.
  bool fits(int id, int batch, int slot) const {
    if (group_.capacity() >= ranks_ * c_.max_tokens || rank_major_) return true;
    int before = 0;
    for (int from = 0; from < ranks_; ++from) {
      for (int token = 0; token < tokens(from, batch); ++token) {
        if (from * c_.max_tokens + token >= slot) return before < group_.capacity();
        for (int other : ids(from, batch, token)) before += other == id;
      }
    }
    return before < group_.capacity();
  }

 public:
  std::string check_combine(int batch, int lane, ep::CombineMode mode) {
    const int me = comm_.rank();
    const auto H = static_cast<std::size_t>(c_.hidden);
    const int T = tokens(me, batch);
    const auto out = fetch(static_cast<const std::uint16_t*>(buffers_[lane].out),
                           static_cast<std::size_t>(c_.max_tokens) * H);
    for (int t = 0; t < T; ++t) {
      const std::vector<int> list = ids(me, batch, t);
      const int slot = me * c_.max_tokens + t;
      std::vector<float> sum(H, 0.0f);
      std::vector<double> sizes(H, 0.0);
      std::vector<float> exact(H, 0.0f);
      const auto add = [&](std::vector<float>& to, int id, float w) {
        const auto row = output_row(id, batch, slot);
        for (std::size_t i = 0; i < H; ++i) to[i] = std::fma(w, from_bf16(row[i]), to[i]);
      };
      for (int k = 0; k < c_.top_k; ++k) {
        if (list[k] < 0 || rank_major_ || lost(rank_of(list[k])) || !fits(list[k], batch, slot))
          continue;
        add(exact, list[k], s_.weighted ? weight(me, batch, t, k) : 1.0f);
        const auto row = output_row(list[k], batch, slot);
        for (std::size_t i = 0; i < H; ++i)
          sizes[i] += std::fabs((s_.weighted ? weight(me, batch, t, k) : 1.0f) * from_bf16(row[i]));
      }
      if (rank_major_ || mode == ep::CombineMode::fast) {
        for (int r = 0; r < ranks_; ++r) {
          std::vector<float> part(H, 0.0f);
          bool any = false;
          for (int k = 0; k < c_.top_k; ++k) {
            if (list[k] < 0 || rank_of(list[k]) != r || lost(r)) continue;
            if (rank_major_ && !any) add(part, r, 1.0f);
            if (!rank_major_ && fits(list[k], batch, slot))
              add(part, list[k], s_.weighted ? weight(me, batch, t, k) : 1.0f);
            any = true;
          }
          if (!any) continue;
          for (std::size_t i = 0; i < H; ++i) sum[i] += from_bf16(to_bf16(part[i]));
        }
      } else {
        sum = exact;
      }
      for (std::size_t i = 0; i < H; ++i) {
        const std::uint16_t got = out[static_cast<std::size_t>(t) * H + i];
        if (got != to_bf16(sum[i]))
          return "rank " + std::to_string(me) + " batch " + std::to_string(batch) + " token " +
                 std::to_string(t) + " channel " + std::to_string(i) + ": combine gave " +
                 std::to_string(from_bf16(got)) + ", expected " + std::to_string(sum[i]);
        if (!rank_major_ && mode == ep::CombineMode::fast &&
            std::fabs(from_bf16(got) - exact[i]) > 0x1p-7 * 1.01 * sizes[i])
          return "combine fast is further from exact than its bound";
      }
    }
    return {};
  }

 private:
  Scenario s_;
  Communicator& comm_;
  ep::Group group_;
  ep::Config c_;
  Memory& memory_;
  std::vector<Buffers> buffers_;
  std::vector<int> first_;
  int experts_ = 0;
  int ranks_ = 0;
  bool rank_major_ = false;
  std::size_t in_row_ = 0;
  std::size_t out_rows_ = 0;
};

}  // namespace marrow::ep_test
