// SPDX-License-Identifier: Apache-2.0
// One row per launcher. torchrun comes first: it may itself run under mpirun or srun, and then its
// numbers are the ones that count.
#include "bootstrap/environment.hpp"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <optional>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::bootstrap {
namespace {

using base::cat;

using Names = std::initializer_list<const char*>;

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

std::optional<int> number(Names names, int minimum) {
  for (const char* name : names) {
    const char* value = variable(name);
    if (value == nullptr) continue;
    std::int64_t parsed = base::parse_int(value, cat("Variable ", name, "="));
    if (parsed < minimum || parsed > std::numeric_limits<int>::max()) {
      throw Error(Code::invalid_argument,
                  cat("Variable ", name, "=", value, " is not a number of at least ", minimum, "."),
                  "start the program with its launcher, or unset the launcher's variables.");
    }
    return static_cast<int>(parsed);
  }
  return std::nullopt;
}

std::string values(Names names) {
  std::string out;
  for (const char* name : names) {
    if (const char* value = variable(name)) out += cat(name, "=", value, ";");
  }
  return out;
}

struct Launcher {
  const char* source;
  Names rank;
  Names size;
  Names local_rank;
  Names local_size;
  Names job;    // values that tell jobs apart
  Names nodes;  // 1: all ranks are on this host
};

std::optional<LaunchInfo> from(const Launcher& launcher) {
  std::optional<int> rank = number(launcher.rank, 0);
  std::optional<int> size = number(launcher.size, 1);
  if (!rank || !size) return std::nullopt;
  if (*rank >= *size) {
    throw Error(Code::invalid_argument,
                cat(launcher.source, " says rank ", *rank, " of ", *size, " ranks (",
                    values(launcher.rank), values(launcher.size), ")."),
                "ranks are 0 to one less than their count; check the variables.");
  }
  LaunchInfo out;
  out.rank = *rank;
  out.nranks = *size;
  out.source = launcher.source;
  std::optional<int> local_size = number(launcher.local_size, 1);
  if (!local_size && number(launcher.nodes, 1) == 1) local_size = *size;
  out.local_size = local_size.value_or(0);
  out.local_rank = number(launcher.local_rank, 0).value_or(out.local_size == *size ? *rank : 0);
  std::string job = values(launcher.job);
  // Without a job's name: ranks of one job on one host have one parent, unless a wrapper forks.
  if (job.empty()) job = cat("parent=", ::getppid());
  out.job_key = cat(launcher.source, ";", job, "size=", *size);
  return out;
}

}  // namespace

LaunchInfo launch_info(const base::Parameters& parameters) {
  static const std::array launchers = {
      Launcher{"torchrun",
               {"RANK"},
               {"WORLD_SIZE"},
               {"LOCAL_RANK"},
               {"LOCAL_WORLD_SIZE"},
               {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
               {}},
      Launcher{"mpirun",
               {"OMPI_COMM_WORLD_RANK"},
               {"OMPI_COMM_WORLD_SIZE"},
               {"OMPI_COMM_WORLD_LOCAL_RANK"},
               {"OMPI_COMM_WORLD_LOCAL_SIZE"},
               {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
               {}},
      Launcher{"PMI",
               {"PMIX_RANK", "PMI_RANK"},
               {"PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
               {"MPI_LOCALRANKID", "SLURM_LOCALID"},
               {"MPI_LOCALNRANKS"},
               {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_PORT"},
               {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}},
      Launcher{"srun",
               {"SLURM_PROCID"},
               {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
               {"SLURM_LOCALID"},
               {},
               {"SLURM_JOB_ID", "SLURM_STEP_ID"},
               {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}}};
  for (const Launcher& launcher : launchers) {
    if (std::optional<LaunchInfo> found = from(launcher)) return *found;
  }
  std::string where = base::parameter_string("MARROW_RENDEZVOUS", parameters);
  if (!where.empty()) {
    throw Error(
        Code::invalid_argument,
        cat("MARROW_RENDEZVOUS=", where, " is set, but no variable says which rank this is."),
        "set RANK and WORLD_SIZE, or start with torchrun, mpirun or srun.");
  }
  LaunchInfo alone;
  alone.source = "none";
  return alone;
}

}  // namespace marrow::bootstrap
