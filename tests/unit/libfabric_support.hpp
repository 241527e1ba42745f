// SPDX-License-Identifier: Apache-2.0
// For tests of the libfabric network: those of a provider that this machine lacks are skipped with the reason.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "marrow/error.hpp"
#include "unit/network_sides.hpp"
#include "unit/required.hpp"

namespace marrow::test {

inline bool built_in() {
  for (const marrow_network* network : proxy::registered_networks())
    if (std::string("libfabric") == network->name) return true;
  return false;
}

/// Why there is no such provider; empty: there is.
inline std::string missing(const std::string& provider) {
  if (!built_in()) return "this build has no libfabric";
  try {
    const proxy::Link link({&network_named("libfabric"), "prov=" + provider, nullptr}, nullptr);
    return "";
  } catch (const Error& error) {
    return error.sentence();
  }
}

#define NEEDS(provider) \
  if (const std::string why = missing(provider); !why.empty()) MARROW_SKIP_WITHOUT("libfabric", why)

class Libfabric : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { NEEDS(GetParam()); }
  std::string options() const { return std::string("prov=") + GetParam(); }
};

}  // namespace marrow::test
