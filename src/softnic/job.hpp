// SPDX-License-Identifier: Apache-2.0
// One NIC: a process's share of one job. Every context opened with the same job name in this process
// holds it; the engine thread starts with the first and ends with the last.
#pragma once

#include <memory>
#include <string>

#include "softnic/directory.hpp"
#include "softnic/engine.hpp"
#include "softnic/options.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class Job {
 public:
  Job(const std::string& name, const Options& options)
      : options_(options),
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
  /// Numbers for completion queues, umems and UAR pages, 1..2^24-1, never reused. Lock held.
  std::uint32_t next_number() { return ++numbers_; }

 private:
  const Options options_;
  Directory directory_;
  Regions regions_;
  std::uint32_t numbers_ = 0;
  Engine engine_;  // last: its thread uses all of the above
};

}  // namespace marrow::softnic
