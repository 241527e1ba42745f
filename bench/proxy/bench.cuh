// SPDX-License-Identifier: Apache-2.0
// What the files of the proxy bench share: rows, the ring they are about, producers of the same shape.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../floor/harness.cuh"
#include "placement.hpp"

namespace proxy_bench {

using floors::must;
using floors::Summary;
using floors::summary;

/// Slots of each ring, ours and the bare one.
constexpr std::uint32_t kRing = 1u << 16;
constexpr int kMostRings = 8;

struct Row {
  std::string what, unit, note;
  int producers = 1, threads = 1;
  bool gpu = true;      ///< else host code alone
  std::string network;  ///< empty: none
  Summary summary;
  bool verified = false;
};
void add(Row row);

/// How many of each producer's descriptors: about `total` in all.
inline int each_of(int producers, std::uint64_t total) {
  const auto each = static_cast<int>(total / static_cast<std::uint64_t>(producers));
  return each < 8 ? 8 : each;
}
inline std::uint64_t total_of(int producers) {
  return producers == 1 ? 200'000 : producers <= 1024 ? 8'000'000 : 4'000'000;
}
inline int blocks_of(int producers) {
  return producers > 1024 ? producers / 128 : producers > 32 ? producers / 128 : 1;
}
inline int threads_of(int producers) { return producers / blocks_of(producers); }

/// Runs the launch between two events on the stream. @return its ns
double timed(cudaStream_t stream, const std::function<void()>& launch);

using placement::pin_self;
/// CPUs near the GPU, one of each core first: the first is for the thread that launches and waits, which spins, the
/// others drain rings; ours and the bare ones take the same.
const std::vector<int>& cpus();
inline int host_cpu() { return cpus().front(); }
inline int drain_cpu(int i) {
  const auto others = static_cast<int>(cpus().size()) - 1;
  return others < 1 ? host_cpu() : cpus()[1 + i % others];
}

/// Bare rings that take turns with ours: what a CPU does at one moment it need not do a second later (another
/// hyperthread of its core, another socket), so figures that are compared are taken side by side.
class BareRings {
 public:
  BareRings();
  ~BareRings();
  BareRings(const BareRings&) = delete;
  BareRings& operator=(const BareRings&) = delete;
  /// Fills `count` rings once, drained on drain_cpu(first) .. @return Mops/s
  double rate(int count, int producers, int first = 0);
  bool right() const { return right_; }

 private:
  struct Parts;
  Parts* parts_;
  bool right_ = true;
};

/// Whether a comma list of parts names that one; an empty list names all.
inline bool wanted(const std::string& only, const std::string& part) {
  const std::string list = ',' + only + ',';
  return only.empty() || list.find(',' + part + ',') != std::string::npos;
}

void bare_rows();
void marrow_rows(const std::string& only);
void bare_placement(const std::vector<int>& drain);
void marrow_placement();
void staging_rows();                 ///< of two GPUs where there are
double mscclpp_rate(int producers);  ///< Mops/s of one run, threads started for it
void mscclpp_rows();                 ///< peer: only when built with -DMARROW_MSCCLPP=path

}  // namespace proxy_bench
