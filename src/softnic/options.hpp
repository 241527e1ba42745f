// SPDX-License-Identifier: Apache-2.0
// What softnic does wrong on purpose, and the few choices a real NIC makes in hardware. Read once a
// job and process, from the option string of MARROW_SOFTNIC. All counts are per process and job, so a
// run with one seed repeats.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace marrow::softnic {

/// Who executes the queues. Automatic: a block on the rank's GPU where windows lie in GPU memory, else a CPU
/// thread.
/// Copy: a CPU thread that reaches GPU memory through the copy engine; slow, for judging fidelity.
enum class EngineChoice : std::uint8_t { automatic, cpu, gpu, copy };

struct Options {
  EngineChoice engine = EngineChoice::automatic;  ///< engine=auto|cpu|gpu|copy
  std::uint64_t seed = 1;
  std::string job;                ///< job=NAME: directory used by a plain open_device
  std::uint16_t start_index = 0;  ///< start_index=N: first index of new queues, for wrap tests
  bool roce = false;              ///< port=roce: an Ethernet port with GIDs and MACs, no LID
  bool hca_atomics = false;       ///< atomics=hca: atomic among QPs only, not against CPU or GPU
  std::chrono::microseconds delay{0};  ///< delay=US: each WQE waits a random 0..US before it runs
  bool reorder = false;        ///< reorder=1: queues are served in random order, with pauses
  std::uint64_t drop = 0;      ///< drop=N: WQE number N never arrives: retry exceeded
  std::uint64_t corrupt = 0;   ///< corrupt=N: one bit of the N-th WRITE's payload is flipped
  std::uint64_t error_at = 0;  ///< error_at=N: WQE number N fails with remote operation error
  std::uint64_t stall = 0;     ///< stall=N[:MS]: the engine stops before WQE number N
  std::chrono::milliseconds stall_time{0};  ///< 0 = until the device is closed
  std::chrono::milliseconds retry{2000};    ///< retry=MS: upper bound on transport retries
};

/// Parses "key=value,...". Counts start at 1; 0 or absent = off.
/// @throws Error(invalid_argument) naming the key, its value and what is possible
Options parse_options(std::string_view text);

/// Small seeded generator (splitmix64): reproducible, never for secrets.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// Uniform enough in [0, bound); bound > 0.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

}  // namespace marrow::softnic
