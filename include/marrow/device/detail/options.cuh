// SPDX-License-Identifier: Apache-2.0
// Sorts the options of an operation by type, at compile time; an option that does not exist is a
// compile error that says so.
#pragma once

#include <type_traits>

#include "marrow/device/detail/operation.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

template <class T>
inline constexpr bool is_option =
    is_coop<T> || std::is_same_v<T, SignalAdd> || std::is_same_v<T, SignalAt> ||
    std::is_same_v<T, CounterInc> || std::is_same_v<T, Ordering> || std::is_same_v<T, Doorbell> ||
    std::is_same_v<T, Team> || std::is_same_v<T, Deadline> || std::is_same_v<T, Scratch>;

template <class T, class... Options>
inline constexpr bool has = (std::is_same_v<T, Options> || ...);

template <class... Options>
struct CoopOf {
  using type = Thread;
};
template <class First, class... Rest>
struct CoopOf<First, Rest...> {
  using type = std::conditional_t<is_coop<First>, First, typename CoopOf<Rest...>::type>;
};

/// The group of an operation that waits.
template <class... Options>
struct GroupOf : CoopOf<Options...> {
  static_assert(!has<EachLane, Options...>,
                "EachLane is for operations that post; wait and flush with Warp");
};

/// The option of type T, or the given default.
template <class T>
MARROW_DEVICE T pick(T otherwise) {
  return otherwise;
}
template <class T, class First, class... Rest>
MARROW_DEVICE T pick(T otherwise, const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<T, First>) {
    return first;
  } else {
    return pick<T>(otherwise, rest...);
  }
}

template <class... Options>
MARROW_DEVICE Knobs knobs_of(const Options&... options) {
  static_assert((is_option<Options> && ...),
                "not an option of a Marrow operation: SignalAdd, SignalAt, CounterInc, a coop "
                "group, Ordering, "
                "Doorbell, Team, Deadline or Scratch");
  Knobs knobs;
  knobs.counter = pick(CounterInc{-1}, options...).id;
  knobs.ordering = pick(Ordering{}, options...);
  knobs.doorbell = pick(Doorbell::now, options...);
  knobs.deadline = pick(Deadline{}, options...);
  knobs.scratch = pick(Scratch{}, options...);
  return knobs;
}

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
