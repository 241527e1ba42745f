// SPDX-License-Identifier: Apache-2.0
// Every way in which verbs can fail: each function with each plausible errno, each status of a completion,
// each asynchronous event. Each must become a sentence that names the peer, the value and the next step,
// every posted operation must complete, and nothing may be left over.
#include <dirent.h>
#include <gmock/gmock.h>

#include <cerrno>

#include "base/log.hpp"
#include "marrow/error.hpp"
#include "unit/faulty_verbs.hpp"
#include "unit/network_sides.hpp"
#include "verbs/registration.hpp"

namespace marrow::test {
namespace {

using faulty::Call;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kProvider = "provider=faulty&credits=8&depth=32";

std::size_t descriptors() {
  std::size_t n = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory)) ++n;
  ::closedir(directory);
  return n;
}

class VerbsFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    faulty::reset();
    warm();
    fds_ = descriptors();
    base::log::set_callback([this](base::log::Level, base::log::Subsystem, std::string_view line) {
      logged_ += std::string(line) + "\n";
    });
  }
  void TearDown() override {
    base::log::set_callback({});
    faulty::reset();
    EXPECT_EQ(faulty::alive(), 0);
    EXPECT_LE(descriptors(), fds_);
  }
  static void warm() {
    static const bool once = [] {
      Sides net("verbs", kProvider);
      EXPECT_EQ(net.problem, "");
      EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
      return true;
    }();
    EXPECT_TRUE(once);
  }
  /// Posts until the peer is down at one end; everything that was taken completes at both.
  void expect_down(Sides& net, const ::testing::Matcher<std::string>& sentence) {
    std::uint32_t posted[2] = {};
    EXPECT_TRUE(net.until([&] {
      for (std::uint32_t r = 0; r < 2; ++r) {
        if (posted[r] < 5000 && net[r].post(net.message(r, 1 - r, "hello")) == 1) ++posted[r];
      }
      return net[0].down.count(1) != 0 || net[1].down.count(0) != 0;
    }));
    const std::string text = net[0].down.count(1) ? net[0].down[1] : net[1].down[0];
    EXPECT_THAT(text, sentence);
    EXPECT_THAT(text, AnyOf(HasSubstr("rank 0"), HasSubstr("rank 1")));
    EXPECT_THAT(text, HasSubstr("; "));  // and what to do about it
    // The other end: by the same error, by a flush, or when the first leaves.
    net[net[0].down.count(1) ? 1 : 0].network->abort(net[net[0].down.count(1) ? 1 : 0].endpoint,
                                                     net[0].down.count(1) ? 0 : 1);
    EXPECT_TRUE(net.until([&] {
      return net[0].done.size() >= posted[0] && net[1].done.size() >= posted[1];
    })) << net[0].done.size()
        << " of " << posted[0] << ", " << net[1].done.size() << " of " << posted[1];
    EXPECT_EQ(net[0].duplicates + net[1].duplicates, 0);
  }

  std::string logged_;
  std::size_t fds_ = 0;
};

// --- set-up ---------------------------------------------------------------------------------------

struct Early {
  Call call;
  int error;
  int skip;
  const char* says;
  const char* advises;
};
void PrintTo(const Early& s, std::ostream* out) {
  *out << faulty::name(s.call) << " errno " << s.error << " after " << s.skip;
}

class VerbsSetUpFaults : public VerbsFaults, public ::testing::WithParamInterface<Early> {};

