// SPDX-License-Identifier: Apache-2.0
// The replacement libraries as libraries of CUDA programs use them: opened by name, symbols by name and
// version, posting through the context's slots. LD_LIBRARY_PATH names their folder.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "marrow/abi/mlx5_prm.h"
#include "verbs/ibverbs_abi.h"

namespace marrow::verbs {
namespace {

void* library(const char* name) {
  void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  EXPECT_NE(handle, nullptr) << ::dlerror();
  return handle;
}
void* ibverbs() {
  static void* const handle = library("libibverbs.so.1");
  return handle;
}
void* mlx5_library() {
  static void* const handle = library("libmlx5.so.1");
  return handle;
}

template <class Function>
Function* symbol(void* handle, const char* name, const char* version) {
  void* found = ::dlvsym(handle, name, version);
  EXPECT_NE(found, nullptr) << name << "@" << version;
  return reinterpret_cast<Function*>(found);
}
template <class Function>
Function* ibv(const char* name, const char* version = "IBVERBS_1.1") {
  return symbol<Function>(ibverbs(), name, version);
}

TEST(SoftnicLibraries, ComeFromTheirFolder) {
  Dl_info info{};
  ASSERT_NE(::dladdr(::dlsym(ibverbs(), "ibv_get_device_list"), &info), 0);
  EXPECT_NE(std::string(info.dli_fname).find("marrow/softnic"), std::string::npos)
      << info.dli_fname << ": LD_LIBRARY_PATH does not name the replacement libraries";
}

// Lanes x signalling rate (Gb/s): 2.5 SDR, 5 DDR, 10 QDR, 14.0625 FDR, 25.78125 EDR, 53.125 HDR, 106.25 NDR, ...
TEST(SoftnicLibraries, RatesAreThoseOnTheWire) {
  auto* to_mbps = ibv<int(int)>("ibv_rate_to_mbps");
  auto* from_mbps = ibv<int(int)>("mbps_to_ibv_rate");
  auto* to_multiple = ibv<int(int)>("ibv_rate_to_mult", "IBVERBS_1.0");
  auto* from_multiple = ibv<int(int)>("mult_to_ibv_rate", "IBVERBS_1.0");
  struct Rate {
    int number;
    double lane;  ///< Gb/s
    int lanes;
  };
  for (const Rate& each :
       {Rate{2, 2.5, 1},    {5, 5, 1},         {3, 2.5, 4},       {6, 5, 4},
        {4, 2.5, 12},       {7, 10, 4},        {8, 5, 12},        {9, 10, 8},
        {10, 10, 12},       {11, 14.0625, 1},  {12, 14.0625, 4},  {13, 14.0625, 8},
        {14, 14.0625, 12},  {15, 25.78125, 1}, {16, 25.78125, 4}, {17, 25.78125, 8},
        {18, 25.78125, 12}, {19, 14.0625, 2},  {20, 53.125, 1},   {21, 53.125, 8},
        {22, 53.125, 12},   {23, 106.25, 8},   {24, 106.25, 12}}) {
    EXPECT_EQ(to_mbps(each.number), static_cast<int>(each.lane * each.lanes * 1000)) << each.number;
    EXPECT_EQ(from_mbps(to_mbps(each.number)), each.number);
    const int multiple = to_multiple(each.number);
    if (each.lane <= 10) {
      EXPECT_EQ(multiple, static_cast<int>(each.lane * each.lanes / 2.5)) << each.number;
    }
    if (multiple > 0) {
      EXPECT_EQ(from_multiple(multiple), each.number);
    }
  }
  for (const int no_rate : {-1, 0, 1, 25, 1000}) {
    EXPECT_EQ(to_mbps(no_rate), -1) << no_rate;
    EXPECT_EQ(to_multiple(no_rate), -1) << no_rate;
    EXPECT_EQ(from_multiple(no_rate == 1 ? 3 : no_rate), 0) << no_rate;
    EXPECT_EQ(from_mbps(no_rate), 0) << no_rate;
  }
}

TEST(SoftnicLibraries, NamesAndVersions) {
  for (const char* name :
       {"ibv_get_device_list", "ibv_free_device_list", "ibv_get_device_name", "ibv_open_device",
        "ibv_close_device",    "ibv_get_async_event",  "ibv_ack_async_event", "ibv_query_device",
        "ibv_query_port",      "ibv_query_gid",        "ibv_query_qp",        "ibv_alloc_pd",
        "ibv_dealloc_pd",      "ibv_reg_mr",           "ibv_dereg_mr",        "ibv_create_cq",
        "ibv_destroy_cq",      "ibv_create_qp",        "ibv_modify_qp",       "ibv_destroy_qp",
        "ibv_fork_init",       "ibv_event_type_str",   "ibv_create_ah",       "ibv_destroy_ah",
        "ibv_create_srq",      "ibv_destroy_srq",      "ibv_wc_status_str"}) {
    ibv<void()>(name);
    EXPECT_NE(::dlsym(ibverbs(), name), nullptr) << name;
  }
  struct Versioned {
    const char* name;
    const char* version;
  };
  for (const Versioned& each : {Versioned{"ibv_reg_mr_iova2", "IBVERBS_1.8"},
                                {"ibv_query_ece", "IBVERBS_1.10"},
                                {"ibv_set_ece", "IBVERBS_1.10"},
                                {"ibv_reg_dmabuf_mr", "IBVERBS_1.12"},
                                {"ibv_query_port_speed", "IBVERBS_1.16"}}) {
    ibv<void()>(each.name, each.version);
  }
  for (const Versioned& each : {Versioned{"mlx5dv_query_device", "MLX5_1.0"},
                                {"mlx5dv_init_obj", "MLX5_1.2"},
                                {"mlx5dv_create_qp", "MLX5_1.3"},
                                {"mlx5dv_devx_obj_create", "MLX5_1.7"},
                                {"mlx5dv_devx_obj_destroy", "MLX5_1.7"},
                                {"mlx5dv_devx_obj_query", "MLX5_1.7"},
                                {"mlx5dv_devx_obj_modify", "MLX5_1.7"},
                                {"mlx5dv_devx_general_cmd", "MLX5_1.7"},
                                {"mlx5dv_devx_query_eqn", "MLX5_1.7"},
                                {"mlx5dv_devx_umem_reg", "MLX5_1.7"},
                                {"mlx5dv_devx_umem_dereg", "MLX5_1.7"},
                                {"mlx5dv_devx_alloc_uar", "MLX5_1.7"},
                                {"mlx5dv_devx_free_uar", "MLX5_1.7"},
                                {"mlx5dv_is_supported", "MLX5_1.8"},
                                {"mlx5dv_devx_umem_reg_ex", "MLX5_1.19"},
                                {"mlx5dv_get_data_direct_sysfs_path", "MLX5_1.25"},
                                {"mlx5dv_reg_dmabuf_mr", "MLX5_1.25"}}) {
    symbol<void()>(mlx5_library(), each.name, each.version);
    EXPECT_NE(::dlsym(mlx5_library(), each.name), nullptr) << each.name;
  }
  // A version that does not have the name: what a wrong version script would let pass.
  EXPECT_EQ(::dlvsym(ibverbs(), "ibv_reg_mr_iova2", "IBVERBS_1.1"), nullptr);
  // Nothing of ours is there to be bound by accident.
  EXPECT_EQ(::dlsym(ibverbs(), "marrow_version"), nullptr);
}

/// One opened device with a protection domain.
class Device {
 public:
  Device() {
    int count = 0;
    ibv_device** list = ibv<ibv_device**(int*)>("ibv_get_device_list")(&count);
    EXPECT_EQ(count, 1);
    EXPECT_EQ(list[1], nullptr);
    EXPECT_TRUE(
        symbol<bool(ibv_device*)>(mlx5_library(), "mlx5dv_is_supported", "MLX5_1.8")(list[0]));
    context = ibv<ibv_context*(ibv_device*)>("ibv_open_device")(list[0]);
    ibv<void(ibv_device**)>("ibv_free_device_list")(list);
    pd = ibv<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(context);
  }
  ~Device() {
    EXPECT_EQ(ibv<int(ibv_pd*)>("ibv_dealloc_pd")(pd), 0);
    EXPECT_EQ(ibv<int(ibv_context*)>("ibv_close_device")(context), 0);
  }
  ibv_mr* reg(void* at, std::size_t bytes, std::uint64_t iova) {
    return ibv<ibv_mr*(ibv_pd*, void*, std::size_t, std::uint64_t, unsigned)>(
        "ibv_reg_mr_iova2", "IBVERBS_1.8")(pd, at, bytes, iova, 0xf);
  }
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
};

TEST(SoftnicLibraries, DeviceSaysWhatCallersLookFor) {
  Device device;
  ibv_device_attr attr{};
  ASSERT_EQ(ibv<int(ibv_context*, ibv_device_attr*)>("ibv_query_device")(device.context, &attr), 0);
  EXPECT_EQ(attr.phys_port_cnt, 1);
  EXPECT_EQ(attr.vendor_id, 0x02c9u);
  // Older callers have a shorter struct: what lies behind it stays as it was.
  struct {
    ibv_port_attr port;
    std::uint8_t behind[64];
  } answer;
  std::memset(&answer, 0xa5, sizeof answer);
  ASSERT_EQ(ibv<int(ibv_context*, std::uint8_t, void*)>("ibv_query_port")(device.context, 1,
                                                                          &answer.port),
            0);
  EXPECT_EQ(answer.port.state, kPortActive);
  EXPECT_EQ(answer.port.link_layer, kLinkLayerInfiniBand);
  EXPECT_NE(answer.port.lid, 0);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&answer);
  for (std::size_t i = kCompatPortAttrBytes; i < sizeof answer; ++i) ASSERT_EQ(bytes[i], 0xa5);
  // The probe of dma-buf support, and a dma-buf.
  const auto dmabuf = ibv<ibv_mr*(ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int)>(
      "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  EXPECT_EQ(dmabuf(device.pd, 0, 4096, 0, -1, 0), nullptr);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(dmabuf(device.pd, 0, 4096, 0, 0, 0), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  // Capabilities by command.
  std::uint8_t in[mlx5::hca_cap::kInBytes] = {};
  std::uint8_t out[mlx5::hca_cap::kOutBytes] = {};
  mlx5::set(in, mlx5::command::opcode, mlx5::kQueryHcaCap);
  mlx5::set(in, mlx5::command::op_mod, 1);
  ASSERT_EQ((symbol<int(ibv_context*, const void*, std::size_t, void*, std::size_t)>(
                mlx5_library(), "mlx5dv_devx_general_cmd", "MLX5_1.7")(device.context, in,
                                                                       sizeof in, out, sizeof out)),
            0);
  EXPECT_EQ(mlx5::get(out + mlx5::hca_cap::kCapability, mlx5::hca_cap::cqe_version), 1u);
}

TEST(SoftnicLibraries, AnAsynchronousReaderEndsWithTheDevice) {
  auto device = std::make_unique<Device>();
  int result = 0;
  std::thread reader([&, context = device->context] {
    ibv_async_event event{};
    result = ibv<int(ibv_context*, ibv_async_event*)>("ibv_get_async_event")(context, &event);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  device.reset();
  reader.join();
  EXPECT_EQ(result, -1);
}

class Pair : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 2; ++i) {
      cq[i] = ibv<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(
          device.context, 64, nullptr, nullptr, 0);
      ASSERT_NE(cq[i], nullptr);
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq[i];
      init.cap = {16, 16, 1, 1, 32};
      init.qp_type = kQpTypeRc;
      qp[i] = ibv<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(device.pd, &init);
      ASSERT_NE(qp[i], nullptr);
    }
    ibv_port_attr port{};
    ibv<int(ibv_context*, std::uint8_t, void*)>("ibv_query_port")(device.context, 1, &port);
    for (int i = 0; i < 2; ++i) {
      ibv_qp_attr a{};
      a.qp_state = IBV_QPS_INIT;
      a.port_num = 1;
      a.qp_access_flags = 0xe;
      ASSERT_EQ(modify(i, a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
                0);
      a.qp_state = IBV_QPS_RTR;
      a.path_mtu = kMtu4096;
      a.dest_qp_num = qp[1 - i]->qp_num;
      a.ah_attr.dlid = port.lid;
      a.ah_attr.port_num = 1;
      ASSERT_EQ(modify(i, a,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
                0);
      a.qp_state = IBV_QPS_RTS;
      a.retry_cnt = a.rnr_retry = 7;
      a.timeout = 14;
      ASSERT_EQ(modify(i, a,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
                0);
    }
    mr = device.reg(memory, sizeof memory, 0);  // addresses are offsets
    ASSERT_NE(mr, nullptr);
  }
  void TearDown() override {
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(ibv<int(ibv_qp*)>("ibv_destroy_qp")(qp[i]), 0);
      EXPECT_EQ(ibv<int(ibv_cq*)>("ibv_destroy_cq")(cq[i]), 0);
    }
    EXPECT_EQ(ibv<int(ibv_mr*)>("ibv_dereg_mr")(mr), 0);
  }
  int modify(int i, ibv_qp_attr& attr, int mask) {
    return ibv<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp")(qp[i], &attr, mask);
  }
  void post(int opcode, std::uint64_t from, std::uint64_t to, std::uint32_t bytes) {
    ibv_sge sge{from, bytes, mr->lkey};
    ibv_send_wr wr{};
    ibv_send_wr* bad = nullptr;
    wr.wr_id = 1;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      wr.wr.atomic.remote_addr = to;
      wr.wr.atomic.rkey = mr->rkey;
      wr.wr.atomic.compare_add = 7;
    } else {
      wr.wr.rdma.remote_addr = to;
      wr.wr.rdma.rkey = mr->rkey;
    }
    ASSERT_EQ(device.context->ops.post_send(qp[0], &wr, &bad), 0);
  }
  ibv_wc wait(int i) {
    ibv_wc wc{};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (device.context->ops.poll_cq(cq[i], 1, &wc) == 0) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "no completion";
        wc.status = -1;
        break;
      }
      std::this_thread::yield();
    }
    return wc;
  }

