// SPDX-License-Identifier: Apache-2.0
// Many ranks: set-up time and memory a rank, of stubs that are threads of this process. A stub is a bootstrap, then a
// network endpoint that knows all others and is connected to none: connections are made on first use.
#include <malloc.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "base/text.hpp"
#include "unit/proxy_support.hpp"
#include "unit/required.hpp"

namespace marrow::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Memory of this process, KiB; what is free goes back first.
double resident() {
  ::malloc_trim(0);
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word) {
    if (word == "VmRSS:") {
      file >> word;
      return std::strtod(word.c_str(), nullptr);
    }
  }
  return 0;
}

/// The soft limit of open files, raised as far as it goes.
rlim_t open_files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

bool has_network(const char* name) {
  for (const proxy::NetworkInfo& info : proxy::known_networks())
    if (info.name == name) return info.reason.empty();
  return false;
}

std::size_t files() {
  const std::filesystem::directory_iterator list("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(list), end(list)));
}

struct Stub {
  std::unique_ptr<bootstrap::Bootstrap> bootstrap;
  std::unique_ptr<proxy::Transport> transport;
};

void on_all(std::vector<Stub>& stubs, const std::function<void(Stub&, int)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < stubs.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(stubs[r], static_cast<int>(r));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void set_up(int n, bool network) {
  base::Parameters parameters;
  parameters.set("MARROW_BOOTSTRAP_TIMEOUT", "55s");
  parameters.set("MARROW_NETWORK", "libfabric");
  parameters.set("MARROW_PROXY_SLEEP_US", "100000");  // a thousand progress threads on two cores
  const UniqueId id = UniqueId::create();
  std::vector<Stub> stubs(static_cast<std::size_t>(n));
  const double before = resident();
  const std::size_t files_before = files();
  auto start = Clock::now();
  on_all(stubs, [&](Stub& stub, int rank) {
    bootstrap::Options options;
    options.parameters = parameters;
    stub.bootstrap = std::make_unique<bootstrap::Bootstrap>(id, n, rank, options);
  });
  const double met = seconds_since(start);
  const double meeting = (resident() - before) / n;
  if (::testing::Test::HasFailure()) return;
  double opened = 0;
  double opening = 0;
  if (network) {
    start = Clock::now();
    on_all(stubs, [&](Stub& stub, int) {
      stub.transport = proxy::Transport::open(*stub.bootstrap, parameters, Place::cpu(), {});
    });
    opened = seconds_since(start);
    opening = (resident() - before) / n - meeting;
    // Connections would make it grow with the number of ranks.
    EXPECT_LT((files() - files_before) / static_cast<std::size_t>(n), 30u);
  }
  std::printf("%4d ranks: bootstrap %6.3f s, %4.0f KiB a rank", n, met, meeting);
  if (network) std::printf("; libfabric endpoint %6.3f s, %4.0f KiB a rank", opened, opening);
  std::printf("\n");
  EXPECT_LT(met, 60);
  EXPECT_LT(opened, 60);
#if !defined(MARROW_SANITIZED)
  if (n >= 64) {
    EXPECT_LT(meeting, 1024) << "KiB a rank";
    EXPECT_LT(opening, 16384) << "KiB a rank";
  }
#endif
  on_all(stubs, [&](Stub& stub, int) {
    if (stub.bootstrap) stub.bootstrap->barrier();
    stub.transport.reset();
    if (stub.bootstrap) stub.bootstrap->close();
  });
}

class Scale : public ::testing::TestWithParam<int> {};

TEST_P(Scale, SetUpTimeAndMemory) {
  const int n = GetParam();
  if (open_files() < static_cast<rlim_t>(n) * 12 + 200) {
    MARROW_SKIP_WITHOUT("files",
                        base::cat(n, " ranks need more open files than ulimit -Hn allows"));
  }
  // An endpoint of ofi_rxm alone takes 4 to 5 MiB.
  const bool all = std::getenv("MARROW_SCALE_ALL") != nullptr;
  set_up(n, (n <= 64 || all) && has_network("libfabric"));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Scale, ::testing::Values(4, 64, 1024),
                         [](const auto& each) { return std::to_string(each.param); });

}  // namespace
}  // namespace marrow::test
