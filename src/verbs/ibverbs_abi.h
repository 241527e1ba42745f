// SPDX-License-Identifier: Apache-2.0
// The part of libibverbs' and libmlx5's binary interface that Marrow uses, declared by ourselves so
// that no RDMA package is needed to build. Names and layouts are theirs (a test compares them with
// the real headers where those are installed); they live in our namespace, so both can be included.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace marrow::verbs {

struct ibv_context;
struct ibv_pd;
struct ibv_qp;
struct ibv_cq;
struct ibv_srq;
struct ibv_comp_channel;
struct ibv_send_wr;
struct ibv_recv_wr;
struct ibv_wc;

inline constexpr std::size_t kSysfsNameMax = 64;
inline constexpr std::size_t kSysfsPathMax = 256;

struct ibv_device {
  void* ops[2];
  int node_type;       ///< 1 = channel adapter
  int transport_type;  ///< 0 = InfiniBand
  char name[kSysfsNameMax];
  char dev_name[kSysfsNameMax];
  char dev_path[kSysfsPathMax];
  char ibdev_path[kSysfsPathMax];
};

/// Slots that are only reached through the context; unused ones are kept as plain pointers. The
/// memory-window slots are called without a look, so whoever fills this sets them too.
struct ibv_context_ops {
  void* unused_0_6[7];
  void* (*alloc_mw)(ibv_pd* pd, int type);
  int (*bind_mw)(ibv_qp* qp, void* window, void* bind);
  int (*dealloc_mw)(void* window);
  void* unused_10;
  int (*poll_cq)(ibv_cq* cq, int count, ibv_wc* wc);
  int (*req_notify_cq)(ibv_cq* cq, int solicited_only);
  void* unused_13_19[7];
  int (*post_srq_recv)(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad);
  void* unused_21_24[4];
  int (*post_send)(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad);
  int (*post_recv)(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad);
  void* unused_27_31[5];
};

