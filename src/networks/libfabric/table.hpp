// SPDX-License-Identifier: Apache-2.0
// libfabric, found at run time: one binary starts with or without it. Only a handful of its functions are
// symbols, the rest are reached through the objects they return.
#pragma once

#include <rdma/fabric.h>

#include <cstdint>
#include <string>

namespace marrow::networks::libfabric {

struct Table {
  std::uint32_t (*version)() = nullptr;
  int (*getinfo)(std::uint32_t version, const char* node, const char* service, std::uint64_t flags,
                 const fi_info* hints, fi_info** info) = nullptr;
  void (*freeinfo)(fi_info* info) = nullptr;
  fi_info* (*dupinfo)(const fi_info* info) = nullptr;
  int (*fabric)(fi_fabric_attr* attr, fid_fabric** fabric, void* context) = nullptr;
  const char* (*strerror)(int error) = nullptr;
};

/// Loaded once and kept. @throws Error(unsupported) saying what is missing
const Table& table();

/// The version to ask for: of the headers, or of the library where that is older.
std::uint32_t wanted_version();

/// libfabric's text of a negative result.
std::string text(std::int64_t result);

/// Throws for a negative result. `what` was attempted.
std::int64_t check(std::int64_t result, const std::string& what);

}  // namespace marrow::networks::libfabric
