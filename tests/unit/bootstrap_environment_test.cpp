// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Launchers' variables and the rendezvous by file, by port and by nothing at all.
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/random.hpp"
#include "bootstrap/environment.hpp"
#include "unit/bootstrap_ranks.hpp"

namespace marrow::bootstrap {
namespace {

using namespace testing;  // NOLINT: the helpers of this test
using ::testing::HasSubstr;

/// Exactly these variables of launchers and none else, for a scope.
class Variables {
 public:
  explicit Variables(const std::map<std::string, std::string>& wanted) {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "PMIX_RANK",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_LOCALID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_STEP_NUM_NODES",
                             "SLURM_NNODES",
                             "MARROW_RENDEZVOUS",
                             "MARROW_SECRET_FILE",
                             "MARROW_SOCKET_IFNAME"}) {
      ::unsetenv(name);
    }
    for (const auto& [name, value] : wanted) {
      ::setenv(name.c_str(), value.c_str(), 1);
      names_.push_back(name);
    }
  }
  ~Variables() {
    for (const std::string& name : names_) ::unsetenv(name.c_str());
  }

 private:
  std::vector<std::string> names_;
};

class Folder {
 public:
  Folder() : path_(::testing::TempDir() + "marrow-test-" + base::random_name(6)) {
    std::filesystem::create_directory(path_);
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& content, mode_t mode = 0600) const {
    std::ofstream(*this / name) << content;
    ::chmod((*this / name).c_str(), mode);
    return *this / name;
  }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::string path_;
};

