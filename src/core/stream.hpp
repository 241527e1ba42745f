// SPDX-License-Identifier: Apache-2.0
// Host-initiated put, signal and wait: a kernel of one block in stream order.
#pragma once

#include "marrow/abi/device_communicator.h"
#include "marrow/place.hpp"

namespace marrow::core {

void put_on_stream(const Place& place, const DeviceCommunicator& comm, int peer, const WindowHandle& window,
                   std::uint64_t offset, const LocalBufferHandle& source, std::uint64_t source_offset,
                   std::uint64_t bytes);
void signal_on_stream(const Place& place, const DeviceCommunicator& comm, int peer, int signal, std::uint64_t n);
void wait_on_stream(const Place& place, const DeviceCommunicator& comm, int signal, std::uint64_t at_least);

}  // namespace marrow::core
