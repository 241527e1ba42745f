// SPDX-License-Identifier: Apache-2.0
// What went wrong asynchronously, on both sides: the control words that waiting kernels look at, and
// the sentences that Communicator::check() throws.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "marrow/abi/device_communicator.h"
#include "marrow/device/status.cuh"
#include "marrow/error.hpp"

namespace marrow::core {

class FaultBoard {
 public:
  /// @param control      zeroed words in memory that host and executor share; outlives the board
  /// @param report_file  MARROW_CHECKED_REPORT
  FaultBoard(ControlBlock* control, int rank, int nranks, std::string report_file = {});

  /// A peer's process or connection ended: every device wait returns peer_failed until agreed().
  void peer_failed(int peer, const std::string& sentence);
  /// The communicator was revoked: every device wait returns aborted.
  void aborted(const std::string& sentence);
  /// A queue or a network reported an error; kept for check(), first one first.
  void network_error(const Error& error);
  /// The survivors agreed on who failed: waits work again, except those that name a failed rank.
  void agreed(const std::vector<bool>& failed);
  /// A new process takes the rank's place; what the old one's end had caused is forgotten.
  void admitted(int rank);

  /// Throws the first thing that went wrong and has not been handled; reports of MARROW_CHECKED
  /// kernels one a call, each once.
  void throw_if_any();
  /// At the end, for programs that never asked: to the report file, or the log as WARN.
  void tell_unread_reports();

 private:
  void set_bits(std::uint64_t bits);
  void write_report(const Error& report);
  /// The next report of a MARROW_CHECKED kernel that nobody has read; also written to the report file.
  std::optional<Error> next_report();
  void throw_stream_failure(Status status) const;

  ControlBlock* control_;
  int rank_;
  std::string report_file_;
  mutable std::mutex mutex_;
  std::vector<bool> failed_;        ///< seen, not yet agreed
  std::vector<bool> masked_;        ///< agreed
  std::uint64_t reports_read_ = 0;  ///< of control_->report, since they were last cleared
  std::optional<Error> failure_;
  std::optional<Error> abort_;
  std::optional<Error> network_;
};

}  // namespace marrow::core
