// SPDX-License-Identifier: Apache-2.0
#include "proxy/staging.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "marrow/error.hpp"

namespace marrow::proxy {

std::uint64_t stage_chunk(std::uint64_t total, int nranks) {
  const std::uint64_t each = total / (2 * static_cast<std::uint64_t>(nranks) * kStageSlots);
  return std::clamp(std::bit_floor(each), kStageSmallestChunk, kStageLargestChunk);
}

std::uint64_t HostCopyEngine::copy(void* to, const void* from, std::size_t bytes) {
  Copy made{to, from, bytes, {}};
  if (bytes <= sizeof(made.small)) {
    std::memcpy(made.small, from, bytes);
    made.from = nullptr;
  }
  copies_.push_back(made);
  return ++last_;
}

bool HostCopyEngine::done(std::uint64_t) {
  for (const Copy& made : copies_)
    std::memcpy(made.to, made.from ? made.from : made.small, made.bytes);
  copies_.clear();
  return true;
}

void* HostCopyEngine::map(int, std::uint64_t, std::size_t) {
  throw Error(Code::unsupported, "there is no device memory to map on the CPU device");
}
void HostCopyEngine::unmap(void*, std::size_t) {}

}  // namespace marrow::proxy
