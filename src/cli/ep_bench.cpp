// SPDX-License-Identifier: Apache-2.0
// Correctness first: the dispatched rows, their order and the combined rows are compared with what the routing
// says, before the clock runs and again afterwards with other data.
#include "cli/ep_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "cli/gpu.hpp"
#include "cli/memory.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

constexpr int kPerGraph = 20;

float float_of(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
std::uint16_t bf16_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // finite
}
float e4m3_value(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const float size = exponent == 0
                         ? std::ldexp(static_cast<float>(code & 7), -9)
                         : std::ldexp(1.0f + static_cast<float>(code & 7) / 8.0f, exponent - 7);
  return code & 0x80 ? -size : size;
}

class EpRank {
 public:
  EpRank(Communicator& comm, const EpOptions& options, const Routing& routing)
      : comm_(comm),
        o_(options),
        routing_(routing),
        config_(ep_config(options, comm.nranks())),
        group_(comm, config_),
        tokens_(static_cast<int>(options.tokens)),
        hidden_(static_cast<std::size_t>(options.hidden)),
        rows_(static_cast<std::size_t>(group_.local_experts()) * group_.capacity()),
        x_(comm.place(), static_cast<std::size_t>(tokens_) * hidden_ * 2),
        ids_(comm.place(), static_cast<std::size_t>(tokens_) * top_k() * 8),
        weights_(comm.place(), static_cast<std::size_t>(tokens_) * top_k() * 4),
        y_(comm.place(), rows_ * group_.row_bytes()),
        scales_(comm.place(), rows_ * group_.scale_bytes()),
        z_(comm.place(), rows_ * hidden_ * 2),
        out_(comm.place(), static_cast<std::size_t>(tokens_) * hidden_ * 2) {
    std::vector<std::int64_t> ids;
    std::vector<float> weights;
    for (int t = 0; t < tokens_; ++t) {
      for (std::size_t k = 0; k < top_k(); ++k) {
        ids.push_back(id(comm_.rank(), t, k));
        weights.push_back(weight(comm_.rank(), t, k));
      }
    }
    ids_.upload(ids);
    weights_.upload(weights);
  }

  EpResult run() {
    EpResult result;
    count_bytes(result);
    if (!checked(1, result)) return end(std::move(result));
    set_data(2);
    for (int i = 0; i < std::max(3, o_.iterations / 10); ++i) pair();
    if (comm_.place().on_gpu()) {
      o_.graph ? time_graphs(result) : time_launches(result);
    } else {
      time_host(result);
    }
    // The last timed batch, then one of other data: rows that an earlier batch has left would be seen.
    if (left_right(result)) (void)checked(3, result);
    return end(std::move(result));
  }

 private:
  std::size_t top_k() const { return static_cast<std::size_t>(o_.top_k); }
  std::size_t at(int rank, int token) const {
    return (static_cast<std::size_t>(rank) * static_cast<std::size_t>(tokens_) +
            static_cast<std::size_t>(token)) %
           routing_.tokens();
  }
  std::int64_t id(int rank, int token, std::size_t k) const {
    return routing_.id[at(rank, token) * top_k() + k];
  }
  float weight(int rank, int token, std::size_t k) const {
    return routing_.weight[at(rank, token) * top_k() + k];
  }
  int owner(std::int64_t expert) const {
    int rank = 0;
    for (std::int64_t first = 0; expert >= (first += config_.experts[rank]);) ++rank;
    return rank;
  }
  float value(int slot, std::size_t i) const {
    const auto n = static_cast<std::uint32_t>(slot) * 2654435761u +
                   static_cast<std::uint32_t>(i) * 40503u + data_ * 977u;
    return float_of(bf16_of(static_cast<float>(static_cast<int>(n >> 20) - 2048) / 512.0f));
  }
  /// Of expert `id` for the token in `slot`: a few bits, so that sums show every mistake.
  float expert_value(std::int64_t id, int slot, std::size_t i) const {
    const std::int64_t n = id * 13 + slot * 7 + static_cast<std::int64_t>(i) * 3 + data_ * 17;
    return static_cast<float>(n % 61 - 30) / 8.0f;
  }

  void set_data(std::uint32_t data) {
    data_ = data;
    std::vector<std::uint16_t> x(static_cast<std::size_t>(tokens_) * hidden_);
    for (int t = 0; t < tokens_; ++t)
      for (std::size_t i = 0; i < hidden_; ++i)
        x[static_cast<std::size_t>(t) * hidden_ + i] =
            bf16_of(value(comm_.rank() * tokens_ + t, i));
    x_.upload(x);
    const std::vector<std::uint16_t> poison(x.size(), 0xffff);
    out_.upload(poison);
    fill_expert_outputs();
  }

