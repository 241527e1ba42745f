// SPDX-License-Identifier: Apache-2.0
// The table of networks: those linked into the program register themselves, others are loaded from a
// file. Nothing in Marrow names one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/parameters.hpp"
#include "marrow/network.h"
#include "proxy/copy_engine.hpp"

namespace marrow::proxy {

/// Registered networks, largest priority first.
std::vector<const marrow_network*> registered_networks();

/// A network to try.
struct Candidate {
  const marrow_network* network = nullptr;
  std::string options;            ///< what followed '?'
  std::shared_ptr<void> library;  ///< keeps a plugin loaded
};

/// What MARROW_NETWORK=`wanted` stands for: auto, name[?options] or path.so[?options].
/// @throws Error(invalid_argument) for an unknown name, listing the known ones; Error(unsupported |
///         version) for a file that is not such a plugin
std::vector<Candidate> candidates(const std::string& wanted);

/// One instance and endpoint of a network, for one progress thread. Closes them at the end.
class Link {
 public:
  /// Makes the instance. @param engine may be null  @param place_pci of the GPU; empty: none
  Link(const Candidate& candidate, std::unique_ptr<CopyEngine> engine,
       const base::Parameters& parameters = {}, std::string place_pci = {});
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void listen(std::uint32_t rank, std::uint32_t nranks, const marrow_network_events& events);

  const marrow_network& network() const { return *candidate_.network; }
  const marrow_network_properties& properties() const { return properties_; }
  const marrow_network_address& address() const { return address_; }
  void* endpoint() const { return endpoint_; }
  CopyEngine* copy_engine() const { return engine_.get(); }
  const base::Parameters& parameters() const { return parameters_; }

  /// Throws for a negative result of one of the network's functions. `what` is what was attempted.
  int check(int result, const std::string& what) const;

 private:
  Candidate candidate_;
  std::unique_ptr<CopyEngine> engine_;
  const base::Parameters parameters_;
  const std::string place_pci_;
  marrow_network_services services_{};
  marrow_network_properties properties_{};
  marrow_network_address address_{};
  void* instance_ = nullptr;
  void* endpoint_ = nullptr;
};

}  // namespace marrow::proxy
