// SPDX-License-Identifier: Apache-2.0
#include "gda/requirements_pci.hpp"

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/read_file.hpp"
#include "verbs/pci.hpp"

namespace marrow::gda {
namespace {

namespace fs = std::filesystem;

fs::path device_path(const std::string& root, const std::string& pci) {
  return fs::path(root + "/sys/bus/pci/devices") / pci;
}

/// Control word of ACS; -1: the bridge has none, -2: cannot be read.
int acs_control(const std::string& root, const std::string& bridge) {
  const std::string raw = base::read_file(device_path(root, bridge) / "config");
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

IommuState iommu_state(const std::string& root, const std::string& pci) {
  std::error_code error;
  fs::directory_iterator units(root + "/sys/class/iommu", error);
  if (error || units == fs::directory_iterator()) return IommuState::off;
  const std::string type = verbs::read_text(device_path(root, pci) / "iommu_group/type");
  if (type == "identity") return IommuState::pass_through;
  return type.empty() ? IommuState::unknown : IommuState::translating;
}

AcsState acs_state(const std::string& root, const std::string& a, const std::string& b) {
  bool unread = false;
  for (const std::string& pci : {a, b}) {
    std::vector<std::string> path = verbs::pci_path(root, pci);
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
