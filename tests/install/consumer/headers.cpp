// SPDX-License-Identifier: Apache-2.0
// A kernel's side: headers only.
#if __has_include(<marrow/device.cuh>)
#include <marrow/device.cuh>
#endif
#include <marrow/abi/abi.h>

MARROW_KERNEL nothing() {}
