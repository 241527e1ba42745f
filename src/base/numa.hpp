// SPDX-License-Identifier: Apache-2.0
// Memory near those who read it: the kernel puts a page where it is touched first, which for memory that one thread
// sets up and another reads can be the wrong socket.
#pragma once

namespace marrow::base {

/// While it lives, pages that this thread touches first lie on that NUMA node if there is room. Without a node (-1), under
/// a policy of the user's (numactl), or on a kernel without NUMA it does nothing.
class PreferNode {
 public:
  explicit PreferNode(int node);
  ~PreferNode();
  PreferNode(const PreferNode&) = delete;
  PreferNode& operator=(const PreferNode&) = delete;

  bool active() const { return active_; }

 private:
  bool active_ = false;
};

}  // namespace marrow::base
