// SPDX-License-Identifier: Apache-2.0
// Our declarations of the driver's interface against cuda.h, where it is installed.
#include <gtest/gtest.h>

#include "cuda/driver_abi.hpp"

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace marrow::cuda {
namespace {

static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(AccessDescriptor) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDescriptor, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(AllocationHandle) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(DevicePointer) == sizeof(CUdeviceptr));

template <class A, class B>
void same(A ours, B theirs) {
  EXPECT_EQ(static_cast<long>(ours), static_cast<long>(theirs));
}

TEST(CudaAbi, ValuesMatchTheHeader) {
  same(Result::out_of_memory, CUDA_ERROR_OUT_OF_MEMORY);
  same(Result::deinitialized, CUDA_ERROR_DEINITIALIZED);
  same(Result::no_device, CUDA_ERROR_NO_DEVICE);
  same(Result::already_mapped, CUDA_ERROR_ALREADY_MAPPED);
  same(Result::peer_access_unsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  same(Result::not_ready, CUDA_ERROR_NOT_READY);
  same(Result::peer_access_already_enabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  same(Result::host_memory_already_registered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  same(Result::not_supported, CUDA_ERROR_NOT_SUPPORTED);
  const CUmemAllocationProp theirs{};
  (void)theirs;
  const AllocationProperties properties;
  same(properties.type, CU_MEM_ALLOCATION_TYPE_PINNED);
  same(properties.handle_types, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  same(properties.location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  same(AccessDescriptor{}.flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  same(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  same(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
  same(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
  same(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
  same(kHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
  same(kRangeHandleDmaBuf, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
  same(kIpcLazyEnablePeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  same(DeviceAttribute::multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  same(DeviceAttribute::integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED);
  same(DeviceAttribute::compute_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  same(DeviceAttribute::compute_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  same(DeviceAttribute::vmm_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  same(DeviceAttribute::posix_fd_supported,
       CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  same(DeviceAttribute::gpu_direct_rdma_with_vmm,
       CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  same(DeviceAttribute::gpu_direct_rdma_supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
  same(DeviceAttribute::gpu_direct_rdma_writes_ordering,
       CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
  same(DeviceAttribute::dma_buf_supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
  same(P2PAttribute::native_atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
  same(PointerAttribute::memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
  same(PointerAttribute::is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED);
  same(PointerAttribute::device_ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
  same(PointerAttribute::is_legacy_ipc_capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
  same(PointerAttribute::allowed_handle_types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
  same(kMemoryTypeHost, CU_MEMORYTYPE_HOST);
  same(kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE);
}

}  // namespace
}  // namespace marrow::cuda
#else
TEST(CudaAbi, NeedsTheHeader) { GTEST_SKIP() << "cuda.h is not installed"; }
#endif
