// SPDX-License-Identifier: Apache-2.0
// Group on the host: checks arguments, counts batches in flight, owns one window for all that kernels need, and one
// in host memory through which reports come back.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "ep/launches.hpp"
#include "ep/shape.hpp"
#include "marrow/ep.hpp"

namespace marrow::ep {
namespace {

Error bad(std::string sentence, std::string next) {
  return {Code::invalid_argument, std::move(sentence), std::move(next)};
}

bool aligned(const void* pointer, std::uintptr_t to) {
  return reinterpret_cast<std::uintptr_t>(pointer) % to == 0;
}

void require_pointer(const void* pointer, std::uintptr_t alignment, const char* what) {
  if (!pointer)
    throw bad(std::string(what) + " is null", "give device memory of the documented shape");
  if (!aligned(pointer, alignment))
    throw bad(std::string(what) + " is not aligned to " + std::to_string(alignment) + " bytes",
              "allocate it so");
}

/// Ranks that are not reached by cells.
std::vector<bool> far_ranks(const Communicator& comm, Protocol protocol) {
  std::vector<bool> far;
  for (const PeerInfo& peer : comm.peers()) {
    far.push_back(peer.rank != comm.rank() &&
                  (protocol == Protocol::signals || peer.path != Path::lsa));
  }
  return far;
}

Error no_cells(std::size_t from, std::size_t to) {
  return {Code::unsupported,
          "ep::Protocol::cells: rank " + std::to_string(from) + " does not reach rank " +
              std::to_string(to) + " by load/store, and nothing else places 16 bytes at once",
          "use Protocol::automatic"};
}

}  // namespace

class Group::State {
 public:
  State(Communicator& comm, Config config) : comm_(comm), launches_(launches(comm.place())) {
    // What one rank finds wrong is told to all, which would wait for it.
    std::optional<Error> wrong;
    try {
      config_ = checked(std::move(config), comm.nranks(), comm.place().on_gpu());
      launches_.load(comm_.place());
    } catch (const Error& error) {
      wrong = error;
    }
    same_on_all(wrong);
    plan_ = plan_with_all();
    const int sms = launches_.processors(comm_.place());
    blocks_ =
        sms > 0 ? (config_.max_sms > 0 ? std::min(config_.max_sms, sms) : sms) : config_.max_sms;
    window_ = comm_.allocate(plan_.memory.total);
    const Shape& s = plan_.shape;
    report_words_ = (s.expert_rank - s.control) / 8;
    // Words of a report, failed ranks, ranks of experts.
    host_ = comm_.allocate(report_words_ * 8 + static_cast<std::uint64_t>(s.ranks) * 4 +
                               static_cast<std::uint64_t>(s.experts) * 2 + 64,
                           Memory::host);
    Requirements needs;
    needs.signals = 2 * s.ranks;
    needs.counters = 0;
    needs.barriers = 0;
    needs.packets = 0;
    device_ = comm_.device_communicator(needs);
    auto* experts = experts_on_host();
    int id = 0;
    for (int r = 0; r < s.ranks; ++r)
      for (int e = 0; e < config_.experts[r]; ++e) experts[id++] = static_cast<std::uint16_t>(r);
    reset(config_.first_batch, masked_, nullptr);
    comm_.barrier();
  }

  ~State() {
    try {
      close();
    } catch (const std::exception&) {  // a destructor: the communicator frees what is left
    }
  }

  void close() {
    if (closed_) return;
    closed_ = true;
    synchronize(nullptr);
    device_.close();
    host_.close();
    window_.close();
  }

  const Config& config() const { return config_; }
  void record_times(std::uint64_t* times) { times_ = times; }
  const Plan& plan() const { return plan_; }
  Communicator& comm() { return comm_; }

  std::uint64_t offset_of(const Handle& handle) const {
    if (handle.index < 0 || handle.index >= config_.handles) {
      throw bad("handle " + std::to_string(handle.index) + " is none of this Group's " +
                    std::to_string(config_.handles),
                "take it from Group::handle(0 .. config().handles - 1)");
    }
    return plan_.shape.handles +
           plan_.shape.handle_stride * static_cast<std::uint64_t>(handle.index);
  }

