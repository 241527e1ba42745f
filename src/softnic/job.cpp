// SPDX-License-Identifier: Apache-2.0
#include "softnic/job.hpp"

#include <unistd.h>

#include <map>
#include <mutex>

namespace marrow::softnic {

std::shared_ptr<Job> Job::join(const std::string& name, const Options& options) {
  struct Known {
    std::mutex mutex;
    ::pid_t process = 0;
    std::map<std::string, std::weak_ptr<Job>> jobs;
  };
  static Known known;
  std::lock_guard lock(known.mutex);
  if (known.process != ::getpid()) {
    // A forked child has the parent's objects but not its engine thread: it starts afresh.
    known.process = ::getpid();
    known.jobs.clear();
  }
  if (auto job = known.jobs[name].lock()) return job;
  auto job = std::make_shared<Job>(name, options);
  known.jobs[name] = job;
  return job;
}

GpuEngine& Job::gpu_engine(int device) {
  if (!descriptors_)
    descriptors_ = std::make_unique<DescriptorServer>(directory_, regions_, engine_);
  std::unique_ptr<GpuEngine>& found = gpu_engines_[device];
  if (!found)
    found = std::make_unique<GpuEngine>(directory_, regions_, engine_, options_, device,
                                        directory_pin_);
  return *found;
}

}  // namespace marrow::softnic
