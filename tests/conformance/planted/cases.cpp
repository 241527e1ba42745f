// SPDX-License-Identifier: Apache-2.0
// The cases that planted bugs must break: one release or acquire removed each, by a macro.
#include "conformance/kernels/completion.cuh"
#include "conformance/kernels/prepare.cuh"
#include "conformance/kernels/put.cuh"

namespace marrow::conformance {

const std::vector<Case>& cases() {
  static const std::vector<Case> table = {
      {"put_signal", "a strong signal covers its put", start<put_signal>, kSized | kGrouped},
      {"flush_reuse", "after flush the source may be overwritten", start<flush_reuse>,
       kSized | kGrouped},
      {"get_flush", "a get is readable after flush", start<get_flush>, kSized | kGrouped},
  };
  return table;
}

}  // namespace marrow::conformance