  Handle handle(int index) const {
    require_open();
    Handle handle;
    handle.index = index;
    const Shape& s = plan_.shape;
    const auto* base = static_cast<const std::byte*>(window_.data()) + offset_of(handle);
    handle.counts = reinterpret_cast<const std::int32_t*>(base + s.counts);
    handle.source = reinterpret_cast<const std::int32_t*>(base + s.source);
    handle.weights = reinterpret_cast<const float*>(base + s.weights);
    if (s.rank_major)
      handle.expert_ids = reinterpret_cast<const std::int32_t*>(base + s.expert_ids);
    return handle;
  }

  void check_input(const DispatchInput& in) const {
    const Shape& s = plan_.shape;
    if (!in.device_tokens && (in.tokens < 0 || in.tokens > s.tokens)) {
      throw bad("dispatch of " + std::to_string(in.tokens) + " tokens on rank " +
                    std::to_string(s.rank) + ", Config::max_tokens is " + std::to_string(s.tokens),
                "make the Group for more tokens, or send them in several batches");
    }
    if (!in.device_tokens && in.tokens == 0) return;
    require_pointer(in.rows, 16, "DispatchInput::rows");
    require_pointer(in.expert_ids, 8, "DispatchInput::expert_ids");
    if (s.scale_bytes) require_pointer(in.scales, 4, "DispatchInput::scales");
  }
  void check_output(const DispatchOutput& out) const {
    const Shape& s = plan_.shape;
    if (s.local == 0) return;
    require_pointer(out.rows, 16, "DispatchOutput::rows");
    if (s.scale_words) require_pointer(out.scales, 4, "DispatchOutput::scales");
  }

  /// The tensor lies in the registered memory that it is said to lie in.
  void require_registered(const CombineInput& in) const {
    const LocalBufferHandle& memory = in.registered.memory;
    if (!memory.local) return;
    const Shape& s = plan_.shape;
    const std::uint64_t bytes =
        (s.rank_major
             ? static_cast<std::uint64_t>(s.ranks) * static_cast<std::uint64_t>(s.tokens)
             : static_cast<std::uint64_t>(s.local) * static_cast<std::uint64_t>(s.capacity)) *
        s.combine_stride;
    const auto from = reinterpret_cast<std::uintptr_t>(in.rows);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.local);
    if (memory.owner != device_.handle().owner)
      throw bad("CombineInput::registered belongs to another communicator",
                "register the tensor with the Group's own");
    if (from >= begin && from - begin <= memory.bytes && bytes <= memory.bytes - (from - begin))
      return;
    throw bad("CombineInput::rows, " + std::to_string(bytes) +
                  " bytes, does not lie in CombineInput::registered, which has " +
                  std::to_string(memory.bytes),
              "give the window or buffer that the whole tensor lies in, or none");
  }

  /// Before a send. Once a call was captured, what is in flight is known to the kernels alone: they check it, too.
  void require_room(std::size_t in_flight, const char* what) const {
    if (captured_ || in_flight < static_cast<std::size_t>(config_.batches_in_flight)) return;
    throw bad(std::string(what) + "_send of one batch more than the " +
                  std::to_string(config_.batches_in_flight) +
                  " that may be in flight (Config::batches_in_flight)",
              std::string("call ") + what + "_receive first, or make the Group for more");
  }
  /// Before a receive. @param in_flight  handles of the batches sent, oldest first
  void require_oldest(const std::vector<int>& in_flight, const Handle& handle,
                      const char* what) const {
    if (captured_) return;
    if (in_flight.empty())
      throw bad(std::string(what) + "_receive without a batch in flight",
                std::string("call ") + what + "_send first");
    if (in_flight.front() == handle.index) return;
    throw bad(std::string(what) + "_receive with handle " + std::to_string(handle.index) +
                  "; the oldest batch in flight was sent with handle " +
                  std::to_string(in_flight.front()),
              "receive batches in the order they were sent, each with its own handle");
  }

