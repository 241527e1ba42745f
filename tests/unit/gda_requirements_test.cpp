// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// `marrow doctor`'s rows on a fake machine: a folder that plays sysfs, and a table that plays a ConnectX.
// Each row is seen in both states, and each missing one alone makes the path unusable.
#include "gda/requirements.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/random.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "marrow/error.hpp"

namespace marrow::gda {
namespace {

namespace fs = std::filesystem;
using State = Need::State;

constexpr const char* kGpu = "0000:18:00.0";
constexpr const char* kNic = "0000:17:00.0";

/// What the fake NIC answers; every member is something that can be wrong.
struct Fake {
  bool libraries = true, devx_library = true, device = true, mlx5 = true, opens = true;
  bool devx_allowed = true, rc = true, atomics = true, overrun = true, wait = true, uar = true;
  unsigned cqe_version = 1, log_depth = 15;
  int port_state = verbs::kPortActive;
  bool port_answers = true;
  std::uint8_t link_layer = verbs::kLinkLayerInfiniBand;
  std::uint16_t lid = 7;
  bool address_handles = true, dmabuf = true;
  int gids = 4;  ///< the last one is IPv4, the others link-local
  int open_contexts = 0, open_uars = 0;
};
Fake fake;

verbs::ibv_device the_device{};
verbs::ibv_device* the_list[] = {&the_device, nullptr};
verbs::ibv_context the_context{};
verbs::mlx5dv_devx_uar the_uar{};

verbs::Table fake_table() {
  verbs::Table t;
  t.name = "fake";
  t.get_device_list = [](int* count) {
    *count = fake.device ? 1 : 0;
    return the_list;
  };
  t.free_device_list = [](verbs::ibv_device**) {};
  t.get_device_name = [](verbs::ibv_device*) -> const char* { return "mlx5_0"; };
  t.is_supported = [](verbs::ibv_device*) { return fake.mlx5; };
  t.open_device = [](verbs::ibv_device*) -> verbs::ibv_context* {
    errno = EACCES;
    if (fake.opens) ++fake.open_contexts;
    return fake.opens ? &the_context : nullptr;
  };
  t.close_device = [](verbs::ibv_context*) { return --fake.open_contexts, 0; };
  t.query_device = [](verbs::ibv_context*, verbs::ibv_device_attr* out) {
    std::strcpy(out->fw_ver, "28.39.1002");
    return 0;
  };
  t.query_port = [](verbs::ibv_context*, std::uint8_t, verbs::ibv_port_attr* out) {
    if (!fake.port_answers) return errno = EIO;
    out->state = fake.port_state;
    out->link_layer = fake.link_layer;
    out->lid = fake.lid;
    out->gid_tbl_len = fake.gids;
    return 0;
  };
  t.query_gid = [](verbs::ibv_context*, std::uint8_t, int index, verbs::ibv_gid* gid) {
    *gid = {};
    if (index >= fake.gids) return errno = ENOENT;
    const std::uint8_t v4[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
    gid->raw[0] = 0xfe, gid->raw[1] = 0x80, gid->raw[15] = 1;
    if (index == 3) std::memcpy(gid->raw, v4, sizeof v4);
    return 0;
  };
  if (fake.address_handles) {
    t.create_ah = [](verbs::ibv_pd*, verbs::ibv_ah_attr*) -> verbs::ibv_ah* { return nullptr; };
    t.destroy_ah = [](verbs::ibv_ah*) { return 0; };
  }
  t.reg_dmabuf_mr = fake.dmabuf ? [](verbs::ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int,
                                     int) -> verbs::ibv_mr* { return nullptr; }
                                : static_cast<decltype(t.reg_dmabuf_mr)>(nullptr);
  if (!fake.devx_library) return t;
  t.init_obj = [](verbs::mlx5dv_obj*, std::uint64_t) { return 0; };
  t.devx_umem_reg = [](verbs::ibv_context*, void*, std::size_t,
                       std::uint32_t) -> verbs::mlx5dv_devx_umem* { return nullptr; };
  t.devx_alloc_uar = [](verbs::ibv_context*, std::uint32_t kind) -> verbs::mlx5dv_devx_uar* {
    errno = ENOMEM;
    if (!fake.uar || kind != verbs::kUarBlueFlame) return nullptr;  // only the last kind is there
    ++fake.open_uars;
    return &the_uar;
  };
  t.devx_free_uar = [](verbs::mlx5dv_devx_uar*) { --fake.open_uars; };
  t.devx_obj_create = [](verbs::ibv_context*, const void*, std::size_t, void*,
                         std::size_t) -> verbs::mlx5dv_devx_obj* { return nullptr; };
  const auto object = [](verbs::mlx5dv_devx_obj*, const void*, std::size_t, void*, std::size_t) {
    return 0;
  };
  t.devx_obj_query = t.devx_obj_modify = object;
  t.devx_obj_destroy = [](verbs::mlx5dv_devx_obj*) { return 0; };
  t.devx_query_eqn = [](verbs::ibv_context*, std::uint32_t, std::uint32_t*) { return 0; };
  t.devx_general_cmd = [](verbs::ibv_context*, const void*, std::size_t, void* out, std::size_t) {
    namespace cap = mlx5::hca_cap;
    if (!fake.devx_allowed) return errno = EPERM;
    auto* c = static_cast<std::uint8_t*>(out) + cap::kCapability;
    mlx5::set(c, cap::reliable_connected, fake.rc);
    mlx5::set(c, cap::atomic, fake.atomics);
    mlx5::set(c, cap::cq_overrun_ignore, fake.overrun);
    mlx5::set(c, cap::cross_channel, fake.wait);
    mlx5::set(c, cap::cqe_version, fake.cqe_version);
    mlx5::set(c, cap::log_max_qp_size, fake.log_depth);
    return 0;
  };
  return t;
}

class Requirements : public testing::Test {
 protected:
  Requirements() : root_(testing::TempDir() + "marrow-doctor-" + base::random_name(6)) {
    fake = {};
    // GPU and NIC below one switch (bridge 16:00.0) of root complex pci0000:15.
    write("sys/module/mlx5_ib/version", "5.0");
    write("sys/module/nvidia_peermem/version", "580.65");
    write("sys/module/nvidia/version", "580.65.06\n");
    write("proc/driver/nvidia/params", "Foo: 1\nRegistryDwords: \"PeerMappingOverride=1;\"\n");
    place(kGpu, "pci0000:15/0000:15:01.0/0000:16:00.0");
    place(kNic, "pci0000:15/0000:15:01.0/0000:16:01.0");
    bridge("0000:15:01.0", 0);
    bridge("0000:16:00.0", 0);
    bridge("0000:16:01.0", 0);
    write("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3", "RoCE v2");
    fs::create_symlink(root_ + "/sys/bus/pci/devices/" + kNic,
                       root_ + "/sys/class/infiniband/mlx5_0/device");
    write("sys/class/infiniband_verbs/uverbs2/ibdev", "mlx5_0\n");
    machine_.root = root_;
    machine_.verbs = [this]() -> const verbs::Table& {
      if (!fake.libraries) throw Error(Code::unsupported, "libibverbs.so.1 was not found");
      table_ = fake_table();
      return table_;
    };
    machine_.library_of = [](const void*) { return "/usr/lib/libibverbs.so.1.14.39.0"; };
    machine_.can_open = [this](const std::string& path) {
      return path == root_ + "/dev/infiniband/uverbs2";
    };
    machine_.gpus = {{0, "NVIDIA H200", kGpu, true, true, true, 200}};
    machine_.map_register = [](int, void*) { return std::string(); };
  }
  ~Requirements() override {
    EXPECT_EQ(fake.open_contexts, 0);
    EXPECT_EQ(fake.open_uars, 0);
    fs::remove_all(root_);
  }

  void write(const std::string& file, const std::string& text) {
    const fs::path path = fs::path(root_) / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }
  /// A PCI device below bridges, as sysfs shows it.
  void place(const std::string& pci, const std::string& below) {
    const fs::path device = fs::path(root_) / "sys/devices" / below / pci;
    fs::create_directories(device);
    const fs::path link = fs::path(root_) / "sys/bus/pci/devices" / pci;
    fs::create_directories(link.parent_path());
    fs::remove(link);
    fs::create_symlink(device, link);
  }
  /// A bridge's configuration space with an ACS capability.
  void bridge(const std::string& pci, std::uint16_t control) {
    std::string config(4096, '\0');
    const std::uint32_t first = 0x0001u | 0x140u << 20, acs = 0x000du;
    std::memcpy(config.data() + 0x100, &first, 4);
    std::memcpy(config.data() + 0x140, &acs, 4);
    std::memcpy(config.data() + 0x146, &control, 2);
    write("sys/bus/pci/devices/" + pci + "/config", config);
  }

  Diagnosis look(const std::string& only = {}) { return requirements(machine_, only); }
  /// The row, which must be there.
  static Need row(const Diagnosis& found, const std::string& name) {
    for (const Need& need : found.needs) {
      if (need.name == name) return need;
    }
    ADD_FAILURE() << "no row " << name;
    return {};
  }
  /// The row's state; whatever is not as it should be has a fix, and the path is usable unless it is missing.
  void expect(const std::string& name, State state) {
    const Diagnosis found = look();
    const Need need = row(found, name);
    EXPECT_EQ(need.state, state) << name << ": " << need.found;
    EXPECT_EQ(need.fix.empty(), state == State::found) << name;
    EXPECT_FALSE(need.needed.empty()) << name;
    EXPECT_EQ(found.usable, state != State::missing) << name;
    EXPECT_EQ(found.nic, found.usable ? "mlx5_0" : "") << name;
  }

  std::string root_;
  Machine machine_;
  verbs::Table table_;
};

TEST_F(Requirements, AGoodMachineHasAllRowsAndIsUsable) {
  const Diagnosis found = look();
  EXPECT_TRUE(found.usable);
  EXPECT_EQ(found.nic, "mlx5_0");
  std::set<std::string> names;
  for (const Need& need : found.needs) {
    EXPECT_EQ(need.state, State::found) << need.part << ", " << need.name << ": " << need.found;
    EXPECT_TRUE(need.fix.empty()) << need.name;
    names.insert(need.name);
  }
  for (const char* name : {"libibverbs",
                           "libmlx5",
                           "mlx5 driver",
                           "peer memory",
                           "locked memory",
                           "NVIDIA driver",
                           "GPU",
                           "PeerMappingOverride",
                           "GPUDirect RDMA",
                           "writes ordering",
                           "IOMMU",
                           "device",
                           "device node",
                           "opens",
                           "firmware",
                           "DevX",
                           "capabilities",
                           "link",
                           "addressing",
                           "LID",
                           "doorbell register",
                           "register mapping",
                           "distance",
                           "ACS"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_NE(row(found, "libibverbs").found.find("14.39"), std::string::npos);
  EXPECT_EQ(row(found, "firmware").found, "28.39.1002");
}

TEST_F(Requirements, AnEmptyMachineHasEveryRowItCanHaveAndThrowsNothing) {
  machine_ = {};
  machine_.root = root_ + "/nothing";
  machine_.verbs = []() -> const verbs::Table& { throw Error(Code::unsupported, "no libibverbs"); };
  machine_.gpu_reason = "no driver";
  const Diagnosis found = look();
  EXPECT_FALSE(found.usable);
  for (const char* name :
       {"libibverbs", "libmlx5", "mlx5 driver", "peer memory", "NVIDIA driver", "GPU"})
    EXPECT_EQ(row(found, name).state, State::missing) << name;
  EXPECT_EQ(row(found, "GPU").found, "no driver");
}

TEST_F(Requirements, Libraries) {
  fake.libraries = false;
  expect("libibverbs", State::missing);
  fake.libraries = true;
  fake.devx_library = false;
  expect("libmlx5", State::missing);
}

TEST_F(Requirements, KernelModules) {
  fs::remove_all(root_ + "/sys/module/mlx5_ib");
  expect("mlx5 driver", State::missing);
  write("sys/module/mlx5_ib/version", "");
  fs::remove_all(root_ + "/sys/module/nvidia_peermem");
  expect("peer memory", State::found);
  EXPECT_EQ(row(look(), "peer memory").found, "dma-buf");
  fake.dmabuf = false;
  expect("peer memory", State::missing);
  fake.dmabuf = true;
  machine_.gpus[0].dma_buf = false;
  expect("peer memory", State::missing);
  write("sys/module/nvidia_peermem/version", "580.65");
  expect("peer memory", State::found);
  EXPECT_EQ(row(look(), "peer memory").found, "nvidia_peermem is loaded");
}

TEST_F(Requirements, LockedMemory) {
  machine_.locked_memory = 8u << 20;
  expect("locked memory", State::missing);
  machine_.may_lock = true;
  expect("locked memory", State::found);
  machine_.may_lock = false;
  machine_.locked_memory = std::uint64_t{1} << 30;
  expect("locked memory", State::warning);
  machine_.locked_memory = std::uint64_t{64} << 30;
  expect("locked memory", State::found);
}

TEST_F(Requirements, Driver) {
  write("sys/module/nvidia/version", "470.256.02");
  expect("NVIDIA driver", State::missing);
  fs::remove_all(root_ + "/sys/module/nvidia");
  expect("NVIDIA driver", State::missing);
}

TEST_F(Requirements, Gpu) {
  machine_.gpus[0].rdma_supported = false;
  expect("GPUDirect RDMA", State::missing);
  machine_.gpus[0].rdma_supported = true;
  machine_.gpus[0].rdma_with_vmm = false;
  expect("GPUDirect RDMA", State::missing);
  machine_.gpus[0].rdma_with_vmm = true;
  machine_.gpus[0].writes_ordering = 0;
  expect("writes ordering", State::missing);
  machine_.gpus[0].writes_ordering = 100;
  expect("writes ordering", State::found);
  machine_.gpus.clear();
  expect("GPU", State::missing);
}

TEST_F(Requirements, OneGoodGpuIsEnough) {
  machine_.gpus.insert(machine_.gpus.begin(), {1, "NVIDIA GeForce", kGpu, false, false, false, 0});
  EXPECT_TRUE(look().usable);
  // ... but it must be the one that reaches the register.
  machine_.map_register = [](int gpu, void*) { return gpu == 0 ? "not permitted" : ""; };
  EXPECT_FALSE(look().usable);
}

TEST_F(Requirements, RegisterMappingAndTheOverride) {
  write("proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
  expect("PeerMappingOverride", State::found);  // not needed: the mapping works
  machine_.map_register = [](int, void*) { return "operation not permitted"; };
  expect("register mapping", State::missing);
  EXPECT_EQ(row(look(), "PeerMappingOverride").state, State::warning);
}

TEST_F(Requirements, Iommu) {
  write("sys/class/iommu/dmar0/name", "");
  expect("IOMMU", State::unknown);
  write(std::string("sys/bus/pci/devices/") + kGpu + "/iommu_group/type", "DMA-FQ\n");
  expect("IOMMU", State::warning);
  write(std::string("sys/bus/pci/devices/") + kGpu + "/iommu_group/type", "identity\n");
  expect("IOMMU", State::found);
}

TEST_F(Requirements, Device) {
  fake.device = false;
  expect("device", State::missing);
  fake.device = true;
  fake.mlx5 = false;
  expect("device", State::missing);
  fake.mlx5 = true;
  fake.opens = false;
  expect("opens", State::missing);
  fake.opens = true;
  machine_.can_open = [](const std::string&) { return false; };
  expect("device node", State::missing);
  fs::remove_all(root_ + "/sys/class/infiniband_verbs");
  expect("device node", State::missing);
  EXPECT_FALSE(look("mlx5_9").usable);
  EXPECT_NE(row(look("mlx5_9"), "device").found.find("mlx5_9"), std::string::npos);
}

TEST_F(Requirements, DevxAndCapabilities) {
  fake.devx_allowed = false;
  expect("DevX", State::missing);
  fake.devx_allowed = true;
  for (bool* bit : {&fake.rc, &fake.atomics, &fake.overrun, &fake.wait}) {
    *bit = false;
    expect("capabilities", State::missing);
    *bit = true;
  }
  fake.cqe_version = 0;
  expect("capabilities", State::missing);
  fake.cqe_version = 1;
  machine_.depth = 32768;
  expect("capabilities", State::found);
  fake.log_depth = 14;
  expect("capabilities", State::missing);
  EXPECT_NE(row(look(), "capabilities").found.find("32768"), std::string::npos);
}

TEST_F(Requirements, Port) {
  fake.port_state = 1;
  expect("link", State::missing);
  fake.port_state = verbs::kPortActive;
  fake.port_answers = false;
  expect("link", State::missing);
  fake.port_answers = true;
  fake.lid = 0;
  expect("LID", State::missing);
  fake.link_layer = verbs::kLinkLayerEthernet;
  expect("addressing", State::found);
  EXPECT_EQ(row(look(), "addressing").found, "Ethernet (RoCE)");
  EXPECT_EQ(row(look(), "GID").state, State::found);
  EXPECT_EQ(row(look(), "GID").found, "index 3: 10.0.0.1, RoCE v2");
  write("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3", "IB/RoCE v1");
  write("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "RoCE v2");
  EXPECT_EQ(row(look(), "GID").found, "index 1: fe80::1, RoCE v2");
  for (int i = 0; i < 4; ++i)
    write("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/" + std::to_string(i), "IB/RoCE v1");
  expect("GID", State::warning);
  EXPECT_EQ(row(look(), "GID").found, "index 3: 10.0.0.1, RoCE v1");
  fake.gids = 0;
  expect("GID", State::missing);
  fake.gids = 4;
  fake.address_handles = false;
  expect("addressing", State::missing);
}

TEST_F(Requirements, DoorbellRegister) {
  fake.uar = false;
  expect("doorbell register", State::missing);
}

TEST_F(Requirements, Distance) {
  EXPECT_EQ(row(look(), "distance").found, "below one PCIe switch");
  place(kNic, "pci0000:15/0000:15:02.0");
  expect("distance", State::warning);
  EXPECT_EQ(row(look(), "distance").found, "one root complex, through the CPU");
  place(kNic, "pci0000:97/0000:97:01.0");
  write(std::string("sys/bus/pci/devices/") + kGpu + "/numa_node", "0\n");
  write(std::string("sys/bus/pci/devices/") + kNic + "/numa_node", "1\n");
  EXPECT_NE(row(look(), "distance").found.find("NUMA nodes 0 and 1"), std::string::npos);
  machine_.gpus[0].pci = "0000:99:00.0";
  expect("distance", State::warning);
}

TEST_F(Requirements, Acs) {
  bridge("0000:16:00.0", 0x0004);
  expect("ACS", State::warning);
  bridge("0000:16:00.0", 0x0001);
  expect("ACS", State::found);
  write("sys/bus/pci/devices/0000:16:00.0/config", std::string(64, '\0'));  // no rights
  expect("ACS", State::unknown);
}

TEST(RequirementsOfSoftnic, AreFoundEverywhere) {
  const Diagnosis found = softnic_requirements(verbs::provider("softnic"));
  EXPECT_TRUE(found.usable);
  EXPECT_TRUE(found.emulated);
  for (const Need& need : found.needs)
    EXPECT_EQ(need.state, State::found) << need.name << ": " << need.found;
}

}  // namespace
}  // namespace marrow::gda
