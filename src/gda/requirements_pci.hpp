// SPDX-License-Identifier: Apache-2.0
// What stands in the way between a GPU and a NIC, read from sysfs below `root`. Hints for `marrow doctor`: nothing
// here decides.
#pragma once

#include <string>

namespace marrow::gda {

enum class IommuState { off, pass_through, translating, unknown };
IommuState iommu_state(const std::string& root, const std::string& pci);

/// Access control services of the bridges above two devices (PCIe base specification, extended
/// capability 0x000d: bits 2 and 3 of its control word redirect peer requests and completions).
enum class AcsState { off, redirect, unknown };
AcsState acs_state(const std::string& root, const std::string& a, const std::string& b);

}  // namespace marrow::gda
