// SPDX-License-Identifier: Apache-2.0
// The same puts without the check for room, to see what the check costs.
#define MARROW_MEASURE_WITHOUT_ROOM_CHECK 1
#include "marrow_kernels.cuh"

namespace gda_bench {

void unchecked_rows() {
  const char* note = "without the check for room";
  issue_row<Sharing::thread, true, What::put>("put 64 B", Placement::device, GdaRelease::device, 1,
                                              note);
  issue_row<Sharing::block, true, What::put>("put 64 B", Placement::device, GdaRelease::device, 1,
                                             note);
  issue_row<Sharing::device, true, What::put>("put 64 B", Placement::device, GdaRelease::device, 1,
                                              note);
}

}  // namespace gda_bench