struct ibv_context {
  ibv_device* device;
  ibv_context_ops ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct ibv_pd {
  ibv_context* context;
  std::uint32_t handle;
};

struct ibv_ah {
  ibv_context* context;
  ibv_pd* pd;
  std::uint32_t handle;
};

struct ibv_comp_channel {
  ibv_context* context;
  int fd;
  int refcnt;
};

struct ibv_srq {
  ibv_context* context;
  void* srq_context;
  ibv_pd* pd;
  std::uint32_t handle;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  std::uint32_t events_completed;
};

struct ibv_srq_attr {
  std::uint32_t max_wr;
  std::uint32_t max_sge;
  std::uint32_t srq_limit;
};

struct ibv_srq_init_attr {
  void* srq_context;
  ibv_srq_attr attr;
};

struct ibv_mr {
  ibv_context* context;
  ibv_pd* pd;
  void* addr;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

struct ibv_cq {
  ibv_context* context;
  ibv_comp_channel* channel;
  void* cq_context;
  std::uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  std::uint32_t comp_events_completed;
  std::uint32_t async_events_completed;
};

struct ibv_qp {
  ibv_context* context;
  void* qp_context;
  ibv_pd* pd;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  std::uint32_t handle;
  std::uint32_t qp_num;
  int state;
  int qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  std::uint32_t events_completed;
};

struct ibv_device_attr {
  char fw_ver[64];
  std::uint64_t node_guid;       ///< BE
  std::uint64_t sys_image_guid;  ///< BE
  std::uint64_t max_mr_size;
  std::uint64_t page_size_cap;
  std::uint32_t vendor_id;
  std::uint32_t vendor_part_id;
  std::uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned int device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int max_mr;
  int max_pd;
  int max_qp_rd_atom;
  int max_ee_rd_atom;
  int max_res_rd_atom;
  int max_qp_init_rd_atom;
  int max_ee_init_rd_atom;
  int atomic_cap;  ///< 0 none, 1 among QPs of this NIC, 2 global
  int max_ee;
  int max_rdd;
  int max_mw;
  int max_raw_ipv6_qp;
  int max_raw_ethy_qp;
  int max_mcast_grp;
  int max_mcast_qp_attach;
  int max_total_mcast_qp_attach;
  int max_ah;
  int max_fmr;
  int max_map_per_fmr;
  int max_srq;
  int max_srq_wr;
  int max_srq_sge;
  std::uint16_t max_pkeys;
  std::uint8_t local_ca_ack_delay;
  std::uint8_t phys_port_cnt;
};

struct ibv_port_attr {
  int state;  ///< 4 = active
  int max_mtu;
  int active_mtu;
  int gid_tbl_len;
  std::uint32_t port_cap_flags;
  std::uint32_t max_msg_sz;
  std::uint32_t bad_pkey_cntr;
  std::uint32_t qkey_viol_cntr;
  std::uint16_t pkey_tbl_len;
  std::uint16_t lid;
  std::uint16_t sm_lid;
  std::uint8_t lmc;
  std::uint8_t max_vl_num;
  std::uint8_t sm_sl;
  std::uint8_t subnet_timeout;
  std::uint8_t init_type_reply;
  std::uint8_t active_width;
  std::uint8_t active_speed;
  std::uint8_t phys_state;
  std::uint8_t link_layer;  ///< 1 InfiniBand, 2 Ethernet
  std::uint8_t flags;
  std::uint16_t port_cap_flags2;
};

/// What the exported function ibv_query_port fills in: callers may be older than the last field of
/// ibv_port_attr, newer ones zero it themselves.
inline constexpr std::size_t kCompatPortAttrBytes = 48;
static_assert(offsetof(ibv_port_attr, port_cap_flags2) == kCompatPortAttrBytes);

union ibv_gid {
  std::uint8_t raw[16];
  struct {
    std::uint64_t subnet_prefix;  ///< BE
    std::uint64_t interface_id;   ///< BE
  } global;
};

/// What _ibv_query_gid_ex fills in.
struct ibv_gid_entry {
  ibv_gid gid;
  std::uint32_t gid_index;
  std::uint32_t port_num;
  std::uint32_t gid_type;  ///< 0 InfiniBand, 1 RoCE v1, 2 RoCE v2
  std::uint32_t ndev_ifindex;
};

struct ibv_global_route {
  ibv_gid dgid;
  std::uint32_t flow_label;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
};

struct ibv_ah_attr {
  ibv_global_route grh;
  std::uint16_t dlid;
  std::uint8_t sl;
  std::uint8_t src_path_bits;
  std::uint8_t static_rate;
  std::uint8_t is_global;
  std::uint8_t port_num;
};

struct ibv_qp_cap {
  std::uint32_t max_send_wr;
  std::uint32_t max_recv_wr;
  std::uint32_t max_send_sge;
  std::uint32_t max_recv_sge;
  std::uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
  void* qp_context;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  ibv_qp_cap cap;
  int qp_type;
  int sq_sig_all;
};

struct ibv_qp_attr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  std::uint32_t qkey;
  std::uint32_t rq_psn;
  std::uint32_t sq_psn;
  std::uint32_t dest_qp_num;
  unsigned int qp_access_flags;
  ibv_qp_cap cap;
  ibv_ah_attr ah_attr;
  ibv_ah_attr alt_ah_attr;
  std::uint16_t pkey_index;
  std::uint16_t alt_pkey_index;
  std::uint8_t en_sqd_async_notify;
  std::uint8_t sq_draining;
  std::uint8_t max_rd_atomic;
  std::uint8_t max_dest_rd_atomic;
  std::uint8_t min_rnr_timer;
  std::uint8_t port_num;
  std::uint8_t timeout;
  std::uint8_t retry_cnt;
  std::uint8_t rnr_retry;
  std::uint8_t alt_port_num;
  std::uint8_t alt_timeout;
  std::uint32_t rate_limit;
};

struct ibv_sge {
  std::uint64_t addr;
  std::uint32_t length;
  std::uint32_t lkey;
};

struct ibv_send_wr {
  std::uint64_t wr_id;
  ibv_send_wr* next;
  ibv_sge* sg_list;
  int num_sge;
  int opcode;
  unsigned int send_flags;
  std::uint32_t imm_data;  ///< BE
  union {
    struct {
      std::uint64_t remote_addr;
      std::uint32_t rkey;
    } rdma;
    struct {
      std::uint64_t remote_addr;
      std::uint64_t compare_add;
      std::uint64_t swap;
      std::uint32_t rkey;
    } atomic;
  } wr;
  std::uint32_t remote_srqn;
  std::uint64_t unused_tail[6];  ///< memory window and segmentation requests
};

struct ibv_recv_wr {
  std::uint64_t wr_id;
  ibv_recv_wr* next;
  ibv_sge* sg_list;
  int num_sge;
};

struct ibv_wc {
  std::uint64_t wr_id;
  int status;
  int opcode;
  std::uint32_t vendor_err;
  std::uint32_t byte_len;
  std::uint32_t imm_data;  ///< BE
  std::uint32_t qp_num;
  std::uint32_t src_qp;
  unsigned int wc_flags;
  std::uint16_t pkey_index;
  std::uint16_t slid;
  std::uint8_t sl;
  std::uint8_t dlid_path_bits;
};

/// Access flags of reg_mr and umem_reg.
enum Access : unsigned {
  IBV_ACCESS_LOCAL_WRITE = 1u << 0,
  IBV_ACCESS_REMOTE_WRITE = 1u << 1,
  IBV_ACCESS_REMOTE_READ = 1u << 2,
  IBV_ACCESS_REMOTE_ATOMIC = 1u << 3,
  IBV_ACCESS_RELAXED_ORDERING = 1u << 20,
};

/// Queue pair types and states; the states' numbers are also those of the PRM.
inline constexpr int kQpTypeRc = 2;
enum QueuePairState : int {
  IBV_QPS_RESET = 0,
  IBV_QPS_INIT = 1,
  IBV_QPS_RTR = 2,
  IBV_QPS_RTS = 3,
  IBV_QPS_SQD = 4,
  IBV_QPS_SQE = 5,
  IBV_QPS_ERR = 6,
};

/// Which fields of ibv_qp_attr count.
enum QpAttributeMask : int {
  IBV_QP_STATE = 1 << 0,
  IBV_QP_CUR_STATE = 1 << 1,
  IBV_QP_ACCESS_FLAGS = 1 << 3,
  IBV_QP_PKEY_INDEX = 1 << 4,
  IBV_QP_PORT = 1 << 5,
  IBV_QP_AV = 1 << 7,
  IBV_QP_PATH_MTU = 1 << 8,
  IBV_QP_TIMEOUT = 1 << 9,
  IBV_QP_RETRY_CNT = 1 << 10,
  IBV_QP_RNR_RETRY = 1 << 11,
  IBV_QP_RQ_PSN = 1 << 12,
  IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
  IBV_QP_MIN_RNR_TIMER = 1 << 15,
  IBV_QP_SQ_PSN = 1 << 16,
  IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
  IBV_QP_DEST_QPN = 1 << 20,
};

/// Work requests and completions.
enum SendOpcode : int {
  IBV_WR_RDMA_WRITE = 0,
  IBV_WR_RDMA_WRITE_WITH_IMM = 1,
  IBV_WR_SEND = 2,
  IBV_WR_SEND_WITH_IMM = 3,
  IBV_WR_RDMA_READ = 4,
  IBV_WR_ATOMIC_CMP_AND_SWP = 5,
  IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
};
enum SendFlags : unsigned {
  IBV_SEND_FENCE = 1u << 0,
  IBV_SEND_SIGNALED = 1u << 1,
  IBV_SEND_SOLICITED = 1u << 2,
  IBV_SEND_INLINE = 1u << 3,
};
enum CompletionStatus : int {
  IBV_WC_SUCCESS = 0,
  IBV_WC_LOC_LEN_ERR = 1,
  IBV_WC_LOC_QP_OP_ERR = 2,
  IBV_WC_LOC_EEC_OP_ERR = 3,
  IBV_WC_LOC_PROT_ERR = 4,
  IBV_WC_WR_FLUSH_ERR = 5,
  IBV_WC_MW_BIND_ERR = 6,
  IBV_WC_BAD_RESP_ERR = 7,
  IBV_WC_LOC_ACCESS_ERR = 8,
  IBV_WC_REM_INV_REQ_ERR = 9,
  IBV_WC_REM_ACCESS_ERR = 10,
  IBV_WC_REM_OP_ERR = 11,
  IBV_WC_RETRY_EXC_ERR = 12,
  IBV_WC_RNR_RETRY_EXC_ERR = 13,
  IBV_WC_REM_ABORT_ERR = 16,
  IBV_WC_GENERAL_ERR = 21,
};
enum CompletionKind : int {
  IBV_WC_SEND = 0,
  IBV_WC_RDMA_WRITE = 1,
  IBV_WC_RDMA_READ = 2,
  IBV_WC_COMP_SWAP = 3,
  IBV_WC_FETCH_ADD = 4,
  IBV_WC_RECV = 128,
  IBV_WC_RECV_RDMA_WITH_IMM = 129,
};
inline constexpr unsigned IBV_WC_WITH_IMM = 1u << 1;

struct ibv_async_event {
  union {
    ibv_cq* cq;
    ibv_qp* qp;
    ibv_srq* srq;
    int port_num;
  } element;
  int event_type;
};
enum AsyncEvent : int {
  IBV_EVENT_CQ_ERR = 0,
  IBV_EVENT_QP_FATAL = 1,
  IBV_EVENT_QP_REQ_ERR = 2,
  IBV_EVENT_QP_ACCESS_ERR = 3,
  IBV_EVENT_COMM_EST = 4,
  IBV_EVENT_SQ_DRAINED = 5,
  IBV_EVENT_PATH_MIG = 6,
  IBV_EVENT_PATH_MIG_ERR = 7,
  IBV_EVENT_DEVICE_FATAL = 8,
  IBV_EVENT_PORT_ACTIVE = 9,
  IBV_EVENT_PORT_ERR = 10,
  IBV_EVENT_LID_CHANGE = 11,
  IBV_EVENT_PKEY_CHANGE = 12,
  IBV_EVENT_SM_CHANGE = 13,
  IBV_EVENT_SRQ_ERR = 14,
  IBV_EVENT_SRQ_LIMIT_REACHED = 15,
  IBV_EVENT_QP_LAST_WQE_REACHED = 16,
  IBV_EVENT_CLIENT_REREGISTER = 17,
  IBV_EVENT_GID_CHANGE = 18,
};

inline constexpr int kPortActive = 4;
inline constexpr int kMtu4096 = 5;
inline constexpr std::uint8_t kLinkLayerInfiniBand = 1;
inline constexpr std::uint8_t kLinkLayerEthernet = 2;

// --- libmlx5 (direct verbs, DevX) ---------------------------------------------------------------

struct mlx5dv_devx_obj;

struct mlx5dv_devx_umem {
  std::uint32_t umem_id;
};

struct mlx5dv_devx_umem_in {
  void* addr;
  std::size_t size;
  std::uint32_t access;
  std::uint64_t pgsz_bitmap;
  std::uint64_t comp_mask;
  int dmabuf_fd;
};
/// comp_mask: dmabuf_fd is valid and addr is an offset into it.
inline constexpr std::uint64_t kUmemMaskDmabuf = 1u << 0;

struct mlx5dv_devx_uar {
  void* reg_addr;   ///< where the doorbell is stored
  void* base_addr;  ///< start of its page
  std::uint32_t page_id;
  off_t mmap_off;
  std::uint64_t comp_mask;
};
/// Flags of devx_alloc_uar.
inline constexpr std::uint32_t kUarBlueFlame = 0;
inline constexpr std::uint32_t kUarNonCached = 1;
inline constexpr std::uint32_t kUarNonCachedDedicated = 1u << 31;

struct mlx5dv_pd {
  std::uint32_t pdn;
  std::uint64_t comp_mask;
};

struct mlx5dv_qp {
  std::uint32_t* dbrec;
  struct {
    void* buf;
    std::uint32_t wqe_cnt;
    std::uint32_t stride;
  } sq, rq;
  struct {
    void* reg;
    std::uint32_t size;
  } bf;
  std::uint64_t comp_mask;  ///< fields beyond this one the caller asks for; answered with 0
};

struct mlx5dv_cq {
  void* buf;
  std::uint32_t* dbrec;
  std::uint32_t cqe_cnt;
  std::uint32_t cqe_size;
  void* cq_uar;
  std::uint32_t cqn;
  std::uint64_t comp_mask;
};

struct mlx5dv_srq {
  void* buf;
  std::uint32_t* dbrec;
  std::uint32_t stride;
  std::uint32_t head;
  std::uint32_t tail;
  std::uint64_t comp_mask;
  std::uint32_t srqn;  ///< only with comp_mask bit 0
};

/// Address vector of a datagram WQE, 48 bytes.
struct mlx5_wqe_av {
  std::uint32_t key[2];   ///< BE: DC key or Q_Key
  std::uint32_t dqp_dct;  ///< BE
  std::uint8_t stat_rate_sl;
  std::uint8_t fl_mlid;
  std::uint16_t rlid;  ///< BE
  std::uint8_t reserved0[4];
  std::uint8_t rmac[6];
  std::uint8_t tclass;
  std::uint8_t hop_limit;
  std::uint32_t grh_gid_fl;  ///< BE
  std::uint8_t rgid[16];
};
static_assert(sizeof(mlx5_wqe_av) == 48);

struct mlx5dv_ah {
  mlx5_wqe_av* av;
  std::uint64_t comp_mask;
};

/// First fields of the answer of mlx5dv_query_device; the rest is optional by comp_mask.
struct mlx5dv_context_head {
  std::uint8_t version;
  std::uint64_t flags;
  std::uint64_t comp_mask;
};
inline constexpr std::uint64_t kContextCqeVersion1 = 1u << 0;

struct mlx5dv_obj {
  struct {
    ibv_qp* in;
    mlx5dv_qp* out;
  } qp;
  struct {
    ibv_cq* in;
    mlx5dv_cq* out;
  } cq;
  struct {
    ibv_srq* in;
    mlx5dv_srq* out;
  } srq;
  struct {
    void* in;
    void* out;
  } rwq, dm;
  struct {
    ibv_ah* in;
    mlx5dv_ah* out;
  } ah;
  struct {
    ibv_pd* in;
    mlx5dv_pd* out;
  } pd;
};
enum Mlx5Object : std::uint64_t {
  kObjectQp = 1u << 0,
  kObjectCq = 1u << 1,
  kObjectSrq = 1u << 2,
  kObjectAh = 1u << 5,
  kObjectPd = 1u << 6,
};

}  // namespace marrow::verbs
