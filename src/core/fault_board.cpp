// SPDX-License-Identifier: Apache-2.0
#include "core/fault_board.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/log.hpp"
#include "base/text.hpp"

namespace marrow::core {
namespace {

std::atomic_ref<std::uint64_t> word(std::uint64_t& w) { return std::atomic_ref<std::uint64_t>(w); }

const char* meaning(std::uint32_t what) {
  switch (static_cast<CheckedWhat>(what)) {
    case CheckedWhat::peer: return "peer is out of range";
    case CheckedWhat::signal: return "signal number is out of range";
    case CheckedWhat::counter: return "counter number is out of range";
    case CheckedWhat::context: return "context number is out of range";
    case CheckedWhat::packet: return "packet slot is out of range";
    case CheckedWhat::barrier: return "barrier slot is out of range";
    case CheckedWhat::bounds_destination: return "range ends past the window";
    case CheckedWhat::bounds_source: return "range ends past the source or target region";
    case CheckedWhat::alignment: return "offset is not aligned";
    case CheckedWhat::size: return "size is out of range";
    case CheckedWhat::path: return "peer is on a path this Gin<...> has not compiled in";
    case CheckedWhat::abi: return "window or buffer has another ABI number";
    case CheckedWhat::window: return "window does not belong to this communicator";
    case CheckedWhat::held_queue:
      return "somebody else posted to the queue that an ExclusiveQueue holds (value and limit are "
             "its next entry)";
  }
  return "precondition violated";
}

}  // namespace

FaultBoard::FaultBoard(ControlBlock* control, int rank, int nranks, std::string report_file)
    : control_(control),
      rank_(rank),
      report_file_(std::move(report_file)),
      failed_(nranks),
      masked_(nranks) {}

void FaultBoard::set_bits(std::uint64_t bits) {
  // Release: publishes failed[] to the kernel that sees the bit; meets load_relaxed in
  // control_status, whose failed[] words are themselves atomic.
  word(control_->state).fetch_or(bits, std::memory_order_release);
}

void FaultBoard::peer_failed(int peer, const std::string& sentence) {
  std::lock_guard lock(mutex_);
  if (peer < 0 || peer >= static_cast<int>(failed_.size()) || failed_[peer] || masked_[peer])
    return;
  failed_[peer] = true;
  if (!failure_) {
    failure_.emplace(
        Code::peer_failed,
        base::cat("rank ", peer, " failed, seen by rank ", rank_, ": ", sentence),
        "call agree_failures() on every survivor to go on without it, or revoke() and end the job");
  }
  MARROW_WARN(core, "rank ", peer, " failed: ", sentence);
  set_bits(kControlPeerFailed);
}

void FaultBoard::aborted(const std::string& sentence) {
  std::lock_guard lock(mutex_);
  if (!abort_) {
    abort_.emplace(Code::aborted, base::cat("the communicator was revoked: ", sentence),
                   "close it and make a new one");
  }
  set_bits(kControlAborted);
}

void FaultBoard::network_error(const Error& error) {
  std::lock_guard lock(mutex_);
  if (network_) return;
  network_ = error;
  MARROW_WARN(core, error.what());
}

void FaultBoard::agreed(const std::vector<bool>& failed) {
  std::lock_guard lock(mutex_);
  bool open = false;
  for (std::size_t r = 0; r < failed.size(); ++r) {
    if (failed[r]) {
      masked_[r] = true;
      failed_[r] = false;
      word(control_->failed[r / 64])
          .fetch_or(std::uint64_t{1} << (r % 64), std::memory_order_relaxed);
    }
    open = open || failed_[r];
  }
  if (std::find(masked_.begin(), masked_.end(), true) != masked_.end()) set_bits(kControlMasked);
  if (!open) {
    failure_.reset();
    network_.reset();
    word(control_->state).fetch_and(~std::uint64_t{kControlPeerFailed}, std::memory_order_release);
  }
}

void FaultBoard::admitted(int rank) {
  std::lock_guard lock(mutex_);
  masked_[rank] = failed_[rank] = false;
  failure_.reset();
  network_.reset();
  word(control_->failed[rank / 64])
      .fetch_and(~(std::uint64_t{1} << (rank % 64)), std::memory_order_relaxed);
  if (std::find(masked_.begin(), masked_.end(), true) == masked_.end()) {
    // No kernel runs during an admission; the next sees this by its launch.
    word(control_->state).fetch_and(~std::uint64_t{kControlMasked}, std::memory_order_release);
  }
}

void FaultBoard::write_report(const Error& report) {
  if (report_file_.empty()) return;
  errno = 0;
  std::ofstream file(report_file_, std::ios::app);
  file << report.what() << "\n" << std::flush;
  if (file) return;
  MARROW_WARN(core, "MARROW_CHECKED_REPORT: ", report_file_, " cannot be written (",
              std::strerror(errno), "); reports that check() does not throw go to this log");
  report_file_.clear();
}

std::optional<Error> FaultBoard::next_report() {
  const auto reports = word(control_->reports);
  for (;;) {
    // Relaxed: what a report says is published by its own line.
    std::uint64_t count = reports.load(std::memory_order_relaxed);
    const std::uint64_t kept = std::min<std::uint64_t>(count, kCheckedReports);
    if (reports_read_ < kept) {
      CheckedReport& report = control_->report[reports_read_];
      // Meets the publish of `line` in detail::violation: the report's other words are whole.
      const auto line_word = std::atomic_ref<std::uint32_t>(report.line);
      const std::uint32_t line = line_word.load(std::memory_order_acquire);
      if (line == 0) return std::nullopt;  // a kernel is writing it
      std::optional<Error> error(
          std::in_place, Code::invalid_argument,
          base::cat(report.file, ":", line, ": ", report.operation, " on rank ", rank_, ": ",
                    meaning(report.what), ": value ", static_cast<std::int64_t>(report.value),
                    ", limit ", report.limit, " (block ", report.block, ", thread ", report.thread,
                    "; ", count, " violations since the last were read)"),
          "correct the call; the operation did nothing and returned Status::invalid");
      line_word.store(0, std::memory_order_relaxed);  // published by the release below
      ++reports_read_;
      write_report(*error);
      return error;
    }
    if (count == 0) return std::nullopt;
    // All that were kept are read: the slots are free again, unless another has come meanwhile.
    // Release: publishes the cleared lines to the kernel whose fetch_add takes a slot next.
    if (reports.compare_exchange_strong(count, 0, std::memory_order_release,
                                        std::memory_order_relaxed)) {
      reports_read_ = 0;
      return std::nullopt;
    }
  }
}

void FaultBoard::tell_unread_reports() {
  std::lock_guard lock(mutex_);
  while (const std::optional<Error> report = next_report()) {
    if (report_file_.empty()) MARROW_WARN(core, report->what());
  }
}

void FaultBoard::throw_stream_failure(Status status) const {
  const Code code = status == Status::timeout       ? Code::timeout
                    : status == Status::peer_failed ? Code::peer_failed
                    : status == Status::aborted     ? Code::aborted
                                                    : Code::invalid_argument;
  throw Error(
      code,
      base::cat("a put, signal or wait on the stream of rank ", rank_, " returned ", name(status)),
      status == Status::timeout
          ? "see whether the peer signals at all; MARROW_WAIT_TIMEOUT bounds the wait"
          : "check the peer, signal and window numbers of the call");
}

void FaultBoard::throw_if_any() {
  std::lock_guard lock(mutex_);
  if (const std::uint64_t seen = word(control_->foreign_abi).load(std::memory_order_relaxed)) {
    throw Error(Code::version,
                base::cat("a kernel of rank ", rank_, " was built against ABI ", seen,
                          ", this library has ABI ", kAbiVersion,
                          " (or the handle it was given was not made by this library)"),
                "rebuild the kernel with this library's headers");
  }
  if (const std::optional<Error> report = next_report()) throw Error(*report);
  const std::uint64_t stream = word(control_->stream_status).exchange(0, std::memory_order_relaxed);
  if (abort_) throw *abort_;
  if (failure_) throw *failure_;
  if (network_) throw *network_;
  if (stream != 0) throw_stream_failure(static_cast<Status>(stream));
}

}  // namespace marrow::core