  void dispatch() {
    group_.dispatch({.tokens = tokens_,
                     .rows = x_.data(),
                     .expert_ids = ids_.as<std::int64_t>(),
                     .weights = weights_.as<float>()},
                    {y_.data(), group_.scale_bytes() ? scales_.data() : nullptr}, group_.handle(0));
  }
  void combine() {
    group_.combine({.rows = z_.data(),
                    .mode = o_.mode == "exact" ? ep::CombineMode::exact : ep::CombineMode::fast},
                   {out_.data()}, group_.handle(0));
  }
  void pair() {
    dispatch();
    combine();
  }

  /// A batch of other data, compared. @return whether it was right on every rank
  bool checked(std::uint32_t data, EpResult& result) {
    set_data(data);
    dispatch();
    combine();
    return left_right(result);
  }
  /// What the last batch has left, compared.
  bool left_right(EpResult& result) {
    result.wrong = check_dispatch();
    if (result.wrong.empty()) result.wrong = check_combine();
    return all_right(result.wrong);
  }
  /// A rank that went on alone would wait for the others.
  bool all_right(const std::string& wrong) {
    const std::uint8_t mine = wrong.empty() ? 1 : 0;
    const auto all = comm_.allgather(&mine, 1);
    return std::all_of(all.begin(), all.end(),
                       [](const auto& one) { return one[0] == std::byte{1}; });
  }

  /// Our experts' rows as they must lie: body(expert, row in it, source rank, token, k).
  template <class Body>
  void each_row(Body&& body) const {
    std::vector<int> next(static_cast<std::size_t>(group_.local_experts()));
    for (int source = 0; source < comm_.nranks(); ++source) {
      for (int t = 0; t < tokens_; ++t) {
        for (std::size_t k = 0; k < top_k(); ++k) {
          const std::int64_t l = id(source, t, k) - group_.first_expert();
          if (l < 0 || l >= group_.local_experts()) continue;
          body(static_cast<int>(l), next[static_cast<std::size_t>(l)]++, source, t, k);
        }
      }
    }
  }

  std::string status() {
    const ep::Report report = group_.report();
    if (report.status != Status::ok) return std::string("status ") + name(report.status);
    return {};
  }

  std::string check_dispatch() {
    if (std::string bad = status(); !bad.empty()) return bad;
    const ep::Handle handle = group_.handle(0);
    const auto L = static_cast<std::size_t>(group_.local_experts());
    const auto C = static_cast<std::size_t>(group_.capacity());
    std::vector<std::int32_t> counts(L), source(rows_);
    copy_out(comm_.place(), counts.data(), handle.counts, L * 4);
    copy_out(comm_.place(), source.data(), handle.source, rows_ * 4);
    std::vector<std::vector<std::uint8_t>> rows(L);
    std::vector<std::vector<float>> scales(L);
    const std::size_t groups = group_.scale_bytes() / 4;
    for (std::size_t l = 0; l < L; ++l) {
      const auto n = static_cast<std::size_t>(counts[l]);
      if (n > C) return format("expert %d counts %d rows", static_cast<int>(l), counts[l]);
      rows[l] = y_.download<std::uint8_t>(n * group_.row_bytes(), l * C * group_.row_bytes());
      scales[l] = scales_.download<float>(n * groups, l * C * groups);
    }
    if (o_.corrupt && comm_.rank() == 0 && data_ == 1) {
      for (auto& expert : rows) {
        if (expert.empty()) continue;
        expert[expert.size() / 2] ^= 0x40;
        break;
      }
    }
    std::vector<std::size_t> seen(L);
    std::string wrong;
    each_row([&](int expert, int row, int from, int token, std::size_t) {
      if (!wrong.empty()) return;
      const auto l = static_cast<std::size_t>(expert);
      const auto i = static_cast<std::size_t>(row);
      const int slot = from * tokens_ + token;
      ++seen[l];
      if (row >= counts[l] || source[l * C + i] != slot) {
        wrong = format("row %d of expert %d does not come from rank %d's token %d", row, expert,
                       from, token);
        return;
      }
      const std::uint8_t* bytes = rows[l].data() + i * group_.row_bytes();
      for (std::size_t c = 0; c < hidden_; ++c) {
        const float want = value(slot, c);
        float got = 0;
        bool right = false;
        if (o_.payload == "bf16") {
          std::uint16_t half = 0;
          std::memcpy(&half, bytes + c * 2, 2);
          got = float_of(half);
          right = got == want;
        } else {
          // Half a step of e4m3 at its largest, in the group's scale.
          const float scale = scales[l][i * groups + c / 128];
          got = e4m3_value(bytes[c]) * scale;
          right = std::fabs(got - want) <= 16.01f * scale && scale < 1.0f;
        }
        if (right) continue;
        wrong = format("row %d of expert %d, channel %d: %g, expected %g", row, expert,
                       static_cast<int>(c), static_cast<double>(got), static_cast<double>(want));
        return;
      }
    });
    for (std::size_t l = 0; l < L && wrong.empty(); ++l)
      if (seen[l] != static_cast<std::size_t>(counts[l]))
        wrong = format("expert %d has %d rows, expected %d", static_cast<int>(l), counts[l],
                       static_cast<int>(seen[l]));
    return wrong;
  }

