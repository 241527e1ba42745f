// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"
#include "base/parameters.hpp"
#include "marrow/parameters.hpp"

namespace marrow {

std::vector<ParameterInfo> parameters() {
  std::vector<ParameterInfo> all;
  for (const base::Parameter& p : base::parameters()) {
    const base::ParameterValue value = base::parameter_text(p.name);
    all.push_back({std::string(p.name), base::name(p.type), base::describe_range(p),
                   std::string(p.default_value), value.text,
                   value.source == base::ParameterSource::environment, std::string(p.owner),
                   std::string(p.help)});
  }
  return all;
}

std::uint64_t dropped_log_lines() noexcept { return base::log::dropped(); }

}  // namespace marrow
