// SPDX-License-Identifier: Apache-2.0
// Queue pairs as gpunetio's own example sets them up: made by its host library, connected through its
// attributes. Everything below goes through whatever libibverbs.so.1 and libmlx5.so.1 are found.
#pragma once

#include <dlfcn.h>
#include <doca_gpunetio_host.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "verbs/ibverbs_abi.h"

namespace judge {

namespace verbs = marrow::verbs;

[[noreturn]] inline void die(const std::string& what) {
  std::fprintf(stderr, "gpunetio host judge: %s\n", what.c_str());
  std::_Exit(1);  // a kernel may still spin
}
inline void must(doca_error_t status, const char* what) {
  if (status != DOCA_SUCCESS)
    die(std::string(what) + " failed, doca_error " + std::to_string(status));
}

/// The verbs a program calls itself, from the library that gpunetio opens too.
struct Verbs {
  Verbs() : library(::dlopen("libibverbs.so.1", RTLD_NOW)) {
    if (library == nullptr) die(std::string("no libibverbs.so.1: ") + ::dlerror());
    get(get_device_list, "ibv_get_device_list");
    get(get_device_name, "ibv_get_device_name");
    get(open_device, "ibv_open_device");
    get(close_device, "ibv_close_device");
    get(query_port, "ibv_query_port");
    get(alloc_pd, "ibv_alloc_pd");
    get(dealloc_pd, "ibv_dealloc_pd");
    get(reg_mr, "ibv_reg_mr");
    get(dereg_mr, "ibv_dereg_mr");
  }
  template <class Function>
  void get(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr) die(std::string("libibverbs.so.1 has no ") + name);
  }
  void* library;
  verbs::ibv_device** (*get_device_list)(int*);
  const char* (*get_device_name)(verbs::ibv_device*);
  verbs::ibv_context* (*open_device)(verbs::ibv_device*);
  int (*close_device)(verbs::ibv_context*);
  int (*query_port)(verbs::ibv_context*, std::uint8_t, void*);
  verbs::ibv_pd* (*alloc_pd)(verbs::ibv_context*);
  int (*dealloc_pd)(verbs::ibv_pd*);
  verbs::ibv_mr* (*reg_mr)(verbs::ibv_pd*, void*, std::size_t, int);
  int (*dereg_mr)(verbs::ibv_mr*);
};

struct Device {
  Device(const char* gpu_bus_id) {
    int count = 0;
    verbs::ibv_device** list = calls.get_device_list(&count);
    if (list == nullptr || count != 1) die("there is not exactly one RDMA device");
    name = calls.get_device_name(list[0]);
    context = calls.open_device(list[0]);
    if (context == nullptr) die("ibv_open_device failed");
    pd = calls.alloc_pd(context);
    verbs::ibv_port_attr port{};
    if (pd == nullptr || calls.query_port(context, 1, &port) != 0) die("no PD or port");
    lid = port.lid;
    must(doca_gpu_create(gpu_bus_id, &gpu), "doca_gpu_create");
  }
  doca_gpu_verbs_qp_init_attr_hl attributes(bool collapsed) const {
    doca_gpu_verbs_qp_init_attr_hl init{};
    init.gpu_dev = gpu;
    init.ibpd = reinterpret_cast<::ibv_pd*>(pd);
    init.sq_nwqe = 256;
    init.nic_handler = DOCA_GPUNETIO_VERBS_NIC_HANDLER_AUTO;
    init.mreg_type = DOCA_GPUNETIO_VERBS_MEM_REG_TYPE_DEFAULT;
    init.send_dbr_mode_ext = DOCA_GPUNETIO_VERBS_SEND_DBR_MODE_EXT_VALID_DBR;
    init.cq_collapsed = collapsed;
    return init;
  }
  Verbs calls;
  std::string name;
  verbs::ibv_context* context = nullptr;
  verbs::ibv_pd* pd = nullptr;
  doca_gpu* gpu = nullptr;
  std::uint16_t lid = 0;
};

