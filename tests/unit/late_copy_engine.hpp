// SPDX-License-Identifier: Apache-2.0
// A copy engine without a GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>

#include "proxy/copy_engine.hpp"

namespace marrow::test {

/// Copies when asked whether they are done, some polls later, in order.
class LateCopyEngine final : public proxy::CopyEngine {
 public:
  void attach_thread() override { attached_ = true; }
  std::uint64_t copy(void* to, const void* from, std::size_t bytes) override {
    EXPECT_TRUE(attached_);
    Copy made{to, from, bytes, {}, 3 + random_() % 20};
    if (bytes <= sizeof(made.small)) {
      std::memcpy(made.small, from, bytes);
      made.from = nullptr;
    }
    copies_.push_back(made);
    return ++last_;
  }
  bool done(std::uint64_t ticket) override {
    while (finished_ < ticket && !copies_.empty()) {
      Copy& front = copies_.front();
      if (front.polls != 0) {
        --front.polls;
        return false;
      }
      std::memcpy(front.to, front.from ? front.from : front.small, front.bytes);
      copies_.pop_front();
      ++finished_;
    }
    return finished_ >= ticket;
  }
  void* map(int, std::uint64_t, std::size_t) override {
    throw std::logic_error("ranks are threads here");
  }
  void unmap(void*, std::size_t) override {}

 private:
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
    std::byte small[64];
    std::uint64_t polls;
  };
  bool attached_ = false;
  std::mt19937_64 random_{7};
  std::deque<Copy> copies_;
  std::uint64_t last_ = 0;
  std::uint64_t finished_ = 0;
};

}  // namespace marrow::test
