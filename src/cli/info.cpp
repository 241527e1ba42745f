// SPDX-License-Identifier: Apache-2.0
// `marrow info`: what is here, which path each pair of ranks gets, and why not a better one. It makes a real
// communicator and real windows: nothing is guessed.
#include <cstdio>
#include <cstring>

#include "cli/commands.hpp"
#include "cli/json.hpp"
#include "cli/ranks.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

/// Joined with newlines, so that ranks can gather it.
std::string pack(const std::vector<PeerInfo>& peers) {
  std::string text;
  for (const PeerInfo& peer : peers) {
    text += format("%d\t%s\t%s\t%d\t%d", peer.rank, name(peer.path), peer.transport.c_str(),
                   peer.emulated, peer.same_host);
    for (const std::string& reason : peer.rejected) text += "\t" + reason;
    text += "\n";
  }
  return text;
}

std::vector<PairReport> unpack(int from, const std::string& text) {
  std::vector<PairReport> pairs;
  for (const std::string& line : split(text, '\n')) {
    const std::vector<std::string> parts = split(line, '\t');
    if (parts.size() < 5) continue;
    PairReport pair;
    pair.from = from;
    pair.to = std::stoi(parts[0]);
    pair.path = parts[1];
    pair.transport = parts[2];
    pair.emulated = parts[3] == "1";
    pair.same_host = parts[4] == "1";
    pair.rejected.assign(parts.begin() + 5, parts.end());
    pairs.push_back(std::move(pair));
  }
  return pairs;
}

WindowReport try_window(Communicator& comm, Memory memory) {
  WindowReport report;
  report.memory = memory == Memory::device ? "device" : "host";
  try {
    Window window = comm.allocate(4096, memory);
    report.accepted = true;
    report.reason = window.why_no_atomics();
    report.atomic_path = report.reason.empty() ? name(window.atomic_path()) : "none";
    window.close();
  } catch (const Error& error) {
    if (error.code() != Code::unsupported) throw;
    report.reason = error.sentence();
  }
  return report;
}

void print_inventory(const Inventory& found) {
  std::printf("marrow %s, ABI %u, built from %s, CUDA driver %s\n\n", found.version.c_str(),
              found.abi, commit().c_str(),
              found.cuda_driver.empty() ? "none" : found.cuda_driver.c_str());
  if (found.gpus.empty()) {
    std::printf("GPUs: none (%s)\n", found.gpu_reason.c_str());
  } else {
    Table table({{"GPU", true},
                 {"name"},
                 {"PCI"},
                 {"NUMA", true},
                 {"memory", true},
                 {"arch"},
                 {"load/store to"}});
    for (const GpuInfo& gpu : found.gpus) {
      std::vector<std::string> reaches;
      for (const int other : gpu.reaches) reaches.push_back(std::to_string(other));
      table.add({std::to_string(gpu.ordinal), gpu.name, gpu.pci, std::to_string(gpu.numa),
                 format("%.0f GiB", static_cast<double>(gpu.memory) / (1 << 30)), gpu.architecture,
                 reaches.empty() ? "itself only" : join(reaches, " ")});
    }
    std::printf("%s", table.text().c_str());
  }
  Table nics({{"NIC"}, {"kind"}, {"state"}, {"gda path"}});
  for (const NicInfo& nic : found.nics)
    nics.add({nic.name, nic.kind, nic.state, nic.usable ? "yes" : "no: " + nic.reason});
  if (found.nics.empty()) {
    std::printf("\nNICs: none\n");
  } else {
    std::printf("\n%s", nics.text().c_str());
  }
  Table networks({{"network"}, {"proxy path"}});
  for (const NetworkInfo& network : found.networks)
    networks.add({network.name, network.usable ? "yes" : "no: " + network.reason});
  if (found.networks.empty()) {
    std::printf("\nNetworks: none\n");
  } else {
    std::printf("\n%s", networks.text().c_str());
  }
}

void print_pairs(const Document& document) {
  Table table({{"from", true},
               {"to", true},
               {"path"},
               {"transport"},
               {"emulated"},
               {"better ones rejected"}});
  for (const PairReport& pair : document.pairs) {
    table.add({std::to_string(pair.from), std::to_string(pair.to), pair.path, pair.transport,
               pair.emulated ? "yes" : "no", join(pair.rejected, "; ")});
  }
  std::printf("\n%s", table.text().c_str());
  Table windows(
      {{"window memory"}, {"accepted"}, {"add, fetch_add, compare_swap by"}, {"why not"}});
  for (const WindowReport& window : document.windows) {
    windows.add({window.memory, window.accepted ? "yes" : "no", window.atomic_path, window.reason});
  }
  std::printf("\n%s", windows.text().c_str());
  const std::string notice = reduced_notice();
  if (!notice.empty()) std::printf("\n%s\n", notice.c_str());
}

}  // namespace

int run_info(const InfoOptions& options) {
  prepare_json(options.json, false);
  Document document;
  document.command = "info";
  document.inventory = inventory();
  const bool text = options.json != "-";
  RankTeam team(options.where, 2);
  prepare_json(options.json, team.speaks());
  // What the machine has stands even when no communicator can be made.
  if (text && team.speaks()) print_inventory(*document.inventory);
  document.parameters = {{"ranks", std::int64_t{team.size()}},
                         {"place", std::string(options.where.gpu ? "gpu" : "cpu")},
                         {"path", options.path},
                         {"network", options.network}};
  team.run(path_parameters(options.path, options.network), [&](Communicator& comm) {
    const std::string mine = pack(comm.peers());
    const auto all = comm.allgather(mine.data(), mine.size());
    const WindowReport device = try_window(comm, Memory::device);
    const WindowReport host = try_window(comm, Memory::host);
    if (comm.rank() != 0) return;
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::string row(reinterpret_cast<const char*>(all[r].data()), all[r].size());
      for (PairReport& pair : unpack(static_cast<int>(r), row))
        document.pairs.push_back(std::move(pair));
    }
    document.windows = {device, host};
  });
  if (!team.speaks()) return 0;
  if (text) print_pairs(document);
  if (!options.json.empty()) write_json(options.json, document);
  return 0;
}

}  // namespace marrow::cli
