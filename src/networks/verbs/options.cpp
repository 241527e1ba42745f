// SPDX-License-Identifier: Apache-2.0
#include "networks/verbs/options.hpp"

#include <algorithm>

#include "base/parameters.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;

constexpr const char* kKeys =
    "nic, gid, depth, credits, timeout, retries, rnr_retries, sl, tc, connect=lazy|eager, softnic, "
    "provider";

/// The communicator's value of a parameter; the environment's where nobody lends one.
std::string parameter(const marrow_network_services& services, const char* name) {
  const char* lent = services.parameter ? services.parameter(services.user, name) : nullptr;
  return lent ? std::string(lent) : base::parameter_text(name).text;
}

std::int64_t number(const std::string& key, const std::string& value, std::int64_t minimum,
                    std::int64_t maximum) {
  const std::string what = cat("option ", key, " of network verbs");
  const std::int64_t n = base::parse_int(value, what);
  if (n < minimum || n > maximum) {
    throw Error(Code::invalid_argument, cat(what, " is ", n, ", not ", minimum, " to ", maximum),
                "correct MARROW_NETWORK");
  }
  return n;
}

void apply(Options& o, const std::string& key, const std::string& value) {
  const auto small = [&](std::int64_t maximum) {
    return static_cast<std::uint8_t>(number(key, value, 0, maximum));
  };
  if (key == "provider") {
    o.provider = value;
  } else if (key == "nic") {
    o.nic = value;
  } else if (key == "gid") {
    o.gid_index = static_cast<int>(number(key, value, -1, 255));
  } else if (key == "depth") {
    o.depth = static_cast<std::uint32_t>(number(key, value, 16, 16384));
  } else if (key == "credits") {
    o.credits = static_cast<std::uint32_t>(number(key, value, 2, 16384));
  } else if (key == "timeout") {
    o.timeout = small(31);
  } else if (key == "retries") {
    o.retries = small(7);
  } else if (key == "rnr_retries") {
    o.rnr_retries = small(7);
  } else if (key == "sl") {
    o.service_level = small(15);
  } else if (key == "tc") {
    o.traffic_class = small(255);
  } else if (key == "softnic") {
    o.softnic = value;
  } else if (key == "connect" && (value == "lazy" || value == "eager")) {
    o.eager = value == "eager";
  } else {
    throw Error(Code::invalid_argument, cat("network verbs has no option '", key, "=", value, "'"),
                cat("its options are ", kKeys));
  }
}

}  // namespace

double Options::patience_seconds() const {
  return 4.096e-6 * static_cast<double>(std::uint64_t{1} << timeout) * (retries + 1);
}

Options read_options(const marrow_network_services& services, const std::string& text) {
  Options o;
  // Through the same checks as options: one range for both.
  constexpr const char* kParameters[][2] = {
      {"nic", "MARROW_NIC"},
      {"gid", "MARROW_GID_INDEX"},
      {"depth", "MARROW_VERBS_DEPTH"},
      {"credits", "MARROW_VERBS_CREDITS"},
      {"timeout", "MARROW_VERBS_TIMEOUT"},
      {"retries", "MARROW_VERBS_RETRIES"},
      {"rnr_retries", "MARROW_VERBS_RNR_RETRIES"},
      {"sl", "MARROW_VERBS_SERVICE_LEVEL"},
      {"tc", "MARROW_VERBS_TRAFFIC_CLASS"},
      {"connect", "MARROW_VERBS_CONNECT"},
      {"softnic", "MARROW_SOFTNIC"},
  };
  for (const auto& [key, name] : kParameters) apply(o, key, parameter(services, name));
  if (services.size >= sizeof(services) && services.place_pci) o.gpu = services.place_pci;
  o.interfaces = parameter(services, "MARROW_SOCKET_IFNAME");
  constexpr const char* kPeerTimeout = "MARROW_PEER_TIMEOUT";
  o.peer_timeout = base::parse_duration(parameter(services, kPeerTimeout), kPeerTimeout);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('&', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = end + 1;
    const std::size_t equal = std::min(item.find('='), item.size());
    apply(o, item.substr(0, equal), equal < item.size() ? item.substr(equal + 1) : "");
  }
  return o;
}

}  // namespace marrow::networks::rdma
