// SPDX-License-Identifier: Apache-2.0
// Of several NICs a rank takes the one nearest to its GPU, by a sysfs tree made for the test: the usual eight-GPU host in
// small. Which device is then opened, by a table of three NICs that softnic stands behind.
#include "verbs/pci.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/random.hpp"
#include "marrow/error.hpp"
#include "networks/verbs/device.hpp"
#include "verbs/table.hpp"

namespace marrow::verbs {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Host : public ::testing::Test {
 protected:
  Host() : root_(testing::TempDir() + "marrow-pci-" + base::random_name(6)) {
    // Two sockets; below each a root port with a switch, and another root complex.
    device("0000:18:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", 0);  // GPU 0
    device("0000:19:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0", 0);  // mlx5_2
    device("0000:20:00.0", "pci0000:15/0000:15:02.0", 0);                            // mlx5_1
    device("0000:30:00.0", "pci0000:2f/0000:2f:01.0", 0);                            // mlx5_3
    device("0000:a8:00.0", "pci0000:a5/0000:a5:01.0/0000:a6:00.0/0000:a7:00.0", 1);  // GPU 1
    device("0000:a9:00.0", "pci0000:a5/0000:a5:01.0/0000:a6:00.0/0000:a7:01.0", 1);  // mlx5_0
    for (const auto& [name, pci] : {std::pair{"mlx5_0", "0000:a9:00.0"},
                                    {"mlx5_1", "0000:20:00.0"},
                                    {"mlx5_2", "0000:19:00.0"},
                                    {"mlx5_3", "0000:30:00.0"}}) {
      const fs::path folder = fs::path(root_) / "sys/class/infiniband" / name;
      fs::create_directories(folder);
      fs::create_symlink(fs::path(root_) / "sys/bus/pci/devices" / pci, folder / "device");
      port(name, "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
    }
    fs::create_directories(fs::path(root_) / "sys/class/infiniband/rxe0");  // virtual: no device
  }
  ~Host() override { fs::remove_all(root_); }

  void device(const std::string& pci, const std::string& below, int node) {
    const fs::path at = fs::path(root_) / "sys/devices" / below / pci;
    fs::create_directories(at);
    std::ofstream(at / "numa_node") << node << "\n";
    const fs::path link = fs::path(root_) / "sys/bus/pci/devices" / pci;
    fs::create_directories(link.parent_path());
    fs::create_symlink(at, link);
  }
  void port(const std::string& nic, const char* state, const char* rate, const char* layer) {
    const fs::path at = fs::path(root_) / "sys/class/infiniband" / nic / "ports/1";
    fs::create_directories(at);
    std::ofstream(at / "state") << state << "\n";
    std::ofstream(at / "rate") << rate << "\n";
    std::ofstream(at / "link_layer") << layer << "\n";
  }

  std::string root_;
  const std::vector<std::string> nics_{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "rxe0"};
};

constexpr const char* kGpu[] = {"0000:18:00.0", "0000:a8:00.0"};

TEST_F(Host, NearestFirst) {
  // One switch, one root complex, one socket, the other socket, not known.
  EXPECT_THAT(nearest_first(root_, nics_, kGpu[0]), ElementsAre(2, 1, 3, 0, 4));
  const std::vector<int> other = nearest_first(root_, nics_, kGpu[1]);
  EXPECT_EQ(other.front(), 0);
  EXPECT_EQ(other.back(), 4);
  EXPECT_TRUE(pci_distance(root_, kGpu[0], "0000:19:00.0").near);
  EXPECT_THAT(pci_distance(root_, kGpu[0], "0000:20:00.0").words, HasSubstr("one root complex"));
  EXPECT_THAT(pci_distance(root_, kGpu[0], "0000:30:00.0").words, HasSubstr("of NUMA node 0"));
  EXPECT_THAT(pci_distance(root_, kGpu[0], "0000:a9:00.0").words, HasSubstr("between the sockets"));
}

TEST_F(Host, WithoutAGpuOrAWayAsTheyStand) {
  EXPECT_THAT(nearest_first(root_, nics_, ""), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(nearest_first(root_, nics_, "0000:ff:00.0"), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(nearest_first(root_ + "/nothing", nics_, kGpu[0]), ElementsAre(0, 1, 2, 3, 4));
  // Equally near ones too.
  EXPECT_THAT(nearest_first(root_, {"mlx5_3", "mlx5_2", "mlx5_3"}, kGpu[0]), ElementsAre(1, 0, 2));
}

/// The nearest one belongs to storage or to nobody: all ranks take NICs of one fabric.
TEST_F(Host, OfTheFastestAndOneLinkLayer) {
  port("mlx5_2", "4: ACTIVE", "25 Gb/sec (1X EDR)", "Ethernet");
  EXPECT_THAT(nearest_first(root_, nics_, kGpu[0]), ElementsAre(1, 3, 0, 2, 4));
  port("mlx5_2", "4: ACTIVE", "400 Gb/sec (4X NDR)", "Ethernet");
  EXPECT_THAT(nearest_first(root_, nics_, kGpu[0]), ElementsAre(1, 3, 0, 2, 4));
  port("mlx5_2", "1: DOWN", "400 Gb/sec (4X NDR)", "InfiniBand");
  EXPECT_THAT(nearest_first(root_, nics_, kGpu[0]), ElementsAre(1, 3, 0, 2, 4));
}

/// Drivers have attributes whose read fails; a folder's does, too. Nonsense is no rate.
TEST_F(Host, WhatCannotBeReadOrIsNonsenseIsNotKnown) {
  const fs::path ib = fs::path(root_) / "sys/class/infiniband";
  const auto make_folder = [](const fs::path& file) {
    fs::remove(file);
    fs::create_directories(file);
  };
  make_folder(ib / "mlx5_2/ports/1/rate");
  make_folder(ib / "mlx5_3/ports/1/state");
  make_folder(fs::path(root_) / "sys/bus/pci/devices/0000:20:00.0/numa_node");
  make_folder(fs::path(root_) / "sys/bus/pci/devices/0000:17:00.0/config");
  EXPECT_THAT(nearest_first(root_, nics_, kGpu[0]), ElementsAre(1, 0, 2, 3, 4));
  for (const char* rate : {"", "nan", "-1 Gb/sec", "fast", "0"}) {
    port("mlx5_1", "4: ACTIVE", rate, "InfiniBand");
    EXPECT_EQ(nearest_first(root_, nics_, kGpu[0]).front(), 0) << rate;
  }
  EXPECT_EQ(read_text("/proc/self/mem"), "");
}

// --- which one is opened ---------------------------------------------------------------------------

ibv_device* the_devices[4] = {};
std::string job;
int broken = -1;

/// mlx5_0 to mlx5_2.
const Table& three() {
  static const Table the_table = [] {
    Table t = provider("softnic");
    t.name = "three";
    t.open_device_in_job = nullptr;
    t.get_device_list = [](int* count) {
      for (std::uintptr_t i = 0; i < 3; ++i) the_devices[i] = reinterpret_cast<ibv_device*>(i + 1);
      *count = 3;
      return the_devices;
    };
    t.free_device_list = [](ibv_device**) {};
    t.get_device_name = [](ibv_device* device) -> const char* {
      static constexpr const char* kNames[] = {"mlx5_0", "mlx5_1", "mlx5_2"};
      return kNames[reinterpret_cast<std::uintptr_t>(device) - 1];
    };
    t.open_device = [](ibv_device* device) -> ibv_context* {
      if (reinterpret_cast<std::uintptr_t>(device) - 1 == static_cast<std::uintptr_t>(broken)) {
        errno = ENODEV;
        return nullptr;
      }
      const Table& soft = provider("softnic");
      int count = 0;
      ibv_device** list = soft.get_device_list(&count);
      ibv_context* context = soft.open_device_in_job(list[0], job.c_str(), "");
      soft.free_device_list(list);
      return context;
    };
    return t;
  }();
  return the_table;
}
TEST_F(Host, TheVerbsNetworkOpensTheNearest) {
  [[maybe_unused]] static const bool registered = register_provider(&three());
  job = "marrow-pci-" + base::random_name(6);
  networks::rdma::Options options;
  options.provider = "three";
  options.sysfs = root_;
  const auto opened = [&] { return networks::rdma::Device::open(options, "")->name(); };
  EXPECT_EQ(opened(), "mlx5_0") << "no GPU: the first";
  options.gpu = kGpu[0];
  EXPECT_EQ(opened(), "mlx5_2");
  options.gpu = kGpu[1];
  EXPECT_EQ(opened(), "mlx5_0");
  // One that does not work is not waited for: the next nearest.
  options.gpu = kGpu[0];
  broken = 2;
  EXPECT_EQ(opened(), "mlx5_1");
  // Who names one gets that one.
  options.nic = "mlx5_0";
  EXPECT_EQ(opened(), "mlx5_0");
  options.nic = "mlx5_2";
  EXPECT_THROW(opened(), Error);
  broken = -1;
}

}  // namespace
}  // namespace marrow::verbs
