// SPDX-License-Identifier: Apache-2.0
// libmlx5.so.1 in front of softnic: the direct-verbs names that drivers of device queues call
// (rdma-core, providers/mlx5/mlx5dv.h). It needs the libibverbs.so.1 of its own folder.
#include <cerrno>
#include <cstring>

#include "softnic_libs/library.hpp"

namespace {

using namespace marrow::verbs;  // NOLINT: this file is that interface

const Table& nic() { return *marrow_softnic_verbs_table(); }

/// First fields of ibv_qp_init_attr_ex: those of ibv_qp_init_attr, then a mask that must name the PD.
struct QpInitAttrEx {
  ibv_qp_init_attr base;
  std::uint32_t comp_mask;
  ibv_pd* pd;
};
static_assert(offsetof(QpInitAttrEx, comp_mask) == 64 || sizeof(void*) != 8);
constexpr std::uint32_t kHasPd = 1;

}  // namespace

MARROW_EXPORT bool mlx5dv_is_supported(ibv_device* device) { return nic().is_supported(device); }
MARROW_EXPORT ibv_context* mlx5dv_open_device(ibv_device* device, void*) {
  return nic().open_device(device);
}
/// Completion entries carry the user index (version 1); none of the optional capabilities is there.
MARROW_EXPORT int mlx5dv_query_device(ibv_context*, mlx5dv_context_head* out) {
  out->version = 0;
  out->flags = kContextCqeVersion1;
  out->comp_mask = 0;
  return 0;
}
MARROW_EXPORT int mlx5dv_init_obj(mlx5dv_obj* object, std::uint64_t type) {
  return nic().init_obj(object, type);
}
/// Without attributes of its own this is ibv_create_qp.
MARROW_EXPORT ibv_qp* mlx5dv_create_qp(ibv_context*, QpInitAttrEx* attr, std::uint64_t* dv) {
  if (attr->comp_mask != kHasPd || (dv != nullptr && *dv != 0)) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  return nic().create_qp(attr->pd, &attr->base);
}

MARROW_EXPORT mlx5dv_devx_umem* mlx5dv_devx_umem_reg(ibv_context* context, void* addr,
                                                     std::size_t size, std::uint32_t access) {
  return nic().devx_umem_reg(context, addr, size, access);
}
MARROW_EXPORT mlx5dv_devx_umem* mlx5dv_devx_umem_reg_ex(ibv_context* context,
                                                        mlx5dv_devx_umem_in* in) {
  return nic().devx_umem_reg_ex(context, in);
}
MARROW_EXPORT int mlx5dv_devx_umem_dereg(mlx5dv_devx_umem* umem) {
  return nic().devx_umem_dereg(umem);
}
MARROW_EXPORT mlx5dv_devx_uar* mlx5dv_devx_alloc_uar(ibv_context* context, std::uint32_t flags) {
  return nic().devx_alloc_uar(context, flags);
}
MARROW_EXPORT void mlx5dv_devx_free_uar(mlx5dv_devx_uar* uar) { nic().devx_free_uar(uar); }
MARROW_EXPORT mlx5dv_devx_obj* mlx5dv_devx_obj_create(ibv_context* context, const void* in,
                                                      std::size_t in_bytes, void* out,
                                                      std::size_t out_bytes) {
  return nic().devx_obj_create(context, in, in_bytes, out, out_bytes);
}
MARROW_EXPORT int mlx5dv_devx_obj_query(mlx5dv_devx_obj* object, const void* in,
                                        std::size_t in_bytes, void* out, std::size_t out_bytes) {
  return nic().devx_obj_query(object, in, in_bytes, out, out_bytes);
}
MARROW_EXPORT int mlx5dv_devx_obj_modify(mlx5dv_devx_obj* object, const void* in,
                                         std::size_t in_bytes, void* out, std::size_t out_bytes) {
  return nic().devx_obj_modify(object, in, in_bytes, out, out_bytes);
}
MARROW_EXPORT int mlx5dv_devx_obj_destroy(mlx5dv_devx_obj* object) {
  return nic().devx_obj_destroy(object);
}
MARROW_EXPORT int mlx5dv_devx_query_eqn(ibv_context* context, std::uint32_t vector,
                                        std::uint32_t* eqn) {
  return nic().devx_query_eqn(context, vector, eqn);
}
MARROW_EXPORT int mlx5dv_devx_general_cmd(ibv_context* context, const void* in,
                                          std::size_t in_bytes, void* out, std::size_t out_bytes) {
  return nic().devx_general_cmd(context, in, in_bytes, out, out_bytes);
}

MARROW_EXPORT int mlx5dv_get_data_direct_sysfs_path(ibv_context*, char*, std::size_t) {
  return ENODEV;
}
MARROW_EXPORT ibv_mr* mlx5dv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length,
                                           std::uint64_t iova, int fd, int access, int) {
  return nic().reg_dmabuf_mr(pd, offset, length, iova, fd, access);
}
