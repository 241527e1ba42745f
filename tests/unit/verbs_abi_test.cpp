// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Our own declarations of the verbs interface against the real headers, where those are installed;
// known numbers of the wire layouts; the provider registry's errors.
#include <gtest/gtest.h>

#include <cstring>

#include "marrow/abi/mlx5_prm.h"
#include "marrow/abi/mlx5_wqe.h"
#include "marrow/error.hpp"
#include "verbs/ibverbs_abi.h"
#include "verbs/table.hpp"

#if __has_include(<infiniband/mlx5dv.h>)
#define MARROW_HAVE_RDMA_HEADERS 1
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#endif

namespace marrow::verbs {
namespace {

#ifdef MARROW_HAVE_RDMA_HEADERS
#define SAME_SIZE(type) static_assert(sizeof(::type) == sizeof(marrow::verbs::type))
#define SAME_OFFSET(type, member) \
  static_assert(offsetof(::type, member) == offsetof(marrow::verbs::type, member))
SAME_SIZE(ibv_device);
SAME_OFFSET(ibv_device, name);
SAME_OFFSET(ibv_device, ibdev_path);
SAME_SIZE(ibv_context);
SAME_OFFSET(ibv_context, ops.poll_cq);
SAME_OFFSET(ibv_context, ops.req_notify_cq);
SAME_OFFSET(ibv_context, ops.post_srq_recv);
SAME_OFFSET(ibv_context, ops.post_send);
SAME_OFFSET(ibv_context, ops.post_recv);
SAME_OFFSET(ibv_context, num_comp_vectors);
SAME_OFFSET(ibv_context, abi_compat);
SAME_SIZE(ibv_pd);
SAME_SIZE(ibv_mr);
SAME_OFFSET(ibv_mr, lkey);
SAME_SIZE(ibv_cq);
SAME_OFFSET(ibv_cq, cqe);
SAME_SIZE(ibv_qp);
SAME_OFFSET(ibv_qp, qp_num);
SAME_OFFSET(ibv_qp, events_completed);
SAME_SIZE(ibv_device_attr);
SAME_OFFSET(ibv_device_attr, max_qp_rd_atom);
SAME_OFFSET(ibv_device_attr, atomic_cap);
SAME_OFFSET(ibv_device_attr, phys_port_cnt);
SAME_SIZE(ibv_port_attr);
SAME_OFFSET(ibv_port_attr, lid);
SAME_OFFSET(ibv_port_attr, link_layer);
SAME_SIZE(ibv_gid);
SAME_SIZE(ibv_global_route);
SAME_SIZE(ibv_ah_attr);
SAME_SIZE(ibv_qp_init_attr);
SAME_OFFSET(ibv_qp_init_attr, qp_type);
SAME_SIZE(ibv_qp_attr);
SAME_OFFSET(ibv_qp_attr, ah_attr);
SAME_OFFSET(ibv_qp_attr, rate_limit);
SAME_SIZE(ibv_sge);
SAME_SIZE(ibv_send_wr);
SAME_OFFSET(ibv_send_wr, imm_data);
SAME_OFFSET(ibv_send_wr, wr);
SAME_SIZE(ibv_recv_wr);
SAME_SIZE(ibv_wc);
SAME_OFFSET(ibv_wc, imm_data);
SAME_OFFSET(ibv_wc, wc_flags);
SAME_SIZE(mlx5dv_devx_umem);
SAME_SIZE(mlx5dv_devx_umem_in);
SAME_OFFSET(mlx5dv_devx_umem_in, dmabuf_fd);
SAME_SIZE(mlx5dv_devx_uar);
SAME_OFFSET(mlx5dv_devx_uar, page_id);
SAME_SIZE(mlx5dv_pd);
SAME_SIZE(mlx5dv_obj);
SAME_OFFSET(mlx5dv_obj, pd);
static_assert(static_cast<int>(MLX5DV_OBJ_PD) == static_cast<int>(kObjectPd) &&
              static_cast<int>(MLX5DV_OBJ_AH) == static_cast<int>(kObjectAh));
SAME_OFFSET(mlx5dv_obj, ah);
SAME_OFFSET(ibv_context, ops.alloc_mw);
SAME_SIZE(ibv_ah);
SAME_SIZE(ibv_srq);
SAME_OFFSET(ibv_srq, events_completed);
SAME_SIZE(ibv_srq_init_attr);
SAME_SIZE(ibv_comp_channel);
SAME_SIZE(ibv_async_event);
SAME_OFFSET(ibv_async_event, event_type);
SAME_OFFSET(mlx5dv_qp, bf.size);
SAME_OFFSET(mlx5dv_qp, comp_mask);
SAME_SIZE(mlx5dv_cq);
SAME_SIZE(mlx5dv_srq);
SAME_OFFSET(mlx5dv_srq, srqn);
SAME_SIZE(mlx5dv_ah);
SAME_SIZE(mlx5_wqe_av);
SAME_OFFSET(mlx5_wqe_av, rlid);
SAME_OFFSET(mlx5_wqe_av, rmac);
static_assert(offsetof(::mlx5dv_context, flags) == offsetof(mlx5dv_context_head, flags) &&
              offsetof(::mlx5dv_context, comp_mask) == offsetof(mlx5dv_context_head, comp_mask));
#define SAME_NUMBER(name) static_assert(static_cast<long>(::name) == static_cast<long>(name))
SAME_NUMBER(IBV_QPS_RTS);
SAME_NUMBER(IBV_QPS_ERR);
SAME_NUMBER(IBV_QP_ACCESS_FLAGS);
SAME_NUMBER(IBV_QP_AV);
SAME_NUMBER(IBV_QP_MIN_RNR_TIMER);
SAME_NUMBER(IBV_QP_DEST_QPN);
SAME_NUMBER(IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_NUMBER(IBV_WR_SEND_WITH_IMM);
SAME_NUMBER(IBV_WR_ATOMIC_FETCH_AND_ADD);
SAME_NUMBER(IBV_SEND_INLINE);
SAME_NUMBER(IBV_WC_REM_ABORT_ERR);
SAME_NUMBER(IBV_WC_GENERAL_ERR);
SAME_NUMBER(IBV_WC_RNR_RETRY_EXC_ERR);
SAME_NUMBER(IBV_WC_RECV_RDMA_WITH_IMM);
SAME_NUMBER(IBV_WC_WITH_IMM);
SAME_NUMBER(IBV_EVENT_QP_FATAL);
static_assert(kQpTypeRc == IBV_QPT_RC);
static_assert(MLX5_OPCODE_SEND_IMM == static_cast<int>(mlx5::kSendImmediate));
static_assert(static_cast<unsigned>(IBV_ACCESS_RELAXED_ORDERING) ==
              static_cast<unsigned>(::IBV_ACCESS_RELAXED_ORDERING));
static_assert(IBV_PORT_ACTIVE == kPortActive && IBV_MTU_4096 == kMtu4096);
static_assert(sizeof(::mlx5_cqe64) == sizeof(mlx5::Cqe));
static_assert(offsetof(::mlx5_cqe64, wqe_counter) == 60 && offsetof(::mlx5_cqe64, op_own) == 63);
static_assert(offsetof(::mlx5_err_cqe, syndrome) == mlx5::kSyndromeOffset);
static_assert(sizeof(::mlx5_wqe_ctrl_seg) == sizeof(mlx5::ControlSegment));
static_assert(offsetof(::mlx5_wqe_ctrl_seg, fm_ce_se) == offsetof(mlx5::ControlSegment, fm_ce_se));
static_assert(MLX5_OPCODE_RDMA_WRITE == static_cast<int>(mlx5::kWrite));
static_assert(MLX5_OPCODE_ATOMIC_FA == static_cast<int>(mlx5::kFetchAdd));
static_assert(MLX5_OPCODE_ATOMIC_MASKED_CS == static_cast<int>(mlx5::kMaskedCompareSwap));
static_assert(MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR == static_cast<int>(mlx5::kRemoteAccessError));
static_assert(MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR ==
              static_cast<int>(mlx5::kTransportRetryExceeded));
static_assert(MLX5_WQE_CTRL_CQ_UPDATE == static_cast<int>(mlx5::kCompletionAlways));
TEST(VerbsAbi, MatchesInstalledHeaders) { SUCCEED(); }
#else
TEST(VerbsAbi, MatchesInstalledHeaders) { GTEST_SKIP() << "rdma-core headers are not installed"; }
#endif

TEST(Mlx5Layout, Words) {
  using namespace mlx5;
  EXPECT_EQ(to_big32(0x01020304u), 0x04030201u);
  EXPECT_EQ(from_big64(to_big64(0x0123456789abcdefull)), 0x0123456789abcdefull);
  const std::uint32_t control = control_word(kFetchAdd, 0xfffe, kMasked8);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&control);
  EXPECT_EQ(bytes[0], 0x09);
  EXPECT_EQ(bytes[1], 0xff);
  EXPECT_EQ(bytes[2], 0xfe);
  EXPECT_EQ(bytes[3], 0x12);
  const std::uint64_t doorbell = doorbell_value(0x123456, 0xfffe);
  const auto* d = reinterpret_cast<const std::uint8_t*>(&doorbell);
  const std::uint8_t expected[8] = {0x00, 0xff, 0xfe, 0x00, 0x12, 0x34, 0x56, 0x00};
  EXPECT_EQ(0, std::memcmp(d, expected, 8));
}

TEST(Mlx5Layout, CompletionMarks) {
  using namespace mlx5;
  EXPECT_FALSE(cqe_valid(kInitialCounterOwner, 0, 32));
  EXPECT_FALSE(cqe_valid(kInitialCounterOwner, 32, 32));
  const std::uint32_t first_lap = to_big32((7u << 16) | (kRequester << 4) | 0u);
  EXPECT_TRUE(cqe_valid(first_lap, 7, 32));
  EXPECT_FALSE(cqe_valid(first_lap, 39, 32));
  EXPECT_EQ(cqe_counter(first_lap), 7);
  // Nothing completed yet reads as counter 0xffff: index 0 is not reached, 0xffff itself is.
  EXPECT_FALSE(counter_reached(cqe_counter(kInitialCounterOwner), 0));
  EXPECT_TRUE(counter_reached(3, 0xfffe));
  EXPECT_FALSE(counter_reached(0xfffe, 3));
}

TEST(Mlx5Prm, FieldsDoNotTouchNeighbours) {
  using namespace mlx5;
  const Field fields[] = {qpc::state,    qpc::log_sq_size, qpc::remote_qpn,    qpc::mtu,
                          qpc::cqn_send, qpc::no_sq,       qpc::log_rq_stride, cqc::collapsed,
                          ads::tclass,   qpc::rq_type,     qpc::record_address};
  for (const Field& field : fields) {
    std::uint8_t bytes[0x110];
    for (int fill : {0x00, 0xff}) {
      std::memset(bytes, fill, sizeof bytes);
      const std::uint64_t all = field.width == 64 ? ~0ull : (1ull << field.width) - 1;
      const std::uint64_t value = 0xa5a5a5a5a5a5a5a5ull & all;
      set(bytes, field, value);
      EXPECT_EQ(get(bytes, field), value);
      set(bytes, field, fill == 0 ? 0 : all);
      for (std::uint8_t byte : bytes) EXPECT_EQ(byte, fill);
    }
  }
  std::uint8_t context[qpc::kBytes] = {};
  set(context, qpc::log_sq_size, 5);
  EXPECT_EQ(context[0x0a], 5 << 3);
  set(context, qpc::remote_qpn, 0x010203);
  EXPECT_EQ(context[0x15], 1);
  EXPECT_EQ(context[0x17], 3);
}

TEST(VerbsProvider, UnknownNameListsTheKnownOnes) {
  try {
    provider("mlx6");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_NE(error.sentence().find("mlx6"), std::string::npos);
    EXPECT_NE(error.next_step().find("system"), std::string::npos);
  }
}

TEST(VerbsProvider, RegisteredTableIsFound) {
  static Table table;
  table.name = "mine";
  register_provider(&table);
  EXPECT_EQ(&provider("mine"), &table);
  EXPECT_FALSE(provider("mine").has_devx());
}

TEST(VerbsProvider, SystemLoadsOrSaysWhatIsMissing) {
  try {
    const Table& system = provider("system");
    EXPECT_NE(system.get_device_list, nullptr);
    int count = -1;
    if (ibv_device** list = system.get_device_list(&count)) system.free_device_list(list);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_NE(std::string(error.what()).find("ibverbs"), std::string::npos);
  }
}

}  // namespace
}  // namespace marrow::verbs
