// SPDX-License-Identifier: Apache-2.0
#include "gda/connection.hpp"

#include <atomic>
#include <cstring>
#include <exception>
#include <span>

#include "base/log.hpp"
#include "base/text.hpp"
#include "marrow/abi/mlx5_wqe.h"

namespace marrow::gda {
namespace {

using base::cat;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t pages(std::uint64_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

const char* operation_name(std::uint8_t opcode) {
  switch (opcode) {
    case mlx5::kNop: return "a NOP";
    case mlx5::kWrite: return "a put (WRITE)";
    case mlx5::kRead: return "a get or flush_remote (READ)";
    case mlx5::kFetchAdd: return "a signal or add (FETCH_ADD)";
    case mlx5::kCompareSwap: return "a compare_swap";
    case mlx5::kWait: return "a counter (WAIT)";
    default: return "an entry that is none of ours";
  }
}

const char* advice(std::uint8_t syndrome) {
  switch (syndrome) {
    case mlx5::kLocalProtectionError:
    case mlx5::kLocalLengthError:
    case mlx5::kLocalAccessError:
      return "check offset and size of the source or target buffer, and that it is still "
             "registered; a kernel built with MARROW_CHECKED=ON names the call";
    case mlx5::kRemoteAccessError:
      return "check offset and size against the peer's window, and that the window is still open "
             "there; a kernel built with MARROW_CHECKED=ON names the call";
    case mlx5::kRemoteInvalidRequestError:
      return "offsets of signals and atomics must be multiples of 8; a kernel built with "
             "MARROW_CHECKED=ON names the call";
    case mlx5::kLocalQpOperationError:
      return "something overwrote the queue; run the kernel under compute-sanitizer or "
             "AddressSanitizer";
    case mlx5::kFlushError:
      return "the queue was stopped; MARROW_GDA_CQ=ring keeps the first error of a queue";
    default: return "look at that rank's log; agree_failures() lets the survivors go on without it";
  }
}

}  // namespace

// The rings first, each on pages of its own; then a tail per queue: records, result words, error word.
struct Connection::Layout {
  static constexpr std::uint64_t kTailBytes = 512;
  static constexpr std::uint64_t kRecord = 0;
  static constexpr std::uint64_t kCqRecord = 64;
  static constexpr std::uint64_t kError = 128;    // written by kernels
  static constexpr std::uint64_t kResults = 192;  // written by the NIC: sink, then the result slots
  static_assert(kResults + (1 + kGdaResults) * 8 <= kTailBytes);

  Layout(std::uint32_t depth, std::size_t queues)
      : ring_bytes(pages(std::uint64_t{depth} * mlx5::kBlockBytes)),
        tails(2 * ring_bytes * queues),
        bytes(tails + pages(queues * kTailBytes)) {}
  std::uint64_t sq(std::size_t queue) const { return 2 * ring_bytes * queue; }
  std::uint64_t cq(std::size_t queue) const { return sq(queue) + ring_bytes; }
  std::uint64_t tail(std::size_t queue) const { return tails + queue * kTailBytes; }

