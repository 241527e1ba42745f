// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine against the script of script.hpp, bit for bit, on whatever memory the place has: one body for the
// CPU device's tests and the GPU's. Outputs are poisoned before each call, and what may not be written must still be so.
#pragma once

#include <atomic>

#include "ep/script.hpp"

namespace marrow::ep_test {

/// Memory that the place's kernels can use.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  ///< lives as long as this object
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
  /// All bytes 0xff.
  virtual void poison(void* at, std::size_t bytes) = 0;
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
  void poison(void* at, std::size_t bytes) override { std::memset(at, 0xff, bytes); }

 private:
  struct alignas(16) Wide {
    std::byte bytes[16];
  };
  std::vector<std::vector<Wide>> blocks_;
};

class Checker : public Script {
 public:
  /// Bytes behind an output that must stay as they were.
  static constexpr std::size_t kGuard = 256;

  Checker(Communicator& comm, const Scenario& scenario, Memory& memory)
      : Checker(comm, scenario, memory, ep::Group(comm, scenario.config)) {}

  ep::Group& group() { return group_; }
  /// Collective: closes the group, and the windows of outputs.
  void close() {
    group_.close();
    for (Window& window : windows_) window.close();
  }

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
          if (s_.registered) fill_outputs(from + i, i);
          step(from + i, 2);
          memory_.poison(buffers_[i].out, out_bytes());
          const ep::CombineInput in = combine_input(i, mode);
          if (s_.split) {
            group_.combine_send(in, handle(from + i), s_.stream);
          } else {
            group_.combine(in, {buffers_[i].out}, handle(from + i), s_.stream);
          }
        }
        for (int i = 0; i < n; ++i) {
          step(from + i, 3);
          if (s_.split) group_.combine_receive({buffers_[i].out}, handle(from + i), s_.stream);
          if (s_.registered) memory_.poison(buffers_[i].z, z_bytes());
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

  struct Buffers {
    void *rows, *scales, *y, *ys, *z, *out;
    std::int64_t* ids;
    float* weights;
  };
  const Buffers& buffers(int lane) const { return buffers_[static_cast<std::size_t>(lane)]; }

  /// Sends batch `batch`: dispatch, or its first half.
  void send(int batch, int lane) {
    const Buffers& b = buffers_[lane];
    const int rank = comm_.rank();
    const int T = tokens(rank, batch);
    std::vector<std::int64_t> all_ids;
    std::vector<float> all_weights;
    std::vector<std::uint8_t> rows;
    std::vector<std::uint8_t> scales;
    rows.resize(static_cast<std::size_t>(T) * in_row_);
    spread(static_cast<std::size_t>(T), in_row_, [&](std::size_t t) {
      const std::vector<std::uint16_t> r = row(rank, batch, static_cast<int>(t));
      std::memcpy(rows.data() + t * in_row_, r.data(), in_row_);
    });
    for (int t = 0; t < T; ++t) {
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
    memory_.poison(b.y, out_rows_ * group_.row_bytes() + kGuard);
    memory_.poison(b.ys, out_rows_ * group_.scale_bytes() + kGuard);
    const ep::DispatchInput in{
        .tokens = T, .rows = b.rows, .scales = b.scales, .expert_ids = b.ids, .weights = b.weights};
    step(batch, 0);
    if (s_.split) {
      group_.dispatch_send(in, handle(batch), s_.stream);
    } else {
      group_.dispatch(in, {b.y, b.ys}, handle(batch), s_.stream);
    }
  }

  std::string check_dispatch(int batch, int lane) {
    const Buffers& b = buffers_[lane];
    const ep::Handle h = handle(batch);
    const int me = comm_.rank();
    const int L = group_.local_experts();
    const auto C = static_cast<std::size_t>(group_.capacity());
    const auto M = static_cast<std::size_t>(c_.max_tokens);
    const auto K = static_cast<std::size_t>(c_.top_k);
    const std::size_t per = rank_major_ ? M : C;
    const auto columns = static_cast<std::size_t>(rank_major_ ? ranks_ : L);
    const std::string where =
        "rank " + std::to_string(me) + " batch " + std::to_string(batch) + ": ";
    // Where each row must be.
    struct Token {
      int from, token;
      std::vector<int> list;
      std::vector<std::size_t> rows;  ///< in the output
      std::vector<int> choices;       ///< expert-major: of rows
    };
    std::vector<Token> all;
    std::vector<std::size_t> next(columns, 0);
    for (int from = 0; from < ranks_; ++from) {
      for (int token = 0; token < tokens(from, batch); ++token) {
        Token t{from, token, ids(from, batch, token), {}, {}};
        for (int k = 0; k < c_.top_k; ++k) {
          const int l = t.list[k] - first_[me];
          if (l < 0 || l >= L) continue;
          if (rank_major_) {
            if (t.rows.empty()) t.rows.push_back(static_cast<std::size_t>(from) * M + next[from]++);
          } else if (const std::size_t i = next[l]++; i < C) {
            t.rows.push_back(static_cast<std::size_t>(l) * C + i);
            t.choices.push_back(k);
          }
        }
        if (!t.rows.empty()) all.push_back(std::move(t));
      }
    }
    const auto counts = fetch(h.counts, columns);
    for (std::size_t l = 0; l < columns; ++l) {
      const std::size_t want = std::min(next[l], per);
      if (static_cast<std::size_t>(counts[l]) != want)
        return where + "count " + std::to_string(l) + " is " + std::to_string(counts[l]) +
               ", expected " + std::to_string(want);
      next[l] = want;
    }
    // Large outputs: of each expert the rows that are there and one more.
    const std::size_t row_bytes = group_.row_bytes();
    const bool whole = out_rows_ * row_bytes <= (std::size_t{8} << 20);
    std::vector<std::vector<std::uint8_t>> y(columns);
    for (std::size_t l = 0; l < columns; ++l) {
      const std::size_t n = whole ? per : std::min(per, next[l] + 1);
      y[l] = fetch(static_cast<const std::uint8_t*>(b.y) + l * per * row_bytes, n * row_bytes);
      if (!poisoned(y[l].data() + next[l] * row_bytes, y[l].data() + y[l].size()))
        return where + "a row of expert " + std::to_string(l) + " past its count was written";
    }
    const std::size_t words = group_.scale_bytes() / 4;
    const auto ys = fetch(static_cast<const std::uint32_t*>(b.ys), out_rows_ * words);
    const auto scale_at = [&](std::size_t row, std::size_t g) {
      return c_.scale_order == ep::ScaleOrder::column_major
                 ? (row / per * words + g) * per + row % per
                 : row * words + g;
    };
    for (std::size_t row = 0; row < out_rows_; ++row) {
      if (row % per < next[row / per]) continue;
      for (std::size_t g = 0; g < words; ++g)
        if (ys[scale_at(row, g)] != 0xffffffffu)
          return where + "a scale of row " + std::to_string(row) + ", past the count, was written";
    }
    const auto guard = [&](const void* at) {
      const auto bytes = fetch(static_cast<const std::uint8_t*>(at), kGuard);
      return poisoned(bytes.data(), bytes.data() + kGuard);
    };
    if (!guard(static_cast<const std::byte*>(b.y) + out_rows_ * row_bytes) ||
        !guard(static_cast<const std::byte*>(b.ys) + out_rows_ * words * 4))
      return where + "bytes behind the output were written";
    const auto source = fetch(h.source, out_rows_);
    const auto weights = fetch(h.weights, rank_major_ ? out_rows_ * K : out_rows_);
    std::vector<std::int32_t> choices;
    if (rank_major_) choices = fetch(h.expert_ids, out_rows_ * K);
    const auto check_row = [&](const Token& t, std::size_t row,
                               const std::vector<std::uint8_t>& bytes,
                               const std::vector<std::uint32_t>& scales) -> std::string {
      const int slot = t.from * c_.max_tokens + t.token;
      const std::string which = where + "row " + std::to_string(row) + " ";
      if (source[row] != slot)
        return which + "comes from slot " + std::to_string(source[row]) + ", expected " +
               std::to_string(slot);
      const std::uint8_t* at = y[row / per].data() + row % per * row_bytes;
      if (std::memcmp(at, bytes.data(), bytes.size()) != 0)
        return which + "of slot " + std::to_string(slot) + ": wrong bytes " +
               wrong_bytes(at, bytes);
      for (std::size_t g = 0; g < scales.size(); ++g)
        if (ys[scale_at(row, g)] != scales[g])
          return which + "scale " + std::to_string(g) + " is " +
                 std::to_string(ys[scale_at(row, g)]) + ", expected " + std::to_string(scales[g]);
      return {};
    };
    return first_wrong(all.size(), static_cast<std::size_t>(c_.hidden), [&](std::size_t i) {
      const Token& t = all[i];
      std::vector<std::uint8_t> bytes;
      std::vector<std::uint32_t> scales;
      expected_row(t.from, batch, t.token, &bytes, &scales);
      for (std::size_t n = 0; n < t.rows.size(); ++n) {
        const std::size_t row = t.rows[n];
        if (std::string wrong = check_row(t, row, bytes, scales); !wrong.empty()) return wrong;
        if (!rank_major_) {
          if (weights[row] != weight(t.from, batch, t.token, t.choices[n]))
            return where + "a wrong weight";
          continue;
        }
        for (std::size_t k = 0; k < K; ++k) {
          const int l = t.list[k] - first_[me];
          const bool ours = l >= 0 && l < L;
          if (choices[row * K + k] != (ours ? l : -1)) return where + "a wrong local expert";
          if (weights[row * K + k] !=
              (ours ? weight(t.from, batch, t.token, static_cast<int>(k)) : 0.0f))
            return where + "a wrong weight of a choice";
        }
      }
      return std::string();
    });
  }

  std::string check_combine(int batch, int lane, ep::CombineMode mode) {
    const int me = comm_.rank();
    const auto H = static_cast<std::size_t>(c_.hidden);
    const auto T = static_cast<std::size_t>(tokens(me, batch));
    const auto out = fetch(static_cast<const std::uint16_t*>(buffers_[lane].out), out_bytes() / 2);
    if (!poisoned(reinterpret_cast<const std::uint8_t*>(out.data() + T * H),
                  reinterpret_cast<const std::uint8_t*>(out.data() + out.size())))
      return "rank " + std::to_string(me) + ": combine wrote past its tokens";
    return first_wrong(T, H * static_cast<std::size_t>(c_.top_k), [&](std::size_t t) {
      std::vector<float> exact;
      std::vector<double> bound;
      const std::vector<float> sum = combined(me, batch, static_cast<int>(t), mode, &exact, &bound);
      for (std::size_t i = 0; i < H; ++i) {
        const std::uint16_t got = out[t * H + i];
        if (got != to_bf16(sum[i]))
          return "rank " + std::to_string(me) + " batch " + std::to_string(batch) + " token " +
                 std::to_string(t) + " channel " + std::to_string(i) + ": combine gave " +
                 std::to_string(from_bf16(got)) + ", expected " + std::to_string(sum[i]);
        if (!rank_major_ && mode == ep::CombineMode::fast && !s_.wild &&
            std::fabs(from_bf16(got) - exact[i]) > bound[i])
          return std::string("combine fast is further from exact than its bound");
      }
      return std::string();
    });
  }

 private:
  Checker(Communicator& comm, const Scenario& scenario, Memory& memory, ep::Group group)
      : Script(scenario, group.config()), comm_(comm), group_(std::move(group)), memory_(memory) {
    const std::size_t M = static_cast<std::size_t>(c_.max_tokens);
    const std::size_t K = static_cast<std::size_t>(c_.top_k);
    out_rows_ = rank_major_ ? static_cast<std::size_t>(ranks_) * M
                            : static_cast<std::size_t>(group_.local_experts()) * group_.capacity();
    for (int f = 0; f < c_.batches_in_flight; ++f) {
      Buffers b;
      b.rows = memory.allocate(M * in_row_);
      b.scales = memory.allocate(M * c_.scale_bytes + 4);
      b.ids = static_cast<std::int64_t*>(memory.allocate(M * K * 8));
      b.weights = static_cast<float*>(memory.allocate(M * K * 4));
      b.y = memory.allocate(out_rows_ * group_.row_bytes() + kGuard);
      b.ys = memory.allocate(out_rows_ * group_.scale_bytes() + kGuard);
      if (s_.registered) {
        // As large on every rank.
        const int most = *std::max_element(c_.experts.begin(), c_.experts.end());
        const std::size_t rows =
            rank_major_ ? out_rows_ : static_cast<std::size_t>(most) * c_.capacity;
        windows_.push_back(
            comm_.allocate(rows * static_cast<std::size_t>(c_.hidden) * 2 + kOffset));
        b.z = static_cast<std::byte*>(windows_.back().data()) + kOffset;
      } else {
        b.z = memory.allocate(z_bytes());
      }
      b.out = memory.allocate(M * static_cast<std::size_t>(c_.hidden) * 2 + kGuard);
      buffers_.push_back(b);
    }
  }

  static constexpr std::size_t kOffset = 48;  // of outputs in their window
  std::size_t z_bytes() const { return out_rows_ * static_cast<std::size_t>(c_.hidden) * 2; }
  ep::CombineInput combine_input(int lane, ep::CombineMode mode) const {
    ep::CombineInput in{.rows = buffers_[lane].z, .mode = mode, .weighted = s_.weighted};
    if (s_.registered) in.registered = windows_[lane].handle();
    return in;
  }

  void step(int batch, int which) {
    if (s_.before) s_.before(batch, which);
  }

  ep::Handle handle(int batch) const { return group_.handle(batch % c_.handles); }

  static bool poisoned(const std::uint8_t* from, const std::uint8_t* to) {
    return std::all_of(from, to, [](std::uint8_t byte) { return byte == 0xff; });
  }
  /// Of an output of combine that is looked at: rows of tokens there can be in this scenario, and what is behind them.
  std::size_t out_bytes() const {
    int most = 0;
    for (int n : s_.tokens) most = std::max(most, std::min(n, c_.max_tokens));
    return static_cast<std::size_t>(most) * static_cast<std::size_t>(c_.hidden) * 2 + kGuard;
  }

  /// What wrong(i) says first, i = 0 .. n-1.
  template <class Wrong>
  static std::string first_wrong(std::size_t n, std::size_t each, Wrong&& wrong) {
    std::vector<std::string> found(n);
    spread(n, each, [&](std::size_t i) { found[i] = wrong(i); });
    for (std::string& text : found)
      if (!text.empty()) return std::move(text);
    return {};
  }

  template <class T>
  std::vector<T> fetch(const T* from, std::size_t n) {
    std::vector<T> values(n);
    memory_.download(values.data(), from, n * sizeof(T));
    return values;
  }

  /// Ranges of bytes of a row that are not as expected.
  static std::string wrong_bytes(const std::uint8_t* row,
                                 const std::vector<std::uint8_t>& expected) {
    std::string text;
    std::size_t from = expected.size();
    for (std::size_t i = 0; i <= expected.size() && text.size() < 100; ++i) {
      const bool wrong = i < expected.size() && row[i] != expected[i];
      if (wrong && from > i) from = i;
      if (wrong || from >= i) continue;
      text += " " + std::to_string(from) + "-" + std::to_string(i - 1);
      from = expected.size();
    }
    return text;
  }

  void fill_outputs(int batch, int lane) {
    const ep::Handle h = handle(batch);
    const auto H = static_cast<std::size_t>(c_.hidden);
    const int columns = rank_major_ ? ranks_ : group_.local_experts();
    const std::size_t per = rank_major_ ? static_cast<std::size_t>(c_.max_tokens)
                                        : static_cast<std::size_t>(group_.capacity());
    const auto counts = fetch(h.counts, static_cast<std::size_t>(columns));
    const auto source = fetch(h.source, out_rows_);
    std::vector<std::uint16_t> rows;
    for (int l = 0; l < columns; ++l) {
      const auto n = static_cast<std::size_t>(counts[l]);
      const std::size_t first = static_cast<std::size_t>(l) * per;
      const int id = rank_major_ ? comm_.rank() : first_[comm_.rank()] + l;
      rows.resize(n * H);
      spread(n, H, [&](std::size_t i) {
        const auto row = output_row(id, batch, source[first + i]);
        std::copy(row.begin(), row.end(), rows.begin() + static_cast<std::ptrdiff_t>(i * H));
      });
      memory_.upload(static_cast<std::byte*>(buffers_[lane].z) + first * H * 2, rows.data(),
                     rows.size() * 2);
    }
  }

  Communicator& comm_;
  ep::Group group_;
  Memory& memory_;
  std::vector<Buffers> buffers_;
  std::vector<Window> windows_;
  std::size_t out_rows_ = 0;
};

}  // namespace marrow::ep_test
