// SPDX-License-Identifier: Apache-2.0
// Cases that go wrong on purpose, for the driver's own test: each must be named, and cost nobody else anything.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

MARROW_KERNEL goes_wrong(Args a) {
  if (a.comm.rank == 0 && thread_index() == 0) fail(a, __LINE__, 0, 0, 0, 1, 2);
}

/// For half a minute: longer than the test lets it, but not for ever.
MARROW_KERNEL goes_on(Args a) {
  const std::uint64_t start = now_ns();
  std::uint32_t turns = 0;
  while (a.comm.rank == 0 && now_ns() - start < 30000000000u) relax(++turns);
}

MARROW_KERNEL dies(Args a) {
  if (a.comm.rank == a.comm.nranks - 1) __builtin_trap();
}

std::vector<Case> selftest_cases() {
  return {
      {"goes_wrong", "nothing: it reports an error", start<goes_wrong>, kSelfTest},
      {"goes_on", "nothing: it does not end", start<goes_on>, kSelfTest},
      {"dies", "nothing: it ends its process", start<dies>, kSelfTest},
  };
}

}  // namespace marrow::conformance