/// Before any peer is spoken to: the network itself says no.
TEST_P(VerbsSetUpFaults, IsASentence) {
  const Early& p = GetParam();
  faulty::set({p.call, p.error, p.skip});
  {
    Sides net("verbs", kProvider);
    EXPECT_TRUE(faulty::happened());
    EXPECT_THAT(net.problem,
                AllOf(HasSubstr(p.says), HasSubstr(p.advises), HasSubstr(std::strerror(p.error))));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each, VerbsSetUpFaults,
    ::testing::Values(
        Early{Call::get_device_list, ENOSYS, 0, "cannot be listed", "ibv_devinfo"},
        Early{Call::get_device_list, EPERM, 0, "cannot be listed", "MARROW_NIC"},
        Early{Call::get_device_list, ENOMEM, 0, "cannot be listed", "rdma link"},
        Early{Call::open_device, EACCES, 0, "mlx5_softnic0 cannot be opened", "/dev/infiniband"},
        Early{Call::open_device, EPERM, 0, "mlx5_softnic0 cannot be opened", "/dev/infiniband"},
        Early{Call::open_device, ENODEV, 0, "mlx5_softnic0 cannot be opened", "/dev/infiniband"},
        Early{Call::open_device, EMFILE, 0, "mlx5_softnic0 cannot be opened", "/dev/infiniband"},
        Early{Call::query_device, EIO, 0, "mlx5_softnic0 does not answer", "kernel's log"},
        Early{Call::query_device, EIO, 1, "mlx5_softnic0 does not answer", "ibv_devinfo"},
        Early{Call::query_port, EINVAL, 0, "port 1 cannot be queried", "ibv_devinfo"},
        Early{Call::query_port, ENODEV, 0, "port 1 cannot be queried", "ibv_devinfo"},
        Early{Call::alloc_pd, ENOMEM, 0, "no protection domain", "other users"},
        Early{Call::reg_mr, ENOMEM, 0, "registering 65536 bytes", "ulimit -l"},
        Early{Call::reg_mr, EAGAIN, 0, "locked memory is", "ulimit -l"},
        Early{Call::reg_mr, ENOMEM, 1, "registering 65536 bytes", "memlock"},
        Early{Call::reg_mr, EFAULT, 0, "registering 65536 bytes", "memory that is mapped"},
        Early{Call::reg_mr, EINVAL, 0, "with mlx5_softnic0", "writable"},
        Early{Call::reg_mr, EPERM, 0, "registering 65536 bytes", "kernel's log"}));

// --- connecting -----------------------------------------------------------------------------------

class VerbsConnectFaults : public VerbsFaults, public ::testing::WithParamInterface<Early> {};

/// With the first operation to a peer: what was posted fails, and the sentence names the peer. Half of
/// these hit whoever connects, half whoever is connected to.
TEST_P(VerbsConnectFaults, NamesThePeerAndFailsWhatWasPosted) {
  const Early& p = GetParam();
  faulty::set({});
  {
    Sides net("verbs", kProvider);
    ASSERT_EQ(net.problem, "");
    faulty::set({p.call, p.error, p.skip, 1});
    EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_PEER_FAILED);
    EXPECT_TRUE(faulty::happened());
    EXPECT_THAT(net[0].down[1],
                AllOf(HasSubstr("rank 1"), AnyOf(HasSubstr(p.says), HasSubstr("refused"))));
    const bool ours = net[0].down[1].find("refused") == std::string::npos;
    EXPECT_TRUE(ours || net.until([&] { return net[1].down.count(0) != 0; }));
    const std::string where_it_was = ours ? net[0].down[1] : net[1].down[0];
    EXPECT_THAT(where_it_was, AllOf(HasSubstr(p.says), HasSubstr(p.advises), HasSubstr("rank "),
                                    HasSubstr(std::strerror(p.error))));
    // For good: the next one fails at once.
    EXPECT_EQ(net.run(0, net.message(0, 1, "y")), MARROW_NETWORK_PEER_FAILED);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each, VerbsConnectFaults,
    ::testing::Values(
        Early{Call::create_cq, ENOMEM, 0, "no completion queue", "ulimit -l"},
        Early{Call::create_cq, EINVAL, 0, "no completion queue", "MARROW_VERBS_DEPTH"},
        Early{Call::create_cq, ENOMEM, 1, "no completion queue", "ulimit -l"},
        Early{Call::create_qp, ENOMEM, 0, "gave no queue pair for rank 1", "ulimit -l"},
        Early{Call::create_qp, EAGAIN, 0, "36 sends, 8 receives", "MARROW_VERBS_CREDITS"},
        Early{Call::create_qp, EIO, 0, "gave no queue pair", "ibv_devinfo -v"},
        Early{Call::create_qp, ENOMEM, 1, "gave no queue pair for rank 0", "ulimit -l"},
        Early{Call::reg_mr, ENOMEM, 0, "for messages of rank 1", "ulimit -l"},
        Early{Call::reg_mr, ENOMEM, 1, "for messages of rank 0", "ulimit -l"},
        Early{Call::to_init, EINVAL, 0, "could not become initialised", "MARROW_GID_INDEX"},
        Early{Call::to_rtr, EINVAL, 0, "could not become ready to receive", "MARROW_NIC"},
        Early{Call::to_rtr, ETIMEDOUT, 0, "ready to receive", "ping"},
        Early{Call::to_rtr, ENETUNREACH, 1, "ready to receive", "ping"},
        Early{Call::to_rtr, EHOSTUNREACH, 0, "ready to receive", "MARROW_GID_INDEX"},
        Early{Call::to_rts, EINVAL, 0, "could not become ready to send", "rdma link"},
        Early{Call::to_rts, ENODEV, 1, "could not become ready to send", "rdma link"},
        Early{Call::post_recv, ENOMEM, 0, "receive 0 of 8", "MARROW_VERBS_CREDITS"},
        Early{Call::post_recv, EINVAL, 5, "receive 5 of 8", "MARROW_VERBS_CREDITS"}));

// --- posting and polling --------------------------------------------------------------------------

struct Use {
  Call call;
  int error;
  int skip;
  int bad;
  const char* says;
};
void PrintTo(const Use& s, std::ostream* out) {
  *out << faulty::name(s.call) << " errno " << s.error << " after " << s.skip << " at " << s.bad;
}
class VerbsUseFaults : public VerbsFaults, public ::testing::WithParamInterface<Use> {};

TEST_P(VerbsUseFaults, EndsTheConnectionWithASentence) {
  const Use& p = GetParam();
  {
    Sides net("verbs", kProvider);
    ASSERT_EQ(net.problem, "");
    for (std::uint32_t r = 0; r < 2; ++r)
      ASSERT_EQ(net.run(r, net.message(r, 1 - r, "before")), MARROW_NETWORK_OK);
    faulty::set({p.call, p.error, p.skip, 1, p.bad});
    // A chain: some of it may have gone out.
    std::vector<marrow_network_operation> chain;
    for (int i = 0; i < 6; ++i) chain.push_back(net.message(0, 1, "chain"));
    const int n = net[0].network->post(net[0].endpoint, chain.data(), 6);
    ASSERT_GE(n, 1);
    expect_down(net, AllOf(HasSubstr(p.says), HasSubstr("mlx5_softnic0"),
                           HasSubstr(std::strerror(p.error))));
    EXPECT_TRUE(faulty::happened());
    // Those that went out and asked for no completion of their own are given up after a second.
    EXPECT_TRUE(net.until([&] {
      return std::all_of(chain.begin(), chain.begin() + n,
                         [&](const auto& o) { return net[0].done.count(o.token) != 0; });
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each, VerbsUseFaults,
    ::testing::Values(Use{Call::post_send, ENOMEM, 0, 0, "could not be posted"},
                      Use{Call::post_send, EINVAL, 0, 3, "could not be posted"},
                      Use{Call::post_send, EIO, 0, 5, "a message of 5 bytes"},
                      Use{Call::post_send, ENODEV, 20, 0, "could not be posted"},
                      Use{Call::post_recv, ENOMEM, 0, 0, "could not be posted"},
                      Use{Call::post_recv, EINVAL, 10, 0, "a receive for rank"},
                      Use{Call::poll_cq, EIO, 0, 0, "cannot be read"},
                      Use{Call::poll_cq, ENODEV, 30, 0, "completions of"}));

/// What is destroyed at the end and refuses is said, and does not keep the rest from going.
TEST_F(VerbsFaults, TeardownThatFailsIsLoggedAndGoesOn) {
  for (const Call call :
       {Call::destroy_qp, Call::dereg_mr, Call::destroy_cq, Call::dealloc_pd, Call::close_device}) {
    logged_.clear();
    {
      Sides net("verbs", kProvider, 2, 0);
      ASSERT_EQ(net.problem, "");
      ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
      faulty::set({call, EBUSY});
    }
    EXPECT_TRUE(faulty::happened()) << faulty::name(call);
    EXPECT_THAT(logged_, HasSubstr(std::strerror(EBUSY))) << faulty::name(call);
    faulty::set({});
    EXPECT_EQ(faulty::alive(), 0) << faulty::name(call);
  }
  {
    Sides net("verbs", kProvider);
    ASSERT_EQ(net.problem, "");
    faulty::set({Call::dereg_mr, EBUSY, 0, 1});
    EXPECT_EQ(net[0].network->deregister_memory(net[0].endpoint, net.memory[0].region),
              MARROW_NETWORK_ERROR);
    EXPECT_THAT(net[0].error(), AllOf(HasSubstr("deregistering 65536 bytes"),
                                      HasSubstr(std::strerror(EBUSY)), HasSubstr("close windows")));
    net.memory[0].region = nullptr;
  }
}

/// A queue pair that cannot even be stopped: nothing is waited for.
TEST_F(VerbsFaults, AQueuePairThatCannotBeStoppedStillCompletesWhatWasPosted) {
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
  faulty::set({Call::to_err, EIO});
  faulty::on_completion([](verbs::ibv_wc& wc) {
    if (!(wc.wr_id >> 63)) wc.status = verbs::IBV_WC_GENERAL_ERR;
  });
  expect_down(net, HasSubstr("IBV_WC_GENERAL_ERR"));
}

// --- completions ----------------------------------------------------------------------------------

class VerbsStatuses : public VerbsFaults, public ::testing::WithParamInterface<int> {};

TEST_P(VerbsStatuses, OfASendIsNamed) {
  {
    Sides net("verbs", kProvider);
    ASSERT_EQ(net.problem, "");
    ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
    std::atomic<int> seen{0};
    faulty::on_completion([&](verbs::ibv_wc& wc) {
      if ((wc.wr_id >> 63) == 0 && ++seen == 7) {
        wc.status = GetParam();
        wc.vendor_err = 129;
      }
    });
    // What a NIC says when the peer's process ended sends the reader to that process.
    const bool ended = GetParam() == verbs::IBV_WC_REM_OP_ERR ||
                       GetParam() == verbs::IBV_WC_REM_ABORT_ERR ||
                       GetParam() == verbs::IBV_WC_RETRY_EXC_ERR;
    // The seventh may be receives given back, when the machine is busy.
    expect_down(
        net, AllOf(AnyOf(HasSubstr("a message of 5 bytes"),
                         HasSubstr("the return of receives of 8 bytes")),
                   HasSubstr("vendor code 129"), HasSubstr(ended ? "look at that rank's log" : ""),
                   HasSubstr(GetParam() <= 21 ? "IBV_WC_" : "completion status 77")));
  }
}
TEST_P(VerbsStatuses, OfAReceiveIsNamed) {
  {
    Sides net("verbs", kProvider);
    ASSERT_EQ(net.problem, "");
    ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
    std::atomic<int> seen{0};
    faulty::on_completion([&](verbs::ibv_wc& wc) {
      if ((wc.wr_id >> 63) != 0 && ++seen == 7) wc.status = GetParam();
    });
    expect_down(net, AllOf(HasSubstr("a receive from rank"),
                           HasSubstr(GetParam() <= 21 ? "IBV_WC_" : "completion status 77")));
  }
}
INSTANTIATE_TEST_SUITE_P(Each, VerbsStatuses,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
                                           17, 18, 19, 20, 21, 77));

TEST_F(VerbsFaults, ShortPollsLoseNothing) {
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  for (const int most : {1, 2, 3}) {
    faulty::short_polls(most);
    net[1].messages.clear();
    std::uint32_t posted = 0;
    EXPECT_TRUE(net.until([&] {
      while (posted < 300 && net[0].post(net.message(0, 1, std::to_string(posted))) == 1) ++posted;
      return net[1].messages.size() == 300;
    })) << most;
    ASSERT_EQ(net[1].messages.size(), 300u);
    for (int i = 0; i < 300; ++i) ASSERT_EQ(net[1].messages[i].second, std::to_string(i));
  }
  EXPECT_TRUE(net[0].down.empty());
}

/// A NIC that takes nothing inline (refuses queue pairs that want it) gets copies.
TEST_F(VerbsFaults, WithoutInlineDataEverythingWorks) {
  for (const int refused : {1, 2}) {
    faulty::set({Call::create_qp, EINVAL, 0, refused});
    Sides net("verbs", kProvider, 1);
    ASSERT_EQ(net.problem, "");
    std::string text(64, 'q');
    ASSERT_EQ(net.run(0, net.message(0, 0, text)), MARROW_NETWORK_OK);
    EXPECT_TRUE(faulty::happened());
    ASSERT_TRUE(net.until([&] { return net[0].messages.size() == 1; }));
    EXPECT_EQ(net[0].messages[0].second, text);
    for (std::uint64_t i = 0; i < 200; ++i) {
      auto value = net.operation(MARROW_NETWORK_PUT_VALUE, 0, 0);
      value.bytes = 24;
      value.remote_offset = 24 * i;
      std::memset(value.inline_data, static_cast<int>(i), 24);
      ASSERT_EQ(net.run(0, value), MARROW_NETWORK_OK);
    }
    ASSERT_EQ(net.run(0, net.operation(MARROW_NETWORK_FLUSH, 0, 0)), MARROW_NETWORK_OK);
    for (std::size_t i = 0; i < 4800; ++i)
      ASSERT_EQ(net.memory[0].bytes[i], static_cast<std::byte>(i / 24));
  }
}

// --- asynchronous events --------------------------------------------------------------------------

class VerbsEvents : public VerbsFaults, public ::testing::WithParamInterface<int> {};

TEST_P(VerbsEvents, EndConnectionsOrAreSaid) {
  const int type = GetParam();
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
  const bool fatal = type <= 3 || type == verbs::IBV_EVENT_DEVICE_FATAL;
  const char* debug = std::getenv("MARROW_DEBUG");
  ::setenv("MARROW_DEBUG", "INFO", 1);
  base::log::reload();
  faulty::deliver(type, 1);
  faulty::deliver(type, 2);  // another port's
  if (fatal) {
    expect_down(net, HasSubstr("IBV_EVENT_"));
  } else {
    const std::string text = type == 99 ? "asynchronous event 99" : "IBV_EVENT_";
    EXPECT_TRUE(
        net.until([&] { return logged_.find(text) != std::string::npos; }, milliseconds(5000)));
    EXPECT_EQ(net.run(0, net.message(0, 1, "goes on")), MARROW_NETWORK_OK);
    EXPECT_TRUE(net[0].down.empty());
    if (type == verbs::IBV_EVENT_PORT_ERR) {
      EXPECT_THAT(logged_, AllOf(HasSubstr("port 1"), HasSubstr("MARROW_VERBS_TIMEOUT"),
                                 HasSubstr("cable"), HasSubstr("8.5")));
    }
  }
  debug ? ::setenv("MARROW_DEBUG", debug, 1) : ::unsetenv("MARROW_DEBUG");
  base::log::reload();
}
INSTANTIATE_TEST_SUITE_P(Each, VerbsEvents,
                         ::testing::Values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
                                           17, 18, 99));

/// The news that a peer is gone and an operation's failure come in the same pass: it is said once, by
/// whichever was first.
TEST_F(VerbsFaults, APeerThatEndsWhileAnOperationFailsIsSaidOnce) {
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(net[0].post(net.message(0, 1, "under way")), 1);
  std::this_thread::sleep_for(milliseconds(20));
  net.close(1);
  std::this_thread::sleep_for(milliseconds(50));  // both wait now
  faulty::on_completion([](verbs::ibv_wc& wc) {
    if (!(wc.wr_id >> 63)) wc.status = verbs::IBV_WC_RETRY_EXC_ERR;
  });
  EXPECT_TRUE(net.until([&] { return net[0].done.size() == 5; }));
  for (int i = 0; i < 100; ++i) net[0].step();
  EXPECT_THAT(net[0].down[1], HasSubstr("IBV_WC_RETRY_EXC_ERR"));
  EXPECT_EQ(net.run(0, net.message(0, 1, "y")), MARROW_NETWORK_PEER_FAILED);
}

/// All of a failing device's peers at once, and nobody waits for completions that a dead NIC never gives.
TEST_F(VerbsFaults, ADeadDeviceFailsEveryPeerAtOnce) {
  Sides net("verbs", "provider=faulty&credits=8", 3);
  ASSERT_EQ(net.problem, "");
  for (std::uint32_t peer : {1u, 2u})
    ASSERT_EQ(net.run(0, net.message(0, peer, "x")), MARROW_NETWORK_OK);
  for (int i = 0; i < 4; ++i) net[0].post(net.message(0, 1, "under way"));
  faulty::deliver(verbs::IBV_EVENT_DEVICE_FATAL);
  EXPECT_TRUE(net.until([&] { return net[0].down.size() == 2; }, milliseconds(1000)));
  for (std::uint32_t peer : {1u, 2u})
    EXPECT_THAT(net[0].down[peer], AllOf(HasSubstr("rank " + std::to_string(peer)),
                                         HasSubstr("IBV_EVENT_DEVICE_FATAL"), HasSubstr("reset")));
}

// --- ports and addresses --------------------------------------------------------------------------

verbs::ibv_gid_entry gid(std::uint32_t index, std::uint32_t type, const char* text) {
  verbs::ibv_gid_entry entry{};
  entry.gid_index = index;
  entry.gid_type = type;
  int at = 0;
  for (const char* c = text; *c; c += 2)
    entry.gid.raw[at++] = static_cast<std::uint8_t>(std::stoi(std::string(c, 2), nullptr, 16));
  return entry;
}
const char* kLinkLocal = "fe80000000000000025056fffe000001";
const char* kIpv4 = "00000000000000000000ffff7f000001";  // 127.0.0.1
const char* kGlobal = "20010db8000000000000000000000005";

TEST_F(VerbsFaults, RoceTakesVersion2AndIpv4First) {
  faulty::set_gids({gid(0, 1, kLinkLocal), gid(1, 2, kLinkLocal), gid(2, 1, kIpv4),
                    gid(3, 2, kGlobal), gid(4, 2, kIpv4)});
  std::vector<verbs::ibv_qp_attr> paths;
  faulty::on_modify([&](const verbs::ibv_qp_attr& attr, int mask) {
    if (mask & verbs::IBV_QP_AV) paths.push_back(attr);
  });
  Sides net("verbs", std::string(kProvider) + "&tc=104&sl=3&timeout=19&retries=5&rnr_retries=6");
  ASSERT_EQ(net.problem, "");
  ASSERT_EQ(net.run(0, net.message(0, 1, "over RoCE")), MARROW_NETWORK_OK) << net[0].down[1];
  ASSERT_EQ(paths.size(), 2u);
  for (const verbs::ibv_qp_attr& attr : paths) {
    EXPECT_EQ(attr.ah_attr.is_global, 1);
    EXPECT_EQ(attr.ah_attr.grh.sgid_index, 4);
    EXPECT_EQ(attr.ah_attr.grh.hop_limit, 64);
    EXPECT_EQ(attr.ah_attr.grh.traffic_class, 104);
    EXPECT_EQ(attr.ah_attr.sl, 3);
    EXPECT_EQ(attr.ah_attr.grh.dgid.raw[12], 127);
  }
}

TEST_F(VerbsFaults, GidIndexCanBeChosenAndAWrongOneListsThem) {
  faulty::set_gids({gid(0, 1, kLinkLocal), gid(1, 2, kIpv4)});
  std::atomic<int> index{-1};
  faulty::on_modify([&](const verbs::ibv_qp_attr& attr, int mask) {
    if (mask & verbs::IBV_QP_AV) index = attr.ah_attr.grh.sgid_index;
  });
  {
    Sides net("verbs", std::string(kProvider) + "&gid=0");
    ASSERT_EQ(net.problem, "");
    ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
    EXPECT_EQ(index, 0);
  }
  Sides wrong("verbs", std::string(kProvider) + "&gid=7");
  EXPECT_THAT(wrong.problem, AllOf(HasSubstr("no GID 7"), HasSubstr("1 = 127.0.0.1 (RoCE v2)"),
                                   HasSubstr("MARROW_GID_INDEX")));
}

TEST_F(VerbsFaults, APortThatIsDownAndANicThatIsNotThereAreNamed) {
  faulty::on_port([](verbs::ibv_port_attr& port) { port.state = 1; });
  {
    Sides net("verbs", kProvider);
    EXPECT_THAT(net.problem, AllOf(HasSubstr("mlx5_softnic0: port 1 is down"), HasSubstr("cable")));
  }
  faulty::on_port({});
  {
    Sides net("verbs", "provider=faulty&nic=mlx5_softnic0:3");
    EXPECT_THAT(net.problem,
                AllOf(HasSubstr("has 1 ports, not a port 3"), HasSubstr("MARROW_NIC")));
  }
  {
    Sides net("verbs", "provider=faulty&nic=mlx5_7");
    EXPECT_THAT(net.problem,
                AllOf(HasSubstr("no RDMA device named mlx5_7"), HasSubstr("rdma link")));
  }
  {
    Sides net("verbs", "provider=faulty&nic=mlx5_softnic0:x");
    EXPECT_THAT(net.problem, HasSubstr("is no device:port"));
  }
  {
    Sides net("verbs", "nic=none");
    EXPECT_THAT(net.problem, HasSubstr("MARROW_NIC=none"));
  }
}

TEST_F(VerbsFaults, RanksWithDifferentRoceVersionsOrNicsAreRefusedAtSetUp) {
  const marrow_network& n = network_named("verbs");
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof services;
  const auto between = [&](const char* one, const char* other) {
    Side a, b;
    faulty::set_gids({gid(0, 1, kIpv4), gid(1, 2, kIpv4)});
    EXPECT_EQ(a.listen(n, services, one, 0, 2), 0) << n.last_error();
    EXPECT_EQ(b.listen(n, services, other, 1, 2), 0) << n.last_error();
    const marrow_network_address all[2] = {a.address, b.address};
    EXPECT_LT(n.connect(a.endpoint, all, 1'000'000'000), 0);
    const std::string sentence = n.last_error();
    a.close();
    b.close();
    return sentence;
  };
  EXPECT_THAT(between("provider=faulty&gid=0", "provider=faulty&gid=1"),
              AllOf(HasSubstr("rank 0 cannot reach rank 1"), HasSubstr("RoCE v2"),
                    HasSubstr("RoCE v1"), HasSubstr("MARROW_GID_INDEX")));
  EXPECT_THAT(
      between("provider=faulty", "nic=softnic"),
      AllOf(HasSubstr("rank 1 uses softnic"), HasSubstr("a real NIC"), HasSubstr("MARROW_NIC")));
}

// --- registration ---------------------------------------------------------------------------------

/// A message must not overtake what was put into GPU memory before it: host and GPU memory lie on two ways,
/// so a READ from the GPU's comes back first. The key is made to say that it is a GPU's.
TEST_F(VerbsFaults, WhatFollowsAPutIntoGpuMemoryWaitsForARead) {
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  net[0].network->release_key(net[0].endpoint, net.memory[1].remote[0]);
  net.memory[1].key[24] = 1;
  ASSERT_EQ(net[0].network->import_key(net[0].endpoint, 1, net.memory[1].key,
                                       net.memory[1].key_bytes, &net.memory[1].remote[0]),
            0);
  std::string posted;
  faulty::on_post([&](const verbs::ibv_send_wr& request) {
    if (request.wr_id >> 32 != 1) return;  // rank 1's own
    const char* names[] = {"write", "write+imm", "send", "send+imm", "read", "cas", "add"};
    posted += std::string(posted.empty() ? "" : " ") + names[request.opcode] +
              (request.send_flags & verbs::IBV_SEND_FENCE ? "(fenced)" : "");
  });
  const auto all = [&](std::vector<marrow_network_operation> operations) {
    posted.clear();
    EXPECT_TRUE(net.until([&] {
      return net[0].network->post(net[0].endpoint, operations.data(),
                                  static_cast<std::uint32_t>(operations.size())) ==
             static_cast<int>(operations.size());
    }));
    EXPECT_TRUE(net.until([&] { return net[0].done.count(operations.back().token) != 0; }));
    for (const auto& o : operations) EXPECT_EQ(net[0].status_of(o.token), MARROW_NETWORK_OK);
    return posted;
  };
  const auto put = [&](bool immediate) {
    auto o = net.operation(MARROW_NETWORK_PUT, 0, 1);
    o.bytes = 100;
    o.has_immediate = immediate;
    o.immediate = 5;
    return o;
  };
  EXPECT_EQ(all({net.message(0, 1, "a")}), "send");
  EXPECT_EQ(all({put(false), put(false), net.message(0, 1, "b"), net.message(0, 1, "c")}),
            "write write read send(fenced) send");
  EXPECT_EQ(all({put(true)}), "write read write+imm(fenced)");
  EXPECT_EQ(all({put(false), net.operation(MARROW_NETWORK_FLUSH, 0, 1),
                 net.operation(MARROW_NETWORK_FLUSH, 0, 1)}),
            "write read read read");
  EXPECT_TRUE(net.until([&] { return net[1].immediates.size() == 1; }));
  EXPECT_EQ(net[1].messages.size(), 3u);
  // A window that was closed meanwhile is not read from: that would end the connection.
  EXPECT_EQ(all({put(false)}), "write");
  ASSERT_EQ(net[0].network->release_key(net[0].endpoint, net.memory[1].remote[0]), 0);
  ASSERT_EQ(net[1].network->deregister_memory(net[1].endpoint, net.memory[1].region), 0);
  net.memory[1].remote[0] = net.memory[1].region = nullptr;
  EXPECT_EQ(all({net.operation(MARROW_NETWORK_FLUSH, 0, 1)}), "read");
  EXPECT_EQ(all({net.message(0, 1, "d")}), "send");
  EXPECT_TRUE(net[0].down.empty());
}

/// GPU memory, without a GPU: which calls are made, in which order, and what is said when none works.
TEST_F(VerbsFaults, GpuMemoryIsADmaBufElsePeerMemoryElseASentence) {
  verbs::Table table = verbs::provider("faulty");
  static int dmabuf_error;
  static std::uint64_t offset_seen;
  table.reg_dmabuf_mr = [](verbs::ibv_pd*, std::uint64_t offset, std::size_t, std::uint64_t, int,
                           int) -> verbs::ibv_mr* {
    static verbs::ibv_mr region{};
    offset_seen = offset;
    errno = dmabuf_error;
    return dmabuf_error ? nullptr : &region;
  };
  static int peer_error;
  table.reg_mr = [](verbs::ibv_pd*, void*, std::size_t, int) -> verbs::ibv_mr* {
    static verbs::ibv_mr region{};
    errno = peer_error;
    return peer_error ? nullptr : &region;
  };
  verbs::Memory memory;
  memory.address = reinterpret_cast<void*>(0x7f0000001100);
  memory.bytes = 4096;
  memory.gpu = true;
  const auto with = [&](bool exports) {
    return verbs::register_memory(
        table, nullptr, nullptr, memory, verbs::IBV_ACCESS_LOCAL_WRITE,
        [exports](void*, std::uint64_t, std::uint64_t& offset, std::string& why) {
          offset = 0x100;
          why = "this GPU exports none";
          return exports ? base::Fd(::dup(0)) : base::Fd();
        },
        "mlx5_9");
  };
  dmabuf_error = 0;
  EXPECT_STREQ(with(true).way, "dma-buf");
  EXPECT_EQ(offset_seen, 0x100u);
  dmabuf_error = EOPNOTSUPP;
  peer_error = 0;
  EXPECT_STREQ(with(true).way, "peer memory");
  EXPECT_STREQ(with(false).way, "peer memory");
  peer_error = EFAULT;
  for (const bool exports : {true, false}) {
    try {
      with(exports);
      ADD_FAILURE();
    } catch (const marrow::Error& error) {
      EXPECT_EQ(error.code(), Code::unsupported);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("4096 bytes"), HasSubstr("mlx5_9"), HasSubstr("nvidia_peermem"),
                        HasSubstr(exports ? std::strerror(EOPNOTSUPP) : "exports none"),
                        HasSubstr(std::strerror(EFAULT))));
    }
  }
}

}  // namespace
}  // namespace marrow::test
