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

/// Slots that are only reached through the context; unused ones are kept as plain pointers.
struct ibv_context_ops {
  void* unused_0_10[11];
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

union ibv_gid {
  std::uint8_t raw[16];
  struct {
    std::uint64_t subnet_prefix;  ///< BE
    std::uint64_t interface_id;   ///< BE
  } global;
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

struct mlx5dv_obj {
  struct Pair {
    void* in;
    void* out;
  };
  Pair qp, cq, srq, rwq, dm, ah;
  struct {
    ibv_pd* in;
    mlx5dv_pd* out;
  } pd;
};
inline constexpr std::uint64_t kObjectPd = 1u << 6;

}  // namespace marrow::verbs
