// SPDX-License-Identifier: Apache-2.0
#include "proxy/device_rings.hpp"

#include <algorithm>
#include <bit>
#include <vector>

namespace marrow::proxy {

DeviceRings::DeviceRings(memory::Arena& arena, const Requirements& requirements,
                         const memory::Block& counters, int nranks, int threads,
                         std::uint32_t log_size, std::uint32_t number, std::uint32_t stage_bytes,
                         std::uint32_t stage_thread_bytes)
    : contexts_(requirements.contexts),
      nranks_(nranks),
      threads_(threads),
      counters_(requirements.counters),
      log_size_(log_size),
      number_(number),
      first_(requirements.first_index),
      counter_words_(reinterpret_cast<std::uint64_t*>(counters.host)) {
  // One block of pinned host memory: slots, consumed lines, results, completions.
  const std::size_t rings = static_cast<std::size_t>(contexts_) * threads_;
  const std::size_t queues = static_cast<std::size_t>(contexts_) * nranks_;
  const std::size_t line_at = (rings << log_size_) * sizeof(ProxyDescriptor);
  const std::size_t result_at = line_at + rings * sizeof(Line);
  const std::size_t completion_at = result_at + rings * kProxyFetchSlots * sizeof(ProxyChunk);
  static_assert(kProxyFetchSlots * sizeof(ProxyChunk) % alignof(ProxyCompletion) == 0);
  const memory::Block block =
      arena.allocate(completion_at + queues * sizeof(ProxyCompletion), Memory::host);
  slots_ = reinterpret_cast<ProxyDescriptor*>(block.host);
  lines_ = reinterpret_cast<Line*>(block.host + line_at);
  results_ = reinterpret_cast<ProxyChunk*>(block.host + result_at);
  completion_ = reinterpret_cast<ProxyCompletion*>(block.host + completion_at);

  // Each slot starts with the lap bit that the first index to use it has not.
  const std::uint64_t size = std::uint64_t{1} << log_size_;
  for (std::size_t r = 0; r < rings; ++r) {
    lines_[r].consumed = first_;
    for (std::uint64_t i = 0; i < size; ++i) {
      const std::uint64_t index = first_ + i;
      const std::uint64_t unused = proxy_lap(index, log_size_) ^ kProxyLapBit;
      if (unused == 0) continue;  // the memory is zero already, and may stay untouched
      for (ProxyChunk& chunk : slots_[(r << log_size_) + (index & (size - 1))].chunk)
        chunk.high = unused;
    }
  }
  for (std::size_t q = 0; q < queues; ++q) completion_[q].completed = first_;

  // What kernels change: in the executor's memory.
  std::vector<ProxyRing> image(rings);
  for (std::size_t r = 0; r < rings; ++r) {
    ProxyRing& ring = image[r];
    ring = {};
    ring.slots = reinterpret_cast<ProxyDescriptor*>(block.device) + (r << log_size_);
    ring.consumed =
        reinterpret_cast<const std::uint64_t*>(block.device + line_at + r * sizeof(Line));
    ring.results =
        reinterpret_cast<const ProxyChunk*>(block.device + result_at) + r * kProxyFetchSlots;
    ring.log_size = log_size_;
    ring.producer = first_;
    ring.limit = first_ + size;
    ring.consumed_seen = first_;
    ring.credits = size;
    std::fill(std::begin(ring.fetch_free), std::end(ring.fetch_free), ~std::uint64_t{0});
  }
  const std::vector<std::uint64_t> posted(queues, first_);
  ProxyDevice device;
  device.abi = kAbiVersion;
  device.threads = static_cast<std::uint32_t>(threads_);
  device.magic = proxy_magic(device.threads);
  device.slots = reinterpret_cast<ProxyDescriptor*>(block.device);
  device.log_size = log_size_;
  device.rings =
      static_cast<ProxyRing*>(arena.upload(image.data(), image.size() * sizeof(ProxyRing)));
  device.posted = static_cast<std::uint64_t*>(
      arena.upload(posted.data(), posted.size() * sizeof(std::uint64_t)));
  device.completion = reinterpret_cast<const ProxyCompletion*>(block.device + completion_at);
  device.stage_thread_bytes = stage_thread_bytes;
  if (stage_bytes != 0) make_stage(arena, stage_bytes, device);
  device_ = static_cast<const ProxyDevice*>(arena.upload(&device, sizeof(device)));
}

/// Slots of one cache line at least; of each ring kStageRing bytes, but 16 slots at least and no more than it has
/// descriptors.
void DeviceRings::make_stage(memory::Arena& arena, std::uint32_t bytes, ProxyDevice& device) {
  constexpr std::uint32_t kStageRing = 1u << 20;
  stage_log_slot_ = static_cast<std::uint32_t>(std::bit_width(std::max(bytes, 64u) - 1));
  const auto most = static_cast<std::uint32_t>(std::countr_zero(kStageRing >> stage_log_slot_));
  stage_log_size_ = std::min(std::max(most, 4u), log_size_);
  const std::size_t rings = static_cast<std::size_t>(contexts_) * threads_;
  stage_ = arena.allocate(rings << (stage_log_size_ + stage_log_slot_), Memory::host);
  const std::size_t unused_at = rings * sizeof(Line);
  const memory::Block words =
      arena.allocate(unused_at + (rings << stage_log_size_) * sizeof(std::uint64_t), Memory::host);
  stage_lines_ = reinterpret_cast<Line*>(words.host);
  stage_unused_ = reinterpret_cast<std::uint64_t*>(words.host + unused_at);
  std::vector<ProxyRing> image(rings);
  for (std::size_t r = 0; r < rings; ++r) {
    ProxyRing& ring = image[r];
    ring = {};
    ring.consumed = reinterpret_cast<const std::uint64_t*>(words.device + r * sizeof(Line));
    ring.log_size = stage_log_size_;
    ring.limit = ring.credits = std::uint64_t{1} << stage_log_size_;
  }
  device.stage_bytes = bytes;
  device.stage_log_slot = stage_log_slot_;
  device.stage_log_size = stage_log_size_;
  device.stage_region = stage_region();
  device.stage_rings =
      static_cast<ProxyRing*>(arena.upload(image.data(), image.size() * sizeof(ProxyRing)));
  device.stage = stage_.device;
  device.stage_unused = reinterpret_cast<std::uint64_t*>(words.device + unused_at);
}

}  // namespace marrow::proxy
