/* SPDX-License-Identifier: Apache-2.0
 * For a test: as if the plugin had been built against a later network.h. */
#include <marrow/network.h>
#undef MARROW_NETWORK_VERSION
#define MARROW_NETWORK_VERSION 9u