std::string failure(Code code, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(LaunchInfo, KnowsTheLaunchers) {
  {
    Variables set({{"RANK", "3"},
                   {"WORLD_SIZE", "8"},
                   {"LOCAL_RANK", "1"},
                   {"LOCAL_WORLD_SIZE", "2"},
                   {"SLURM_PROCID", "0"},
                   {"SLURM_NTASKS", "4"}});
    LaunchInfo info = launch_info();
    EXPECT_EQ(info.source, "torchrun");
    EXPECT_EQ(info.rank, 3);
    EXPECT_EQ(info.nranks, 8);
    EXPECT_EQ(info.local_rank, 1);
    EXPECT_EQ(info.local_size, 2);
  }
  {
    Variables set({{"OMPI_COMM_WORLD_RANK", "5"},
                   {"OMPI_COMM_WORLD_SIZE", "6"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "5"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "6"},
                   {"PMIX_RANK", "5"}});
    LaunchInfo info = launch_info();
    EXPECT_EQ(info.source, "mpirun");
    EXPECT_EQ(info.rank, 5);
    EXPECT_EQ(info.local_size, 6);
  }
  {
    Variables set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
    EXPECT_EQ(launch_info().source, "PMI");
    EXPECT_EQ(launch_info().nranks, 2);
  }
  {
    Variables set({{"SLURM_PROCID", "2"},
                   {"SLURM_NTASKS", "12"},
                   {"SLURM_STEP_NUM_TASKS", "4"},
                   {"SLURM_LOCALID", "2"},
                   {"SLURM_STEP_NUM_NODES", "1"}});
    LaunchInfo info = launch_info();
    EXPECT_EQ(info.source, "srun");
    EXPECT_EQ(info.nranks, 4);
    EXPECT_EQ(info.local_size, 4);
  }
  Variables none({});
  EXPECT_EQ(launch_info().source, "none");
  EXPECT_EQ(launch_info().nranks, 1);
}

TEST(LaunchInfo, BadVariablesAreNamed) {
  Variables word({{"RANK", "first"}, {"WORLD_SIZE", "2"}});
  EXPECT_THAT(failure(Code::invalid_argument, [] { launch_info(); }), HasSubstr("RANK= \"first\""));
  Variables big({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
  EXPECT_THAT(failure(Code::invalid_argument, [] { launch_info(); }), HasSubstr("rank 2 of 2"));
  Variables nobody(std::map<std::string, std::string>{{"MARROW_RENDEZVOUS", "tcp://localhost:1"}});
  EXPECT_THAT(failure(Code::invalid_argument, [] { launch_info(); }),
              HasSubstr("RANK and WORLD_SIZE"));
}

/// n ranks as threads meet `times` times, each as launch_info() would say.
std::vector<Outcome> meet(int n, int times, const base::Parameters& parameters,
                          const LaunchInfo& like = {}) {
  return on_threads(n, [&](int rank) {
    LaunchInfo launch = like;
    launch.rank = rank;
    launch.nranks = n;
    std::unique_ptr<Bootstrap> before;
    for (int i = 0; i < times; ++i) {
      UniqueId id = rendezvous(launch, parameters);
      auto bootstrap = std::make_unique<Bootstrap>(id, n, rank, Options{in(10000), parameters});
      auto all = bootstrap->allgather(bytes(std::to_string(rank)));
      for (int r = 0; r < n; ++r) {
        EXPECT_EQ(text(all[static_cast<std::size_t>(r)]), std::to_string(r));
      }
      if (before) before->close();  // two were alive at once
      before = std::move(bootstrap);
    }
    before->close();
  });
}

TEST(Rendezvous, AFileIsMadeAndRemovedAndAStaleOneRecognised) {
  Variables none({});
  Folder folder;
  base::Parameters parameters;
  parameters.set("MARROW_RENDEZVOUS", "file://" + (folder / "meet"));
  expect_all_ok(meet(3, 3, parameters));
  EXPECT_EQ(folder.files(), 0u);
  // A job that died: its file names a listener that is gone.
  LaunchInfo crashed;
  crashed.nranks = 3;
  UniqueId id = rendezvous(crashed, parameters);
  EXPECT_EQ(folder.files(), 1u);
  take_listener(decode(id).credentials.session);
  expect_all_ok(meet(3, 2, parameters));
  EXPECT_EQ(folder.files(), 0u);
}

TEST(Rendezvous, AMissingRankZeroIsNamedWithTheFile) {
  Folder folder;
  base::Parameters parameters;
  parameters.set("MARROW_RENDEZVOUS", "file://" + (folder / "meet"));
  parameters.set("MARROW_BOOTSTRAP_TIMEOUT", "100ms");
  LaunchInfo launch;
  launch.rank = 1;
  launch.nranks = 2;
  std::string what = failure(Code::timeout, [&] { rendezvous(launch, parameters); });
  EXPECT_THAT(what, HasSubstr(folder / "meet"));
  EXPECT_THAT(what, HasSubstr("does not exist"));
}

TEST(Rendezvous, AFileOthersCanReadIsRefused) {
  Folder folder;
  base::Parameters parameters;
  parameters.set("MARROW_RENDEZVOUS", "file://" + folder.write("meet", "x", 0644));
  LaunchInfo launch;
  launch.rank = 1;
  launch.nranks = 2;
  EXPECT_THAT(failure(Code::authentication, [&] { rendezvous(launch, parameters); }),
              HasSubstr("mode 644"));
}

TEST(Rendezvous, APortWithASecretWorksSeveralTimes) {
  Variables none({});
  Folder folder;
  std::uint16_t port = 0;
  listen_tcp(loopback_address(), port).reset();
  base::Parameters parameters;
  parameters.set("MARROW_RENDEZVOUS", "tcp://localhost:" + std::to_string(port));
  parameters.set("MARROW_SECRET_FILE", folder.write("secret", "0123456789abcdef0123"));
  LogLines log;
  expect_all_ok(meet(3, 3, parameters));
  EXPECT_EQ(log.all(), "");
}

TEST(Rendezvous, WithoutASecretThereIsOnlyLoopbackAndAWarning) {
  Variables none({});
  std::uint16_t port = 0;
  listen_tcp(loopback_address(), port).reset();
  base::Parameters parameters;
  parameters.set("MARROW_RENDEZVOUS", "tcp://127.0.0.1:" + std::to_string(port));
  LogLines log;
  expect_all_ok(meet(2, 2, parameters));
  EXPECT_EQ(log.count("without MARROW_SECRET_FILE: whoever can log in to this host"), 1);
  parameters.set("MARROW_RENDEZVOUS", "tcp://192.0.2.1:" + std::to_string(port));
  LaunchInfo launch;
  launch.rank = 1;
  launch.nranks = 2;
  EXPECT_THAT(failure(Code::authentication, [&] { rendezvous(launch, parameters); }),
              HasSubstr("would let anybody on the network join"));
}

/// Whether rank 0's listener of a job that meets at `host` can be reached at `address`.
bool listens(const std::string& host, const Folder& folder, const IpAddress& address) {
  Variables none({});
  std::uint16_t port = 0;
  listen_tcp(loopback_address(), port).reset();
  base::Parameters parameters;
  parameters.set("MARROW_RENDEZVOUS", "tcp://" + host + ":" + std::to_string(port));
  parameters.set("MARROW_SECRET_FILE", folder.write("secret", "0123456789abcdef0123"));
  LaunchInfo launch;
  launch.nranks = 2;
  const UniqueId id = rendezvous(launch, parameters);
  const Connecting started = connect_tcp({address, port});
  pollfd entry = {started.fd.get(), POLLOUT, 0};
  ::poll(&entry, 1, 2000);
  const bool reached =
      started.error == 0 || (started.error == EINPROGRESS && connect_error(started.fd.get()) == 0);
  take_listener(decode(id).credentials.session);
  return reached;
}

TEST(Rendezvous, RankZeroListensOnTheAddressGivenOnly) {
  if (!loopback_works()) GTEST_SKIP() << "loopback is down";
  Folder folder;
  const IpAddress here = loopback_address();
  IpAddress other = here;  // 127.0.0.2: this host, too, but not what the user wrote
  other.back() = 2;
  EXPECT_TRUE(listens("127.0.0.1", folder, here));
  EXPECT_FALSE(listens("127.0.0.1", folder, other));
  EXPECT_TRUE(listens("127.0.0.2", folder, other));
  EXPECT_FALSE(listens("localhost", folder, other));
  for (const IpAddress& mine : interface_addresses("")) {
    if (is_loopback(mine) || to_text(mine).find(':') != std::string::npos) continue;
    EXPECT_TRUE(listens(to_text(mine), folder, mine)) << to_text(mine);
    EXPECT_FALSE(listens(to_text(mine), folder, here)) << to_text(mine);
    break;
  }
}

TEST(Rendezvous, DifferentSecretsAreRefused) {
  if (!loopback_works()) GTEST_SKIP() << "loopback is down";
  Variables none({});
  Folder folder;
  std::uint16_t port = 0;
  listen_tcp(loopback_address(), port).reset();
  std::string url = "tcp://127.0.0.1:" + std::to_string(port);
  LogLines log;
  auto outcomes = on_threads(2, [&](int rank) {
    base::Parameters parameters;
    parameters.set("MARROW_RENDEZVOUS", url);
    parameters.set("MARROW_SECRET_FILE",
                   folder.write("secret" + std::to_string(rank), std::string(20, 'a' + rank)));
    LaunchInfo launch;
    launch.rank = rank;
    launch.nranks = 2;
    Bootstrap bootstrap(rendezvous(launch, parameters), 2, rank, options(500));
  });
  EXPECT_EQ(outcomes[0].code(), Code::timeout);
  EXPECT_EQ(outcomes[1].code(), Code::authentication);
}

TEST(Rendezvous, BadPlacesAndSecretsAreExplained) {
  Folder folder;
  LaunchInfo launch;
  launch.nranks = 2;
  auto with = [&](const std::string& url, const std::string& secret) {
    return [&launch, url, secret] {
      base::Parameters parameters;
      parameters.set("MARROW_RENDEZVOUS", url);
      parameters.set("MARROW_SECRET_FILE", secret);
      rendezvous(launch, parameters);
    };
  };
  for (const char* url :
       {"nowhere", "tcp://host", "tcp://:1", "tcp://host:99999", "file://relative"}) {
    EXPECT_THAT(failure(Code::invalid_argument, with(url, "")), HasSubstr(url));
  }
  EXPECT_THAT(failure(Code::invalid_argument, with("tcp://localhost:1", folder / "none")),
              HasSubstr("does not exist"));
  EXPECT_THAT(
      failure(Code::invalid_argument, with("tcp://localhost:1", folder.write("s", "short"))),
      HasSubstr("has 5 bytes; at least 16"));
  EXPECT_THAT(failure(Code::authentication,
                      with("tcp://localhost:1", folder.write("open", std::string(20, 'x'), 0640))),
              HasSubstr("chmod 600"));
  EXPECT_THAT(failure(Code::system, with("file://" + (folder / "no/such/folder"), "")),
              HasSubstr("No such file"));
}

TEST(Rendezvous, OneHostNeedsNoSettings) {
  Folder folder;
  Variables set({{"TMPDIR", folder / ""}});
  LaunchInfo like;
  like.source = "torchrun";
  like.local_size = 3;
  like.job_key = "a job";
  expect_all_ok(meet(3, 2, {}, like));
  like.local_size = 2;
  LaunchInfo spread = like;
  spread.nranks = 3;
  EXPECT_THAT(failure(Code::invalid_argument, [&] { rendezvous(spread); }),
              HasSubstr("set MARROW_RENDEZVOUS=tcp://"));
}

TEST(Rendezvous, OneRankNeedsNobody) {
  Variables none({});
  Bootstrap bootstrap(rendezvous(launch_info()), 1, 0);
  bootstrap.barrier();
  bootstrap.close();
}

}  // namespace
}  // namespace marrow::bootstrap