  void require_open() const {
    if (closed_) throw bad("a call of an ep::Group that is closed", "make another");
  }

  void dispatch(const DispatchInput& in, const DispatchOutput& out, const Handle& handle,
                void* stream, Phase phase) {
    require_open();
    const std::uint64_t at = offset_of(handle);
    if (phase != Phase::receive) check_input(in);
    if (phase != Phase::send) check_output(out);
    if (phase == Phase::both && !dispatches_.empty())
      throw bad("dispatch with an earlier batch in flight", "receive it first");
    captured_ = captured_ || launches_.capturing(target(stream).place);
    if (phase == Phase::send) require_room(dispatches_.size(), "dispatch");
    if (phase == Phase::receive) require_oldest(dispatches_, handle, "dispatch");
    launches_.dispatch(target(stream), device_.handle(), window_.handle(), plan_.shape, in, out, at,
                       phase);
    if (phase == Phase::send && !captured_) dispatches_.push_back(handle.index);
    if (phase == Phase::receive && !dispatches_.empty()) dispatches_.erase(dispatches_.begin());
  }

  void combine(const CombineInput& in, const CombineOutput& out, const Handle& handle, void* stream,
               Phase phase) {
    require_open();
    const std::uint64_t at = offset_of(handle);
    if (phase != Phase::receive && plan_.shape.local > 0) {
      require_pointer(in.rows, 16, "CombineInput::rows");
      require_registered(in);
    }
    if (phase != Phase::send) require_pointer(out.rows, 16, "CombineOutput::rows");
    if (phase == Phase::both && !combines_.empty())
      throw bad("combine with an earlier one in flight", "receive it first");
    captured_ = captured_ || launches_.capturing(target(stream).place);
    CombineInput how = in;
    if (phase == Phase::send) require_room(combines_.size(), "combine");
    if (phase == Phase::receive) {
      require_oldest(combines_, handle, "combine");
      how = how_.empty() ? last_combine_ : how_.front();
    }
    launches_.combine(target(stream), device_.handle(), window_.handle(), plan_.shape, how, out, at,
                      phase);
    if (phase == Phase::send) {
      last_combine_ = in;
      if (!captured_) {
        combines_.push_back(handle.index);
        how_.push_back(in);
      }
    } else if (phase == Phase::receive && !combines_.empty()) {
      combines_.erase(combines_.begin());
      how_.erase(how_.begin());
    }
  }

  Report report(void* stream, bool clear) {
    require_open();
    const Shape& s = plan_.shape;
    launches_.report(target(stream), window_.handle(), s, words_on_host(), clear);
    synchronize(stream);
    const auto* words = static_cast<const std::byte*>(host_.host());
    Control control;
    std::memcpy(&control, words, sizeof control);
    Report report;
    // Kernels that exchange nothing are not ok, whatever was cleared.
    report.status =
        worse(static_cast<Status>(control.status), static_cast<Status>(control.stopped));
    report.dispatches = control.dispatches;
    report.combines = control.combines;
    report.duplicates = control.duplicates;
    report.out_of_range = control.out_of_range;
    report.overflow = control.overflow;
    sent_ = std::max({control.dispatch_sent, control.combine_sent, control.dispatch_received,
                      control.combine_received});
    const auto n = static_cast<std::size_t>(s.ranks);
    std::vector<std::uint32_t> failed(n);
    std::vector<std::uint32_t> given_up(n);
    std::memcpy(failed.data(), words + (s.failed - s.control), n * 4);
    std::memcpy(given_up.data(), words + (s.given_up - s.control), n * 4);
    for (std::size_t r = 0; r < n; ++r) report.failed.push_back((failed[r] | given_up[r]) != 0);
    std::vector<std::uint64_t> waited(3 * n);
    std::memcpy(waited.data(), words + (s.waited - s.control), 3 * n * 8);
    report.dispatch_waited_ns.assign(waited.begin(), waited.begin() + s.ranks);
    report.combine_waited_ns.assign(waited.begin() + s.ranks, waited.begin() + 2 * s.ranks);
    report.longest_wait_ns.assign(waited.begin() + 2 * s.ranks, waited.end());
    return report;
  }

