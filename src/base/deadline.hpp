// SPDX-License-Identifier: Apache-2.0
// Every wait in Marrow is bounded, so waits take a point in time, not a duration: a loop of polls
// then cannot restart its own clock. There is no "never" on purpose.
#pragma once

#include <algorithm>
#include <chrono>

namespace marrow::base {

/// A point on the steady clock after which a wait gives up.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Already expired: "look once, do not wait".
  Deadline() : at_(Clock::now()) {}

  /// The point `duration` from now.
  static Deadline after(std::chrono::milliseconds duration) {
    return Deadline(Clock::now() + duration);
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }

  bool expired() const { return Clock::now() >= at_; }

  /// Time left, never negative; rounded up so that a poll of it does not spin at the end.
  std::chrono::milliseconds remaining() const {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }

  /// remaining() as poll(2)'s timeout, at most `at_most`.
  int poll_timeout(std::chrono::milliseconds at_most = std::chrono::hours(1)) const {
    return static_cast<int>(std::min(remaining(), at_most).count());
  }

  Clock::time_point time_point() const { return at_; }

  /// The earlier of two.
  static Deadline earliest(Deadline a, Deadline b) { return a.at_ < b.at_ ? a : b; }

 private:
  explicit Deadline(Clock::time_point when) : at_(when) {}
  Clock::time_point at_;
};

}  // namespace marrow::base
