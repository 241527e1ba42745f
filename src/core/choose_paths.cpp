// SPDX-License-Identifier: Apache-2.0
// Set-up of the paths: gather the facts, open what some pair needs, plan. Every step is collective
// and its outcome the same on every rank.
#include "base/log.hpp"
#include "base/text.hpp"
#include "core/state.hpp"
#include "proxy/cuda_copy_engine.hpp"
#include "proxy/networks.hpp"
#include "topology/topology.hpp"

namespace marrow::core {

/// Ranks that have failed, as they were: a survivor remembers them, a replacement is told.
Survey CommunicatorState::survey_failed_ranks(const std::vector<bool>& masked) {
  Survey failed;
  failed.facts.resize(nranks());
  failed.endpoints.resize(nranks());
  failed.wishes.resize(nranks());
  int teller = 0;
  while (masked[teller] || teller == newcomer_) ++teller;
  const auto told = [&](std::span<std::byte> bytes) {
    const auto theirs = bootstrap_->broadcast(teller, bytes);
    if (theirs.size() == bytes.size()) std::copy(theirs.begin(), theirs.end(), bytes.begin());
  };
  for (int r = 0; r < nranks(); ++r) {
    if (!masked[r]) continue;
    failed.wishes[r].resize(nranks());
    if (!survey_.facts.empty()) {
      failed.facts[r] = survey_.facts[r];
      failed.endpoints[r] = survey_.endpoints[r];
      failed.wishes[r] = survey_.wishes[r];
    }
    told(std::as_writable_bytes(std::span(&failed.facts[r], 1)));
    told(std::as_writable_bytes(std::span(&failed.endpoints[r], 1)));
    told(std::as_writable_bytes(std::span(failed.wishes[r])));
  }
  return failed;
}

void CommunicatorState::survey() {
  topology::Endpoint endpoint;
  together("finding this rank's GPU", [&] {
    endpoint = topology::endpoint(config_.place, bootstrap_->host_id(rank()),
                                  bootstrap_->process_id(rank()));
  });
  RankFacts facts;
  facts.host = bootstrap_->host_id(rank());
  facts.on_gpu = config_.place.on_gpu();
  facts.device = config_.place.device;
  facts.lsa_limit = base::parameter_int("MARROW_LSA_SIZE", parameters_);

  const std::vector<bool> masked = bootstrap_->mask();
  Survey next = survey_failed_ranks(masked);
  const std::vector<RankFacts> all_facts = allgather(facts);
  const std::vector<topology::Endpoint> endpoints = allgather(endpoint);
  const auto wishes = bootstrap_->allgather(std::as_bytes(std::span(wishes_)));
  for (int r = 0; r < nranks(); ++r) {
    if (!masked[r]) {
      next.facts[r] = all_facts[r];
      next.endpoints[r] = endpoints[r];
      next.wishes[r].resize(nranks());
      std::memcpy(next.wishes[r].data(), wishes[r].data(), wishes[r].size());
    }
    next.facts[r].gda_usable = next.facts[r].proxy_usable = 0;
  }
  std::vector<std::uint8_t> row(nranks());
  for (int r = 0; r < nranks(); ++r) row[r] = topology::reach(endpoint, next.endpoints[r]).lsa;
  const auto rows = bootstrap_->allgather(std::as_bytes(std::span(row)));
  next.reach.assign(nranks(), std::vector<bool>(nranks()));
  for (int from = 0; from < nranks(); ++from) {
    for (int to = 0; to < nranks(); ++to) {
      // Nobody can ask a failed rank whom it reaches: whoever reaches it.
      if (masked[from] && masked[to]) continue;
      next.reach[from][to] = (masked[from] ? rows[to][from] : rows[from][to]) != std::byte{0};
    }
  }
  survey_ = std::move(next);
}

void CommunicatorState::open_gda() {
  try {
    nic_ = gda::Nic::open(*bootstrap_, parameters_, config_.place);
    for (RankFacts& facts : facts_) facts.gda_usable = 1, facts.gda_emulated = nic_->emulated();
  } catch (const Error& error) {
    if (error.code() != Code::unsupported) throw;
    gda_reason_ = error.sentence();  // the same on every rank: another path is tried
    MARROW_INFO(init, "no gda path: ", gda_reason_);
  }
}

void CommunicatorState::open_proxy() {
  proxy::Hooks hooks;
  hooks.on_error = [this](int peer, const Error& error) {
    if (peer >= 0 && bootstrap_->state(peer) == bootstrap::PeerState::failed)
      return;  // reported already
    faults_->network_error(error);
  };
  if (config_.place.on_gpu()) {
    hooks.make_copy_engine = [device = config_.place.device] {
      return proxy::create_cuda_copy_engine(device);
    };
  }
  auto transport =
      proxy::Transport::open(*bootstrap_, parameters_, config_.place, std::move(hooks));
  std::lock_guard lock(mutex_);
  proxy_ = std::move(transport);
  for (int r = 0; r < nranks(); ++r) {
    if (masked_[r]) proxy_->fail_peer(r);
  }
  for (RankFacts& facts : facts_) facts.proxy_usable = 1;
}

void CommunicatorState::choose_paths() {
  together("reading MARROW_PATH and MARROW_NETWORK", [&] {
    wishes_ = parse_wishes(base::parameter_string("MARROW_PATH", parameters_), nranks());
    // A misspelt name is told also where no pair needs a network, not on the day when one does.
    const std::string network = base::parameter_string("MARROW_NETWORK", parameters_);
    if (network.find('/') == std::string::npos && network.find(".so") == std::string::npos)
      proxy::candidates(network);
  });
  survey();
  facts_ = survey_.facts;
  const std::vector<std::vector<Wish>>& wishes = survey_.wishes;
  const std::vector<std::vector<bool>>& reach = survey_.reach;
  for (int r = 1; r < nranks(); ++r) {
    if (facts_[r].on_gpu != facts_[0].on_gpu) {
      throw Error(Code::mismatch,
                  base::cat("rank 0 runs on a ", facts_[0].on_gpu ? "GPU" : "CPU", ", rank ", r,
                            " on the other kind"),
                  "give every rank the same kind of Config::place");
    }
  }

  plan_teams(facts_, reach, plan_);
  const auto some_pair = [&](auto&& needs) {
    for (int from = 0; from < nranks(); ++from) {
      for (int to = 0; to < nranks(); ++to) {
        if (needs(from, to, wishes[from][to])) return true;
      }
    }
    return false;
  };
  if (some_pair([&](int from, int to, Wish wish) {
        return wish == Wish::gda || (wish == Wish::automatic && !plan_.same_team(from, to));
      })) {
    open_gda();
  }
  if (some_pair([&](int from, int to, Wish wish) {
        return wish == Wish::proxy || (wish == Wish::automatic && !plan_.same_team(from, to) &&
                                       !gda_reaches(facts_[from], facts_[to]));
      })) {
    open_proxy();
  }
  plan_ = plan_paths(facts_, wishes, reach, gda_reason_);
}

std::vector<PeerInfo> CommunicatorState::peers() const {
  if (closed_) {
    throw Error(Code::invalid_argument, "peers() after close()",
                "ask before you close the communicator");
  }
  std::vector<PeerInfo> result;
  const int me = bootstrap_->rank();
  for (int r = 0; r < bootstrap_->nranks(); ++r) {
    PeerInfo info;
    info.rank = r;
    info.path = plan_.path[me][r];
    info.same_host = bootstrap_->same_host(r);
    info.same_process = bootstrap_->same_process(r);
    info.emulated = !config_.place.on_gpu();
    switch (info.path) {
      case Path::lsa: info.transport = "load/store"; break;
      case Path::gda:
        info.transport = base::cat("gda on ", nic_->name());
        info.emulated = info.emulated || nic_->emulated();
        break;
      case Path::proxy:
        info.transport = base::cat("proxy on ", proxy_->name(),
                                   proxy_->stages_device_memory() ? ", GPU memory staged" : "");
        info.emulated = info.emulated || proxy_->emulated();
        break;
    }
    info.rejected = rejections(plan_, facts_, wishes_, me, r, gda_reason_);
    result.push_back(std::move(info));
  }
  return result;
}

}  // namespace marrow::core
