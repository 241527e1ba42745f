// SPDX-License-Identifier: Apache-2.0
// System calls instead of libnuma, which not every machine has.
#include "base/numa.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace marrow::base {
namespace {

constexpr int kDefault = 0, kPreferred = 1;  // MPOL_DEFAULT, MPOL_PREFERRED
constexpr int kBits = 64 * 16;               // nodes that a mask can name
constexpr int kWord = 8 * sizeof(unsigned long);

}  // namespace

PreferNode::PreferNode(int node) {
  if (node < 0 || node >= kBits) return;
  int policy = -1;
  if (::syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) != 0 || policy != kDefault)
    return;
  unsigned long mask[kBits / kWord] = {};
  mask[node / kWord] = 1UL << (node % kWord);
  // The kernel takes one bit less than it is told.
  active_ = ::syscall(SYS_set_mempolicy, kPreferred, mask, kBits + 1UL) == 0;
}

PreferNode::~PreferNode() {
  if (active_) ::syscall(SYS_set_mempolicy, kDefault, nullptr, 0UL);
}

}  // namespace marrow::base
