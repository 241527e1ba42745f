// SPDX-License-Identifier: Apache-2.0
// The table of cases: the one list that g++ (cases.cpp) and nvcc (cases.cu) both compile.
#pragma once

#include "conformance/kernels/completion.cuh"
#include "conformance/kernels/meet.cuh"
#include "conformance/kernels/put.cuh"
#include "conformance/kernels/refuse.cuh"
#include "conformance/kernels/start.cuh"
#include "conformance/kernels/words.cuh"

namespace marrow::conformance {

const std::vector<Case>& cases() {
  // name, what breaks when it fails, kernel, traits, bytes, iterations
  static const std::vector<Case> table = {
      {"put_signal", "a strong signal covers its put", start<put_signal>, kSized | kGrouped},
      {"puts_signal", "a strong signal covers all puts before it", start<puts_signal>,
       kSized | kGrouped},
      {"weak_signal", "a weak signal covers its own put", start<weak_signal>, kSized | kGrouped},
      {"values_signal", "a strong signal covers values and adds", start<values_signal>, 0, 115},
      {"adds_signal", "a strong signal covers adds on the atomic path", start<adds_signal>},
      {"signal_at", "SignalAt covers its put", start<signal_at>, kSized},
      {"tile_signal", "a tile sends as one", start<tile_signal>},
      {"deferred", "deferred doorbells ring with the next operation or flush", start<deferred>,
       kSized | kGrouped},
      {"released", "a put after the caller's own release", start<released>, kSized},
      {"burst", "more operations than queue entries", start<burst>, 0, 1600, 5},
      {"posters", "all threads post on one context", start<posters>, kManyPosters, 16 * 1024, 10},
      {"flush_reuse", "after flush the source may be overwritten", start<flush_reuse>,
       kSized | kGrouped},
      {"counter_reuse", "a counter says that its source may be overwritten", start<counter_reuse>,
       kSized | kGrouped},
      {"counter_shared", "one counter counts operations to all peers", start<counter_shared>,
       kSized},
      {"flush_async", "a request completes as flush does", start<flush_async>, kSized},
      {"flush_remote", "flush_remote orders across contexts", start<flush_remote>,
       kSized | kGrouped | kTwoContexts},
      {"get_flush", "a get is readable after flush", start<get_flush>, kSized | kGrouped},
      {"get_counter", "a get is readable when its counter is reached", start<get_counter>,
       kSized | kGrouped},
      {"barrier_put", "a barrier with fence put covers puts of all contexts", start<barrier_put>,
       kSized},
      {"barrier_get", "a barrier with fence get completes gets", start<barrier_get>, kSized},
      {"barrier_none", "nobody leaves a barrier before all have come", start<barrier_none>},
      {"teams", "peers and barriers by team", start<teams>},
      {"packets", "a packet carries its own arrival", start<packets>, 0, 8, 50},
      {"cells", "16 bytes are stored and loaded at once", start<cells>, kLsaOnly, 256, 50},
      {"load_store", "barriers order plain loads and stores", start<load_store>, kLsaOnly | kSized},
      {"fetch_add", "fetch_add is exact under contention", start<fetch_add>, 0, 8},
      {"compare_swap", "compare_swap is exact under contention", start<compare_swap>, 0, 8, 10},
      {"exact_sum", "adds over several paths to one signal are exact", start<exact_sum>, kCounted,
       8},
      {"wait_any", "wait_any finds every signal once", start<wait_any>, kSized},
      {"shadow", "shadows count for signals nobody resets", start<shadow>},
      {"reset", "reset makes a signal and a counter 0", start<reset>},
      {"test_read", "test_signal and read_signal acquire", start<test_read>, kSized},
      {"timeouts", "waits end at their deadline, then work on", start<timeouts>, 0, 64, 2},
      {"invalid", "wrong numbers are refused and lose nothing", start<invalid>, kCheckThrows, 64,
       2},
      {"pruned", "Gin<Path> serves its path only", start<pruned>},
  };
  return table;
}

}  // namespace marrow::conformance