  std::uint64_t ring_bytes;
  std::uint64_t tails;
  std::uint64_t bytes;
};

Connection::Connection(std::shared_ptr<Device> device, bootstrap::Bootstrap& bootstrap,
                       memory::Arena& arena, const Requirements& requirements,
                       const Region* counters)
    : nic_(std::move(device)),
      arena_(arena),
      rank_(bootstrap.rank()),
      nranks_(bootstrap.nranks()),
      contexts_(requirements.contexts),
      counting_(counters != nullptr && requirements.counters > 0),
      masked_(bootstrap.mask()) {
  masked_.resize(static_cast<std::size_t>(nranks_));
  const std::size_t queues = mains() * (counting_ ? 2 : 1);
  const Layout layout(nic_->options().depth, queues);
  // The ranks go on together or not at all: a failure is told to the others before it is thrown.
  std::exception_ptr failure;
  const auto step = [&](auto&& body) {
    try {
      if (!failure) body();
    } catch (...) {
      failure = std::current_exception();
    }
  };
  try {
    step([&] { make(layout, requirements); });
    if (failure) pairs_.clear();
    const std::vector<std::vector<std::byte>> numbers = exchange_numbers(bootstrap);
    step([&] { connect(numbers); });
    step([&] { publish(layout, requirements, counters); });
    agree(bootstrap, failure == nullptr);
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  if (failure) {
    drop();
    std::rethrow_exception(failure);
  }
}

Connection::~Connection() { drop(); }

void Connection::drop() noexcept {
  pairs_.clear();
  umem_.reset();
  for (Fence& fence : fences_) {
    if (fence.region && nic_->table().dereg_mr(fence.region) != 0)
      MARROW_WARN(gda, "freeing a fence word: ", nic_->failure());
    if (fence.block.device) arena_.release(fence.block);
    fence = {};
  }
  if (results_ && nic_->table().dereg_mr(results_) != 0)
    MARROW_WARN(gda, "freeing result words: ", nic_->failure());
  results_ = nullptr;
  if (block_.device) arena_.release(block_);
  block_ = {};
  if (error_block_.device) arena_.release(error_block_);
  error_block_ = {};
}

void Connection::make(const Layout& layout, const Requirements& requirements) {
  const bool on_gpu = nic_->on_gpu_engine();
  block_ = arena_.allocate(layout.bytes, on_gpu ? Memory::device : Memory::host);
  const std::size_t queues = mains() * (counting_ ? 2 : 1);
  // check() reads the error words at any time: they stay in host memory.
  if (on_gpu) error_block_ = arena_.allocate(queues * Layout::kTailBytes, Memory::host);
  errors_ = reinterpret_cast<std::uint64_t*>(
      on_gpu ? error_block_.host : block_.host + layout.tail(0) + Layout::kError);
  std::vector<mlx5::Cqe> fresh(nic_->options().depth);
  for (mlx5::Cqe& entry : fresh) entry.counter_owner = mlx5::kInitialCounterOwner;
  for (std::size_t q = 0; q < queues; ++q) {
    const std::size_t bytes = fresh.size() * sizeof(mlx5::Cqe);
    if (on_gpu) {
      arena_.update(block_.device, layout.cq(q), fresh.data(), bytes);
    } else {
      std::memcpy(block_.host + layout.cq(q), fresh.data(), bytes);
    }
  }
  make_fences();
  std::byte* const memory = on_gpu ? block_.device : block_.host;
  umem_ = std::make_unique<Umem>(nic_, memory, block_.bytes);
  results_ = nic_->table().reg_mr(nic_->pd(), memory + layout.tails, block_.bytes - layout.tails,
                                  verbs::IBV_ACCESS_LOCAL_WRITE);
  if (!results_) {
    throw Error(Code::out_of_memory,
                cat("registering result words with ", nic_->name(), " failed: ", nic_->failure()),
                "raise `ulimit -l`");
  }
  for (std::size_t q = 0; q < queues; ++q) {
    const QueuePlace place{layout.sq(q), layout.cq(q), layout.tail(q) + Layout::kRecord,
                           layout.tail(q) + Layout::kCqRecord};
    const bool companion = q >= mains();
    pairs_.push_back(std::make_unique<QueuePair>(
        nic_, *umem_, place, static_cast<std::uint16_t>(requirements.first_index),
        counting_ && !companion));
  }
}

// Every peer's queues answer before anyone posts.
void Connection::agree(bootstrap::Bootstrap& bootstrap, bool good) {
  const std::byte mine{good};
  const auto all = bootstrap.allgather(std::span(&mine, 1));
  for (int peer = 0; peer < nranks_; ++peer) {
    if (!all[peer].empty() && all[peer][0] != std::byte{1}) {
      throw Error(Code::network, cat("rank ", peer, " could not connect its queues"),
                  "see that rank's error");
    }
  }
}

// Only a NIC that writes to device memory needs words in both: softnic and the CPU device have host
// memory only.
void Connection::make_fences() {
  if (nic_->emulated() || !nic_->place().on_gpu()) return;
  for (int kind = 0; kind < 2; ++kind) {
    Fence& fence = fences_[kind];
    fence.block = arena_.allocate(sizeof(std::uint64_t), kind == 0 ? Memory::device : Memory::host);
    verbs::Memory memory;
    memory.address = fence.block.device;
    memory.bytes = fence.block.bytes;
    memory.gpu = fence.block.host == nullptr;
    fence.region = nic_->register_memory(
        memory, verbs::IBV_ACCESS_LOCAL_WRITE | verbs::IBV_ACCESS_REMOTE_READ);
  }
}

// Where the port is, one queue pair number per (context, peer), then fence words; a single word after a failure.
std::vector<std::vector<std::byte>> Connection::exchange_numbers(bootstrap::Bootstrap& bootstrap) {
  std::vector<std::uint32_t> mine{0};
  if (!pairs_.empty()) {
    const verbs::PortAddress port = verbs::address_of(nic_->port());
    mine.resize(kPortWords);
    std::memcpy(mine.data(), &port, sizeof port);
    for (std::size_t q = 0; q < mains(); ++q) mine.push_back(pairs_[q]->number());
    for (const Fence& fence : fences_) {
      const auto base = reinterpret_cast<std::uint64_t>(fence.block.device);
      mine.insert(mine.end(),
                  {static_cast<std::uint32_t>(base), static_cast<std::uint32_t>(base >> 32),
                   fence.region ? fence.region->rkey : 0});
    }
  }
  return bootstrap.allgather(std::as_bytes(std::span(mine)));
}

void Connection::connect(const std::vector<std::vector<std::byte>>& all) {
  for (int peer = 0; peer < nranks_; ++peer) {
    if (masked_[peer] || all[peer].empty()) continue;
    std::vector<std::uint32_t> theirs(all[peer].size() / 4);
    std::memcpy(theirs.data(), all[peer].data(), theirs.size() * 4);
    if (theirs.size() != words()) {
      throw Error(theirs.size() == 1 ? Code::network : Code::mismatch,
                  theirs.size() == 1
                      ? cat("rank ", peer, " could not make its queues")
                      : cat("rank ", peer, " told ", theirs.size(),
                            " words about its queues, rank ", rank_, " told ", words()),
                  theirs.size() == 1 ? "see that rank's error"
                                     : "every rank must ask for the same contexts");
    }
  }
  for (Fence& fence : fences_) {
    fence.bases.resize(static_cast<std::size_t>(nranks_));
    fence.keys.resize(static_cast<std::size_t>(nranks_));
  }
  for (int peer = 0; peer < nranks_; ++peer) {
    if (masked_[peer] || all[peer].empty()) continue;
    std::vector<std::uint32_t> theirs(words());
    std::memcpy(theirs.data(), all[peer].data(), theirs.size() * 4);
    verbs::PortAddress port;
    std::memcpy(&port, theirs.data(), sizeof port);
    const std::string why = verbs::cannot_reach(nic_->port(), port);
    if (!why.empty()) {
      throw Error(Code::unsupported,
                  cat(nic_->name(), " of rank ", rank_, " cannot reach rank ", peer, ": ", why),
                  "choose ports and GIDs alike (MARROW_NIC, MARROW_GID_INDEX)");
    }
    const std::uint32_t* fence_words = theirs.data() + kPortWords + mains();
    for (Fence& fence : fences_) {
      fence.bases[peer] = fence_words[0] | std::uint64_t{fence_words[1]} << 32;
      fence.keys[peer] = mlx5::to_big32(fence_words[2]);
      fence_words += 3;
    }
    for (int context = 0; context < contexts_; ++context) {
      const std::size_t q = static_cast<std::size_t>(context) * nranks_ + peer;
      pairs_[q]->connect(theirs[kPortWords + static_cast<std::size_t>(context) * nranks_ + rank_],
                         port);
      // A companion writes to our own counters, so it is connected to itself.
      if (counting_)
        pairs_[mains() + q]->connect(pairs_[mains() + q]->number(),
                                     verbs::address_of(nic_->port()));
    }
  }
}

void Connection::publish(const Layout& layout, const Requirements& requirements,
                         const Region* counters) {
  struct alignas(128) Image {
    std::byte bytes[128];
  };
  std::vector<Image> image(1 + pairs_.size() * sizeof(GdaQueue) / sizeof(Image));
  auto* header = new (image.data()) GdaDevice;
  header->queues = static_cast<std::uint32_t>(pairs_.size());
  if (counting_) {
    header->companion = static_cast<std::uint32_t>(pairs_.size() / 2);
    header->counter_base = counters->iova;
    header->counter_rkey = counters->rkey_be;
  }
  for (int kind = 0; kind < 2; ++kind) {
    if (!fences_[kind].region) continue;
    header->fence_base[kind] = arena_.upload(std::span<const std::uint64_t>(fences_[kind].bases));
    header->fence_rkey[kind] = arena_.upload(std::span<const std::uint32_t>(fences_[kind].keys));
  }
  for (std::size_t q = 0; q < pairs_.size(); ++q) {
    const QueuePair& pair = *pairs_[q];
    auto* queue = new (image.data() + 1 + q * sizeof(GdaQueue) / sizeof(Image)) GdaQueue;
    std::byte* tail = block_.device + layout.tail(q);
    queue->sq = block_.device + layout.sq(q);
    queue->doorbell = pair.doorbell();
    queue->record = reinterpret_cast<std::uint32_t*>(tail + Layout::kRecord +
                                                     offsetof(mlx5::DoorbellRecord, send));
    queue->mask = static_cast<std::uint16_t>(nic_->options().depth - 1);
    queue->qpn = mlx5::to_big32(pair.number() << 8);
    queue->sink = reinterpret_cast<std::uint64_t>(block_.host ? block_.host : block_.device) +
                  layout.tail(q) + Layout::kResults;
    queue->sink_lkey = mlx5::to_big32(results_->lkey);
    queue->cqn = mlx5::to_big32(pair.cq_number());
    queue->cq = reinterpret_cast<const std::uint32_t*>(block_.device + layout.cq(q) +
                                                       offsetof(mlx5::Cqe, counter_owner));
    queue->result = reinterpret_cast<std::uint64_t*>(tail + Layout::kResults) + 1;
    queue->error = reinterpret_cast<std::uint64_t*>(
        error_block_.device ? error_block_.device + q * Layout::kTailBytes : tail + Layout::kError);
    // The GPU engine's block is of the same GPU as the poster, wherever the payload lies.
    queue->release =
        static_cast<std::uint8_t>(nic_->on_gpu_engine() ? GdaRelease::device : GdaRelease::system);
    queue->release_reason =
        static_cast<std::uint8_t>(nic_->on_gpu_engine() ? GdaReleaseReason::gpu_memory
                                  : nic_->emulated()    ? GdaReleaseReason::cpu_engine
                                                        : GdaReleaseReason::host_memory);
    queue->collapsed = nic_->options().collapsed ? 1 : 0;
    // The NIC counts 16 bits; ours is the first 64-bit index from the wanted one on that agrees with it.
    const std::uint64_t wanted = requirements.first_index;
    const std::uint64_t first =
        wanted + static_cast<std::uint16_t>(pair.first() - static_cast<std::uint16_t>(wanted));
    queue->reserved_index = queue->guess = queue->ready_index = queue->posted_index = first;
    queue->completed_index = queue->fenced_index = first;
  }
  table_ = static_cast<const GdaDevice*>(arena_.upload(image.data(), image.size() * sizeof(Image)));
}

/// A kernel records a failure when it polls that queue; one that only waits for a signal never does. So
/// the host looks at the completion entries too. The first failure counts, not the flushes after it.
std::uint64_t Connection::failure_in_queue(std::size_t queue) const {
  if (!block_.host) return found_.empty() ? 0 : found_[queue];
  const Layout layout(nic_->options().depth, pairs_.size());
  return first_failure(reinterpret_cast<mlx5::Cqe*>(block_.host + layout.cq(queue)),
                       nic_->options().collapsed ? 1 : nic_->options().depth);
}

std::uint64_t Connection::first_failure(mlx5::Cqe* entries, std::size_t count) {
  std::uint64_t flushed = 0;
  for (std::size_t i = 0; i < count; ++i) {
    auto* words = reinterpret_cast<std::uint32_t*>(entries + i);
    const auto load = [&](int word, std::memory_order order) {
      return std::atomic_ref<std::uint32_t>(words[word]).load(order);
    };
    // Meets the engine's release of the entry's last word: the words before it are whole.
    const std::uint32_t last = load(15, std::memory_order_acquire);
    if (const auto kind = mlx5::cqe_opcode(last);
        kind != mlx5::kRequesterError && kind != mlx5::kResponderError) {
      continue;
    }
    const std::uint32_t syndromes = mlx5::from_big32(load(13, std::memory_order_relaxed));
    const std::uint64_t seen = gda_error::pack(
        static_cast<std::uint8_t>(syndromes), static_cast<std::uint8_t>(syndromes >> 8),
        static_cast<std::uint8_t>(mlx5::from_big32(load(14, std::memory_order_relaxed)) >> 24),
        mlx5::cqe_counter(last));
    if (gda_error::syndrome(seen) != mlx5::kFlushError) return seen;
    flushed = seen;
  }
  return flushed;
}

void Connection::look_in_gpu_memory() const {
  const std::uint64_t failures = nic_->failures();
  if (block_.host || failures == failures_seen_) return;
  failures_seen_ = failures;
  const Layout layout(nic_->options().depth, pairs_.size());
  std::vector<mlx5::Cqe> entries(nic_->options().collapsed ? 1 : nic_->options().depth);
  found_.assign(pairs_.size(), 0);
  for (std::size_t q = 0; q < pairs_.size(); ++q) {
    arena_.download(entries.data(), block_.device, layout.cq(q),
                    entries.size() * sizeof(mlx5::Cqe));
    found_[q] = first_failure(entries.data(), entries.size());
  }
}

std::vector<QueueError> Connection::errors() const {
  std::vector<QueueError> found;
  const std::lock_guard lock(mutex_);
  look_in_gpu_memory();
  for (std::size_t q = 0; q < pairs_.size(); ++q) {
    auto* word = errors_ + q * (Layout::kTailBytes / sizeof(std::uint64_t));
    const int peer = static_cast<int>(q % nranks_);
    if (masked_[peer]) continue;
    std::uint64_t error = std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_relaxed);
    if (error == 0) error = failure_in_queue(q);
    if (error == 0) continue;
    QueueError e;
    e.peer = peer;
    e.context = static_cast<int>(q % mains() / nranks_);
    e.syndrome = gda_error::syndrome(error);
    e.code = gda_error::is_invalid(error) ? Code::network : Code::peer_failed;
    e.sentence = cat(operation_name(gda_error::opcode(error)), " from rank ", rank_, " to rank ",
                     peer, ", context ", e.context, q >= mains() ? " (counter queue)" : "",
                     ", queue pair ", pairs_[q]->number(), ", entry ", gda_error::wqe_index(error),
                     ", failed on ", nic_->name(), ": ", mlx5::syndrome_name(e.syndrome),
                     " (syndrome ", static_cast<int>(e.syndrome), ", vendor ",
                     static_cast<int>(gda_error::vendor(error)), ")");
    e.next_step = advice(e.syndrome);
    found.push_back(std::move(e));
  }
  return found;
}

void Connection::mask_peer(int rank) noexcept {
  const std::lock_guard lock(mutex_);
  if (rank < 0 || rank >= nranks_ || masked_[rank]) return;
  masked_[rank] = true;
  for (int context = 0; context < contexts_; ++context) {
    const std::size_t q = static_cast<std::size_t>(context) * nranks_ + rank;
    pairs_[q]->stop();
    if (counting_) pairs_[mains() + q]->stop();
  }
}

std::string Connection::release_scope() const {
  if (nic_->on_gpu_engine()) return "device: a block of the same GPU executes the queues";
  return nic_->emulated() ? "system: a CPU thread executes the queues"
                          : "system: queues lie in host memory";
}

}  // namespace marrow::gda