  std::vector<bool> agree(std::chrono::milliseconds deadline, void* stream) {
    (void)report(stream, false);
    std::vector<bool> failed = comm_.agree_failures(deadline);
    // Nobody sends any more. What is still under way must land before anybody empties its buffers and resets its
    // signals; so each flushes, and the exchange below shows that all have.
    const Status flushed = flush(deadline, stream);
    const std::uint64_t mine[2] = {sent_, static_cast<std::uint64_t>(flushed)};
    const auto all = comm_.allgather(mine, sizeof mine);
    // All start at a batch number that nobody has used.
    std::uint64_t next = 0;
    for (std::size_t r = 0; r < all.size(); ++r) {
      std::uint64_t theirs[2] = {};
      if (all[r].size() == sizeof theirs) std::memcpy(theirs, all[r].data(), sizeof theirs);
      next = std::max(next, theirs[0]);
      const Status status = static_cast<Status>(theirs[1]);
      if (status == Status::ok) continue;
      throw Error(status == Status::peer_failed ? Code::peer_failed
                  : status == Status::aborted   ? Code::aborted
                                                : Code::timeout,
                  "rank " + std::to_string(r) + " could not bring to an end within " +
                      std::to_string(deadline.count()) + " ms what it had sent: " + name(status),
                  "call agree() again on all survivors; see comm.check() of that rank");
    }
    dispatches_.clear();
    combines_.clear();
    how_.clear();
    masked_ = failed;
    reset(next + 1, failed, stream);
    comm_.barrier();
    return failed;
  }

 private:
  Target target(void* stream) const {
    Place place = comm_.place();
    if (stream) place.stream = stream;
    return {place, blocks_, config_.threads, times_};
  }
  void synchronize(void* stream) { launches_.synchronize(target(stream).place); }

