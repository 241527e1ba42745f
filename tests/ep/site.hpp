// SPDX-License-Identifier: Apache-2.0
// Where the cases run: the CPU device (site_cpu.cpp) or GPUs (site_gpu.cpp). The cases themselves do not know.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/scenario.hpp"

namespace marrow::ep_test {

/// One rank's place, memory and stream; made by the rank's own thread.
class Site {
 public:
  virtual ~Site() = default;
  virtual Place place() = 0;
  virtual Memory& memory() = 0;
  void* stream() { return place().stream; }
  /// A second stream; nothing orders it with the first one but order().
  virtual void* other_stream() = 0;
  /// What `later` gets from now on runs after what `earlier` has got.
  virtual void order(void* earlier, void* later) = 0;
  /// In the stream's order: all bytes 0xff; a copy.
  virtual void scribble(void* stream, void* at, std::size_t bytes) = 0;
  virtual void copy(void* stream, void* to, const void* from, std::size_t bytes) = 0;
  /// Records what `body` enqueues; the result replays it and waits for its end. The CPU device runs `body` each time.
  virtual std::function<void()> graph(const std::function<void()>& body) = 0;
};
std::unique_ptr<Site> make_site(int rank);

/// Ranks that there can be. On GPUs MARROW_TEST_EP_RANKS a GPU, one by default.
int most_ranks();
/// ep::Config::max_sms of a rank: those of a GPU must fit on it together. 0: all.
int sms_of_a_rank();
bool on_gpus();
/// Why nothing can run in this process any more (a kernel crashed), or nothing.
std::string context_lost();
/// Paths that the cases run over by default.
std::vector<std::string> paths();

/// lsa, gda, proxy; mixed: all three between the ranks; teams: MARROW_LSA_SIZE=2; alone: MARROW_LSA_SIZE=1;
/// narrow_gda, narrow_proxy: the shortest queues, on a NIC or network that delays and reorders; unordered: a network that
/// delays, loses and repeats.
Config config_for(const std::string& path, int rank, int ranks);

/// Runs body(rank, communicator, site) on `ranks` threads, closes, and expects that each returned "".
using Body = std::function<std::string(Communicator&, Site&)>;
void run_ranks(const std::string& path, int ranks, const Body& body);

/// The same for a Checker's batches.
void run_scenario(const std::string& path, int ranks, const Scenario& scenario);

}  // namespace marrow::ep_test
