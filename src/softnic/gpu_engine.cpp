// SPDX-License-Identifier: Apache-2.0
#include "softnic/gpu_engine.hpp"

#include <sched.h>
#include <sys/prctl.h>

#include <cstring>
#include <new>

#include "base/log.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"
#include "marrow/error.hpp"
#include "softnic/descriptor_server.hpp"
#include "softnic/host_env.hpp"

namespace marrow::softnic {
namespace {

using cuda::check;
using cuda::check_quietly;
using cuda::driver;
using gpu::Command;

constexpr Nanoseconds kMicrosecond = 1000;
constexpr Nanoseconds kMillisecond = 1000 * kMicrosecond;
/// The block ends after that long without work, so that calls that wait for it go through.
constexpr Nanoseconds kIdle = 10 * kMillisecond;
/// And after that long without a sign of its process. A process that was stopped (SIGSTOP) starts it again.
constexpr Nanoseconds kHeartbeat = 2000 * kMillisecond;
constexpr auto kTick = std::chrono::microseconds(200);
/// Longest wait for a command: the block may have to wait until a kernel leaves it an SM.
constexpr Nanoseconds kCommandTime = 20'000 * kMillisecond;
constexpr std::uint32_t kFirstCompletionQueue = 1u << 23;  ///< apart from the CPU engine's numbers

template <class T>
T load(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
template <class T>
void store(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

gpu::FaultOptions faults_of(const Options& o) {
  const auto ns = [](auto duration) {
    return static_cast<Nanoseconds>(std::chrono::nanoseconds(duration).count());
  };
  gpu::FaultOptions f;
  f.seed = o.seed;
  f.delay = ns(o.delay);
  f.drop = o.drop;
  f.corrupt = o.corrupt;
  f.error_at = o.error_at;
  f.stall = o.stall;
  f.stall_time = ns(o.stall_time);
  f.retry = ns(o.retry);
  f.reorder = o.reorder ? 1 : 0;
  f.any = f.delay != 0 || f.drop != 0 || f.corrupt != 0 || f.error_at != 0 || f.stall != 0 ||
          f.reorder != 0;
  return f;
}

}  // namespace

bool GpuEngine::possible(const Options& options, std::string* why) {
  const auto no = [&](const char* sentence) {
    if (why != nullptr) *why = sentence;
    return false;
  };
  if (options.engine == EngineChoice::cpu || options.engine == EngineChoice::copy) {
    return no(
        "MARROW_SOFTNIC=engine=cpu or copy: softnic's engine is a CPU thread, which cannot load or "
        "store GPU memory");
  }
  if (options.hca_atomics) {
    return no(
        "MARROW_SOFTNIC=atomics=hca needs softnic's CPU engine, which cannot load or store "
        "GPU memory");
  }
  if (!gpu::has_block()) {
    return no(
        "softnic's engine is a CPU thread, which cannot load or store GPU memory, and this "
        "library was built without nvcc, so it has no GPU engine");
  }
  return true;
}

GpuEngine::GpuEngine(Directory& directory, Regions& regions, Engine& lock, const Options& options,
                     int device, std::weak_ptr<Pinned>& directory_pin)
    : directory_(directory),
      regions_(regions),
      lock_(lock),
      context_(cuda::Context::of(device)),
      stream_(context_, -5),
      copies_(context_),
      queue_pairs_(gpu::kMaxQueuePairs),
      completion_queues_(gpu::kMaxCompletionQueues),
      cells_(gpu::kCells),
      generations_(gpu::kMaxCompletionQueues),
      entered_(kMaxRegions) {
  const cuda::Current current(*context_);
  if (const int error = gpu::prepare_block(); error != 0) {
    throw Error(Code::cuda,
                base::cat("loading softnic's engine block on GPU ", device, " failed: CUDA error ",
                          error, "."),
                "this build may lack code for that GPU: set MARROW_CUDA_ARCH and build again");
  }
  tables_memory_ = cuda::VmmMapping::create(context_, sizeof(gpu::Tables));
  check(driver().memset_d8_async(tables_memory_.address(), 0, tables_memory_.bytes(),
                                 stream_.handle()),
        "clearing the GPU engine's tables");
  stream_.synchronize();
  tables_ = reinterpret_cast<gpu::Tables*>(tables_memory_.address());

  mailbox_memory_ = base::Mapping::anonymous(sizeof(gpu::Mailbox) + sizeof(gpu::Replies));
  mailbox_ = new (mailbox_memory_.data()) gpu::Mailbox{};
  replies_ = new (mailbox_ + 1) gpu::Replies{};
  check(mailbox_pin_.pin(context_, mailbox_memory_.data(), mailbox_memory_.size()),
        "registering the GPU engine's mailbox with CUDA",
        "raise the limit of locked memory (ulimit -l)");
  void* const shared = &directory_.shared();
  directory_pin_ = directory_pin.lock();
  if (!directory_pin_) {
    directory_pin_ = std::make_shared<Pinned>();
    check(directory_pin_->pin(context_, shared, sizeof(SharedDirectory)),
          "registering softnic's directory with CUDA",
          "raise the limit of locked memory (ulimit -l)");
    directory_pin = directory_pin_;
  }
  launch_.mailbox = reinterpret_cast<gpu::Mailbox*>(cuda::seen_by_gpu(*context_, mailbox_));
  launch_.directory = reinterpret_cast<SharedDirectory*>(cuda::seen_by_gpu(*context_, shared));
  launch_.tables = tables_;
  launch_.process = directory_.self();
  launch_.idle = kIdle;
  launch_.heartbeat = kHeartbeat;
  launch_.faults = faults_of(options);
  try {
    regions_.watch(*this);  // may start the block: regions go into its tables
    thread_ = base::start_thread(base::cat("the thread of the GPU engine on GPU ", device),
                                 [this] { serve(); });
  } catch (...) {
    leave();
    throw;
  }
  MARROW_INFO(softnic, "GPU engine on GPU ", device);
}

GpuEngine::~GpuEngine() {
  stop_.store(true);
  if (thread_.joinable()) thread_.join();
  leave();
}

/// Ends the block; afterwards the members may go.
void GpuEngine::leave() noexcept {
  regions_.unwatch(*this);
  end_block();
  if (running_) {
    // It would write into what is freed below. Rather lose the memory.
    MARROW_WARN(softnic, "the GPU engine's block on GPU ", device(),
                " does not end; its memory is "
                "kept");
    new (std::nothrow) cuda::VmmMapping(std::move(tables_memory_));
    mailbox_pin_.keep();
    directory_pin_->keep();
    new (std::nothrow) base::Mapping(std::move(mailbox_memory_));
    new (std::nothrow) std::map<std::uint32_t, Import>(std::move(imports_));
    return;
  }
  for (auto& [key, import] : imports_) drop(import);
}

cuda::Result GpuEngine::Pinned::pin(std::shared_ptr<cuda::Context> context, void* pages,
                                    std::size_t bytes) {
  const cuda::Current current(*context);
  const cuda::Result result = driver().host_register(
      pages, bytes, cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap);
  if (result == cuda::Result::success) {
    pages_ = pages;
    context_ = std::move(context);
  }
  return result;
}

GpuEngine::Pinned::~Pinned() {
  if (pages_ == nullptr) return;
  try {
    const cuda::Current current(*context_);
    check_quietly(driver().host_unregister(pages_), "unregistering the GPU engine's pages");
  } catch (const Error&) {  // the driver has shut down and freed everything
  }
}

// --- the block ---------------------------------------------------------------------------------------

void GpuEngine::start_block() {
  if (running_ || !broken_.empty()) return;
  const cuda::Current current(*context_);
  ++launch_.number;
  launch_.queue_pairs = 0;
  for (std::uint32_t i = 0; i < queue_pairs_.size(); ++i) {
    if (queue_pairs_[i] != nullptr) launch_.queue_pairs = i + 1;
  }
  store(mailbox_->command, commands_);
  beat();
  const int error = gpu::launch_block(launch_, stream_.handle());
  if (error != 0) {
    broken(base::cat("starting softnic's engine block on GPU ", device(), ": CUDA error ", error));
  }
  running_ = true;
}

void GpuEngine::broken(const std::string& what) {
  broken_ = what;
  MARROW_WARN(softnic, what);
  throw Error(Code::cuda, base::cat(what, "."),
              "an earlier kernel may have failed: run with compute-sanitizer");
}

/// Whether the block has ended; then it may be started again.
bool GpuEngine::block_left() {
  if (running_ && driver().stream_query(stream_.handle()) == cuda::Result::success)
    running_ = false;
  return !running_;
}

/// Brings what the block says to where the CPU sees it: about 10 us.
void GpuEngine::fetch_replies() {
  const cuda::Current current(*context_);
  check(driver().copy_async(
            reinterpret_cast<cuda::DevicePointer>(cuda::seen_by_gpu(*context_, replies_)),
            reinterpret_cast<cuda::DevicePointer>(&tables_->replies), sizeof(gpu::Replies),
            copies_.handle()),
        "fetching what the GPU engine's block says");
  check(driver().stream_synchronize(copies_.handle()), "fetching what the GPU engine's block says");
  std::uint64_t failures = 0;
  for (const std::uint64_t each : replies_->failures) failures += each;
  failures_.store(failures, std::memory_order_release);
}

void GpuEngine::end_block() noexcept {
  if (!running_) return;
  store(mailbox_->command, commands_ | gpu::kQuit);
  const Nanoseconds limit = HostEnv::now() + 5000 * kMillisecond;
  while (!block_left() && HostEnv::now() < limit) {
    beat();
    ::sched_yield();
    // Where the context is dead (a kernel of the user's crashed) the block is, too.
    const cuda::Result result = driver().stream_query(stream_.handle());
    if (result != cuda::Result::not_ready) running_ = false;
  }
}

/// A crashed kernel, ours or the user's, takes the whole context with it.
void GpuEngine::look_for_crash() {
  if (!running_ || !broken_.empty()) return;
  const cuda::Result result = driver().stream_query(stream_.handle());
  if (result == cuda::Result::success || result == cuda::Result::not_ready) return;
  running_ = false;
  broken(base::cat("the GPU engine's block on GPU ", device(), " failed: ", cuda::text(result)));
}

void GpuEngine::beat() {
  std::atomic_ref<std::uint64_t>(mailbox_->heartbeat).fetch_add(1, std::memory_order_relaxed);
}

/// Has the block carry out one command. @param out  payload, @param in  where its answer goes
void GpuEngine::command(Command kind, std::uint32_t index, std::uint32_t flags, const void* out,
                        void* in, std::uint32_t bytes, std::uint64_t address) {
  if (!broken_.empty()) {
    throw Error(Code::cuda, base::cat("softnic's GPU engine is out of order: ", broken_, "."),
                "close the communicator and open another");
  }
  if (out != nullptr) std::memcpy(mailbox_->payload, out, bytes);
  mailbox_->kind = kind;
  mailbox_->index = index;
  mailbox_->flags = flags;
  mailbox_->bytes = bytes;
  mailbox_->address = address;
  store(mailbox_->command, ++commands_);
  const Nanoseconds start = HostEnv::now();
  for (;;) {
    if (block_left()) start_block();
    look_for_crash();
    fetch_replies();
    if (replies_->done == commands_) break;
    beat();
    if (HostEnv::now() - start > kCommandTime) {
      broken(base::cat("the GPU engine's block on GPU ", device(),
                       " does not answer; kernels must leave it room for one block of ",
                       gpu::kThreads, " threads"));
    }
  }
  if (in == nullptr) return;
  // One copy reads `done` and the payload in any order; the payload of this answer is sure in the next.
  fetch_replies();
  std::memcpy(in, replies_->payload, bytes);
}

std::uint64_t GpuEngine::failures() const { return failures_.load(std::memory_order_acquire); }

// --- queues ------------------------------------------------------------------------------------------

std::uint32_t GpuEngine::next_completion_queue() {
  for (std::uint32_t i = 1; i < gpu::kMaxCompletionQueues; ++i) {
    if (completion_queues_[i]) continue;
    const std::uint32_t generation = generations_[i]++ % 1024;
    return kFirstCompletionQueue + generation * gpu::kMaxCompletionQueues + i;
  }
  return 0;
}

void GpuEngine::add(CompletionQueue& cq) {
  const std::uint32_t slot = gpu::completion_queue_slot(cq.cqn);
  command(Command::put_completion_queue, slot, 0, &cq, nullptr, sizeof cq);
  completion_queues_[slot] = true;
}

void GpuEngine::remove(CompletionQueue& cq) {
  const std::uint32_t slot = gpu::completion_queue_slot(cq.cqn);
  const CompletionQueue none;
  completion_queues_[slot] = false;
  command(Command::put_completion_queue, slot, 0, &none, nullptr, sizeof none);
}

/// Two queue pairs at one completion queue: from now on its entries are written under a lock.
void GpuEngine::mark_user(CompletionQueue& cq, const QueuePair& qp) {
  if (cq.first_user == qp.qpn || cq.shared != 0) return;
  const std::uint32_t slot = gpu::completion_queue_slot(cq.cqn);
  if (cq.first_user == 0) {
    cq.first_user = qp.qpn;  // nothing is in it yet: the host's copy, with its start index, counts
  } else {
    CompletionQueue live;
    command(Command::get_completion_queue, slot, 0, nullptr, &live, sizeof live);
    cq.produced = live.produced;
    cq.good = live.good;
    cq.failed = live.failed;
    cq.overrun = live.overrun;
    cq.shared = 1;
  }
  command(Command::put_completion_queue, slot, 0, &cq, nullptr, sizeof cq);
}

void GpuEngine::add(QueuePair& qp) {
  std::uint32_t index = 0;
  while (index < queue_pairs_.size() && queue_pairs_[index] != nullptr) ++index;
  if (index == queue_pairs_.size()) {
    throw Error(Code::out_of_memory,
                base::cat("the GPU engine has ", gpu::kMaxQueuePairs, " queue pairs already."),
                "use fewer contexts");
  }
  qp.gpu = this;
  qp.gpu_index = index;
  qp.send_index = gpu::completion_queue_slot(qp.send_cq->cqn);
  qp.receive_index = gpu::completion_queue_slot(qp.receive_cq->cqn);
  mark_user(*qp.send_cq, qp);
  mark_user(*qp.receive_cq, qp);
  queue_pairs_[index] = &qp;
  ++in_use_;
  give(qp, gpu::kPrime);
}

void GpuEngine::remove(QueuePair& qp) {
  queue_pairs_[qp.gpu_index] = nullptr;
  --in_use_;
  const QueuePair none;
  try {
    command(Command::put_queue_pair, qp.gpu_index, 0, &none, nullptr, sizeof none);
  } catch (const Error& error) {
    MARROW_WARN(softnic, "removing queue pair ", qp.qpn, ": ", error.sentence());
  }
  qp.gpu = nullptr;
  if (in_use_ == 0) end_block();  // nobody waits for its idle time
  watch_peers();
}

/// The image that the block gets: its own addresses.
QueuePair GpuEngine::as_device(const QueuePair& qp) const {
  QueuePair image = qp;
  const auto seen = [&](const void* shared) {
    return reinterpret_cast<QpSlot*>(reinterpret_cast<std::byte*>(launch_.directory) +
                                     (static_cast<const std::byte*>(shared) -
                                      reinterpret_cast<const std::byte*>(&directory_.shared())));
  };
  image.slot = seen(qp.slot);
  image.peer_slot = seen(&directory_.qp_slot(qp.remote_qpn));
  image.work = nullptr;
  return image;
}

QueuePair GpuEngine::look_at(const QueuePair& qp) {
  QueuePair live;
  command(Command::get_queue_pair, qp.gpu_index, 0, nullptr, &live, sizeof live);
  live.slot = qp.slot;
  live.peer_slot = nullptr;
  live.send_cq = qp.send_cq;
  live.receive_cq = qp.receive_cq;
  live.work = qp.work;
  return live;
}

void GpuEngine::take(QueuePair& qp) {
  QueuePair live;
  command(Command::get_queue_pair, qp.gpu_index, gpu::kFreeze, nullptr, &live, sizeof live);
  live.slot = qp.slot;
  live.peer_slot = nullptr;
  live.send_cq = qp.send_cq;
  live.receive_cq = qp.receive_cq;
  live.work = qp.work;
  qp = live;
}

void GpuEngine::give(QueuePair& qp, std::uint32_t flags) {
  if (qp.state == mlx5::kReadyToSend) qp.peer = peer_facts(directory_, qp);
  const QueuePair image = as_device(qp);
  command(Command::put_queue_pair, qp.gpu_index, flags, &image, nullptr, sizeof image);
  watch_peers();
}

std::uint64_t* GpuEngine::take_cell() {
  for (std::uint32_t i = 0; i < gpu::kCells; ++i) {
    if (cells_[i]) continue;
    auto* cell = reinterpret_cast<std::uint64_t*>(&tables_->cells[i][0]);
    const std::uint64_t zeros[gpu::kCellBytes / 8] = {};
    command(Command::write, 0, 0, zeros, nullptr, sizeof zeros,
            reinterpret_cast<std::uint64_t>(cell));
    cells_[i] = true;
    return cell;
  }
  return nullptr;
}

void GpuEngine::give_cell(std::uint64_t* cell) {
  cells_[static_cast<std::size_t>(reinterpret_cast<std::byte*>(cell) - &tables_->cells[0][0]) /
         gpu::kCellBytes] = false;
}

// --- keys --------------------------------------------------------------------------------------------

void GpuEngine::enter(const Region& region) {
  const std::uint32_t slot = region.key >> 8;
  command(Command::write, 0, 0, &region, nullptr, sizeof region,
          reinterpret_cast<std::uint64_t>(&tables_->regions[slot]));
  entered_[slot] = true;
}

/// A region of this process. Memory that this GPU cannot reach is left out: its keys are then unknown.
void GpuEngine::entered(const Region& region) {
  try {
    Region seen = region;
    if (region.gpu_memory != 0) {
      const int owner = cuda::owner_of(region.base);
      if (owner != device()) {
        cuda::enable_peer(*context_, owner, reinterpret_cast<cuda::DevicePointer>(region.base));
      }
    } else {
      seen.base = cuda::seen_by_gpu(*context_, region.base);
      if (seen.base == nullptr) return;
    }
    enter(seen);
  } catch (const Error& error) {
    MARROW_WARN(softnic, "GPU ", device(), " cannot reach the memory of key ", region.key, ": ",
                error.sentence());
  }
}

void GpuEngine::revoked(std::uint32_t key) noexcept {
  const std::uint32_t slot = key >> 8;
  if (!entered_[slot]) return;
  entered_[slot] = false;
  try {
    const Region none;
    if (broken_.empty()) {
      command(Command::write, 0, 0, &none, nullptr, sizeof none,
              reinterpret_cast<std::uint64_t>(&tables_->regions[slot]));
    }
  } catch (const Error& error) {
    MARROW_WARN(softnic, "revoking key ", key, ": ", error.sentence());
  }
}

/// Maps a region of another process. @return whether the table has it now
/// @param fd  where the region needs one
bool GpuEngine::import(std::uint32_t key, const base::Fd& fd) {
  RegionSlot* slot = directory_.region_slot(key);
  if (slot == nullptr || slot->key.load(std::memory_order_acquire) != key) return false;
  constexpr auto relaxed = std::memory_order_relaxed;
  Region region;
  region.key = key;
  // Acquire loads keep their order: if the name still stands, what was read belongs to it.
  constexpr auto acquire = std::memory_order_acquire;
  region.process = slot->process.load(acquire);
  region.access = slot->access.load(acquire);
  region.pd = slot->pd.load(acquire);
  region.iova = slot->iova.load(acquire);
  region.length = slot->length.load(acquire);
  const std::uint32_t kind = slot->kind.load(acquire);
  const int number = slot->fd.load(acquire);
  const std::uint64_t offset = slot->offset.load(acquire);
  cuda::IpcHandle handle;
  std::uint64_t words[8];
  for (int i = 0; i < 8; ++i) words[i] = slot->ipc[i].load(acquire);
  std::memcpy(&handle, words, sizeof handle);
  if (slot->key.load(relaxed) != key || region.process == directory_.self()) return false;

  Import made;
  switch (kind) {
    case RegionSlot::kGpuMemory: {
      if (!fd) return false;
      made.vmm = cuda::VmmMapping::import(context_, fd.get(), offset + region.length);
      region.base = reinterpret_cast<std::byte*>(made.vmm.address() + offset);
      region.gpu_memory = 1;
      break;
    }
    case RegionSlot::kGpuIpc:
      made.ipc = cuda::IpcMapping(context_, handle.bytes);
      region.base = reinterpret_cast<std::byte*>(made.ipc.address() + offset);
      region.gpu_memory = 1;
      break;
    default: {
      if (number < 0) return false;
      std::uint64_t start = 0;
      made.file = regions_.map_file(region.process, number, *slot, start);
      if (!made.file.valid()) return false;
      const cuda::Current current(*context_);
      check(driver().host_register(made.file.data(), made.file.size(),
                                   cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap),
            "registering a peer's host memory with CUDA");
      made.registered = true;
      region.base = cuda::seen_by_gpu(*context_, made.file.as<std::byte>(offset - start));
    }
  }
  enter(region);
  imports_[key] = std::move(made);
  return true;
}

void GpuEngine::drop(Import& import) noexcept {
  if (!import.registered) return;
  try {
    const cuda::Current current(*context_);
    check_quietly(driver().host_unregister(import.file.data()), "unregistering a peer's memory");
  } catch (const Error&) {
  }
}

void GpuEngine::forget_stale() {
  for (auto it = imports_.begin(); it != imports_.end();) {
    const RegionSlot* slot = directory_.region_slot(it->first);
    if (slot != nullptr && slot->key.load(std::memory_order_acquire) == it->first) {
      ++it;
      continue;
    }
    revoked(it->first);
    drop(it->second);
    it = imports_.erase(it);
  }
}

// --- the thread --------------------------------------------------------------------------------------

void GpuEngine::serve() {
  ::prctl(PR_SET_NAME, "marrow-gpu-nic");
  ::prctl(PR_SET_TIMERSLACK, 1000UL);
  while (!stop_.load(std::memory_order_relaxed)) {
    beat();
    try {
      {
        Engine::ControlLock lock(lock_);
        attend();
      }
      answer_requests();
    } catch (const Error& error) {
      MARROW_WARN(softnic, "GPU engine: ", error.what());
    }
    std::this_thread::sleep_for(
        in_use_.load(std::memory_order_relaxed) != 0 ? kTick : std::chrono::microseconds(1000));
  }
}

void GpuEngine::attend() {
  if (!broken_.empty() || in_use_ == 0) return;
  if (block_left()) start_block();
  fetch_replies();
  std::memcpy(wanted_, replies_->wanted, sizeof wanted_);
  const Nanoseconds now = HostEnv::now();
  if (now - watched_ > kMillisecond) {
    watched_ = now;
    look_for_crash();
    watch_peers();
  }
  if (now - tidied_ > 100 * kMillisecond) {
    tidied_ = now;
    forget_stale();
  }
}

/// Enters the keys of other processes that workers have met.
void GpuEngine::answer_requests() {
  for (std::uint32_t warp = 0; warp < gpu::kWorkers; ++warp) {
    const std::uint64_t request = wanted_[warp];
    if (request == mailbox_->answered[warp]) continue;
    const auto key = static_cast<std::uint32_t>(request);
    try {
      // Without the lock: its owner may be asking us at the same time.
      const base::Fd fd = fetch_for(key);
      Engine::ControlLock lock(lock_);
      if (imports_.count(key) == 0) import(key, fd);
    } catch (const Error& error) {
      MARROW_WARN(softnic, "key ", key, ": ", error.what());
    }
    store(mailbox_->answered[warp], request);
  }
}

base::Fd GpuEngine::fetch_for(std::uint32_t key) {
  const RegionSlot* slot = directory_.region_slot(key);
  if (slot == nullptr || slot->key.load(std::memory_order_acquire) != key ||
      slot->kind.load(std::memory_order_relaxed) != RegionSlot::kGpuMemory) {
    return {};
  }
  const std::uint32_t process = slot->process.load(std::memory_order_relaxed);
  if (process == directory_.self()) return {};
  return fetch_descriptor(directory_, process, key);
}

/// Tells the block what has become of the other ends.
void GpuEngine::watch_peers() {
  if (!broken_.empty()) return;
  for (QueuePair* qp : queue_pairs_) {
    if (qp == nullptr || qp->state != mlx5::kReadyToSend) continue;
    const PeerFacts facts = peer_facts(directory_, *qp);
    if (std::memcmp(&facts, &qp->peer, sizeof facts) == 0) continue;
    qp->peer = facts;
    command(Command::set_peer, qp->gpu_index, 0, &facts, nullptr, sizeof facts);
  }
}

}  // namespace marrow::softnic
