// SPDX-License-Identifier: Apache-2.0
// network.h is a binary interface: a plugin of yesterday and a library of today must mean the same bytes. Where a
// member moves, MARROW_NETWORK_VERSION has to change; what is added at a struct's end changes its size only.
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "marrow/network.h"

namespace marrow {
namespace {

using Offsets = std::vector<std::size_t>;

TEST(NetworkLayout, ANumberStandsForOneLayout) {
  EXPECT_EQ(MARROW_NETWORK_VERSION, 1u);
  EXPECT_STREQ(MARROW_NETWORK_SYMBOL, "marrow_network_plugin");
  EXPECT_EQ((Offsets{MARROW_NETWORK_MAX_ADDRESS, MARROW_NETWORK_MAX_KEY, MARROW_NETWORK_MAX_MESSAGE,
                     MARROW_NETWORK_MAX_INLINE}),
            (Offsets{256, 128, 64, 24}));
  using S = marrow_network_services;
  EXPECT_EQ((Offsets{sizeof(S), offsetof(S, user), offsetof(S, log), offsetof(S, copy),
                     offsetof(S, copy_test), offsetof(S, map_device), offsetof(S, unmap_device),
                     offsetof(S, parameter), offsetof(S, find), offsetof(S, place_pci)}),
            (Offsets{80, 8, 16, 24, 32, 40, 48, 56, 64, 72}));
  using P = marrow_network_properties;
  EXPECT_EQ((Offsets{sizeof(P), offsetof(P, device), offsetof(P, ordered), offsetof(P, atomics),
                     offsetof(P, device_memory), offsetof(P, host_only), offsetof(P, emulated),
                     offsetof(P, immediate_bytes), offsetof(P, needs_descriptor),
                     offsetof(P, max_inline), offsetof(P, max_message), offsetof(P, numa_node)}),
            (Offsets{96, 4, 68, 69, 70, 71, 72, 73, 74, 76, 80, 88}));
  using M = marrow_network_memory;
  EXPECT_EQ((Offsets{sizeof(M), offsetof(M, bytes), offsetof(M, device), offsetof(M, fd),
                     offsetof(M, fd_offset)}),
            (Offsets{32, 8, 16, 20, 24}));
  using O = marrow_network_operation;
  EXPECT_EQ((Offsets{sizeof(O), offsetof(O, kind), offsetof(O, peer), offsetof(O, token),
                     offsetof(O, local), offsetof(O, remote), offsetof(O, local_offset),
                     offsetof(O, remote_offset), offsetof(O, bytes), offsetof(O, operand),
                     offsetof(O, compare), offsetof(O, immediate), offsetof(O, has_immediate),
                     offsetof(O, inline_data)}),
            (Offsets{144, 0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 76, 80}));
  using C = marrow_network_completion;
  EXPECT_EQ((Offsets{sizeof(C), offsetof(C, token), offsetof(C, value), offsetof(C, status),
                     offsetof(C, peer)}),
            (Offsets{24, 0, 8, 16, 20}));
  using E = marrow_network_events;
  EXPECT_EQ(
      (Offsets{sizeof(E), offsetof(E, message), offsetof(E, immediate), offsetof(E, peer_down)}),
      (Offsets{32, 8, 16, 24}));
  using A = marrow_network_address;
  EXPECT_EQ((Offsets{sizeof(A), offsetof(A, data)}), (Offsets{260, 4}));
  using N = marrow_network;
  EXPECT_EQ((Offsets{sizeof(N), offsetof(N, version), offsetof(N, size), offsetof(N, name),
                     offsetof(N, priority), offsetof(N, init), offsetof(N, properties),
                     offsetof(N, listen), offsetof(N, close), offsetof(N, register_memory),
                     offsetof(N, import_key), offsetof(N, post), offsetof(N, progress),
                     offsetof(N, test), offsetof(N, abort), offsetof(N, last_error)}),
            (Offsets{152, 0, 4, 8, 16, 24, 48, 56, 72, 80, 96, 112, 120, 128, 136, 144}));
}

TEST(NetworkLayout, NumbersOfKindsAndErrors) {
  EXPECT_EQ((Offsets{MARROW_NETWORK_PUT, MARROW_NETWORK_PUT_VALUE, MARROW_NETWORK_GET,
                     MARROW_NETWORK_ADD, MARROW_NETWORK_FETCH_ADD, MARROW_NETWORK_COMPARE_SWAP,
                     MARROW_NETWORK_MESSAGE, MARROW_NETWORK_FLUSH}),
            (Offsets{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ((std::vector<int>{MARROW_NETWORK_OK, MARROW_NETWORK_ERROR, MARROW_NETWORK_INVALID,
                              MARROW_NETWORK_UNSUPPORTED, MARROW_NETWORK_PEER_FAILED,
                              MARROW_NETWORK_TIMEOUT, MARROW_NETWORK_NO_MEMORY}),
            (std::vector<int>{0, -1, -2, -3, -4, -5, -6}));
}

}  // namespace
}  // namespace marrow
