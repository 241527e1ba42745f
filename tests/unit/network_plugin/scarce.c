/* SPDX-License-Identifier: Apache-2.0
 * The example plugin where memory ends: whichever allocation of listen fails, it says so and keeps nothing. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int calls, fail_at, live;
static void* scarce_calloc(size_t n, size_t bytes) {
  if (++calls == fail_at) return NULL;
  void* made = calloc(n, bytes);
  live += made != NULL;
  return made;
}
static void counted_free(void* made) {
  live -= made != NULL;
  free(made);
}
#define calloc scarce_calloc
#define free counted_free
#include "../../../examples/network-plugin/threads.c"

int main(void) {
  const marrow_network* n = marrow_network_plugin();
  marrow_network_events events = {0};
  marrow_network_address address;
  int bad = 0;
  for (fail_at = 1;; ++fail_at) {
    void* endpoint = NULL;
    calls = 0;
    const int result = n->listen(NULL, 0, 0, 4, &events, &endpoint, &address);
    if (result == MARROW_NETWORK_OK) {
      n->close(endpoint);
      break;
    }
    if (result != MARROW_NETWORK_NO_MEMORY || live != 0) {
      printf("allocation %d failed: listen said %d and kept %d\n", fail_at, result, live);
      bad = 1;
      live = 0;
    }
  }
  if (live != 0) printf("close kept %d\n", live);
  if (fail_at < 5) printf("only %d allocations were tried\n", fail_at - 1);
  return bad || live != 0 || fail_at < 5;
}
