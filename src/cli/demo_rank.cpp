// SPDX-License-Identifier: Apache-2.0
#include "cli/demo_rank.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cli/stand_in.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

/// Byte offsets of a window's parts.
struct Parts {
  std::uint64_t count, expert, rows, back, bytes;
  Parts(std::uint64_t ranks, std::uint64_t cap, std::uint64_t row) {
    count = 0;
    expert = ranks * kCountStride;
    rows = expert + ranks * cap * sizeof(std::uint32_t);
    back = rows + ranks * cap * row;
    bytes = back + ranks * cap * row;
  }
};

/// One rank at work.
class RankWork {
 public:
  RankWork(Communicator& comm, const DemoJob& job)
      : comm_(comm),
        job_(job),
        me_(comm.rank()),
        n_(static_cast<std::uint64_t>(comm.nranks())),
        wave_tokens_(cli::wave_tokens(job)),
        cap_((wave_tokens_ * job.routing.top_k + 3) / 4 * 4),
        row_(std::uint64_t{job.hidden} * sizeof(float)),
        parts_(n_, cap_, row_),
        shape_{comm.place().on_gpu() ? comm.nranks() : 1, comm.place().on_gpu() ? 256 : 1},
        memory_(default_memory(comm.place(),
                               comm.peers()[(static_cast<std::size_t>(me_) + 1) % n_].path)),
        window_(comm.allocate(parts_.bytes, memory_)),
        device_(comm.device_communicator({.contexts = 1,
                                          .signals = static_cast<int>(2 * n_),
                                          .counters = 0,
                                          .barriers = 1,
                                          .packets = 0})),
        tokens_(comm.place(), std::max<std::uint64_t>(job.layout.local_tokens(me_), 1) * row_,
                memory_),
        experts_(comm.place(), n_ * cap_ * sizeof(std::uint32_t), memory_),
        results_(comm.place(), n_ * cap_ * row_, memory_),
        first_(comm.place(), (n_ + 1) * sizeof(std::uint32_t)),
        token_(comm.place(), std::uint64_t{cap_} * sizeof(std::uint32_t)),
        slot_(comm.place(), std::uint64_t{cap_} * sizeof(std::uint32_t)),
        weight_(comm.place(), std::uint64_t{cap_} * sizeof(float)),
        output_(comm.place(), wave_tokens_ * row_),
        log_(comm.place(), shape_.blocks) {
    fill_tokens();
    tokens_local_ = comm.register_local(tokens_.data(), tokens_.bytes());
    experts_local_ = comm.register_local(experts_.data(), experts_.bytes());
    results_local_ = comm.register_local(results_.data(), results_.bytes());
  }

  void wave(std::uint32_t number) {
    const WavePlan plan = plan_wave(job_.routing, job_.layout, me_, number, wave_tokens_, cap_);
    upload(plan);
    ExchangeArguments a = arguments(plan, number);
    comm_.barrier();  // all start together: the time is the exchange's, not the uploads'
    launch_dispatch(comm_.place(), shape_, a);
    log_.finish(comm_, "dispatch");
    report_.exchange_us += static_cast<double>(log_.elapsed_ns()) * 1e-3;
    check_dispatch(number);
    comm_.barrier();
    launch_expert(comm_.place(), shape_, a);
    log_.finish(comm_, "the experts");
    report_.exchange_us += static_cast<double>(log_.elapsed_ns()) * 1e-3;
    launch_combine(comm_.place(), shape_, a);
    log_.finish(comm_, "combine");
    report_.exchange_us += static_cast<double>(log_.elapsed_ns()) * 1e-3;
    check_returned(plan);
    check_output(plan);
  }

  RankReport report() const { return report_; }

 private:
  void fill_tokens() {
    const std::uint64_t first = job_.layout.first_token(me_), count = job_.layout.local_tokens(me_);
    std::vector<float> values(count * job_.hidden);
    for (std::uint64_t t = 0; t < count; ++t) {
      for (std::uint64_t h = 0; h < job_.hidden; ++h)
        values[t * job_.hidden + h] = token_value(job_.seed, first + t, h);
    }
    // The test hook: one bit of the last rank's first token is wrong when it leaves.
    if (job_.corrupt && me_ + 1 == comm_.nranks() && count > 0) {
      float& victim = values[job_.hidden / 2];
      victim = std::bit_cast<float>(std::bit_cast<std::uint32_t>(victim) ^ 1u);
    }
    tokens_.upload(values);
  }

