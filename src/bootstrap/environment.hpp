// SPDX-License-Identifier: Apache-2.0
// Who am I, and where do we meet: answers from the launcher's variables, so that
// Communicator::from_environment() needs no argument under torchrun, mpirun and srun.
#pragma once

#include <string>

#include "base/parameters.hpp"
#include "marrow/unique_id.hpp"

namespace marrow::bootstrap {

struct LaunchInfo {
  int rank = 0;
  int nranks = 1;
  int local_rank = 0;   ///< among the ranks of this host
  int local_size = 1;   ///< ranks on this host; 0: the launcher does not say
  std::string source;   ///< "torchrun", "mpirun", "PMI", "srun" or "none"
  std::string job_key;  ///< the same for all ranks of this job on this host, unlike for other jobs
};

/// Reads, first match wins: RANK and WORLD_SIZE (torchrun); OMPI_COMM_WORLD_* (Open MPI); PMI_* and
/// PMIX_RANK (MPICH, PMIx); SLURM_PROCID and SLURM_STEP_NUM_TASKS or SLURM_NTASKS (srun). None of
/// them: one rank.
/// Throws Error(invalid_argument) naming a variable that is not a number or out of range, and when
/// MARROW_RENDEZVOUS is set but nothing says who is who.
LaunchInfo launch_info(const base::Parameters& parameters = {});

/// Collective of the ranks of `launch`: all return ids of one communicator.
///   MARROW_RENDEZVOUS=file:///path  rank 0 writes the id there (mode 0600, atomically) and removes
///                                   it when all have joined; what a crashed job left is recognised.
///   MARROW_RENDEZVOUS=tcp://host:port  rank 0 listens there; the secret follows from
///                                   MARROW_SECRET_FILE. Without one, only loopback or an address of
///                                   the interface in MARROW_SOCKET_IFNAME, with a warning.
///   unset, all ranks on one host    a file in a private folder (mode 0700) of the temporary folder
///   unset, several hosts            tcp://MASTER_ADDR:(MASTER_PORT + 1) if MARROW_SECRET_FILE is
///                                   set, else an error that says what to set
/// Waits MARROW_BOOTSTRAP_TIMEOUT at most.
/// Throws Error(invalid_argument, timeout, authentication, system).
UniqueId rendezvous(const LaunchInfo& launch, const base::Parameters& parameters = {});

}  // namespace marrow::bootstrap