  std::uint64_t* words_on_host() const { return static_cast<std::uint64_t*>(host_.data()); }
  std::uint32_t* failed_on_host() const {
    return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(host_.host()) +
                                            report_words_ * 8);
  }
  std::uint16_t* experts_on_host() const {
    return reinterpret_cast<std::uint16_t*>(failed_on_host() + plan_.shape.ranks);
  }

  /// Everything we sent has arrived at all peers that are alive, or why not.
  Status flush(std::chrono::milliseconds deadline, void* stream) {
    if (!plan_.shape.far_any) return Status::ok;
    *static_cast<std::uint64_t*>(host_.host()) = static_cast<std::uint64_t>(Status::invalid);
    const auto ns = std::max<std::int64_t>(1, deadline.count()) * std::int64_t{1000000};
    launches_.flush(target(stream), device_.handle(), words_on_host(),
                    static_cast<std::uint64_t>(ns));
    synchronize(stream);
    return static_cast<Status>(*static_cast<const std::uint64_t*>(host_.host()));
  }

  /// @param failed  masked ranks
  void reset(std::uint64_t batch, const std::vector<bool>& failed, void* stream) {
    auto* words = failed_on_host();
    bool any = false;
    for (std::size_t r = 0; r < failed.size(); ++r) {
      words[r] = failed[r] ? static_cast<std::uint32_t>(Status::peer_failed) : 0;
      any |= failed[r];
    }
    const auto shift =
        static_cast<std::byte*>(host_.data()) - static_cast<std::byte*>(host_.host());
    const auto device = [&](auto* p) {
      using Pointer = decltype(p);
      return reinterpret_cast<Pointer>(reinterpret_cast<std::uintptr_t>(p) +
                                       static_cast<std::uintptr_t>(shift));
    };
    launches_.reset(target(stream), device_.handle(), window_.handle(), plan_.shape, batch,
                    any ? device(words) : nullptr, device(experts_on_host()));
    synchronize(stream);
    sent_ = batch;
  }

  /// Offsets and staging as all ranks together need them: a pair uses puts if either side has to, and a window is as
  /// large everywhere.
  Plan plan_with_all() const {
    std::vector<bool> far = far_ranks(comm_, config_.protocol);
    std::string mine(far.size(), '0');
    for (std::size_t r = 0; r < far.size(); ++r)
      if (far[r] && !masked_[r]) mine[r] = '1';
    const auto all = comm_.allgather(mine.data(), mine.size());
    const auto me = static_cast<std::size_t>(comm_.rank());
    bool any = false;
    for (std::size_t r = 0; r < all.size(); ++r) {
      far[r] = mine[r] == '1';
      if (all[r].empty() != masked_[r] || (!masked_[r] && all[r].size() != mine.size()))
        throw Error(Code::peer_failed,
                    "rank " + std::to_string(r) + " failed while an ep::Group was made",
                    "call agree_failures() on every survivor and make it again");
      if (masked_[r]) continue;
      const std::string theirs(reinterpret_cast<const char*>(all[r].data()), all[r].size());
      const std::size_t to = theirs.find('1');
      any |= to != std::string::npos;
      if (to != std::string::npos && config_.protocol == Protocol::cells) throw no_cells(r, to);
      far[r] = far[r] || theirs[me] == '1';
    }
    return make_plan(config_, comm_.rank(), far, any);
  }

  /// Ranks that were given different Configs would write past each other's buffers. Notes who is masked: they say nothing.
  /// @param wrong  why this rank makes no Group: all throw
  void same_on_all(const std::optional<Error>& wrong) {
    std::string text;
    const auto add = [&text](long long value) { text += std::to_string(value) + ","; };
    const Config& c = config_;
    for (int n : c.experts) add(n);
    for (long long value :
         {static_cast<long long>(c.max_tokens), static_cast<long long>(c.hidden),
          static_cast<long long>(c.top_k), static_cast<long long>(c.payload),
          static_cast<long long>(c.scales), static_cast<long long>(c.row_bytes),
          static_cast<long long>(c.scale_bytes), static_cast<long long>(c.layout),
          static_cast<long long>(c.capacity), static_cast<long long>(c.batches_in_flight),
          static_cast<long long>(c.handles), static_cast<long long>(c.protocol),
          static_cast<long long>(c.first_batch)})
      add(value);
    if (wrong)
      text = "!" + std::to_string(static_cast<int>(wrong->code())) + " " + wrong->sentence();
    const auto all = comm_.allgather(text.data(), text.size());
    if (wrong) throw *wrong;
    for (const auto& bytes : all) masked_.push_back(bytes.empty());
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::string theirs(reinterpret_cast<const char*>(all[r].data()), all[r].size());
      if (theirs.empty() || theirs == text) continue;  // empty: a failed rank
      if (theirs[0] == '!')
        throw Error(static_cast<Code>(std::atoi(theirs.c_str() + 1)),
                    "rank " + std::to_string(r) +
                        " makes no ep::Group: " + theirs.substr(theirs.find(' ') + 1),
                    "see that rank's error");
      std::string sentence = "ranks " + std::to_string(comm_.rank());
      sentence.append(" and ").append(std::to_string(r)).append(" gave different ep::Configs: ");
      sentence.append(text).append(" and ").append(theirs);
      sentence.append(
          " (experts, max_tokens, hidden, top_k, payload, scales, row_bytes, scale_bytes, "
          "layout, capacity, batches_in_flight, handles, protocol, first_batch)");
      throw Error(Code::mismatch, sentence, "give all ranks the same");
    }
  }

  Communicator& comm_;
  const Launches& launches_;
  Config config_;
  Plan plan_{};
  int blocks_ = 1;
  Window window_;
  Window host_;
  DeviceCommunicatorOwner device_;
  std::uint64_t report_words_ = 0;
  std::uint64_t sent_ = 0;
  std::vector<bool> masked_;     ///< failed, as the survivors agreed; the same on all
  std::vector<int> dispatches_;  ///< handles of the batches in flight, oldest first
  std::vector<int> combines_;
  std::vector<CombineInput> how_;  ///< of combines_
  CombineInput last_combine_;
  bool captured_ = false;  ///< a graph holds some of our calls
  std::uint64_t* times_ = nullptr;
  bool closed_ = false;
};

