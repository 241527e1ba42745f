// SPDX-License-Identifier: Apache-2.0
// One table of function pointers with the real libibverbs and libmlx5 signatures. gda and the verbs
// network call through it and never know whether a ConnectX or softnic answers; a provider fills
// it. The system provider is the two libraries, opened at run time; softnic registers itself at
// link time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "verbs/ibverbs_abi.h"

namespace marrow::verbs {

/// Functions of one provider. Those under "optional" may be null: test before the call. Errors are
/// reported as the real functions do: null or -1 with errno, or a positive errno as the result.
struct Table {
  const char* name = nullptr;  ///< "softnic", "system"

  // libibverbs
  ibv_device** (*get_device_list)(int* count) = nullptr;
  void (*free_device_list)(ibv_device** list) = nullptr;
  const char* (*get_device_name)(ibv_device* device) = nullptr;
  ibv_context* (*open_device)(ibv_device* device) = nullptr;
  int (*close_device)(ibv_context* context) = nullptr;
  int (*query_device)(ibv_context* context, ibv_device_attr* attr) = nullptr;
  int (*query_port)(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) = nullptr;
  int (*query_gid)(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) = nullptr;
  ibv_pd* (*alloc_pd)(ibv_context* context) = nullptr;
  int (*dealloc_pd)(ibv_pd* pd) = nullptr;
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* addr, std::size_t length, int access) = nullptr;
  int (*dereg_mr)(ibv_mr* mr) = nullptr;