  void upload(const WavePlan& plan) {
    std::vector<std::uint32_t> first{0}, token, expert(n_ * cap_);
    for (std::size_t d = 0; d < n_; ++d) {
      for (std::size_t i = 0; i < plan.rows[d].size(); ++i) {
        token.push_back(
            static_cast<std::uint32_t>(plan.rows[d][i].token - job_.layout.first_token(me_)));
        expert[d * cap_ + i] = plan.rows[d][i].expert;
      }
      first.push_back(static_cast<std::uint32_t>(token.size()));
    }
    const auto weights = job_.routing.weight.begin() +
                         static_cast<std::ptrdiff_t>(plan.first_token * job_.routing.top_k);
    first_.upload(first);
    token_.upload(token);
    experts_.upload(expert);
    slot_.upload(plan.slot);
    weight_.upload(
        std::vector<float>(weights, weights + static_cast<std::ptrdiff_t>(plan.slot.size())));
    report_.rows += token.size();
  }

  ExchangeArguments arguments(const WavePlan& plan, std::uint32_t number) const {
    ExchangeArguments a;
    a.comm = device_.handle();
    a.window = window_.handle();
    a.tokens = tokens_local_.handle();
    a.experts = experts_local_.handle();
    a.results = results_local_.handle();
    a.first = first_.as<std::uint32_t>();
    a.token = token_.as<std::uint32_t>();
    a.slot = slot_.as<std::uint32_t>();
    a.weight = weight_.as<float>();
    a.output = output_.as<float>();
    a.count_at = parts_.count;
    a.expert_at = parts_.expert;
    a.rows_at = parts_.rows;
    a.return_at = parts_.back;
    a.cap = cap_;
    a.hidden = job_.hidden;
    a.top_k = job_.routing.top_k;
    a.wave_tokens = plan.tokens;
    a.wave = number + 1;
    a.log = log_.log();
    return a;
  }

  template <class T>
  std::vector<T> read(std::uint64_t offset, std::uint64_t count) const {
    std::vector<T> values(count);
    copy_out(comm_.place(), values.data(), static_cast<std::byte*>(window_.data()) + offset,
             count * sizeof(T));
    return values;
  }

  void wrong(const std::string& sentence) {
    ++report_.wrong;
    if (report_.first_wrong.empty()) report_.first_wrong = sentence;
  }

  /// Compares a row bit by bit. @param where  names the row; @param expected  value of element h
  template <class Where, class Expected>
  void check_row(const float* row, Where&& where, Expected&& expected) {
    report_.checked += job_.hidden;
    for (std::uint32_t h = 0; h < job_.hidden; ++h) {
      const float want = expected(h);
      const auto got_bits = std::bit_cast<std::uint32_t>(row[h]),
                 want_bits = std::bit_cast<std::uint32_t>(want);
      if (got_bits == want_bits) continue;
      wrong(format("%s, element %u: got %.9g (0x%08x), expected %.9g (0x%08x)", where().c_str(), h,
                   static_cast<double>(row[h]), got_bits, static_cast<double>(want), want_bits));
    }
  }

  void check_dispatch(std::uint32_t number) {
    for (std::uint64_t s = 0; s < n_; ++s) {
      const int source = static_cast<int>(s);
      const WavePlan plan =
          plan_wave(job_.routing, job_.layout, source, number, wave_tokens_, cap_);
      const std::vector<PlannedRow>& planned = plan.rows[static_cast<std::size_t>(me_)];
      const std::uint64_t count = read<std::uint64_t>(parts_.count + s * kCountStride, 1)[0];
      if (count != planned.size()) {
        wrong(format("dispatch: rank %d got %llu rows from rank %d, expected %zu", me_,
                     static_cast<unsigned long long>(count), source, planned.size()));
      }
      const auto expert =
          read<std::uint32_t>(parts_.expert + s * cap_ * sizeof(std::uint32_t), planned.size());
      const auto rows = read<float>(parts_.rows + s * cap_ * row_, planned.size() * job_.hidden);
      for (std::size_t i = 0; i < planned.size(); ++i) {
        if (expert[i] != planned[i].expert) {
          wrong(format("dispatch: rank %d, row %zu from rank %d: expert %u, expected %u", me_, i,
                       source, expert[i], planned[i].expert));
        }
        check_row(
            rows.data() + i * job_.hidden, [&] { return place_of("dispatch", source, planned[i]); },
            [&](std::uint32_t h) { return token_value(job_.seed, planned[i].token, h); });
      }
    }
  }