  Device device;
  ibv_cq* cq[2] = {};
  ibv_qp* qp[2] = {};
  ibv_mr* mr = nullptr;
  alignas(64) std::uint64_t memory[512] = {};
};

TEST_F(Pair, PingPongThroughTheContextsSlots) {
  for (std::uint64_t round = 1; round <= 100; ++round) {
    ibv_sge sge{2048, 64, mr->lkey};
    ibv_recv_wr receive{round, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    ASSERT_EQ(device.context->ops.post_recv(qp[1], &receive, &bad), 0);
    memory[0] = round;
    post(IBV_WR_SEND, 0, 0, 64);
    EXPECT_EQ(wait(0).status, IBV_WC_SUCCESS);
    const ibv_wc got = wait(1);
    EXPECT_EQ(got.opcode, IBV_WC_RECV);
    EXPECT_EQ(got.wr_id, round);
    EXPECT_EQ(got.byte_len, 64u);
    EXPECT_EQ(memory[256], round);
  }
}

TEST_F(Pair, OneSidedWithOffsetsAsAddresses) {
  memory[0] = 0x1234;
  post(IBV_WR_RDMA_WRITE, 0, 1024, 8);
  EXPECT_EQ(wait(0).opcode, IBV_WC_RDMA_WRITE);
  EXPECT_EQ(memory[128], 0x1234u);
  post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 1024, 8);
  EXPECT_EQ(wait(0).opcode, IBV_WC_FETCH_ADD);
  EXPECT_EQ(memory[1], 0x1234u);
  EXPECT_EQ(memory[128], 0x123bu);
  post(IBV_WR_RDMA_READ, 16, 1024, 8);
  EXPECT_EQ(wait(0).opcode, IBV_WC_RDMA_READ);
  EXPECT_EQ(memory[2], 0x123bu);
  post(IBV_WR_RDMA_WRITE, 0, 4090, 8);  // past the end
  EXPECT_EQ(wait(0).status, IBV_WC_REM_ACCESS_ERR);
}

}  // namespace
}  // namespace marrow::verbs
