// SPDX-License-Identifier: Apache-2.0
#include "ep/site.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "thread_ranks.hpp"

#ifndef MARROW_EP_UNORDERED
#define MARROW_EP_UNORDERED "unordered.so"
#endif

namespace marrow::ep_test {

Config config_for(const std::string& path, int rank, int ranks) {
  Config config;
  auto& p = config.parameters;
  p["MARROW_WAIT_TIMEOUT"] = "30s";
  if (path == "lsa") return config;
  p["MARROW_NIC"] = "softnic";
  p["MARROW_NETWORK"] = "shm";
  if (path == "teams") {
    p["MARROW_LSA_SIZE"] = "2";
  } else if (path == "alone") {
    p["MARROW_LSA_SIZE"] = "1";
  } else if (path == "narrow_gda") {
    p["MARROW_PATH"] = "gda";
    p["MARROW_GDA_DEPTH"] = "32";
    p["MARROW_SOFTNIC"] = "delay=50,reorder=1,seed=7";
  } else if (path == "narrow_proxy") {
    p["MARROW_PATH"] = "proxy";
    p["MARROW_PROXY_RING"] = "16";
    p["MARROW_NETWORK"] = "shm?reorder=7";
  } else if (path == "unordered") {
    p["MARROW_PATH"] = "proxy";
    p["MARROW_NETWORK"] = MARROW_EP_UNORDERED "?delay=50&drop=100&duplicate=20";
  } else if (path == "mixed") {
    static constexpr const char* kNames[] = {"lsa", "gda", "proxy"};
    std::string list;
    for (int peer = 0; peer < ranks; ++peer)
      list += std::string(peer ? "," : "") + kNames[peer == rank ? 0 : (rank + peer) % 3];
    p["MARROW_PATH"] = list;
  } else {
    p["MARROW_PATH"] = path;
  }
  return config;
}

void run_ranks(const std::string& path, int ranks, const Body& body) {
  const int n = std::min(ranks, most_ranks());
  ASSERT_GE(n, 1) << "no GPU is visible";
  const auto results = test::as_threads(n, [&](int rank, const UniqueId& id) {
    const std::unique_ptr<Site> site = make_site(rank);
    Config config = config_for(path, rank, n);
    config.place = site->place();
    Communicator comm(id, n, rank, config);
    const std::string wrong = body(comm, *site);
    comm.close();
    return wrong;
  });
  for (const std::string& result : results) EXPECT_EQ(result, "") << path << ", " << n << " ranks";
  if (const std::string why = context_lost(); !why.empty()) {
    // Whatever ran now would fail, too.
    std::fprintf(stderr, "A kernel crashed in this test or at its end (%s): stopped here.\n",
                 why.c_str());
    std::_Exit(1);
  }
}

void run_scenario(const std::string& path, int ranks, const Scenario& scenario) {
  run_ranks(path, ranks, [&](Communicator& comm, Site& site) {
    Scenario mine = scenario;
    mine.stream = site.stream();
    mine.config.experts.resize(static_cast<std::size_t>(comm.nranks()), 1);
    Checker checker(comm, mine, site.memory());
    std::string wrong = checker.run();
    checker.group().close();
    return wrong;
  });
}

}  // namespace marrow::ep_test
