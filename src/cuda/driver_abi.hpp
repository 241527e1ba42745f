// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver's and NVML's C interface that Marrow calls, declared here so that the
// library builds without CUDA's headers. Values and layouts are those of cuda.h (CUDA 12.4 and
// newer; the driver keeps them stable); tests/unit/cuda_abi_test.cpp compares them with cuda.h
// where it is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace marrow::cuda {

/// CUresult. 0 is success.
enum class Result : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  deinitialized = 4,
  no_device = 100,
  invalid_device = 101,
  invalid_context = 201,
  already_mapped = 208,
  peer_access_unsupported = 217,
  invalid_handle = 400,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  peer_access_already_enabled = 704,
  host_memory_already_registered = 712,
  host_memory_not_registered = 713,
  not_permitted = 800,
  not_supported = 801,
  unknown = 999,
};

using Device = int;
using DevicePointer = unsigned long long;
using ContextHandle = struct CUctx_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using AllocationHandle = unsigned long long;

struct Uuid {
  unsigned char bytes[16];
};
struct IpcHandle {
  unsigned char bytes[64];
};

/// CUmemLocation. type 1: a device.
struct Location {
  int type = 1;
  int id = 0;
};
/// CUmemAllocationProp. type 1: pinned; handle type 1: POSIX file descriptor.
struct AllocationProperties {
  int type = 1;
  int handle_types = 1;
  Location location;
  void* win32_meta_data = nullptr;
  struct {
    unsigned char compression = 0;
    unsigned char gpu_direct_rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32);
/// CUmemAccessDesc. flags 3: read and write.
struct AccessDescriptor {
  Location location;
  int flags = 3;
};
static_assert(sizeof(AccessDescriptor) == 12);

inline constexpr int kHandlePosixFd = 1;
inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostRegisterDeviceMap = 2;
inline constexpr unsigned kIpcLazyEnablePeerAccess = 1;

/// CUdevice_attribute.
enum class DeviceAttribute : int {
  integrated = 18,
  multiprocessors = 16,
  pci_bus = 33,
  pci_device = 34,
  pci_domain = 50,
  compute_major = 75,
  compute_minor = 76,
  vmm_supported = 102,
  posix_fd_supported = 103,
  gpu_direct_rdma_with_vmm = 110,
  gpu_direct_rdma_supported = 116,
  gpu_direct_rdma_writes_ordering = 118,
  dma_buf_supported = 124,
};
/// CUdevice_P2PAttribute.
enum class P2PAttribute : int { performance_rank = 1, access = 2, native_atomics = 3 };
/// CUpointer_attribute.
enum class PointerAttribute : int {
  memory_type = 2,
  is_managed = 8,
  device_ordinal = 9,
  is_legacy_ipc_capable = 10,
  range_start = 11,
  range_size = 12,
  mapped = 13,
  allowed_handle_types = 14,
};
inline constexpr int kMemoryTypeHost = 1;
inline constexpr int kMemoryTypeDevice = 2;

/// X(member, exported symbol, arguments). The symbols are the current versions (_v2 where it is).
#define MARROW_CUDA_DRIVER_FUNCTIONS(X)                                                            \
  X(init, "cuInit", (unsigned))                                                                    \
  X(driver_version, "cuDriverGetVersion", (int*))                                                  \
  X(error_name, "cuGetErrorName", (Result, const char**))                                          \
  X(error_string, "cuGetErrorString", (Result, const char**))                                      \
  X(device_count, "cuDeviceGetCount", (int*))                                                      \
  X(device_get, "cuDeviceGet", (Device*, int))                                                     \
  X(device_name, "cuDeviceGetName", (char*, int, Device))                                          \
  X(device_uuid, "cuDeviceGetUuid_v2", (Uuid*, Device))                                            \
  X(device_pci_bus_id, "cuDeviceGetPCIBusId", (char*, int, Device))                                \
  X(device_attribute, "cuDeviceGetAttribute", (int*, DeviceAttribute, Device))                     \
  X(device_total_memory, "cuDeviceTotalMem_v2", (std::size_t*, Device))                            \
  X(device_can_access_peer, "cuDeviceCanAccessPeer", (int*, Device, Device))                       \
  X(device_p2p_attribute, "cuDeviceGetP2PAttribute", (int*, P2PAttribute, Device, Device))         \
  X(context_retain, "cuDevicePrimaryCtxRetain", (ContextHandle*, Device))                          \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (Device))                                     \
  X(context_push, "cuCtxPushCurrent_v2", (ContextHandle))                                          \
  X(context_pop, "cuCtxPopCurrent_v2", (ContextHandle*))                                           \
  X(context_enable_peer, "cuCtxEnablePeerAccess", (ContextHandle, unsigned))                       \
  X(memory_create, "cuMemCreate",                                                                  \
    (AllocationHandle*, std::size_t, const AllocationProperties*, unsigned long long))             \
  X(memory_release, "cuMemRelease", (AllocationHandle))                                            \
  X(memory_reserve, "cuMemAddressReserve",                                                         \
    (DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long))                 \
  X(memory_unreserve, "cuMemAddressFree", (DevicePointer, std::size_t))                            \
  X(memory_map, "cuMemMap",                                                                        \
    (DevicePointer, std::size_t, std::size_t, AllocationHandle, unsigned long long))               \
  X(memory_unmap, "cuMemUnmap", (DevicePointer, std::size_t))                                      \
  X(memory_set_access, "cuMemSetAccess",                                                           \
    (DevicePointer, std::size_t, const AccessDescriptor*, std::size_t))                            \
  X(memory_get_access, "cuMemGetAccess", (unsigned long long*, const Location*, DevicePointer))    \
  X(memory_export, "cuMemExportToShareableHandle",                                                 \
    (void*, AllocationHandle, int, unsigned long long))                                            \
  X(memory_import, "cuMemImportFromShareableHandle", (AllocationHandle*, void*, int))              \
  X(memory_granularity, "cuMemGetAllocationGranularity",                                           \
    (std::size_t*, const AllocationProperties*, int))                                              \
  X(memory_retain, "cuMemRetainAllocationHandle", (AllocationHandle*, void*))                      \
  X(memory_handle_for_range, "cuMemGetHandleForAddressRange",                                      \
    (void*, DevicePointer, std::size_t, int, unsigned long long))                                  \
  X(memory_range, "cuMemGetAddressRange_v2", (DevicePointer*, std::size_t*, DevicePointer))        \
  X(pointer_attribute, "cuPointerGetAttribute", (void*, PointerAttribute, DevicePointer))          \
  X(ipc_get, "cuIpcGetMemHandle", (IpcHandle*, DevicePointer))                                     \
  X(ipc_open, "cuIpcOpenMemHandle_v2", (DevicePointer*, IpcHandle, unsigned))                      \
  X(ipc_close, "cuIpcCloseMemHandle", (DevicePointer))                                             \
  X(host_register, "cuMemHostRegister_v2", (void*, std::size_t, unsigned))                         \
  X(host_unregister, "cuMemHostUnregister", (void*))                                               \
  X(host_device_pointer, "cuMemHostGetDevicePointer_v2", (DevicePointer*, void*, unsigned))        \
  X(memset_d8_async, "cuMemsetD8Async", (DevicePointer, unsigned char, std::size_t, StreamHandle)) \
  X(copy_async, "cuMemcpyAsync", (DevicePointer, DevicePointer, std::size_t, StreamHandle))        \
  X(stream_create_with_priority, "cuStreamCreateWithPriority", (StreamHandle*, unsigned, int))     \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle))                                          \
  X(stream_synchronize, "cuStreamSynchronize", (StreamHandle))                                     \
  X(stream_query, "cuStreamQuery", (StreamHandle))                                                 \
  X(event_create, "cuEventCreate", (EventHandle*, unsigned))                                       \
  X(event_destroy, "cuEventDestroy_v2", (EventHandle))                                             \
  X(event_record, "cuEventRecord", (EventHandle, StreamHandle))                                    \
  X(event_query, "cuEventQuery", (EventHandle))

using NvmlDevice = struct nvmlDevice_st*;

/// memory_handle_for_range: a dma-buf descriptor of pages of GPU memory.
inline constexpr int kRangeHandleDmaBuf = 1;

/// NVML. Every function returns 0 on success; P2P caps index: 2 NVLink, 3 atomics, 4 prop (any).
#define MARROW_NVML_FUNCTIONS(X)                                               \
  X(init, "nvmlInit_v2", ())                                                   \
  X(driver_version, "nvmlSystemGetDriverVersion", (char*, unsigned))           \
  X(device_by_uuid, "nvmlDeviceGetHandleByUUID", (const char*, NvmlDevice*))   \
  X(p2p_status, "nvmlDeviceGetP2PStatus", (NvmlDevice, NvmlDevice, int, int*)) \
  X(topology_ancestor, "nvmlDeviceGetTopologyCommonAncestor", (NvmlDevice, NvmlDevice, int*))

}  // namespace marrow::cuda
