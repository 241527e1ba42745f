// SPDX-License-Identifier: Apache-2.0
// The stand-in for an expert's network, and the combine, as kernels and the reference compute them.
// Fused multiply-adds are written out, so that g++, nvcc and every CPU round alike and results can be
// compared bit by bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "marrow/abi/abi.h"

namespace marrow::cli {

/// Scale and offset that differ from expert to expert, exact in float.
MARROW_HOST_DEVICE inline float stand_in_expert(std::uint32_t expert, float x) {
  const float scale = 0.5f + static_cast<float>(expert % 251) * 0.0078125f;
  const float offset = static_cast<float>(expert % 127) * 0.25f - 8.0f;
  return fmaf(scale, x, offset);
}

MARROW_HOST_DEVICE inline float stand_in_combine(float weight, float row, float sum) {
  return fmaf(weight, row, sum);
}

/// Element h of token t: uniform in [-1, 1) with 24 bits, from splitmix64.
inline float token_value(std::uint64_t seed, std::uint64_t token, std::uint64_t h) {
  std::uint64_t z = seed + (token * 0x10001ull + h + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<float>(static_cast<std::int32_t>(z >> 40) - (1 << 23)) * (1.0f / (1 << 23));
}

}  // namespace marrow::cli
