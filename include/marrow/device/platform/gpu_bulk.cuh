// SPDX-License-Identifier: Apache-2.0
// Bulk copy on GPUs that have it (sm_90 and newer): one thread drives the SM's copy engine through
// stages of shared memory, so a few SMs with few threads fill NVLink. Elsewhere it is the plain copy.
#pragma once

namespace marrow {
inline namespace gpu_device {
namespace detail {

inline constexpr std::uint32_t kBulkStages = 8;
inline constexpr std::uint32_t kBulkBarriers = 128;  ///< bytes of scratch for the stages' barriers
inline constexpr std::uint32_t kBulkMostStage = 16384;  ///< more does not help
inline constexpr std::uint32_t kBulkLeastStage = 1024;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

MARROW_DEVICE std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Waits for a load into shared memory, which waits for nothing but memory.
MARROW_DEVICE void bulk_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "AGAIN:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra AGAIN;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

/// Called by one thread. All sizes multiples of 16. On return the copy is complete: this thread's later
/// release covers it.
__device__ __noinline__ inline void bulk_copy_alone(unsigned char* to, const unsigned char* from,
                                                    std::size_t bytes, unsigned char* scratch,
                                                    std::uint32_t stage_bytes) {
  constexpr std::uint32_t kAhead = kBulkStages / 2;
  const std::uint32_t barriers = shared_address(scratch);
  const std::uint32_t stages = barriers + kBulkBarriers;
  for (std::uint32_t s = 0; s < kBulkStages; ++s) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * s) : "memory");
  }
  // The source may have been written, and this shared memory used, by ordinary stores: the copy engine
  // must see them. It also orders the barriers' initialisation.
  asm volatile("fence.proxy.async;" ::: "memory");
  const std::size_t count = (bytes + stage_bytes - 1) / stage_bytes;
  const auto part = [&](std::size_t i) {
    const std::size_t left = bytes - i * stage_bytes;
    return static_cast<std::uint32_t>(left < stage_bytes ? left : stage_bytes);
  };
  const auto load = [&](std::size_t i) {
    const auto stage = static_cast<std::uint32_t>(i % kBulkStages);
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barriers + 8 * stage),
        "r"(part(i))
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(stages + stage * stage_bytes),
        "l"(__cvta_generic_to_global(from + i * stage_bytes)), "r"(part(i)),
        "r"(barriers + 8 * stage)
        : "memory");
  };
  for (std::size_t i = 0; i < kAhead && i < count; ++i) load(i);
  for (std::size_t i = 0; i < count; ++i) {
    const auto stage = static_cast<std::uint32_t>(i % kBulkStages);
    bulk_wait(barriers + 8 * stage, static_cast<std::uint32_t>(i / kBulkStages) & 1);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to + i * stage_bytes)),
                 "r"(stages + stage * stage_bytes), "r"(part(i))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (i + kAhead < count) {
      // That stage was stored kBulkStages - kAhead groups ago: wait until those have been read.
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kBulkStages - kAhead) : "memory");
      load(i + kAhead);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  for (std::uint32_t s = 0; s < kBulkStages; ++s) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barriers + 8 * s) : "memory");
  }
}
#endif

}  // namespace detail

/// copy() through shared memory that the caller lends; member 0 does it. The others return at once, so
/// the group must meet before the scratch is used again.
MARROW_DEVICE void bulk_copy(void* dst, const void* src, std::size_t bytes, const Scratch& scratch,
                             unsigned rank, unsigned size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto either =
      reinterpret_cast<std::uintptr_t>(dst) | reinterpret_cast<std::uintptr_t>(src) | bytes;
  const auto lent = reinterpret_cast<std::uintptr_t>(scratch.shared);
  std::uint32_t stage =
      scratch.bytes < detail::kBulkBarriers
          ? 0
          : (scratch.bytes - detail::kBulkBarriers) / detail::kBulkStages / 128 * 128;
  if (stage > detail::kBulkMostStage) stage = detail::kBulkMostStage;
  if ((either & 15) == 0 && (lent & 127) == 0 && stage >= detail::kBulkLeastStage &&
      bytes >= 2 * stage) {
    if (rank == 0) {
      detail::bulk_copy_alone(static_cast<unsigned char*>(dst),
                              static_cast<const unsigned char*>(src), bytes,
                              static_cast<unsigned char*>(scratch.shared), stage);
    }
    return;
  }
#endif
  copy(dst, src, bytes, rank, size);
}

}  // namespace gpu_device
}  // namespace marrow
