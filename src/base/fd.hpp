// SPDX-License-Identifier: Apache-2.0
// A file descriptor with one owner.
#pragma once

#include <utility>

namespace marrow::base {

/// Owns one file descriptor; closes it at the end of its life. Movable, not copyable.
class Fd {
 public:
  Fd() = default;
  /// Takes ownership of `fd`; -1 means none.
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const noexcept { return fd_; }
  bool valid() const noexcept { return fd_ >= 0; }
  explicit operator bool() const noexcept { return valid(); }

  /// Gives the descriptor to the caller, who closes it.
  int release() noexcept { return std::exchange(fd_, -1); }

  /// Closes what is held and takes `fd`. errno is kept, so it may run on error paths.
  void reset(int fd = -1) noexcept;
  void close() noexcept { reset(); }

  /// A second descriptor of the same open file, close-on-exec. Throws Error(system or
  /// out_of_memory).
  Fd dup() const { return dup_of(fd_); }
  static Fd dup_of(int fd);

 private:
  int fd_ = -1;
};

}  // namespace marrow::base
