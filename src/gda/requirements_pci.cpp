// SPDX-License-Identifier: Apache-2.0
#include "gda/requirements_pci.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "base/text.hpp"

namespace marrow::gda {
namespace {

namespace fs = std::filesystem;
using base::cat;

fs::path device_path(const std::string& root, const std::string& pci) {
  return fs::path(root + "/sys/bus/pci/devices") / pci;
}

/// "pci0000:17", then the bridges and the device; empty when it is not there.
std::vector<std::string> path_of(const std::string& root, const std::string& pci) {
  std::error_code error;
  const fs::path real = pci.empty() ? fs::path() : fs::canonical(device_path(root, pci), error);
  std::vector<std::string> out;
  for (const fs::path& part : real) {
    if (!out.empty() || part.string().rfind("pci", 0) == 0) out.push_back(part.string());
    if (out.size() == 1 && out[0].find(':') == std::string::npos) out.clear();  // "pci" itself
  }
  return error ? std::vector<std::string>() : out;
}

int numa_of(const std::string& root, const std::string& pci) {
  const std::string text = read_text(device_path(root, pci) / "numa_node");
  return text.empty() ? -1 : std::atoi(text.c_str());
}

/// Control word of ACS; -1: the bridge has none, -2: cannot be read.
int acs_control(const std::string& root, const std::string& bridge) {
  std::ifstream file(device_path(root, bridge) / "config", std::ios::binary);
  const std::vector<char> raw((std::istreambuf_iterator<char>(file)),
                              std::istreambuf_iterator<char>());
  constexpr std::size_t kExtended = 0x100;
  if (raw.size() <= kExtended) return -2;  // without rights the kernel gives 64 bytes
  const auto word = [&](std::size_t at, std::size_t bytes) {
    std::uint32_t value = 0;
    if (at + bytes <= raw.size()) std::memcpy(&value, raw.data() + at, bytes);
    return value;
  };
  std::size_t at = kExtended;
  for (int hops = 0; hops < 64 && at >= kExtended; ++hops) {
    const std::uint32_t head = word(at, 4);
    if ((head & 0xffff) == 0x000d) return static_cast<int>(word(at + 6, 2));
    at = head >> 20;
  }
  return -1;
}

}  // namespace

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // One value a file in sysfs; of longer texts all lines count.
  const std::size_t end = all.find_last_not_of(" \n");
  return end == std::string::npos ? std::string() : all.substr(0, end + 1);
}

std::string pci_of_nic(const std::string& root, const std::string& nic) {
  std::error_code error;
  const fs::path device =
      fs::canonical(fs::path(root + "/sys/class/infiniband") / nic / "device", error);
  return error ? std::string() : device.filename().string();
}

PciDistance pci_distance(const std::string& root, const std::string& a, const std::string& b) {
  const std::vector<std::string> first = path_of(root, a), second = path_of(root, b);
  if (first.empty() || second.empty()) return {false, "unknown: sysfs does not say"};
  if (first[0] == second[0]) {
    const bool one_switch = first.size() > 2 && second.size() > 2 && first[1] == second[1];
    return one_switch ? PciDistance{true, "below one PCIe switch"}
                      : PciDistance{false, "one root complex, through the CPU"};
  }
  const int node = numa_of(root, a), other = numa_of(root, b);
  if (node == other) return {false, cat("two root complexes of NUMA node ", node)};
  return {false,
          cat("NUMA nodes ", node, " and ", other, ", through the link between the sockets")};
}

IommuState iommu_state(const std::string& root, const std::string& pci) {
  std::error_code error;
  fs::directory_iterator units(root + "/sys/class/iommu", error);
  if (error || units == fs::directory_iterator()) return IommuState::off;
  const std::string type = read_text(device_path(root, pci) / "iommu_group/type");
  if (type == "identity") return IommuState::pass_through;
  return type.empty() ? IommuState::unknown : IommuState::translating;
}

AcsState acs_state(const std::string& root, const std::string& a, const std::string& b) {
  bool unread = false;
  for (const std::string& pci : {a, b}) {
    std::vector<std::string> path = path_of(root, pci);
    if (path.empty()) return AcsState::unknown;
    for (std::size_t i = 1; i + 1 < path.size(); ++i) {
      const int control = acs_control(root, path[i]);
      unread = unread || control == -2;
      if (control > 0 && (control & 0xc) != 0) return AcsState::redirect;
    }
  }
  return unread ? AcsState::unknown : AcsState::off;
}

}  // namespace marrow::gda
