// SPDX-License-Identifier: Apache-2.0
#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/routing.hpp"
#include "marrow/error.hpp"

namespace marrow::cli {

const bool kFullJson = false;

void require_json(const std::string& option) {
  throw Error(Code::unsupported,
              option + " needs JSON, and this marrow was built without nlohmann-json",
              "install nlohmann-json3-dev and build again");
}

std::string to_json(const Document&) {
  require_json("writing results");
  return {};
}
void write_json(const std::string&, const Document&) { require_json("--json"); }

Routing read_routing(const std::string&, std::uint64_t) {
  require_json("--routing");
  return {};
}

}  // namespace marrow::cli
