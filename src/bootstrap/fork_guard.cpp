// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/fork_guard.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <utility>

namespace marrow::bootstrap {
namespace {

// Plain globals, never destroyed (a fork may come at any time) and set up under the lock: a function's
// static would be guarded by code that ThreadSanitizer does not see when only the user's program is
// instrumented.
constinit std::mutex guard_mutex;
std::set<int>* guarded_fds = nullptr;

/// Called with guard_mutex held.
std::set<int>& guarded() {
  if (guarded_fds == nullptr) {
    guarded_fds = new std::set<int>;
    // The lock is held across the fork, so the child finds the set whole. Only the forking thread
    // exists there: it may unlock.
    ::pthread_atfork([] { guard_mutex.lock(); }, [] { guard_mutex.unlock(); },
                     [] {
                       int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
                       for (int fd : *guarded_fds) {
                         if (null >= 0) ::dup3(null, fd, O_CLOEXEC);
                       }
                       if (null >= 0) ::close(null);
                       guard_mutex.unlock();
                     });
  }
  return *guarded_fds;
}

}  // namespace

ForkGuard::ForkGuard(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  std::lock_guard lock(guard_mutex);
  guarded().insert(fd_);
}

ForkGuard::ForkGuard(ForkGuard&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

ForkGuard& ForkGuard::operator=(ForkGuard&& other) noexcept {
  if (this != &other) {
    release();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void ForkGuard::release() noexcept {
  if (fd_ < 0) return;
  std::lock_guard lock(guard_mutex);
  guarded().erase(std::exchange(fd_, -1));
}

}  // namespace marrow::bootstrap
