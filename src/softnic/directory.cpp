// SPDX-License-Identifier: Apache-2.0
#include "softnic/directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

#include "base/deadline.hpp"
#include "base/log.hpp"
#include "base/read_file.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::softnic {
namespace {

constexpr const char* kShmFolder = "/dev/shm";

std::string file_prefix() { return base::cat("marrow-softnic-", ::geteuid(), "-"); }

/// Names this process's PID namespace. Containers may share /dev/shm but not PIDs, and a member that
/// cannot see the others' processes would take them for dead: each namespace has directories of its own.
std::uint64_t pid_namespace() {
  struct stat status {};
  if (::stat("/proc/self/ns/pid", &status) != 0) {
    throw base::system_error(errno, "reading /proc/self/ns/pid",
                             "softnic needs /proc; mount it or use another path than gda");
  }
  return status.st_ino;
}

/// Start time of a process in clock ticks since boot; 0 if there is none, or only its corpse.
std::uint64_t process_start_time(std::int32_t pid) {
  const std::string text = base::read_file(base::cat("/proc/", pid, "/stat"));
  // The second field is the command in parentheses and may hold anything: start behind its end.
  const auto end = text.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(text.substr(end + 1));
  std::string state;
  fields >> state;
  if (state == "Z" || state == "X") return 0;
  std::string field;
  for (int i = 4; i <= 21; ++i) fields >> field;
  std::uint64_t start = 0;
  fields >> start;
  return start;
}

/// True if `file` is still the one that `name` leads to.
bool is_linked(int file, const std::string& name) {
  struct stat mine {};
  struct stat current {};
  if (::fstat(file, &mine) != 0 || mine.st_nlink == 0) return false;
  return ::stat(base::cat(kShmFolder, "/", name).c_str(), &current) == 0 &&
         current.st_ino == mine.st_ino && current.st_dev == mine.st_dev;
}

void make_robust(pthread_mutex_t& mutex) {
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(&mutex, &attributes);
  ::pthread_mutexattr_destroy(&attributes);
}

/// Removes directories of this user that no living process holds.
void remove_left_over_files(const std::string& except) {
  DIR* folder = ::opendir(kShmFolder);
  if (folder == nullptr) return;
  const std::string prefix = file_prefix();
  while (const dirent* entry = ::readdir(folder)) {
    const std::string name = entry->d_name;
    if (!name.starts_with(prefix) || name == except) continue;
    base::Fd file(::shm_open(base::cat("/", name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
    if (!file || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    if (is_linked(file.get(), name)) {
      MARROW_INFO(softnic, "removing the directory of an ended job, ", name);
      ::shm_unlink(base::cat("/", name).c_str());
    }
  }
  ::closedir(folder);
}

}  // namespace

SharedLock::SharedLock(pthread_mutex_t& mutex) : mutex_(mutex) {
  // The tables need no repair after a death inside: every slot is claimed and freed by one store.
  if (::pthread_mutex_lock(&mutex_) == EOWNERDEAD) ::pthread_mutex_consistent(&mutex_);
}

Directory::Directory(const std::string& job) : liveness_(kMaxProcesses) {
  const bool good =
      !job.empty() && job.size() <= 64 && std::all_of(job.begin(), job.end(), [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-';
      });
  if (!good) {
    throw Error(Code::invalid_argument, base::cat("softnic job name '", job, "' is not usable."),
                "use 1 to 64 letters, digits, - or _");
  }
  name_ = base::cat(file_prefix(), pid_namespace(), "-", job);
  remove_left_over_files(name_);
  // Lost races (file removed under us, creator not done) are tried again.
  const auto deadline = base::Deadline::after(std::chrono::seconds(10));
  while (!try_join(name_, deadline.expired()))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  take_process_slot();
}

bool Directory::try_join(const std::string& name, bool last_try) {
  const std::string path = "/" + name;
  if (last_try) {
    throw Error(
        Code::timeout,
        base::cat("softnic directory ", kShmFolder, path, " is held half made by another process."),
        "stop that process or remove the file");
  }
  bool created = true;
  file_.reset(::shm_open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file_ && errno == EEXIST) {
    created = false;
    file_.reset(::shm_open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
    if (!file_ && errno == ENOENT) return false;
  }
  if (!file_) base::throw_errno(base::cat("opening softnic directory ", kShmFolder, path));
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) base::throw_errno("fstat of the softnic directory");
  if (status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    throw Error(
        Code::authentication,
        base::cat("softnic directory ", kShmFolder, path, " belongs to user ", status.st_uid,
                  " with mode ", status.st_mode & 0777, ", not to this user alone."),
        "remove it or choose another job name");
  }
  if (created) {
    if (::flock(file_.get(), LOCK_EX) != 0) base::throw_errno("flock of the softnic directory");
    if (!is_linked(file_.get(), name)) return false;  // swept before it was locked
    if (::ftruncate(file_.get(), sizeof(SharedDirectory)) != 0) {
      base::throw_errno("sizing the softnic directory");
    }
  } else {
    if (::flock(file_.get(), LOCK_SH | LOCK_NB) != 0) return false;  // being made or removed
    if (!is_linked(file_.get(), name)) return false;
    if (status.st_size != static_cast<off_t>(sizeof(SharedDirectory)) &&
        ::fstat(file_.get(), &status) == 0 && status.st_size != 0 &&
        status.st_size != static_cast<off_t>(sizeof(SharedDirectory))) {
      throw Error(Code::version,
                  base::cat("softnic directory ", kShmFolder, path, " has ", status.st_size,
                            " bytes, this build makes ", sizeof(SharedDirectory), "."),
                  "use one Marrow build for all ranks");
    }
    if (status.st_size == 0) {
      // Its maker has not locked it yet, or died before it could. In either case it may go.
      if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 && is_linked(file_.get(), name)) {
        ::shm_unlink(path.c_str());
      }
      return false;
    }
  }
  mapping_ = base::Mapping::of_fd(file_.get(), sizeof(SharedDirectory));
  shared_ = mapping_.as<SharedDirectory>();
  if (created) {
    make_robust(shared_->membership);
    make_robust(shared_->atomics);
    shared_->version.store(kDirectoryVersion, std::memory_order_relaxed);
    shared_->next_pd.store(1, std::memory_order_relaxed);
    shared_->magic.store(kDirectoryMagic, std::memory_order_release);
    // Trading the lock down may leave a gap in which a sweeper removes the file.
    if (::flock(file_.get(), LOCK_SH) != 0) base::throw_errno("flock of the softnic directory");
    return is_linked(file_.get(), name);
  }
  if (shared_->magic.load(std::memory_order_acquire) != kDirectoryMagic) {
    if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 && is_linked(file_.get(), name)) {
      ::shm_unlink(path.c_str());  // its maker died in the middle
    }
    return false;
  }
  const std::uint32_t version = shared_->version.load(std::memory_order_relaxed);
  if (version != kDirectoryVersion) {
    throw Error(Code::version,
                base::cat("softnic directory version ", version, ", this build has ",
                          kDirectoryVersion, "."),
                "use one Marrow build for all ranks");
  }
  return true;
}

void Directory::take_process_slot() {
  SharedLock lock(shared_->membership);
  const auto pid = static_cast<std::int32_t>(::getpid());
  std::uint32_t free_slot = kMaxProcesses;
  for (std::uint32_t i = 0; i < kMaxProcesses; ++i) {
    ProcessSlot& slot = shared_->processes[i];
    if (slot.state.load(std::memory_order_acquire) == ProcessSlot::kLive) {
      const auto its_start = process_start_time(slot.pid.load(std::memory_order_relaxed));
      if (its_start != 0 && its_start == slot.start_time.load(std::memory_order_relaxed)) continue;
      clear_after(i);
    }
    if (free_slot == kMaxProcesses) free_slot = i;
  }
  if (free_slot == kMaxProcesses) {
    throw Error(Code::out_of_memory,
                base::cat("the softnic job already has ", kMaxProcesses, " processes."),
                "use another job name");
  }
  self_ = free_slot;
  ProcessSlot& slot = shared_->processes[self_];
  slot.pid.store(pid, std::memory_order_relaxed);
  slot.start_time.store(process_start_time(pid), std::memory_order_relaxed);
  slot.state.store(ProcessSlot::kLive, std::memory_order_release);
}

// Called with the membership lock, or by the owner itself when it leaves.
void Directory::clear_after(std::uint32_t process) {
  // Slots are handed out in turn, so none past the counters was ever used: keeps the file sparse.
  const std::uint32_t regions =
      std::min(kMaxRegions, kFirstRegion + shared_->next_region.load(std::memory_order_relaxed));
  for (std::uint32_t i = kFirstRegion; i < regions; ++i) {
    RegionSlot& region = shared_->regions[i];
    if (region.key.load(std::memory_order_acquire) != 0 &&
        region.process.load(std::memory_order_relaxed) == process) {
      region.key.store(0, std::memory_order_release);
    }
  }
  const std::uint32_t queue_pairs =
      std::min(kMaxQueuePairs, shared_->next_qp.load(std::memory_order_relaxed));
  for (std::uint32_t i = 0; i < queue_pairs; ++i) {
    QpSlot& qp = shared_->queue_pairs[i];
    if (qp.qpn.load(std::memory_order_acquire) != 0 &&
        qp.process.load(std::memory_order_relaxed) == process) {
      qp.qpn.store(0, std::memory_order_release);
    }
  }
  shared_->processes[process].state.store(ProcessSlot::kFree, std::memory_order_release);
}

Directory::~Directory() {
  {
    SharedLock lock(shared_->membership);
    clear_after(self_);
  }
  mapping_.reset();
  // Only the last member can turn its lock into an exclusive one.
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 && is_linked(file_.get(), name_)) {
    ::shm_unlink(("/" + name_).c_str());
  }
}

QpSlot* Directory::claim_qp(std::uint32_t& qpn) {
  const std::uint32_t first = shared_->next_qp.fetch_add(1, std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < kMaxQueuePairs; ++i) {
    const std::uint32_t index = (first + i) % kMaxQueuePairs;
    QpSlot& slot = shared_->queue_pairs[index];
    std::uint32_t expected = 0;
    if (!slot.qpn.compare_exchange_strong(expected, kClaimed, std::memory_order_acq_rel)) continue;
    slot.process.store(self_, std::memory_order_relaxed);
    const std::uint32_t generation =
        slot.generation.load(std::memory_order_relaxed) % 1023 + 1;  // 1..1023
    slot.generation.store(generation, std::memory_order_relaxed);
    qpn = generation << kQpSlotBits | index;
    return &slot;
  }
  return nullptr;
}

RegionSlot* Directory::claim_region(std::uint32_t& key) {
  constexpr std::uint32_t usable = kMaxRegions - kFirstRegion;
  const std::uint32_t first = shared_->next_region.fetch_add(1, std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < usable; ++i) {
    const std::uint32_t index = kFirstRegion + (first + i) % usable;
    RegionSlot& slot = shared_->regions[index];
    std::uint32_t expected = 0;
    if (!slot.key.compare_exchange_strong(expected, kClaimed, std::memory_order_acq_rel)) continue;
    slot.process.store(self_, std::memory_order_relaxed);
    const std::uint32_t generation = (slot.generation.load(std::memory_order_relaxed) + 1) & 0xff;
    slot.generation.store(generation, std::memory_order_relaxed);
    key = index << 8 | generation;
    return &slot;
  }
  return nullptr;
}

bool Directory::alive(std::uint32_t index) {
  if (index == self_) return true;
  if (index >= kMaxProcesses) return false;
  ProcessSlot& slot = shared_->processes[index];
  if (slot.state.load(std::memory_order_acquire) != ProcessSlot::kLive) return false;
  Liveness& known = liveness_[index];
  const auto now = std::chrono::steady_clock::now();
  const std::uint64_t start = slot.start_time.load(std::memory_order_relaxed);
  if (known.start_time != start || now - known.asked > std::chrono::milliseconds(10)) {
    known.start_time = start;
    known.asked = now;
    known.alive =
        start != 0 && process_start_time(slot.pid.load(std::memory_order_relaxed)) == start;
  }
  return known.alive;
}

base::Fd Directory::open_descriptor_of(std::uint32_t index, int fd) const {
  // The kernel allows this to the same user only. The caller checks that it got the file it wants.
  const std::int32_t pid = shared_->processes[index].pid.load(std::memory_order_relaxed);
  const std::string path = base::cat("/proc/", pid, "/fd/", fd);
  return base::Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
}

PeerFacts peer_facts(Directory& directory, const QueuePair& qp) {
  PeerFacts facts;
  QpSlot& slot = directory.qp_slot(qp.remote_qpn);
  if (slot.qpn.load(std::memory_order_acquire) != qp.remote_qpn) return facts;
  facts.process = slot.process.load(std::memory_order_relaxed);
  if (!directory.alive(facts.process)) {
    facts.answer = PeerFacts::gone;
    return facts;
  }
  facts.pd = slot.pd.load(std::memory_order_relaxed);
  facts.access = slot.access.load(std::memory_order_relaxed);
  const std::uint32_t state = slot.state.load(std::memory_order_acquire);
  const bool connected = (state == mlx5::kReadyToReceive || state == mlx5::kReadyToSend) &&
                         slot.remote_qpn.load(std::memory_order_relaxed) == qp.qpn &&
                         qp.remote_lid == facts.process + 1;
  facts.answer = connected ? PeerFacts::connected : PeerFacts::not_connected;
  return facts;
}

}  // namespace marrow::softnic