  std::string place_of(const char* phase, int from, const PlannedRow& row) const {
    return format("%s: rank %d from rank %d, token %llu, expert %u", phase, me_, from,
                  static_cast<unsigned long long>(row.token), row.expert);
  }

  void check_returned(const WavePlan& plan) {
    for (std::uint64_t d = 0; d < n_; ++d) {
      const std::vector<PlannedRow>& planned = plan.rows[d];
      const auto rows = read<float>(parts_.back + d * cap_ * row_, planned.size() * job_.hidden);
      for (std::size_t i = 0; i < planned.size(); ++i) {
        check_row(
            rows.data() + i * job_.hidden,
            [&] { return place_of("return", static_cast<int>(d), planned[i]); },
            [&](std::uint32_t h) {
              return stand_in_expert(planned[i].expert,
                                     token_value(job_.seed, planned[i].token, h));
            });
      }
    }
  }

  void check_output(const WavePlan& plan) {
    const Routing& routing = job_.routing;
    const auto rows = output_.download<float>(std::uint64_t{plan.tokens} * job_.hidden);
    for (std::uint32_t t = 0; t < plan.tokens; ++t) {
      const std::uint64_t token = plan.first_token + t;
      check_row(
          rows.data() + std::uint64_t{t} * job_.hidden,
          [&] {
            return format("combine: rank %d, token %llu", me_,
                          static_cast<unsigned long long>(token));
          },
          [&](std::uint32_t h) {
            const float x = token_value(job_.seed, token, h);
            float sum = 0;
            for (std::uint64_t k = token * routing.top_k; k < (token + 1) * routing.top_k; ++k) {
              sum = stand_in_combine(routing.weight[k], stand_in_expert(routing.id[k], x), sum);
            }
            return sum;
          });
    }
  }

  Communicator& comm_;
  const DemoJob& job_;
  const int me_;
  const std::uint64_t n_;
  const std::uint32_t wave_tokens_, cap_;
  const std::uint64_t row_;
  const Parts parts_;
  const Shape shape_;
  const Memory memory_;
  Window window_;
  DeviceCommunicatorOwner device_;
  Buffer tokens_, experts_, results_, first_, token_, slot_, weight_, output_;
  LocalBuffer tokens_local_, experts_local_, results_local_;
  KernelLog log_;
  RankReport report_;
};

}  // namespace

std::uint32_t wave_tokens(const DemoJob& job) {
  constexpr std::uint64_t kWindowBytes = 16 << 20;
  const auto ranks = static_cast<std::uint64_t>(job.layout.ranks);
  const std::uint64_t token = 2 * ranks * job.routing.top_k * job.hidden * sizeof(float);
  const std::uint64_t most = std::max<std::uint64_t>(job.layout.local_tokens(0), 1);
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(kWindowBytes / token, 1, std::min<std::uint64_t>(most, 1024)));
}

std::uint32_t waves(const DemoJob& job) {
  const std::uint64_t each = wave_tokens(job);
  return static_cast<std::uint32_t>((job.layout.local_tokens(0) + each - 1) / each);
}

RankReport exchange(Communicator& comm, const DemoJob& job,
                    const std::function<void(std::uint32_t)>& progress) {
  RankWork work(comm, job);
  for (std::uint32_t w = 0; w < waves(job); ++w) {
    progress(w);
    work.wave(w);
  }
  comm.barrier();  // nobody frees a window that a peer still checks
  return work.report();
}

}  // namespace marrow::cli
