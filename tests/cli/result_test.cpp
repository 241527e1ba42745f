// SPDX-License-Identifier: Apache-2.0
// A figure's kind cannot contradict the devices that made it.
#include "cli/result.hpp"

#include <gtest/gtest.h>

#include "cli/numbers.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"
#include "marrow/error.hpp"

namespace marrow::cli {
namespace {

const DeviceUse kGpu{"kernels", DeviceClass::gpu, "NVIDIA H200"};
const DeviceUse kCpuDevice{"kernels", DeviceClass::cpu_device, "threads"};
const DeviceUse kHost{"proxy", DeviceClass::host, "thread"};
const DeviceUse kNic{"network", DeviceClass::nic, "mlx5_0"};
const DeviceUse kSoftnic{"network", DeviceClass::softnic, "softnic0"};
const DeviceUse kModel{"network", DeviceClass::timing_model, "400G"};

Row row(Kind kind, std::vector<DeviceUse> devices) {
  Row r;
  r.what = "put latency";
  r.unit = "us";
  r.kind = kind;
  r.devices = std::move(devices);
  return r;
}

TEST(Kind, FollowsFromTheDevices) {
  EXPECT_EQ(kind_of({kGpu}), Kind::measured);
  EXPECT_EQ(kind_of({kGpu, kHost}), Kind::measured);
  EXPECT_EQ(kind_of({kGpu, kNic}), Kind::measured);
  EXPECT_EQ(kind_of({kHost}), Kind::measured_host);
  EXPECT_EQ(kind_of({kCpuDevice}), Kind::emulated);
  EXPECT_EQ(kind_of({kGpu, kSoftnic}), Kind::emulated);
  EXPECT_EQ(kind_of({kGpu, kSoftnic, kModel}), Kind::modelled);
}

TEST(Kind, ALieIsRefusedWithTheDevicesNamed) {
  for (const Kind claim : {Kind::measured, Kind::measured_host, Kind::modelled}) {
    try {
      check_kind(row(claim, {kGpu, kSoftnic}));
      FAIL() << name(claim) << " passed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("softnic0"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("'emulated'"), std::string::npos) << error.what();
    }
  }
  EXPECT_NO_THROW(check_kind(row(Kind::emulated, {kGpu, kSoftnic})));
  EXPECT_THROW(check_kind(row(Kind::measured, {kCpuDevice})), Error);
  EXPECT_THROW(check_kind(row(Kind::emulated, {kGpu})), Error);
  EXPECT_THROW(check_kind(row(Kind::measured, {})), Error);
}

TEST(Statistics, OfKnownSamples) {
  std::vector<double> samples;
  for (int i = 100; i >= 1; --i) samples.push_back(i);
  const Statistics s = statistics_of(samples);
  EXPECT_EQ(s.count, 100u);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.median, 50);
  EXPECT_EQ(s.p99, 99);
  EXPECT_EQ(s.max, 100);
  EXPECT_DOUBLE_EQ(s.mean, 50.5);
  EXPECT_NEAR(s.stddev, 29.011, 0.001);
  EXPECT_EQ(statistics_of({}).count, 0u);
  EXPECT_EQ(statistics_of({3}).p99, 3);
}

TEST(Numbers, SizesListsAndRanges) {
  EXPECT_EQ(parse_sizes("--sizes", "8,1K,64K..256K"),
            (std::vector<std::uint64_t>{8, 1024, 65536, 131072, 262144}));
  EXPECT_EQ(parse_sizes("--sizes", "1MiB"), (std::vector<std::uint64_t>{1 << 20}));
  for (const char* bad :
       {"", "8,", "K", "0", "-8", "8X", "1Kx", "1M..1K", "1..1T", "9999999999G", "8 K"}) {
    EXPECT_THROW(parse_sizes("--sizes", bad), UsageError) << bad;
  }
  EXPECT_EQ(parse_number("--n", "7", 1, 9), 7);
  for (const char* bad : {"", "0", "10", "7x", "1e1", "99999999999999999999"})
    EXPECT_THROW(parse_number("--n", bad, 1, 9), UsageError) << bad;
}

TEST(Table, ColumnsLineUp) {
  Table table({{"path"}, {"time", true}});
  table.add({"lsa", "1.5"});
  table.add({"proxy", "100.25"});
  EXPECT_EQ(table.text(), "path     time\nlsa       1.5\nproxy  100.25\n");
  EXPECT_EQ(table.markdown(), "| path | time |\n|---|---:|\n| lsa | 1.5 |\n| proxy | 100.25 |\n");
}

TEST(Text, NearestWord) {
  EXPECT_EQ(nearest("brrier", {"put", "barrier"}), "barrier");
  EXPECT_EQ(nearest("zzzzzz", {"put", "barrier"}), "");
  EXPECT_EQ(bytes_text(65536), "64 KiB");
  EXPECT_EQ(bytes_text(1000), "1000 B");
}

}  // namespace
}  // namespace marrow::cli
