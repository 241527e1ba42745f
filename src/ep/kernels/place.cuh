// SPDX-License-Identifier: Apache-2.0
// Placing rows when the bits do not fit into shared memory: a kernel of its own, a column (an expert; one more for the list
// of entries) a block, which counts through all tokens of all ranks in order and leaves the result in the handle.
#pragma once

#include "ep/kernels/receive.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// @return the list of a token, or one without tokens if its source is not in time
MARROW_DEVICE bool wait_for_list(const Run& r, int source, int token, List* list) {
  const std::byte* meta = r.local + r.s.meta_at(r.set, source);
  return wait_for_source(r, source,
                         [&] {
                           return look_at_list(r.s, meta, token, r.epoch, list) ||
                                  is_past(token, look_at_head(meta, r.epoch));
                         }) &&
         list->here;
}

/// Column of expert l: rows of it.
MARROW_DEVICE void place_column(const Run& r, std::uint32_t* memory, int column) {
  const Shape& s = r.s;
  std::uint32_t running = 0;
  for (int source = 0; source < s.ranks; ++source) {
    if (r.is_failed(source)) continue;
    for (int from = 0; from < s.tokens; from += block_size()) {
      const int token = from + thread_index();
      List list;
      int k = -1;
      int order = 0;  // our experts before it in the list
      if (token < s.tokens && wait_for_list(r, source, token, &list)) {
        for (int other = 0; other < s.top_k && k < 0; ++other) {
          const int l = list.id(other) - s.first;
          if (l == column) {
            k = other;
          } else if (static_cast<unsigned>(l) < static_cast<unsigned>(s.local)) {
            ++order;
          }
        }
      }
      std::uint32_t total = 0;
      const std::uint32_t place = running + block_sum(memory, k >= 0 ? 1 : 0, &total);
      running += total;
      if (k < 0) continue;
      const int slot = source * s.tokens + token;
      const bool fits = place < static_cast<std::uint32_t>(s.capacity);
      const std::int64_t row = fits ? static_cast<std::int64_t>(column) * s.capacity + place : -1;
      std::int32_t* rows = rows_of(record_at(r, 0, Origin::of(source, token)));
      auto* weights = reinterpret_cast<float*>(rows + s.record_rows);
      const float mine = wait_for_weight(r, source, token, k);
      rows[order] = static_cast<std::int32_t>(row);
      weights[order] = mine;
      if (!fits) continue;
      r.table<std::int32_t>(s.source)[row] = slot;
      r.table<float>(s.weights)[row] = mine;
    }
  }
  if (thread_index() != 0) return;
  const auto capacity = static_cast<std::uint32_t>(s.capacity);
  r.table<std::int32_t>(s.counts)[column] =
      static_cast<std::int32_t>(running < capacity ? running : capacity);
  if (running > capacity) add_relaxed<Scope::device>(&r.control()->overflow, running - capacity);
}

/// The list of entries, their pairs and what records say of them; rank-major: their rows too.
MARROW_DEVICE void place_entries(const Run& r, std::uint32_t* memory) {
  const Shape& s = r.s;
  std::uint32_t entries = 0;
  std::uint32_t pairs = 0;
  for (int source = 0; source < s.ranks; ++source) {
    const std::uint32_t before = entries;
    for (int from = 0; from < s.tokens && !r.is_failed(source); from += block_size()) {
      const int token = from + thread_index();
      const std::uint64_t since = now_ns();  // before, others were waited for
      List list;
      int count = 0;
      if (token < s.tokens && wait_for_list(r, source, token, &list)) {
        for (int k = 0; k < s.top_k; ++k)
          count += static_cast<unsigned>(list.id(k) - s.first) < static_cast<unsigned>(s.local);
      }
      if (token == 0) (void)r.note_wait(0, source, since);
      std::uint32_t total = 0;
      const std::uint32_t entry = entries + block_sum(memory, count > 0 ? 1 : 0, &total);
      entries += total;
      const std::uint32_t pair =
          pairs + block_sum(memory, static_cast<std::uint32_t>(count), &total);
      pairs += total;
      if (count == 0) continue;
      const Origin origin = Origin::of(source, token);
      r.table<Origin>(s.list)[entry] = origin;
      if (s.rank_major) {
        const auto id_of = [&](int other) { return list.id(other); };
        for (int k = 0; k < s.top_k; ++k) {
          float weight = 0;
          if (static_cast<unsigned>(list.id(k) - s.first) < static_cast<unsigned>(s.local))
            weight = wait_for_weight(r, source, token, k);
          write_choice(r, 0, origin, k, list.id(k),
                       source * s.tokens + static_cast<int>(entry - before), -1,
                       find_in_list(r, k, id_of), weight);
        }
        continue;
      }
      int order = 0;
      for (int k = 0; k < s.top_k; ++k) {
        const int id = list.id(k);
        if (static_cast<unsigned>(id - s.first) < static_cast<unsigned>(s.local)) {
          r.table<Pair>(s.pairs)[pair + static_cast<unsigned>(order)] = Pair{origin, k, -2 - order};
          ++order;
        }
      }
      const int ordinal = lower_ranks(r, [&](int other) { return list.id(other); });
      *reinterpret_cast<Record*>(record_at(r, 0, origin)) = {
          static_cast<std::int16_t>(count), static_cast<std::int16_t>(ordinal), origin, {}};
    }
    if (s.rank_major && thread_index() == 0)
      r.table<std::int32_t>(s.counts)[source] = static_cast<std::int32_t>(entries - before);
  }
  if (thread_index() != 0) return;
  auto* head = r.table<HandleHead>(0);
  head->entries = static_cast<std::int32_t>(entries);
  head->pairs = static_cast<std::int32_t>(pairs);
}

MARROW_KERNEL place_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                           const MARROW_GRID_CONSTANT WindowHandle window,
                           const MARROW_GRID_CONSTANT Shape s, std::uint64_t handle) {
  await_previous_kernel();
  auto* control = at<Control>(window.local, s.control);
  if (is_stopped(control)) return;
  std::uint64_t start = now_ns();
  if (s.far_any) {
    start = load_relaxed<Scope::device>(&control->started);
  } else if (block_index() == 0 && thread_index() == 0) {
    store_relaxed<Scope::device>(&control->started, start);
  }
  const Run r(comm, window, s, handle, load_relaxed<Scope::device>(&control->dispatch_received),
              start, load_relaxed<Scope::device>(&control->any_failed) != 0);
  auto* memory = dynamic_shared<std::uint32_t>();
  const int columns = s.rank_major ? 0 : s.local;
  for (int column = block_index(); column <= columns; column += grid_size()) {
    if (column == columns) {
      place_entries(r, memory);
    } else {
      place_column(r, memory, column);
    }
    meet();
  }
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
