// SPDX-License-Identifier: Apache-2.0
// Set-up, liveness and tear-down of a communicator.
#include <algorithm>
#include <atomic>
#include <exception>

#include "base/log.hpp"
#include "base/text.hpp"
#include "core/device_state.hpp"
#include "core/state.hpp"
#include "core/window.hpp"
#include "cuda/driver.hpp"

namespace marrow::core {
namespace {

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

CommunicatorState::CommunicatorState(const UniqueId& id, int nranks, int rank, Config config,
                                     bool replacement)
    : number_(next_number()), id_(id), config_(std::move(config)) {
  const base::log::ThreadRank log_rank(rank);
  try {
    for (const auto& [name, value] : config_.parameters) parameters_.set(name, value);
    base::check_parameters(parameters_);
  } catch (const Error& error) {
    if (!replacement) bootstrap::Bootstrap::give_up(id, nranks, rank, error);
    throw;
  }
  if (nranks > kMaxRanks) {  // the same on every rank, or a mismatch of counts that rank 0 tells
    if (rank == 0 && !replacement) id.discard();
    throw Error(Code::invalid_argument, base::cat("A communicator of ", nranks, " ranks."),
                base::cat("use 1 to ", kMaxRanks));
  }
  bootstrap::Options options;
  options.parameters = parameters_;
  options.replacement = replacement;
  bootstrap_ = std::make_unique<bootstrap::Bootstrap>(id, nranks, rank, options);
  masked_ = bootstrap_->mask();
  slow_periods_.assign(nranks, 0);
  const auto reserve = [&] {
    arena_ = memory::Arena::create(config_.place);
    control_ = arena_->allocate(sizeof(ControlBlock), Memory::host);
  };
  if (replacement) {
    reserve();  // the survivors have theirs
  } else {
    together("reserving control memory", reserve);
  }
  faults_ =
      std::make_unique<FaultBoard>(reinterpret_cast<ControlBlock*>(control_.host), rank, nranks,
                                   base::parameter_string("MARROW_CHECKED_REPORT", parameters_));
  if (std::find(masked_.begin(), masked_.end(), true) != masked_.end()) faults_->agreed(masked_);
  watch();
  try {
    if (replacement) {
      newcomer_ = rank;
      join_survivors();
    } else {
      choose_paths();
    }
  } catch (...) {
    // The board dies before the bootstrap, whose thread would still tell it about leaving peers.
    unwatch();
    throw;
  }
  MARROW_INFO(init, "rank ", rank, " of ", nranks, " ready, atomic path ", name(plan_.atomic),
              ", lsa team of ", plan_.lsa_size[rank]);
}

CommunicatorState::~CommunicatorState() {
  try {
    close();
  } catch (const std::exception& error) {
    MARROW_WARN(core, "closing a communicator: ", error.what());
  }
  unwatch();
}

void CommunicatorState::unwatch() {
  if (!bootstrap_) return;
  bootstrap_->on_change({});
  bootstrap_->on_revoke({});
}

void CommunicatorState::watch() {
  bootstrap_->on_change([this](int peer, bootstrap::PeerState state, const std::string& sentence) {
    if (state == bootstrap::PeerState::failed) {
      faults_->peer_failed(peer, sentence);
      std::lock_guard lock(mutex_);
      if (proxy_) proxy_->fail_peer(peer);
    } else if (state == bootstrap::PeerState::slow) {
      std::lock_guard lock(mutex_);
      ++slow_periods_[peer];
    }
  });
  bootstrap_->on_revoke([this](int by, const std::string& sentence) {
    faults_->aborted(
        base::cat("by rank ", by, ": ", sentence.empty() ? "no reason given" : sentence));
  });
}

std::uint32_t CommunicatorState::next_symmetric_id() {
  const std::vector<std::uint32_t> next = allgather(next_id_);
  const std::uint32_t id = *std::max_element(next.begin(), next.end());
  next_id_ = id + 1;
  return id;
}

void CommunicatorState::same_on_all(const char* what, std::uint64_t value) {
  const std::vector<std::uint64_t> values = allgather(value);
  for (int r = 0; r < nranks(); ++r) {
    if (masked_[r] || values[r] == value) continue;
    // The same pair on every rank: the first that differs from the first live one.
    int first = 0;
    while (masked_[first]) ++first;
    int other = first;
    while (masked_[other] || values[other] == values[first]) ++other;
    throw Error(Code::mismatch,
                base::cat(what, " differs: rank ", first, " gave ", values[first], ", rank ", other,
                          " gave ", values[other]),
                "every rank must make this call with the same value");
  }
}

std::shared_ptr<DeviceState> CommunicatorState::device_communicator(
    const Requirements& requirements) {
  auto device = std::make_shared<DeviceState>(shared_from_this(), requirements, made_);
  std::lock_guard lock(mutex_);
  devices_.push_back(device);
  return device;
}

void CommunicatorState::forget(DeviceState* device) {
  std::lock_guard lock(mutex_);
  std::erase_if(devices_, [&](const auto& kept) { return kept.get() == device; });
}

void CommunicatorState::check() {
  faults_->throw_if_any();
  std::lock_guard lock(mutex_);
  for (const auto& device : devices_) device->check();
}

void CommunicatorState::revoke(const std::string& why) {
  faults_->aborted(base::cat("by rank ", rank(), ": ", why.empty() ? "no reason given" : why));
  bootstrap_->revoke(why);
}

std::vector<bool> CommunicatorState::agree_failures(std::chrono::milliseconds deadline) {
  require_admitted("agree_failures()");
  const base::Deadline until = base::Deadline::after(deadline);
  for (;;) {
    const std::vector<bool> failed = bootstrap_->agree_failures(until);
    adopt_failures(failed);
    try {
      rebuild_if_torn();
      return failed;
    } catch (const Error& error) {
      // Somebody died meanwhile: agreed again, until the deadline.
      if (error.code() != Code::peer_failed || until.expired()) throw;
    }
  }
}

void CommunicatorState::adopt_failures(const std::vector<bool>& failed) {
  std::vector<std::shared_ptr<DeviceState>> devices;
  {
    std::lock_guard lock(mutex_);
    masked_ = failed;
    devices = devices_;
  }
  for (const auto& device : devices) device->mask(failed);
  for (int r = 0; proxy_ && r < nranks(); ++r) {
    if (failed[r]) proxy_->fail_peer(r);
  }
  faults_->agreed(failed);
}

PeerStatistics CommunicatorState::statistics(int peer) const {
  if (peer < 0 || peer >= bootstrap_->nranks()) {
    throw Error(Code::invalid_argument, base::cat("statistics of rank ", peer),
                base::cat("ranks are 0 to ", bootstrap_->nranks() - 1));
  }
  PeerStatistics result;
  result.slow = bootstrap_->state(peer) == bootstrap::PeerState::slow;
  result.failed = bootstrap_->state(peer) == bootstrap::PeerState::failed;
  std::lock_guard lock(mutex_);
  result.slow_periods = slow_periods_[peer];
  return result;
}

void CommunicatorState::synchronize() {
  if (!config_.place.on_gpu()) return;  // launch() on the CPU device has finished its kernel
  const auto context = cuda::Context::of(config_.place.device);
  const cuda::Current current(*context);
  cuda::check(
      cuda::driver().stream_synchronize(static_cast<cuda::StreamHandle>(config_.place.stream)),
      base::cat("waiting for the kernels of rank ", rank(), " on GPU ", config_.place.device),
      "a kernel failed; run it under compute-sanitizer");
}

void CommunicatorState::close() {
  if (closed_ || !bootstrap_) return;
  closed_ = true;
  std::exception_ptr failure;
  // A replacement that is not complete has nobody to meet; the survivors' admit() fails at once.
  if (to_make_ > 0) {
    bootstrap_->abandon("left before its admission was complete");
    failure = std::make_exception_ptr(Error(Code::aborted, "not admitted"));
  }
  // The survivors' barrier: a dead peer cannot come, and is no reason to keep resources.
  const auto meet = [&] {
    try {
      if (!failure && !bootstrap_->revoked()) bootstrap_->barrier();
    } catch (...) {
      failure = std::current_exception();
    }
  };
  std::vector<std::shared_ptr<DeviceState>> devices;
  std::vector<std::shared_ptr<WindowState>> windows;
  std::exception_ptr crash;
  try {
    synchronize();  // our kernels; each of their waits has a deadline
  } catch (...) {
    crash = std::current_exception();  // the others' barrier needs us all the same
  }
  faults_->tell_unread_reports();
  meet();  // every rank's kernels are done with everybody's memory
  {
    std::lock_guard lock(mutex_);
    devices.swap(devices_);
    windows.swap(windows_);
  }
  for (const auto& device : devices) device->stop();
  meet();  // no proxy thread of any rank touches anything any more
  unwatch();
  const auto leave = [&] {
    try {
      if (to_make_ == 0) bootstrap_->close();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  // Once revoked, the last collective is the only one left to meet in: the others' kernels may still
  // store into our memory (thread ranks use the same mapping).
  const bool revoked = bootstrap_->revoked().has_value();
  if (revoked) leave();
  for (const auto& device : devices) device->release();
  for (const auto& window : windows) window->release();
  proxy_.reset();
  nic_.reset();
  if (!revoked) leave();
  if (!failure) failure = crash;
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      // Peers that died were reported by check() and waits; closing after them is the normal end.
      if (error.code() != Code::peer_failed && error.code() != Code::aborted) throw;
    }
  }
}

}  // namespace marrow::core