  void fill_expert_outputs() {
    const auto C = static_cast<std::size_t>(group_.capacity());
    std::vector<std::uint16_t> row(hidden_);
    each_row([&](int expert, int i, int from, int token, std::size_t) {
      const int slot = from * tokens_ + token;
      for (std::size_t c = 0; c < hidden_; ++c)
        row[c] = bf16_of(expert_value(group_.first_expert() + expert, slot, c));
      const std::size_t index = static_cast<std::size_t>(expert) * C + static_cast<std::size_t>(i);
      copy_in(comm_.place(), z_.data() + index * hidden_ * 2, row.data(), hidden_ * 2);
    });
  }

  std::string check_combine() {
    if (std::string bad = status(); !bad.empty()) return bad;
    const auto out = out_.download<std::uint16_t>(static_cast<std::size_t>(tokens_) * hidden_);
    for (int t = 0; t < tokens_; ++t) {
      const int slot = comm_.rank() * tokens_ + t;
      for (std::size_t c = 0; c < hidden_; ++c) {
        float sum = 0;
        float size = 0;
        for (std::size_t k = 0; k < top_k(); ++k) {
          const float row = expert_value(id(comm_.rank(), t, k), slot, c);
          sum = std::fma(weight(comm_.rank(), t, k), row, sum);
          size += std::fabs(weight(comm_.rank(), t, k) * row);
        }
        const float got = float_of(out[static_cast<std::size_t>(t) * hidden_ + c]);
        const float bound = static_cast<float>(1 + comm_.nranks()) * 0x1p-9f * size + 1e-30f;
        const bool right = o_.mode == "exact"
                               ? got == float_of(bf16_of(sum))
                               : std::fabs(got - sum) <= bound + std::fabs(sum) * 0x1p-8f;
        if (!right)
          return format("token %d, channel %d: combined %g, expected %g", t, static_cast<int>(c),
                        static_cast<double>(got), static_cast<double>(sum));
      }
    }
    return {};
  }

  void count_bytes(EpResult& r) const {
    const std::uint64_t row = group_.row_bytes() + group_.scale_bytes();
    const std::uint64_t back = hidden_ * 2;
    std::vector<bool> to(static_cast<std::size_t>(comm_.nranks()));
    for (int source = 0; source < comm_.nranks(); ++source) {
      for (int t = 0; t < tokens_; ++t) {
        std::fill(to.begin(), to.end(), false);
        for (std::size_t k = 0; k < top_k(); ++k) {
          const int rank = owner(id(source, t, k));
          const bool again = to[static_cast<std::size_t>(rank)];
          to[static_cast<std::size_t>(rank)] = true;
          if (source == comm_.rank()) {
            ++r.choices;
            if (rank != source && !again) r.dispatch_wire += row;  // once a token and rank
          } else if (rank == comm_.rank() && (o_.mode == "exact" || !again)) {
            r.combine_wire += back;
          }
        }
      }
    }
    r.dispatch_logical = r.choices * row;
    r.combine_logical = r.choices * back;
  }

  void time_host(EpResult& r) {
    using Clock = std::chrono::steady_clock;
    const auto us = [](Clock::time_point from, Clock::time_point to) {
      return std::chrono::duration<double, std::micro>(to - from).count();
    };
    for (int i = 0; i < o_.iterations; ++i) {
      const auto start = Clock::now();
      dispatch();
      const auto middle = Clock::now();
      combine();
      const auto end = Clock::now();
      r.dispatch_us.push_back(us(start, middle));
      r.combine_us.push_back(us(middle, end));
      r.pair_us.push_back(us(start, end));
    }
  }

