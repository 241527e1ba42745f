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

std::vector<std::vector<bool>> CommunicatorState::who_reaches_whom() {
  topology::Endpoint mine;
  together("finding this rank's GPU", [&] {
    mine = topology::endpoint(config_.place, bootstrap_->host_id(rank()),
                              bootstrap_->process_id(rank()));
  });
  const std::vector<topology::Endpoint> endpoints = allgather(mine);
  std::vector<std::uint8_t> row(nranks());
  for (int r = 0; r < nranks(); ++r) row[r] = topology::reach(mine, endpoints[r]).lsa;
  const auto rows = bootstrap_->allgather(std::as_bytes(std::span(row)));
  std::vector<std::vector<bool>> reach(nranks(), std::vector<bool>(nranks()));
  for (int from = 0; from < nranks(); ++from) {
    for (int to = 0; to < nranks(); ++to) reach[from][to] = rows[from][to] != std::byte{0};
  }
  return reach;
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
  std::vector<std::vector<Wish>> wishes(nranks(), std::vector<Wish>(nranks()));
  const auto rows = bootstrap_->allgather(std::as_bytes(std::span(wishes_)));
  for (int r = 0; r < nranks(); ++r) std::memcpy(wishes[r].data(), rows[r].data(), rows[r].size());

  RankFacts mine;
  mine.host = bootstrap_->host_id(rank());
  mine.on_gpu = config_.place.on_gpu();
  mine.device = config_.place.device;
  mine.lsa_limit = base::parameter_int("MARROW_LSA_SIZE", parameters_);
  facts_ = allgather(mine);
  for (int r = 1; r < nranks(); ++r) {
    if (facts_[r].on_gpu != facts_[0].on_gpu) {
      throw Error(Code::mismatch,
                  base::cat("rank 0 runs on a ", facts_[0].on_gpu ? "GPU" : "CPU", ", rank ", r,
                            " on the other kind"),
                  "give every rank the same kind of Config::place");
    }
  }

  const auto reach = who_reaches_whom();
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
        info.transport = base::cat("proxy on ", proxy_->name());
        info.emulated = info.emulated || proxy_->emulated();
        break;
    }
    info.rejected = rejections(plan_, facts_, wishes_, me, r, gda_reason_);
    result.push_back(std::move(info));
  }
  return result;
}

}  // namespace marrow::core
