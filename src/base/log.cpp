// SPDX-License-Identifier: Apache-2.0
// The sink. Two things can hurt a job here: SIGPIPE (a closed reader would kill the process) and a
// reader that stopped (a full pipe would stop the process). The first is blocked and swallowed for
// the duration of the write, the second is given one second.
#include "base/log.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <mutex>

#include "base/fd.hpp"

namespace marrow::base::log {

namespace detail {
constinit std::atomic<std::uint32_t> enabled_mask[5] = {0xffffffffu, 0xffffffffu, 0xffffffffu,
                                                        0xffffffffu, 0xffffffffu};
}  // namespace detail

namespace {

constexpr std::array kLevelNames = {"NONE", "VERSION", "WARN", "INFO", "TRACE"};
constexpr std::array kSubsystemNames = {"INIT",     "ENV",  "BOOTSTRAP", "NET", "MEMORY",
                                        "TOPOLOGY", "CORE", "PROXY",     "GDA", "SOFTNIC",
                                        "VERBS",    "CUDA", "EP",        "CLI"};
static_assert(kSubsystemNames.size() == static_cast<std::size_t>(Subsystem::count_));

constexpr int kStuckReaderMilliseconds = 1000;

struct Sink {
  std::mutex mutex;
  Callback callback;
  Fd file;  // none: stderr
  bool configured = false;
  std::string host;
  std::uint64_t reported_drops = 0;
};

// Never destroyed: threads may log while the process exits.
Sink& sink() {
  static Sink* instance = new Sink;
  return *instance;
}

std::atomic<std::uint64_t> dropped_lines{0};
thread_local int this_thread_rank = -1;

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? std::string() : std::string(value);
}

std::string host_name() {
  std::array<char, 256> buffer{};
  if (::gethostname(buffer.data(), buffer.size() - 1) != 0) return "unknown-host";
  return buffer.data();
}

std::string expand(const std::string& pattern, const std::string& host) {
  std::string out;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '%' && i + 1 < pattern.size()) {
      char kind = pattern[++i];
      if (kind == 'h') {
        out += host;
      } else if (kind == 'p') {
        out += std::to_string(::getpid());
      } else {
        out += kind;
      }
    } else {
      out += pattern[i];
    }
  }
  return out;
}

/// Bits of the subsystems that MARROW_DEBUG_SUBSYS names; unknown names go to `unknown`.
std::uint32_t parse_subsystems(const std::string& value, std::string& unknown) {
  constexpr std::uint32_t all = (1u << static_cast<unsigned>(Subsystem::count_)) - 1;
  if (value.empty()) return all;
  bool invert = value[0] == '^';
  std::uint32_t mask = 0;
  std::size_t begin = invert ? 1 : 0;
  while (begin <= value.size()) {
    std::size_t end = std::min(value.find(',', begin), value.size());
    std::string item = upper(value.substr(begin, end - begin));
    begin = end + 1;
    if (item.empty()) continue;
    if (item == "ALL") {
      mask = all;
      continue;
    }
    auto found = std::find(kSubsystemNames.begin(), kSubsystemNames.end(), item);
    if (found == kSubsystemNames.end()) {
      unknown = item;
    } else {
      mask |= 1u << (found - kSubsystemNames.begin());
    }
  }
  return invert ? all & ~mask : mask;
}