  void time_launches(EpResult& r) {
    const Place place = comm_.place();
    gpu::Events events(place.device, static_cast<std::size_t>(o_.iterations) * 2 + 1);
    events.record(place.stream, 0);
    for (int i = 0; i < o_.iterations; ++i) {
      const auto n = static_cast<std::size_t>(i) * 2;
      dispatch();
      events.record(place.stream, n + 1);
      combine();
      events.record(place.stream, n + 2);
    }
    comm_.synchronize();
    for (int i = 0; i < o_.iterations; ++i) {
      const auto n = static_cast<std::size_t>(i) * 2;
      r.dispatch_us.push_back(events.elapsed_us(n, n + 1));
      r.combine_us.push_back(events.elapsed_us(n + 1, n + 2));
      r.pair_us.push_back(events.elapsed_us(n, n + 2));
    }
  }

  void time_graphs(EpResult& r) {
    const Place place = comm_.place();
    const auto time = [&](const std::function<void()>& body, std::vector<double>& us) {
      gpu::Graph graph(place.device, place.stream, [&] {
        for (int i = 0; i < kPerGraph; ++i) body();
      });
      const int launches = std::max(5, o_.iterations / kPerGraph);
      gpu::Events events(place.device, static_cast<std::size_t>(launches) + 1);
      graph.launch(place.stream);
      events.record(place.stream, 0);
      for (int i = 1; i <= launches; ++i) {
        graph.launch(place.stream);
        events.record(place.stream, static_cast<std::size_t>(i));
      }
      comm_.synchronize();
      for (int i = 1; i <= launches; ++i)
        us.push_back(
            events.elapsed_us(static_cast<std::size_t>(i) - 1, static_cast<std::size_t>(i)) /
            kPerGraph);
      comm_.barrier();
    };
    time([&] { dispatch(); }, r.dispatch_us);
    time([&] { combine(); }, r.combine_us);
    time([&] { pair(); }, r.pair_us);
  }

  EpResult end(EpResult result) {
    comm_.synchronize();
    group_.close();
    return result;
  }

  Communicator& comm_;
  const EpOptions& o_;
  const Routing& routing_;
  ep::Config config_;
  ep::Group group_;
  int tokens_;
  std::size_t hidden_;
  std::size_t rows_;
  Buffer x_, ids_, weights_, y_, scales_, z_, out_;
  std::uint32_t data_ = 0;
};

}  // namespace

EpOptions ep_defaults(EpOptions o, const Routing& routing, bool gpu) {
  const auto fill = [](std::int64_t& value, std::int64_t standard) {
    if (value == 0) value = standard;
  };
  if (!routing.id.empty()) {
    if ((o.experts != 0 && o.experts != routing.experts) ||
        (o.top_k != 0 && o.top_k != routing.top_k))
      throw UsageError(
          format("--routing: the log has %u experts and top-k %u. Leave --experts and --topk out.",
                 routing.experts, routing.top_k));
    o.experts = routing.experts;
    o.top_k = routing.top_k;
  }
  fill(o.tokens, gpu ? 128 : 16);
  fill(o.hidden, gpu ? 7168 : 512);
  fill(o.experts, gpu ? 256 : 32);
  fill(o.top_k, gpu ? 8 : 4);
  if (o.iterations == 0) o.iterations = gpu ? 400 : 20;
  if (o.top_k > o.experts) throw UsageError("--topk is larger than --experts.");
  if (o.hidden % (o.payload == "fp8" ? 16 : 8) != 0)
    throw UsageError("--hidden: a row must be a multiple of 16 bytes.");
  return o;
}

Routing uniform_routing(std::uint64_t seed, std::uint64_t tokens, std::uint32_t experts,
                        std::uint32_t top_k) {
  Routing routing;
  routing.experts = experts;
  routing.top_k = top_k;
  routing.source = format("uniform random, seed %llu", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::vector<std::uint32_t> all(experts);
  for (std::uint32_t e = 0; e < experts; ++e) all[e] = e;
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint32_t k = 0; k < top_k; ++k) {
      std::swap(all[k], all[k + random() % (experts - k)]);
      routing.id.push_back(all[k]);
      routing.weight.push_back(static_cast<float>(random() % 1024 + 1) / 1024.0f);
    }
  }
  return routing;
}

ep::Config ep_config(const EpOptions& o, int ranks) {
  ep::Config config;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t from = o.experts * r / ranks;
    config.experts.push_back(static_cast<int>(o.experts * (r + 1) / ranks - from));
  }
  config.max_tokens = static_cast<int>(o.tokens);
  config.hidden = static_cast<int>(o.hidden);
  config.top_k = static_cast<int>(o.top_k);
  config.payload = o.payload == "bf16" ? ep::Payload::bf16 : ep::Payload::fp8;
  config.max_sms = o.sms;
  return config;
}

EpResult run_ep_rank(Communicator& comm, const EpOptions& options, const Routing& routing) {
  return EpRank(comm, options, routing).run();
}

}  // namespace marrow::cli