  // libibverbs, optional
  int (*query_gid_ex)(ibv_context* context, std::uint32_t port, std::uint32_t index,
                      ibv_gid_entry* entry, std::uint32_t flags, std::size_t entry_bytes) = nullptr;
  ibv_mr* (*reg_mr_iova2)(ibv_pd* pd, void* addr, std::size_t length, std::uint64_t iova,
                          unsigned access) = nullptr;
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                           int fd, int access) = nullptr;
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* cq_context,
                       ibv_comp_channel* channel, int vector) = nullptr;
  int (*destroy_cq)(ibv_cq* cq) = nullptr;
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr) = nullptr;
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask) = nullptr;
  int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) = nullptr;
  int (*destroy_qp)(ibv_qp* qp) = nullptr;
  ibv_srq* (*create_srq)(ibv_pd* pd, ibv_srq_init_attr* attr) = nullptr;
  int (*modify_srq)(ibv_srq* srq, ibv_srq_attr* attr, int mask) = nullptr;
  int (*query_srq)(ibv_srq* srq, ibv_srq_attr* attr) = nullptr;
  int (*destroy_srq)(ibv_srq* srq) = nullptr;
  ibv_ah* (*create_ah)(ibv_pd* pd, ibv_ah_attr* attr) = nullptr;
  int (*destroy_ah)(ibv_ah* ah) = nullptr;
  ibv_comp_channel* (*create_comp_channel)(ibv_context* context) = nullptr;
  int (*destroy_comp_channel)(ibv_comp_channel* channel) = nullptr;
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) = nullptr;
  void (*ack_cq_events)(ibv_cq* cq, unsigned count) = nullptr;
  int (*get_async_event)(ibv_context* context, ibv_async_event* event) = nullptr;
  void (*ack_async_event)(ibv_async_event* event) = nullptr;

  // libmlx5; null as a group where only libibverbs is present
  bool (*is_supported)(ibv_device* device) = nullptr;
  int (*init_obj)(mlx5dv_obj* object, std::uint64_t type) = nullptr;
  mlx5dv_devx_umem* (*devx_umem_reg)(ibv_context* context, void* addr, std::size_t size,
                                     std::uint32_t access) = nullptr;
  mlx5dv_devx_umem* (*devx_umem_reg_ex)(ibv_context* context,
                                        mlx5dv_devx_umem_in* in) = nullptr;  // optional
  int (*devx_umem_dereg)(mlx5dv_devx_umem* umem) = nullptr;
  mlx5dv_devx_uar* (*devx_alloc_uar)(ibv_context* context, std::uint32_t flags) = nullptr;
  void (*devx_free_uar)(mlx5dv_devx_uar* uar) = nullptr;
  mlx5dv_devx_obj* (*devx_obj_create)(ibv_context* context, const void* in, std::size_t in_bytes,
                                      void* out, std::size_t out_bytes) = nullptr;
  int (*devx_obj_query)(mlx5dv_devx_obj* object, const void* in, std::size_t in_bytes, void* out,
                        std::size_t out_bytes) = nullptr;
  int (*devx_obj_modify)(mlx5dv_devx_obj* object, const void* in, std::size_t in_bytes, void* out,
                         std::size_t out_bytes) = nullptr;
  int (*devx_obj_destroy)(mlx5dv_devx_obj* object) = nullptr;
  int (*devx_query_eqn)(ibv_context* context, std::uint32_t vector, std::uint32_t* eqn) = nullptr;
  int (*devx_general_cmd)(ibv_context* context, const void* in, std::size_t in_bytes, void* out,
                          std::size_t out_bytes) = nullptr;

  // Marrow's own, null for real NICs

  /// Opens the device inside a job: all contexts opened with one job id, by threads and processes
  /// of one user on one host, reach each other and nobody else does. open_device uses the option
  /// "job=".
  /// @param job      1..64 characters of [A-Za-z0-9_-]; null = as open_device
  /// @param options  "key=value,..." as MARROW_SOFTNIC; null = the value of that parameter
  ibv_context* (*open_device_in_job)(ibv_device* device, const char* job,
                                     const char* options) = nullptr;
  /// Says which file descriptor stands behind memory, so that other processes can map it. Memory
  /// registered (reg_mr) after this call inside [addr, addr + bytes) is reached by the engines of all
  /// processes of the job directly; other regions only through a message to this process's engine,
  /// which is slower. The descriptor is duplicated.
  /// @param fd      memfd or other file that can be mapped shared
  /// @param offset  position of addr in the file, in bytes, page aligned as addr
  /// @return 0 or errno
  int (*expose_memory)(ibv_context* context, void* addr, std::size_t bytes, int fd,
                       std::uint64_t offset) = nullptr;
  /// Takes expose_memory back. Regions registered meanwhile stay as they are. @return 0 or errno
  int (*withdraw_memory)(ibv_context* context, void* addr) = nullptr;
  /// Says that kernels of a GPU will use the context, so that memory registered from now on may be that
  /// GPU's. @return null, or a sentence why its memory cannot be used
  const char* (*accept_gpu)(ibv_context* context, int gpu) = nullptr;
  /// Chooses who executes the queues and doorbell registers that the context makes from now on: a block on
  /// its GPU, whose queues and registers lie in GPU memory, or a CPU thread.
  /// @param gpu_memory  1: registered memory is GPU memory somewhere in the job
  /// @return 1: the GPU, 0: the CPU, -1: failed (errno)
  int (*choose_engine)(ibv_context* context, int gpu_memory) = nullptr;
  /// How many of the context's queue pairs an error has stopped so far; for queues that no CPU can look at.
  std::uint64_t (*failures)(ibv_context* context) = nullptr;
  /// A sentence about the last failure on this thread, "" if none.
  const char* (*last_error)() = nullptr;

  /// True if queues can be created through DevX, that is, the gda path can use this provider.
  bool has_devx() const noexcept {
    return is_supported && init_obj && devx_umem_reg && devx_alloc_uar && devx_obj_create &&
           devx_obj_modify && devx_obj_query && devx_obj_destroy && devx_query_eqn &&
           devx_general_cmd;
  }
};

/// Makes a table known by its name; for static initialisers of providers. The table must live as
/// long as the program. Registering a name twice replaces it.
/// @return true, so that a static object can be initialised with it
bool register_provider(const Table* table);

/// The table named "system" (libibverbs.so.1 and, where present, libmlx5.so.1) or one registered.
/// @throws Error  invalid_argument: unknown name (the sentence lists the known ones);
///                unsupported: a library or symbol is missing (the sentence names it)
const Table& provider(std::string_view name);

/// Names that provider() knows, "system" included.
std::vector<std::string> provider_names();

}  // namespace marrow::verbs
