// SPDX-License-Identifier: Apache-2.0
// JSON in and out, on nlohmann-json.
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/routing.hpp"
#include "cli/text.hpp"
#include "marrow/error.hpp"
#include "marrow/marrow.hpp"

namespace marrow::cli {

const bool kFullJson = true;

void require_json(const std::string&) {}

namespace {

using Json = nlohmann::ordered_json;

/// Samples kept in a file; more are thinned, their statistics stay.
constexpr std::size_t kMaxSamples = 10000;

Json values(const std::vector<std::pair<std::string, Value>>& pairs) {
  Json object = Json::object();
  for (const auto& [key, value] : pairs) {
    std::visit([&, &key = key](const auto& v) { object[key] = v; }, value);
  }
  return object;
}

Json row_json(const Row& row) {
  check_kind(row);
  Json json;
  json["what"] = row.what;
  json["unit"] = row.unit;
  json["kind"] = name(row.kind);
  if (!row.path.empty()) json["path"] = row.path;
  if (!row.network.empty()) json["network"] = row.network;
  for (const DeviceUse& use : row.devices) {
    json["devices"].push_back(
        {{"role", use.role}, {"device", name(use.device)}, {"name", use.name}});
  }
  json["parameters"] = values(row.parameters);
  const Statistics& s = row.statistics;
  json["statistics"] = {{"count", s.count}, {"min", s.min}, {"median", s.median}, {"mean", s.mean},
                        {"p99", s.p99},     {"max", s.max}, {"stddev", s.stddev}};
  const std::size_t step = (row.samples.size() + kMaxSamples - 1) / kMaxSamples;
  for (std::size_t i = 0; i < row.samples.size(); i += std::max<std::size_t>(step, 1))
    json["samples"].push_back(row.samples[i]);
  if (row.verified) json["verified"] = *row.verified;
  if (!row.note.empty()) json["note"] = row.note;
  return json;
}

Json inventory_json(const Inventory& found) {
  Json json;
  json["abi"] = found.abi;
  json["cuda_driver"] = found.cuda_driver;
  json["gpu_reason"] = found.gpu_reason;
  json["gpus"] = json["nics"] = json["networks"] = Json::array();
  for (const GpuInfo& gpu : found.gpus) {
    json["gpus"].push_back({{"ordinal", gpu.ordinal},
                            {"name", gpu.name},
                            {"pci", gpu.pci},
                            {"numa", gpu.numa},
                            {"memory", gpu.memory},
                            {"architecture", gpu.architecture},
                            {"reaches", gpu.reaches}});
  }
  for (const NicInfo& nic : found.nics) {
    json["nics"].push_back({{"name", nic.name},
                            {"kind", nic.kind},
                            {"state", nic.state},
                            {"numa", nic.numa},
                            {"usable", nic.usable},
                            {"reason", nic.reason}});
  }
  for (const NetworkInfo& network : found.networks) {
    json["networks"].push_back(
        {{"name", network.name}, {"usable", network.usable}, {"reason", network.reason}});
  }
  return json;
}

Json pairs_json(const std::vector<PairReport>& pairs) {
  Json json = Json::array();
  for (const PairReport& pair : pairs) {
    json.push_back({{"from", pair.from},
                    {"to", pair.to},
                    {"path", pair.path},
                    {"transport", pair.transport},
                    {"emulated", pair.emulated},
                    {"same_host", pair.same_host},
                    {"rejected", pair.rejected}});
  }
  return json;
}

Json diagnosis_json(const Diagnosis& found) {
  Json json;
  json["usable"] = found.usable;
  json["emulated"] = found.emulated;
  json["nic"] = found.nic;
  json["needs"] = Json::array();
  for (const Need& need : found.needs) {
    json["needs"].push_back({{"part", need.part},
                             {"name", need.name},
                             {"state", name(need.state)},
                             {"found", need.found},
                             {"needed", need.needed},
                             {"fix", need.fix}});
  }
  return json;
}

}  // namespace

std::string to_json(const Document& document) {
  const Machine machine = this_machine();
  Json json;
  json["schema"] = "marrow.bench.1";
  json["command"] = document.command;
  json["version"] = version();
  json["commit"] = commit();
  json["date"] = date_now();
  json["machine"] = {{"host", machine.host},   {"os", machine.os},     {"cpu", machine.cpu},
                     {"cores", machine.cores}, {"gpus", machine.gpus}, {"driver", machine.driver}};
  json["parameters"] = values(document.parameters);
  json["results"] = Json::array();
  for (const Row& row : document.rows) json["results"].push_back(row_json(row));
  if (document.inventory) json["inventory"] = inventory_json(*document.inventory);
  if (!document.pairs.empty()) json["pairs"] = pairs_json(document.pairs);
  for (const WindowReport& window : document.windows) {
    json["windows"].push_back({{"memory", window.memory},
                               {"accepted", window.accepted},
                               {"atomic_path", window.atomic_path},
                               {"reason", window.reason}});
  }
  if (document.diagnosis) json["diagnosis"] = diagnosis_json(*document.diagnosis);
  for (const ParameterInfo& p : document.environment) {
    json["environment"].push_back({{"name", p.name},
                                   {"type", p.type},
                                   {"range", p.range},
                                   {"default", p.default_value},
                                   {"value", p.value},
                                   {"from_environment", p.from_environment},
                                   {"owner", p.owner},
                                   {"help", p.help}});
  }
  return json.dump(1) + "\n";
}

void write_json(const std::string& file, const Document& document) {
  const std::string text = to_json(document);
  if (file == "-") {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) throw cannot_write(file, errno);
}

namespace {

[[noreturn]] void bad_line(const std::string& path, std::uint64_t line, const std::string& what) {
  throw Error(Code::invalid_argument,
              format("%s, line %llu: %s", path.c_str(), static_cast<unsigned long long>(line),
                     what.c_str()),
              "a router log is one JSON object a line: a meta line, then a route line with "
              "topk_ids and topk_weights for each token");
}

/// Checks one route line and appends it.
void add_route(const std::string& path, std::uint64_t line, const nlohmann::json& route,
               Routing& routing) {
  if (routing.top_k == 0) bad_line(path, line, "a route line before the meta line");
  const auto list = [&](const char* key) -> const nlohmann::json& {
    const auto found = route.find(key);
    if (found == route.end() || !found->is_array())
      bad_line(path, line, std::string("no list '") + key + "'");
    if (found->size() != routing.top_k) {
      bad_line(path, line,
               format("'%s' has %zu entries, top_k is %u", key, found->size(), routing.top_k));
    }
    return *found;
  };
  std::set<std::int64_t> seen;
  for (const nlohmann::json& id : list("topk_ids")) {
    const std::int64_t expert = id.is_number_integer() ? id.get<std::int64_t>() : -1;
    if (expert < 0 || expert >= routing.experts) {
      bad_line(path, line,
               "expert " + id.dump() + format(" is not one of 0 to %u", routing.experts - 1));
    }
    if (!seen.insert(expert).second)
      bad_line(path, line, "expert " + id.dump() + " twice in one token");
    routing.id.push_back(static_cast<std::uint32_t>(expert));
  }
  for (const nlohmann::json& weight : list("topk_weights")) {
    if (!weight.is_number() || !std::isfinite(weight.get<float>()))
      bad_line(path, line, "weight " + weight.dump() + " is not a number");
    routing.weight.push_back(weight.get<float>());
  }
}

/// The next line; one without an end (/dev/zero) stops at what no router log has. @return false at the end
bool next_line(std::istream& file, const std::string& path, std::uint64_t line, std::string& text) {
  constexpr std::size_t kLongest = std::size_t{1} << 20;
  text.clear();
  for (char c = 0; file.get(c) && c != '\n';) {
    if (text.size() == kLongest) bad_line(path, line, "longer than 1 MiB");
    text.push_back(c);
  }
  if (file.bad())
    throw Error(Code::invalid_argument, "reading the router log " + path + " failed",
                "give a file in vLLM's JSON-lines form, not a folder or a device");
  return !file.eof() || !text.empty();
}

}  // namespace

Routing read_routing(const std::string& path, std::uint64_t limit) {
  std::ifstream file(path);
  if (!file)
    throw Error(Code::invalid_argument, "cannot read the router log " + path,
                "give a file in vLLM's JSON-lines form");
  Routing routing;
  std::string text, model;
  nlohmann::json
      layer;  // of the first route line: a log of several layers has each token once a layer
  for (std::uint64_t line = 1;
       (limit == 0 || routing.tokens() < limit) && next_line(file, path, line, text); ++line) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
    if (json.is_discarded() || !json.is_object()) {
      bad_line(path, line,
               file.eof() ? "not a JSON object; the file is cut off" : "not a JSON object");
    }
    const std::string type =
        json.contains("type") && json["type"].is_string() ? json["type"].get<std::string>() : "";
    if (type == "meta") {
      const auto number = [&](const char* key, std::uint32_t most) {
        const auto found = json.find(key);
        if (found == json.end() || !found->is_number_unsigned() ||
            found->get<std::uint64_t>() < 1 || found->get<std::uint64_t>() > most) {
          bad_line(path, line, format("'%s' must be a number from 1 to %u", key, most));
        }
        return found->get<std::uint32_t>();
      };
      routing.experts = number("num_experts", 1u << 16);
      routing.top_k = number("top_k", 32);
      if (json.contains("model_id") && json["model_id"].is_string())
        model = json["model_id"].get<std::string>();
    } else if (type == "route") {
      const nlohmann::json here = json.value("layer", nlohmann::json());
      if (routing.id.empty()) layer = here;
      if (here == layer) add_route(path, line, json, routing);
    }
  }
  if (routing.tokens() == 0) bad_line(path, 1, "no route line in the file");
  routing.source = path + (model.empty() ? "" : " (" + model + ")");
  return routing;
}

}  // namespace marrow::cli
