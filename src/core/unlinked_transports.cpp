// SPDX-License-Identifier: Apache-2.0
// Weak stand-ins while the gda and proxy parts are not in the tree: opening them is `unsupported`, so
// the lsa path links and runs alone. The real definitions win at link time; delete this file then.
#include "gda/nic.hpp"
#include "gda/queues.hpp"
#include "proxy/transport.hpp"

#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace marrow::gda {
class Device {};
__attribute__((weak)) std::unique_ptr<Nic> Nic::open(bootstrap::Bootstrap&, const base::Parameters&, const Place&) {
  throw Error(Code::unsupported, "the gda path is not built in");
}
__attribute__((weak)) Nic::~Nic() {}
__attribute__((weak)) const std::string& Nic::name() const {
  static const std::string none = "none";
  return none;
}
__attribute__((weak)) bool Nic::emulated() const { return false; }
__attribute__((weak)) bool Nic::can_use(Memory, std::string*) const { return false; }
__attribute__((weak)) Region Nic::register_region(const memory::Block&, Access) { return {}; }
__attribute__((weak)) void Nic::deregister(Region&) noexcept {}
__attribute__((weak)) std::unique_ptr<Queues> Nic::connect(bootstrap::Bootstrap&, memory::Arena&, const Requirements&, const Region*) {
  return nullptr;
}
}  // namespace marrow::gda

namespace marrow::proxy {
__attribute__((weak)) std::unique_ptr<Transport> Transport::open(bootstrap::Bootstrap&, const base::Parameters&, const Place&, Hooks) {
  throw Error(Code::unsupported, "the proxy path is not built in");
}
__attribute__((weak)) std::vector<NetworkInfo> known_networks() { return {}; }
}  // namespace marrow::proxy
