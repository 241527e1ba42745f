// SPDX-License-Identifier: Apache-2.0
// Logging as NCCL users know it. MARROW_DEBUG=NONE|VERSION|WARN|INFO|TRACE (default WARN),
// MARROW_DEBUG_SUBSYS=INIT,NET,... (a leading ^ inverts), MARROW_DEBUG_FILE=path with %h (host) and
// %p (pid). Lines read
//     host:pid:tid [rank] MARROW INFO text
// and leave in one write each, so ranks do not interleave. A line that cannot be written (full
// disk, closed pipe, reader that stopped) is dropped and counted: logging never fails a job.
//
// A library must not own the process's sinks: a callback, if set, gets every line instead.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/text.hpp"

namespace marrow::base::log {

enum class Level : std::uint8_t { none = 0, version = 1, warn = 2, info = 3, trace = 4 };

/// Who speaks. MARROW_DEBUG_SUBSYS uses the names in upper case.
enum class Subsystem : std::uint8_t {
  init,
  env,
  bootstrap,
  net,
  memory,
  topology,
  core,
  proxy,
  gda,
  softnic,
  verbs,
  cuda,
  ep,
  cli,
  count_
};

const char* name(Level level) noexcept;
const char* name(Subsystem subsystem) noexcept;

/// Gets each finished line (without newline) instead of the file or stderr. Called by any thread,
/// one at a time; must not log itself. What it throws is swallowed and the line counts as dropped.
using Callback = std::function<void(Level, Subsystem, std::string_view line)>;
void set_callback(Callback callback);  // empty: back to file or stderr

/// Reads MARROW_DEBUG, _SUBSYS and _FILE again. They are read once, at the first line otherwise.
void reload();

/// Lines lost so far in this process.
std::uint64_t dropped() noexcept;

/// The rank shown in this thread's lines; -1 shows none. Each thread that works for a communicator
/// sets it, ranks may be threads.
void set_thread_rank(int rank) noexcept;
int thread_rank() noexcept;

/// Sets the rank for a scope.
class ThreadRank {
 public:
  explicit ThreadRank(int rank) noexcept : before_(thread_rank()) { set_thread_rank(rank); }
  ~ThreadRank() { set_thread_rank(before_); }
  ThreadRank(const ThreadRank&) = delete;
  ThreadRank& operator=(const ThreadRank&) = delete;

 private:
  int before_;
};

namespace detail {
/// One bit a subsystem, per level. All ones until the environment was read: the first line of any
/// kind then takes the slow path, which reads it. Relaxed: no data is published through it.
extern std::atomic<std::uint32_t> enabled_mask[5];
void write(Level level, Subsystem subsystem, const char* file, int line, const std::string& text);
}  // namespace detail

/// One load and one branch.
inline bool enabled(Level level, Subsystem subsystem) noexcept {
  return (detail::enabled_mask[static_cast<unsigned>(level)].load(std::memory_order_relaxed) >>
              static_cast<unsigned>(subsystem) &
          1u) != 0;
}

}  // namespace marrow::base::log

/// MARROW_WARN(net, "peer ", rank, " is slow"): parts are evaluated only when the line is wanted.
#define MARROW_LOG_AT_(level, subsystem, ...)                                                 \
  do {                                                                                        \
    if (::marrow::base::log::enabled(::marrow::base::log::Level::level,                       \
                                     ::marrow::base::log::Subsystem::subsystem)) {            \
      ::marrow::base::log::detail::write(::marrow::base::log::Level::level,                   \
                                         ::marrow::base::log::Subsystem::subsystem, __FILE__, \
                                         __LINE__, ::marrow::base::cat(__VA_ARGS__));         \
    }                                                                                         \
  } while (0)
#define MARROW_VERSION_LINE(subsystem, ...) MARROW_LOG_AT_(version, subsystem, __VA_ARGS__)
#define MARROW_WARN(subsystem, ...) MARROW_LOG_AT_(warn, subsystem, __VA_ARGS__)
#define MARROW_INFO(subsystem, ...) MARROW_LOG_AT_(info, subsystem, __VA_ARGS__)
#define MARROW_TRACE(subsystem, ...) MARROW_LOG_AT_(trace, subsystem, __VA_ARGS__)
