// SPDX-License-Identifier: Apache-2.0
// One NIC: a process's share of one job. Every context opened with the same job name in this process
// holds it; the engine thread starts with the first and ends with the last.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "softnic/descriptor_server.hpp"
#include "softnic/directory.hpp"
#include "softnic/engine.hpp"
#include "softnic/far_memory.hpp"
#include "softnic/gpu_engine.hpp"
#include "softnic/options.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class Job {
 public:
  Job(const std::string& name, const Options& options)
      : options_(options),
        far_(options.engine == EngineChoice::copy ? gpu_copies() : nullptr),
        directory_(name),
        regions_(directory_),
        engine_(directory_, regions_, options_) {}

  /// The job of this name in this process, joined if need be. Options count for the first opener.
  /// @throws Error as Directory
  static std::shared_ptr<Job> join(const std::string& name, const Options& options);

  const Options& options() const { return options_; }
  Directory& directory() { return directory_; }
  Regions& regions() { return regions_; }
  Engine& engine() { return engine_; }
  /// The engine of one GPU, made if need be. Lock held. @throws Error as GpuEngine
  GpuEngine& gpu_engine(int device);
  /// Numbers for completion queues, umems and UAR pages, 1..2^24-1, never reused. Lock held.
  std::uint32_t next_number() { return ++numbers_; }

 private:
  const Options options_;
  std::shared_ptr<FarMemory> far_;  ///< engine=copy
  Directory directory_;
  Regions regions_;
  std::uint32_t numbers_ = 0;
  Engine engine_;  // its thread uses all of the above
  std::unique_ptr<DescriptorServer> descriptors_;
  std::weak_ptr<GpuEngine::Pinned> directory_pin_;
  std::map<int, std::unique_ptr<GpuEngine>> gpu_engines_;  // last: they use all of the above
};

}  // namespace marrow::softnic
