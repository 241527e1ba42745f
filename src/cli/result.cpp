// SPDX-License-Identifier: Apache-2.0
#include "cli/result.hpp"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <numeric>
#include <thread>

#include "cli/gpu.hpp"
#include "cli/text.hpp"
#include "marrow/error.hpp"

namespace marrow::cli {

const char* name(Kind kind) {
  switch (kind) {
    case Kind::measured: return "measured";
    case Kind::measured_host: return "measured (host)";
    case Kind::emulated: return "emulated";
    case Kind::modelled: return "modelled";
  }
  return "unknown";
}

const char* name(DeviceClass device) {
  switch (device) {
    case DeviceClass::gpu: return "gpu";
    case DeviceClass::nic: return "nic";
    case DeviceClass::host: return "host";
    case DeviceClass::cpu_device: return "cpu device";
    case DeviceClass::softnic: return "softnic";
    case DeviceClass::timing_model: return "timing model";
  }
  return "unknown";
}

Kind kind_of(const std::vector<DeviceUse>& devices) {
  const auto any = [&](DeviceClass wanted) {
    return std::any_of(devices.begin(), devices.end(),
                       [&](const DeviceUse& use) { return use.device == wanted; });
  };
  if (any(DeviceClass::timing_model)) return Kind::modelled;
  if (any(DeviceClass::cpu_device) || any(DeviceClass::softnic)) return Kind::emulated;
  if (any(DeviceClass::gpu) || any(DeviceClass::nic)) return Kind::measured;
  return Kind::measured_host;
}

void check_kind(const Row& row) {
  if (row.devices.empty()) {
    throw Error(Code::internal, "the row '" + row.what + "' names no device",
                "name every device that did a step");
  }
  const Kind truth = kind_of(row.devices);
  if (row.kind == truth) return;
  std::vector<std::string> devices;
  for (const DeviceUse& use : row.devices)
    devices.push_back(use.role + " on " + name(use.device) + " " + use.name);
  throw Error(Code::internal,
              format("the row '%s' claims to be '%s', but its devices (%s) make it '%s'",
                     row.what.c_str(), name(row.kind), join(devices, ", ").c_str(), name(truth)),
              "give the row the kind that its devices have");
}

Statistics statistics_of(std::vector<double> samples) {
  Statistics s;
  s.count = samples.size();
  if (samples.empty()) return s;
  std::sort(samples.begin(), samples.end());
  const auto rank = [&](double q) {
    const auto at = static_cast<std::size_t>(std::ceil(q * static_cast<double>(samples.size())));
    return samples[std::min(samples.size(), std::max<std::size_t>(at, 1)) - 1];
  };
  s.min = samples.front();
  s.max = samples.back();
  s.median = rank(0.5);
  s.p99 = rank(0.99);
  s.mean =
      std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
  double squares = 0;
  for (const double x : samples) squares += (x - s.mean) * (x - s.mean);
  s.stddev = samples.size() > 1 ? std::sqrt(squares / static_cast<double>(samples.size() - 1)) : 0;
  return s;
}

namespace {
std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) == 0) {
      const std::size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return "unknown";
}
}  // namespace

Machine this_machine() {
  Machine machine;
  utsname names{};
  if (uname(&names) == 0) {
    machine.host = names.nodename;
    machine.os = std::string(names.sysname) + " " + names.release + " " + names.machine;
  }
  machine.cpu = cpu_model();
  machine.cores = static_cast<std::int64_t>(std::thread::hardware_concurrency());
  const int gpus = gpu::count();
  for (int g = 0; g < gpus; ++g) machine.gpus.push_back(gpu::name(g));
  machine.driver = gpu::driver();
  return machine;
}

std::string date_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace marrow::cli
