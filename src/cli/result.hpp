// SPDX-License-Identifier: Apache-2.0
// One figure and where it comes from. Every command reports through these, so that no figure leaves
// without its kind, and a kind that contradicts the devices of its row never leaves at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "marrow/inventory.hpp"
#include "marrow/parameters.hpp"

namespace marrow::cli {

/// measured: the named hardware did every step; measured_host: host code alone; emulated: softnic or the CPU device
/// did a step; modelled: a timing model computed it.
enum class Kind : std::uint8_t { measured, measured_host, emulated, modelled };
/// As in tables and JSON: "measured", "measured (host)", "emulated", "modelled".
const char* name(Kind kind);

/// What did a step of the work behind a figure.
enum class DeviceClass : std::uint8_t { gpu, nic, host, cpu_device, softnic, timing_model };
const char* name(
    DeviceClass device);  ///< "gpu", "nic", "host", "cpu device", "softnic", "timing model"

struct DeviceUse {
  std::string role;  ///< "kernels", "network", "memory"
  DeviceClass device = DeviceClass::host;
  std::string name;  ///< e.g. "NVIDIA H200", "softnic0"
};

/// The only kind that agrees with these devices.
Kind kind_of(const std::vector<DeviceUse>& devices);

struct Statistics {
  std::uint64_t count = 0;
  double min = 0, median = 0, mean = 0, p99 = 0, max = 0, stddev = 0;
};
/// Of any samples, in their unit; zeros of none.
Statistics statistics_of(std::vector<double> samples);

using Value = std::variant<std::int64_t, double, std::string, bool>;

/// One figure.
struct Row {
  std::string what;  ///< e.g. "put latency"
  std::string unit;  ///< "us", "GB/s", "Mops/s"
  Kind kind = Kind::emulated;
  std::string path;     ///< lsa, gda, proxy; empty: none
  std::string network;  ///< e.g. "softnic0", "shm"; empty: none
  std::vector<DeviceUse> devices;
  std::vector<std::pair<std::string, Value>> parameters;
  std::vector<double> samples;  ///< may be empty: then statistics stand alone
  Statistics statistics;
  std::optional<bool> verified;  ///< data checked element by element
  std::string note;              ///< how it was taken, e.g. "half of a round trip"
};

/// @throws Error(internal) when the row's kind contradicts its devices, or the row names none
void check_kind(const Row& row);

/// Where and when.
struct Machine {
  std::string host, os, cpu;
  std::int64_t cores = 0;
  std::vector<std::string> gpus;
  std::string driver;
};
Machine this_machine();

/// How one rank reaches another (`marrow info`).
struct PairReport {
  int from = 0, to = 0;
  std::string path, transport;
  bool emulated = false, same_host = true;
  std::vector<std::string> rejected;  ///< one sentence a better path that was not taken
};

/// Whether windows of one kind of memory can be made (`marrow info`).
struct WindowReport {
  std::string memory;  ///< "device" or "host"
  bool accepted = false;
  std::string atomic_path;  ///< "none": puts and gets only
  std::string reason;       ///< why it is not accepted, or why it has no atomics
};

/// What `--json` writes: bench/schema.json.
struct Document {
  std::string command;
  std::vector<std::pair<std::string, Value>> parameters;
  std::vector<Row> rows;
  std::optional<Inventory> inventory;
  std::vector<PairReport> pairs;
  std::vector<WindowReport> windows;
  std::optional<Diagnosis> diagnosis;
  std::vector<ParameterInfo> environment;
};

std::string commit();    ///< of the source this binary was built from; "unknown" outside git
std::string date_now();  ///< UTC, 2026-01-31T12:00:00Z

}  // namespace marrow::cli
