// SPDX-License-Identifier: Apache-2.0
// Numbers of verbs as sentences for a person: what went wrong and what to do about it.
#pragma once

#include <cstdint>
#include <string>

#include "networks/verbs/options.hpp"
#include "verbs/ibverbs_abi.h"

namespace marrow::networks::rdma {

/// "retries exceeded (IBV_WC_RETRY_EXC_ERR)".
std::string status_text(int status);
/// What a completion's status advises.
std::string status_advice(int status, const Options& options);
/// Whether a status says that the peer, or the way to it, is gone.
bool means_peer_gone(int status);

/// "a put", "a message"; kinds of marrow_network_operation.
const char* operation_text(std::uint32_t kind);

/// "port down (IBV_EVENT_PORT_ERR)".
std::string event_text(int type);

}  // namespace marrow::networks::rdma
