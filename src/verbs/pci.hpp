// SPDX-License-Identifier: Apache-2.0
// How a GPU and a NIC are connected, read from sysfs below `root`: what `marrow doctor` says, and which NIC a rank takes
// that was told none.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace marrow::verbs {

/// A file's text without the end of its last line; empty when there is none.
std::string read_text(const std::filesystem::path& path);

/// "pci0000:17", then the bridges and the device; empty when it is not there.
std::vector<std::string> pci_path(const std::string& root, const std::string& pci);

/// PCI address of an RDMA device, e.g. "0000:17:00.0"; empty for virtual ones.
std::string pci_of_nic(const std::string& root, const std::string& nic);

struct PciDistance {
  bool near = false;  ///< below one switch
  std::string words;
  int cost = 0;  ///< smaller is nearer: bridges in between, and 100 for each kind of boundary
};
PciDistance pci_distance(const std::string& root, const std::string& a, const std::string& b);

/// Places in `nics` (RDMA devices by name) in the order in which a rank with that GPU tries them: those with an active port
/// of the highest rate, of these the link layer of the first such, of these by their way to the GPU; equal ones as
/// they stand. So ranks of like hosts take NICs of one fabric, and not a slow one because it is near. Without a GPU
/// (empty) as they stand.
std::vector<int> nearest_first(const std::string& root, const std::vector<std::string>& nics,
                               const std::string& gpu);

}  // namespace marrow::verbs