/// Writes all of `line` to `fd`; false if it was lost. SIGPIPE stays inside.
bool write_line(int fd, std::string_view line) {
  sigset_t pipe_only;
  sigset_t before;
  sigset_t pending;
  ::sigemptyset(&pipe_only);
  ::sigaddset(&pipe_only, SIGPIPE);
  ::sigpending(&pending);
  bool was_pending = ::sigismember(&pending, SIGPIPE) == 1;
  ::pthread_sigmask(SIG_BLOCK, &pipe_only, &before);
  bool ok = true;
  while (!line.empty()) {
    pollfd entry = {fd, POLLOUT, 0};
    if (::poll(&entry, 1, kStuckReaderMilliseconds) == 0) {
      ok = false;
      break;
    }
    ssize_t wrote = ::write(fd, line.data(), line.size());
    if (wrote < 0) {
      if (errno == EINTR) continue;
      ok = false;
      if (errno == EPIPE && !was_pending) {
        timespec none = {0, 0};
        while (::sigtimedwait(&pipe_only, nullptr, &none) < 0 && errno == EINTR) {
        }
      }
      break;
    }
    line.remove_prefix(static_cast<std::size_t>(wrote));
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return ok;
}

std::string prefix(const Sink& to, Level level) {
  std::string out = cat(to.host, ":", ::getpid(), ":", ::syscall(SYS_gettid), " ");
  if (this_thread_rank >= 0) out += cat("[", this_thread_rank, "] ");
  return out + "MARROW " + name(level) + " ";
}

/// Hands one line to the callback or the file. Caller holds the mutex.
void emit(Sink& to, Level level, Subsystem subsystem, const std::string& line) {
  bool ok = true;
  if (to.callback) {
    try {
      to.callback(level, subsystem, line);
    } catch (...) {
      ok = false;
    }
  } else {
    int fd = to.file ? to.file.get() : STDERR_FILENO;
    std::uint64_t lost = dropped_lines.load(std::memory_order_relaxed);
    std::string text;
    if (lost != to.reported_drops) {
      text = cat(prefix(to, Level::warn), lost - to.reported_drops, " log lines were lost here\n");
    }
    text += line;
    text += '\n';
    ok = write_line(fd, text);
    if (ok) to.reported_drops = lost;
  }
  if (!ok) dropped_lines.fetch_add(1, std::memory_order_relaxed);
}

/// Reads the environment. Caller holds the mutex. A bad value must not throw: it warns.
void configure(Sink& to) {
  to.configured = true;
  to.host = host_name();
  std::string complaint;
  Level level = Level::warn;
  std::string wanted = upper(environment("MARROW_DEBUG"));
  if (!wanted.empty()) {
    auto found = std::find(kLevelNames.begin(), kLevelNames.end(), wanted);
    if (found != kLevelNames.end()) {
      level = static_cast<Level>(found - kLevelNames.begin());
    } else {
      complaint = cat("MARROW_DEBUG=", wanted,
                      " is none of NONE, VERSION, WARN, INFO, TRACE; "
                      "WARN is used.");
    }
  }
  std::string unknown;
  std::uint32_t subsystems = parse_subsystems(environment("MARROW_DEBUG_SUBSYS"), unknown);
  if (!unknown.empty()) {
    complaint = cat("MARROW_DEBUG_SUBSYS names \"", unknown, "\"; known are ALL");
    for (const char* known : kSubsystemNames) complaint += cat(", ", known);
    complaint += ".";
  }
  to.file.reset();
  std::string path = environment("MARROW_DEBUG_FILE");
  if (!path.empty()) {
    path = expand(path, to.host);
    to.file.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!to.file) {
      complaint =
          cat("MARROW_DEBUG_FILE=", path, " cannot be opened (errno ", errno, "); stderr is used.");
    }
  }
  for (unsigned i = 1; i < 5; ++i) {
    // Warnings ignore the subsystem filter: they are few, and about things that go wrong.
    std::uint32_t mask = i <= static_cast<unsigned>(Level::warn) ? 0xffffffffu : subsystems;
    if (i > static_cast<unsigned>(level)) mask = 0;
    detail::enabled_mask[i].store(mask, std::memory_order_relaxed);
  }
  detail::enabled_mask[0].store(0, std::memory_order_relaxed);
  if (!complaint.empty() && level >= Level::warn) {
    emit(to, Level::warn, Subsystem::env, prefix(to, Level::warn) + complaint);
  }
}

}  // namespace

const char* name(Level level) noexcept { return kLevelNames[static_cast<std::size_t>(level)]; }
const char* name(Subsystem subsystem) noexcept {
  return kSubsystemNames[static_cast<std::size_t>(subsystem)];
}

void set_callback(Callback callback) {
  Sink& to = sink();
  std::lock_guard lock(to.mutex);
  to.callback = std::move(callback);
}

void reload() {
  Sink& to = sink();
  std::lock_guard lock(to.mutex);
  configure(to);
}

std::uint64_t dropped() noexcept { return dropped_lines.load(std::memory_order_relaxed); }
void set_thread_rank(int rank) noexcept { this_thread_rank = rank; }
int thread_rank() noexcept { return this_thread_rank; }

namespace detail {

void write(Level level, Subsystem subsystem, const char* file, int line, const std::string& text) {
  try {
    Sink& to = sink();
    std::lock_guard lock(to.mutex);
    if (!to.configured) configure(to);
    if (!enabled(level, subsystem)) return;
    std::string out = prefix(to, level);
    if (level == Level::warn) {
      std::string_view path = file;
      std::size_t slash = path.find_last_of('/');
      out += cat(path.substr(slash == std::string_view::npos ? 0 : slash + 1), ":", line, " ");
    }
    out += text;
    emit(to, level, subsystem, out);
  } catch (...) {
    dropped_lines.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace detail

}  // namespace marrow::base::log
