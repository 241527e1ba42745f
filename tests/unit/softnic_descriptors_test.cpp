// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// Who hands out the descriptors of GPU memory answers whoever asks, whatever others at its socket do.
#include <gtest/gtest.h>

#include "marrow/error.hpp"
#include "softnic/descriptor_server.hpp"
#include "softnic/job.hpp"
#include "softnic_support.hpp"
#include "unit/silent_strangers.hpp"

namespace marrow::softnic_test {
namespace {

TEST(SoftnicDescriptors, StrangersWhoSayNothingHoldNobodyUp) {
  softnic::Job job(unique_job("strangers"), {});
  const softnic::DescriptorServer server(job.directory(), job.regions(), job.engine());
  const auto names = test::own_unix_sockets("marrow-softnic-");
  ASSERT_EQ(names.size(), 1u);
  const std::vector<base::Fd> strangers = test::silent_strangers(names[0]);
  const auto start = std::chrono::steady_clock::now();
  try {
    softnic::fetch_descriptor(job.directory(), job.directory().self(), 5);
    FAIL() << "key 5 names nothing";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::network) << error.what();  // answered: not timeout
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1000));
}

}  // namespace
}  // namespace marrow::softnic_test
