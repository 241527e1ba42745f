// SPDX-License-Identifier: Apache-2.0
// Every rank listens twice: on TCP, and on an abstract Unix socket whose name follows from the secret.
// Ranks of one host find each other over the second, so a job on a machine without any configured
// network (not even loopback) works too.
#pragma once

#include "base/sockets.hpp"

namespace marrow::bootstrap {

using base::accept_one;
using base::connect_error;
using base::connect_tcp;
using base::connect_unix;
using base::Connecting;
using base::interface_addresses;
using base::IpAddress;
using base::is_loopback;
using base::listen_tcp;
using base::listen_unix;
using base::loopback_address;
using base::peer_text;
using base::resolve;
using base::TcpAddress;
using base::to_text;

}  // namespace marrow::bootstrap
