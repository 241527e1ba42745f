// SPDX-License-Identifier: Apache-2.0
// Keeps a rank's sockets out of the children it forks (data loader workers, say). A child that held
// them would keep the connections open after the rank was killed, and its death would go unnoticed
// until MARROW_PEER_TIMEOUT. close-on-exec does not help: such children never exec.
#pragma once

namespace marrow::bootstrap {

/// While it lives, a fork gives the child /dev/null in place of `fd`. The number stays taken in the
/// child, so that destructors which run there close nothing of anybody else.
class ForkGuard {
 public:
  ForkGuard() = default;
  explicit ForkGuard(int fd);
  ForkGuard(ForkGuard&& other) noexcept;
  ForkGuard& operator=(ForkGuard&& other) noexcept;
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  ~ForkGuard() { release(); }

  /// Ends the guard; call before the descriptor is closed.
  void release() noexcept;

 private:
  int fd_ = -1;
};

}  // namespace marrow::bootstrap
