// SPDX-License-Identifier: Apache-2.0
// The ranks a command works with: threads of this process, or this process as one rank of a job that
// mpirun, torchrun, srun or `--processes` started.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "cli/options.hpp"
#include "marrow/marrow.hpp"

namespace marrow::cli {

/// Whether a launcher's variables name this process a rank.
bool under_launcher();

/// `--processes`: starts `ranks` copies of this command line as ranks and waits for them. The first
/// exit code that is not 0 is ours; the others then have ten seconds.
int spawn_processes(int ranks, char** argv);

class RankTeam {
 public:
  /// @throws UsageError when --ranks contradicts the launcher; Error(unsupported) for GPUs that are not there
  RankTeam(const RankOptions& options, int default_ranks);

  int size() const { return size_; }
  /// This process prints: it has rank 0.
  bool speaks() const { return rank_ <= 0; }
  bool on_gpu() const { return gpu_; }
  bool threads() const { return rank_ < 0; }

  /// Every rank makes a communicator with these parameters and runs the body; returns when all of this
  /// process's ranks have. The first failure revokes the communicator and is thrown; each body must be
  /// collective in the same way.
  void run(const std::map<std::string, std::string>& parameters,
           const std::function<void(Communicator&)>& body);

 private:
  void run_rank(const UniqueId& id, int rank, const Place& place,
                const std::map<std::string, std::string>& parameters,
                const std::function<void(Communicator&)>& body) const;

  int size_ = 1;
  int rank_ = -1;  ///< -1: all ranks are threads of this process
  bool gpu_ = false;
  std::unique_ptr<Communicator>
      base_;  ///< under a launcher: carries the ids of the communicators made later
};

}  // namespace marrow::cli
