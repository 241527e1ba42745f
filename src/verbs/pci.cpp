// SPDX-License-Identifier: Apache-2.0
#include "verbs/pci.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <tuple>

#include "base/read_file.hpp"
#include "base/text.hpp"

namespace marrow::verbs {
namespace {

namespace fs = std::filesystem;
using base::cat;

/// What one more boundary costs; there are fewer bridges than this in any path.
constexpr int kBoundary = 100;

int numa_of(const std::string& root, const std::string& pci) {
  const std::string text = read_text(fs::path(root + "/sys/bus/pci/devices") / pci / "numa_node");
  return text.empty() ? -1 : std::atoi(text.c_str());
}

/// The fastest active port of a NIC; rate 0 without one.
struct Fabric {
  double gigabits = 0;
  std::string layer;
};
Fabric fabric_of(const std::string& root, const std::string& nic) {
  Fabric best;
  std::error_code error;
  for (const auto& port :
       fs::directory_iterator(fs::path(root + "/sys/class/infiniband") / nic / "ports", error)) {
    if (read_text(port.path() / "state").find("ACTIVE") == std::string::npos) continue;
    const double gigabits =
        std::atof(read_text(port.path() / "rate").c_str());  // "400 Gb/sec (...)"
    if (gigabits > best.gigabits) best = {gigabits, read_text(port.path() / "link_layer")};
  }
  return best;
}

}  // namespace

std::string read_text(const fs::path& path) {
  const std::string all = base::read_file(path);
  // One value a file in sysfs; of longer texts all lines count.
  const std::size_t end = all.find_last_not_of(" \n");
  return end == std::string::npos ? std::string() : all.substr(0, end + 1);
}

std::vector<std::string> pci_path(const std::string& root, const std::string& pci) {
  std::error_code error;
  const fs::path real = pci.empty()
                            ? fs::path()
                            : fs::canonical(fs::path(root + "/sys/bus/pci/devices") / pci, error);
  std::vector<std::string> out;
  for (const fs::path& part : real) {
    if (!out.empty() || part.string().rfind("pci", 0) == 0) out.push_back(part.string());
    if (out.size() == 1 && out[0].find(':') == std::string::npos) out.clear();  // "pci" itself
  }
  return error ? std::vector<std::string>() : out;
}

std::string pci_of_nic(const std::string& root, const std::string& nic) {
  std::error_code error;
  const fs::path device =
      fs::canonical(fs::path(root + "/sys/class/infiniband") / nic / "device", error);
  return error ? std::string() : device.filename().string();
}

PciDistance pci_distance(const std::string& root, const std::string& a, const std::string& b) {
  const std::vector<std::string> first = pci_path(root, a), second = pci_path(root, b);
  if (first.empty() || second.empty()) return {false, "unknown: sysfs does not say", 4 * kBoundary};
  const auto same = static_cast<std::size_t>(
      std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first -
      first.begin());
  const auto bridges = static_cast<int>(first.size() + second.size() - 2 * same);
  if (same > 0) {
    const bool one_switch = same > 1 && first.size() > 2 && second.size() > 2;
    return one_switch
               ? PciDistance{true, "below one PCIe switch", bridges}
               : PciDistance{false, "one root complex, through the CPU", kBoundary + bridges};
  }
  const int node = numa_of(root, a), other = numa_of(root, b);
  if (node == other)
    return {false, cat("two root complexes of NUMA node ", node), 2 * kBoundary + bridges};
  return {false, cat("NUMA nodes ", node, " and ", other, ", through the link between the sockets"),
          3 * kBoundary + bridges};
}

std::vector<int> nearest_first(const std::string& root, const std::vector<std::string>& nics,
                               const std::string& gpu) {
  std::vector<int> order(nics.size());
  std::iota(order.begin(), order.end(), 0);
  if (gpu.empty() || nics.size() < 2) return order;
  std::vector<Fabric> fabrics;
  for (const std::string& nic : nics) fabrics.push_back(fabric_of(root, nic));
  // The first of the fastest: max_element takes the first of equals.
  const Fabric best =
      *std::max_element(fabrics.begin(), fabrics.end(),
                        [](const Fabric& a, const Fabric& b) { return a.gigabits < b.gigabits; });
  std::vector<std::tuple<bool, bool, int>> costs;
  for (std::size_t i = 0; i < nics.size(); ++i) {
    costs.emplace_back(fabrics[i].gigabits < best.gigabits, fabrics[i].layer != best.layer,
                       pci_distance(root, gpu, pci_of_nic(root, nics[i])).cost);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] < costs[b]; });
  return order;
}

}  // namespace marrow::verbs
