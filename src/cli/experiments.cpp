// SPDX-License-Identifier: Apache-2.0
#include "cli/experiments.hpp"

#include "marrow/error.hpp"

namespace marrow::cli {

const std::vector<Experiment>& experiments() {
  static const std::vector<Experiment> all = {
      {"put", "put + strong signal: latency, then bandwidth of puts from several blocks",
       "8,1K,64K..1M", 2, run_put},
      {"put_value", "put of a value that travels in the queue entry + strong signal", "8,24", 2,
       run_put_value},
      {"get", "get + flush: latency, then bandwidth", "8,1K,64K..1M", 2, run_get},
      {"signal", "strong signal alone", "", 2, run_signal},
      {"packet", "8 bytes that carry their own arrival flag; larger sizes are several packets",
       "8,64,1K", 2, run_packet},
      {"floor", "put + strong signal, 8 B, beside plain stores on the same memory, in turns (lsa)",
       "", 2, run_floor},
      {"barrier", "barrier of all ranks that also orders puts", "", 1, run_barrier},
      {"alltoall", "every rank sends a chunk to every rank, launch included", "1K,64K,1M", 1,
       run_all_to_all},
  };
  return all;
}

const Experiment& experiment(const std::string& name) {
  for (const Experiment& e : experiments()) {
    if (e.name == name) return e;
  }
  throw Error(Code::internal, "no experiment '" + name + "'");
}

std::vector<std::uint64_t> sizes_of(const ExperimentContext& context, const char* defaults) {
  return context.options.sizes.empty() ? parse_sizes("--sizes", defaults) : context.options.sizes;
}

}  // namespace marrow::cli
