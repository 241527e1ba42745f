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

struct Guarded {
  std::mutex mutex;
  std::set<int> fds;
};

// Never destroyed: a fork may come at any time.
Guarded& guarded() {
  static Guarded* instance = [] {
    auto* fresh = new Guarded;
    // The lock is held across the fork, so the child finds the set whole. Only the forking thread
    // exists there: it may unlock.
    ::pthread_atfork([] { guarded().mutex.lock(); }, [] { guarded().mutex.unlock(); },
                     [] {
                       int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
                       for (int fd : guarded().fds) {
                         if (null >= 0) ::dup3(null, fd, O_CLOEXEC);
                       }
                       if (null >= 0) ::close(null);
                       guarded().mutex.unlock();
                     });
    return fresh;
  }();
  return *instance;
}

}  // namespace

ForkGuard::ForkGuard(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  std::lock_guard lock(guarded().mutex);
  guarded().fds.insert(fd_);
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
  std::lock_guard lock(guarded().mutex);
  guarded().fds.erase(std::exchange(fd_, -1));
}

}  // namespace marrow::bootstrap