/// RST2INIT, INIT2RTR, RTR2RTS through gpunetio's attributes, then its query.
inline void connect(const Device& device, doca_verbs_qp* qp, std::uint32_t remote_qpn) {
  doca_verbs_ah_attr* path = nullptr;
  auto* context = reinterpret_cast<::ibv_context*>(device.context);
  must(doca_verbs_ah_attr_create(context, &path), "ah_attr_create");
  must(doca_verbs_ah_attr_set_addr_type(path, DOCA_VERBS_ADDR_TYPE_IB_NO_GRH), "addr_type");
  must(doca_verbs_ah_attr_set_sgid_index(path, 0), "sgid_index");
  must(doca_verbs_ah_attr_set_hop_limit(path, 255), "hop_limit");
  must(doca_verbs_ah_attr_set_dlid(path, device.lid), "dlid");
  must(doca_verbs_ah_attr_set_sl(path, 0), "sl");
  doca_verbs_qp_attr* a = nullptr;
  must(doca_verbs_qp_attr_create(&a), "qp_attr_create");
  must(doca_verbs_qp_attr_set_path_mtu(a, DOCA_VERBS_MTU_SIZE_4K_BYTES), "path_mtu");
  must(doca_verbs_qp_attr_set_rq_psn(a, 0), "rq_psn");
  must(doca_verbs_qp_attr_set_sq_psn(a, 0), "sq_psn");
  must(doca_verbs_qp_attr_set_port_num(a, 1), "port_num");
  must(doca_verbs_qp_attr_set_ack_timeout(a, 14), "ack_timeout");
  must(doca_verbs_qp_attr_set_retry_cnt(a, 7), "retry_cnt");
  must(doca_verbs_qp_attr_set_rnr_retry(a, 1), "rnr_retry");
  must(doca_verbs_qp_attr_set_min_rnr_timer(a, 1), "min_rnr_timer");
  must(doca_verbs_qp_attr_set_allow_remote_write(a, 1), "allow_remote_write");
  must(doca_verbs_qp_attr_set_allow_remote_read(a, 1), "allow_remote_read");
  must(doca_verbs_qp_attr_set_allow_remote_atomic(a, DOCA_VERBS_QP_ATOMIC_MODE_IB_SPEC),
       "allow_remote_atomic");
  must(doca_verbs_qp_attr_set_ah_attr(a, path), "ah_attr");
  must(doca_verbs_qp_attr_set_pkey_index(a, 0), "pkey_index");
  must(doca_verbs_qp_attr_set_dest_qp_num(a, remote_qpn), "dest_qp_num");
  must(doca_verbs_qp_attr_set_next_state(a, DOCA_VERBS_QP_STATE_INIT), "next_state");
  must(doca_verbs_qp_modify(qp, a,
                            DOCA_VERBS_QP_ATTR_NEXT_STATE | DOCA_VERBS_QP_ATTR_ALLOW_REMOTE_WRITE |
                                DOCA_VERBS_QP_ATTR_ALLOW_REMOTE_READ |
                                DOCA_VERBS_QP_ATTR_PKEY_INDEX | DOCA_VERBS_QP_ATTR_PORT_NUM),
       "RST2INIT");
  must(doca_verbs_qp_attr_set_next_state(a, DOCA_VERBS_QP_STATE_RTR), "next_state");
  must(doca_verbs_qp_modify(qp, a,
                            DOCA_VERBS_QP_ATTR_NEXT_STATE | DOCA_VERBS_QP_ATTR_RQ_PSN |
                                DOCA_VERBS_QP_ATTR_DEST_QP_NUM | DOCA_VERBS_QP_ATTR_PATH_MTU |
                                DOCA_VERBS_QP_ATTR_AH_ATTR | DOCA_VERBS_QP_ATTR_MIN_RNR_TIMER),
       "INIT2RTR");
  must(doca_verbs_qp_attr_set_next_state(a, DOCA_VERBS_QP_STATE_RTS), "next_state");
  must(doca_verbs_qp_modify(qp, a,
                            DOCA_VERBS_QP_ATTR_NEXT_STATE | DOCA_VERBS_QP_ATTR_SQ_PSN |
                                DOCA_VERBS_QP_ATTR_ACK_TIMEOUT | DOCA_VERBS_QP_ATTR_RETRY_CNT |
                                DOCA_VERBS_QP_ATTR_RNR_RETRY),
       "RTR2RTS");
  must(doca_verbs_qp_attr_destroy(a), "qp_attr_destroy");
  must(doca_verbs_ah_attr_destroy(path), "ah_attr_destroy");
}

}  // namespace judge