MemoryNeeded Group::memory_needed(const Communicator& comm, const Config& config) {
  const Config c = checked(config, comm.nranks(), comm.place().on_gpu());
  const std::vector<bool> far = far_ranks(comm, c.protocol);
  const auto first = std::find(far.begin(), far.end(), true);
  if (c.protocol == Protocol::cells && first != far.end())
    throw no_cells(static_cast<std::size_t>(comm.rank()),
                   static_cast<std::size_t>(first - far.begin()));
  return make_plan(c, comm.rank(), far).memory;
}
MemoryNeeded Group::memory_needed(const Config& config, int far) {
  const int ranks = static_cast<int>(config.experts.size());
  const Config c = checked(config, ranks, true);
  std::vector<bool> which(static_cast<std::size_t>(ranks), false);
  std::fill_n(which.begin(), std::clamp(far, 0, ranks), true);
  return make_plan(c, 0, which).memory;
}

Group::Group(Communicator& comm, Config config)
    : state_(std::make_unique<State>(comm, std::move(config))) {}
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(Group&&) noexcept = default;
Group::~Group() = default;

const Config& Group::config() const { return state_->config(); }
const MemoryNeeded& Group::memory() const { return state_->plan().memory; }
int Group::local_experts() const { return state_->plan().shape.local; }
int Group::first_expert() const { return state_->plan().shape.first; }
int Group::capacity() const { return state_->plan().shape.capacity; }
std::uint32_t Group::row_bytes() const {
  return static_cast<std::uint32_t>(state_->plan().shape.row_cells) * 16;
}
std::uint32_t Group::scale_bytes() const {
  return static_cast<std::uint32_t>(state_->plan().shape.scale_words) * 4;
}
std::vector<bool> Group::cells() const {
  const Shape& s = state_->plan().shape;
  std::vector<bool> cells;
  for (int r = 0; r < s.ranks; ++r) cells.push_back(!s.is_far(r));
  return cells;
}
Handle Group::handle(int index) const { return state_->handle(index); }

void Group::dispatch_send(const DispatchInput& input, const Handle& handle, void* stream) {
  state_->dispatch(input, {}, handle, stream, Phase::send);
}
void Group::dispatch_receive(const DispatchOutput& output, const Handle& handle, void* stream) {
  state_->dispatch({}, output, handle, stream, Phase::receive);
}
void Group::dispatch(const DispatchInput& input, const DispatchOutput& output, const Handle& handle,
                     void* stream) {
  state_->dispatch(input, output, handle, stream, Phase::both);
}
void Group::combine_send(const CombineInput& input, const Handle& handle, void* stream) {
  state_->combine(input, {}, handle, stream, Phase::send);
}
void Group::combine_receive(const CombineOutput& output, const Handle& handle, void* stream) {
  state_->combine({}, output, handle, stream, Phase::receive);
}
void Group::combine(const CombineInput& input, const CombineOutput& output, const Handle& handle,
                    void* stream) {
  state_->combine(input, output, handle, stream, Phase::both);
}
Report Group::report(void* stream) { return state_->report(stream, false); }
void Group::reset_report(void* stream) { (void)state_->report(stream, true); }
std::vector<bool> Group::agree(std::chrono::milliseconds deadline, void* stream) {
  return state_->agree(deadline, stream);
}
void Group::record_times(std::uint64_t* times) { state_->record_times(times); }
void Group::close() {
  if (state_) state_->close();
}

}  // namespace marrow::ep
