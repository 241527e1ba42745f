// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.hpp"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cli/gpu.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

bool set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

int local_rank(int rank) {
  for (const char* variable :
       {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    if (set(variable)) return std::atoi(std::getenv(variable));
  }
  return rank;
}

/// A GPU's stream for the life of one communicator.
class Stream {
 public:
  Stream(bool wanted, int device) : device_(device) {
    if (wanted) stream_ = gpu::create_stream(device);
  }
  ~Stream() {
    if (stream_ != nullptr) gpu::destroy_stream(device_, stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Place place() const { return stream_ != nullptr ? Place::gpu(device_, stream_) : Place::cpu(); }

 private:
  int device_;
  void* stream_ = nullptr;
};

/// The failure that came first and is not just the echo of another rank's.
struct FirstFailure {
  std::mutex mutex;
  std::exception_ptr first, echo;
  void add(const std::exception_ptr& failure) {
    bool is_echo = false;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      is_echo = error.code() == Code::aborted || error.code() == Code::peer_failed ||
                error.sentence().find("failed on rank") != std::string::npos;
    } catch (...) {
    }
    std::lock_guard lock(mutex);
    std::exception_ptr& slot = is_echo ? echo : first;
    if (!slot) slot = failure;
  }
  void rethrow() const {
    if (first) std::rethrow_exception(first);
    if (echo) std::rethrow_exception(echo);
  }
};

}  // namespace

bool under_launcher() {
  return set("OMPI_COMM_WORLD_SIZE") || set("PMI_SIZE") || set("PMIX_RANK") ||
         (set("RANK") && set("WORLD_SIZE")) || (set("SLURM_PROCID") && set("SLURM_STEP_ID")) ||
         set("MARROW_RENDEZVOUS");
}

int spawn_processes(int ranks, char** argv) {
  char folder[] = "/tmp/marrow-ranks-XXXXXX";
  if (mkdtemp(folder) == nullptr) {
    throw Error(Code::system, std::string("making a folder in /tmp: ") + std::strerror(errno),
                "check that /tmp is writable");
  }
  const std::string rendezvous = std::string("file://") + folder + "/rendezvous";
  // Held back so that an interrupt ends the ranks and removes the folder first; the ranks get it.
  sigset_t stops, before;
  sigemptyset(&stops);
  for (const int stop : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&stops, stop);
  sigprocmask(SIG_BLOCK, &stops, &before);
  int stopped_by = 0;
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // no orphan ranks
      sigprocmask(SIG_SETMASK, &before, nullptr);
      setenv("MARROW_RENDEZVOUS", rendezvous.c_str(), 1);
      setenv("RANK", std::to_string(r).c_str(), 1);
      setenv("LOCAL_RANK", std::to_string(r).c_str(), 1);
      setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
      setenv("LOCAL_WORLD_SIZE", std::to_string(ranks).c_str(), 1);
      execv("/proc/self/exe", argv);
      _exit(127);
    }
    if (child > 0) children.push_back(child);
  }
  int result = static_cast<int>(children.size()) == ranks ? 0 : 2;
  auto kill_at = std::chrono::steady_clock::time_point::max();
  while (!children.empty()) {
    int status = 0;
    const pid_t done = waitpid(-1, &status, WNOHANG);
    if (done > 0) {
      std::erase(children, done);
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
      if (code != 0 && result == 0) result = code;
    } else {
      const timespec pause{0, 5'000'000};
      const int stop = sigtimedwait(&stops, nullptr, &pause);
      if (stop > 0) {
        stopped_by = stop;
        for (const pid_t child : children) kill(child, SIGKILL);
      }
    }
    const auto now = std::chrono::steady_clock::now();
    if (result != 0 && kill_at == std::chrono::steady_clock::time_point::max())
      kill_at = now + std::chrono::seconds(10);
    if (now > kill_at) {
      for (const pid_t child : children) kill(child, SIGKILL);
      kill_at = now + std::chrono::seconds(10);
    }
  }
  unlink((std::string(folder) + "/rendezvous").c_str());
  rmdir(folder);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  if (stopped_by != 0) raise(stopped_by);
  return result;
}

RankTeam::RankTeam(const RankOptions& options, int default_ranks) : gpu_(options.gpu) {
  if (gpu_ && gpu::count() == 0) {
    throw Error(Code::unsupported, "--place gpu: " + gpu::why_none(),
                "use --place cpu, or a machine and build with a GPU");
  }
  if (under_launcher()) {
    base_ = std::make_unique<Communicator>(Communicator::from_environment());
    size_ = base_->nranks();
    rank_ = base_->rank();
    if (options.ranks != 0 && options.ranks != size_) {
      throw UsageError(
          format("--ranks is %d, but the launcher started %d ranks.", options.ranks, size_));
    }
  } else {
    size_ = options.ranks != 0 ? options.ranks : default_ranks;
  }
}

void RankTeam::run_rank(const UniqueId& id, int rank, const Place& place,
                        const std::map<std::string, std::string>& parameters,
                        const std::function<void(Communicator&)>& body) const {
  Config config;
  config.place = place;
  config.parameters = parameters;
  Communicator comm(id, size_, rank, config);
  try {
    body(comm);
  } catch (const Error& error) {
    // The others stop at once instead of waiting for us.
    comm.revoke(error.sentence());
    throw;
  } catch (const std::exception& error) {
    comm.revoke(error.what());
    throw;
  }
  comm.close();
}

void RankTeam::run(const std::map<std::string, std::string>& parameters,
                   const std::function<void(Communicator&)>& body) {
  const int gpus = gpu_ ? gpu::count() : 1;
  if (!threads()) {
    UniqueId id;
    if (rank_ == 0) id = UniqueId::create();
    const auto ids = base_->allgather(id.bytes().data(), UniqueId::kSize);
    const Stream stream(gpu_, local_rank(rank_) % gpus);
    run_rank(rank_ == 0 ? id : UniqueId::from_bytes(ids[0]), rank_, stream.place(), parameters,
             body);
    return;
  }
  // What one rank alone could fail at comes before any rank exists: nobody waits for it.
  std::vector<std::unique_ptr<Stream>> streams;
  for (int r = 0; r < size_; ++r) streams.push_back(std::make_unique<Stream>(gpu_, r % gpus));
  std::promise<bool> start;
  const std::shared_future<bool> started = start.get_future().share();
  const UniqueId id = UniqueId::create();
  FirstFailure failure;
  const auto rank_main = [&](int rank) {
    if (!started.get()) return;
    try {
      run_rank(id, rank, streams[static_cast<std::size_t>(rank)]->place(), parameters, body);
    } catch (...) {
      failure.add(std::current_exception());
    }
  };
  std::vector<std::thread> others;
  try {
    for (int r = 1; r < size_; ++r) others.emplace_back(rank_main, r);
    start.set_value(true);
  } catch (const std::system_error& error) {
    start.set_value(false);
    id.discard();
    failure.add(std::make_exception_ptr(
        Error(Code::out_of_memory,
              format("starting rank %zu of %d as a thread failed: %s", others.size() + 1, size_,
                     error.what()),
              "use fewer ranks, or raise the limit of threads or memory (ulimit -u, ulimit -v)")));
  }
  rank_main(0);
  for (std::thread& other : others) other.join();
  failure.rethrow();
}

}  // namespace marrow::cli
