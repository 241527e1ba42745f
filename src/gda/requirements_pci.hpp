// SPDX-License-Identifier: Apache-2.0
// How a GPU and a NIC are connected, read from sysfs below `root`. Hints for `marrow doctor`: nothing
// here decides.
#pragma once

#include <filesystem>
#include <string>

namespace marrow::gda {

/// A file's text without the end of its last line; empty when there is none.
std::string read_text(const std::filesystem::path& path);

/// PCI address of an RDMA device, e.g. "0000:17:00.0"; empty for virtual ones.
std::string pci_of_nic(const std::string& root, const std::string& nic);

struct PciDistance {
  bool near = false;  ///< below one switch
  std::string words;
};
PciDistance pci_distance(const std::string& root, const std::string& a, const std::string& b);

enum class IommuState { off, pass_through, translating, unknown };
IommuState iommu_state(const std::string& root, const std::string& pci);

/// Access control services of the bridges above two devices (PCIe base specification, extended
/// capability 0x000d: bits 2 and 3 of its control word redirect peer requests and completions).
enum class AcsState { off, redirect, unknown };
AcsState acs_state(const std::string& root, const std::string& a, const std::string& b);

}  // namespace marrow::gda
