// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// Everything that can be wrong at set-up: who is told what, and that strangers change nothing.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <random>

#include "base/random.hpp"
#include "bootstrap/channel.hpp"
#include "unit/bootstrap_ranks.hpp"

namespace marrow::bootstrap {
namespace {

using namespace testing;  // NOLINT: the helpers of this test
using ::testing::AllOf;
using ::testing::HasSubstr;

base::Fd connect_to(const UniqueId& id) {
  base::Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in where = {};
  where.sin_family = AF_INET;
  where.sin_port = htons(decode(id).port);
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) != 0) fd.reset();
  return fd;
}

void send_raw(const base::Fd& fd, std::span<const std::byte> raw) {
  [[maybe_unused]] ssize_t sent = ::send(fd.get(), raw.data(), raw.size(), MSG_NOSIGNAL);
}

/// A frame header as it stands on the wire.
Bytes header(std::uint16_t version, std::uint16_t type, std::uint64_t length) {
  Writer out;
  out.number(kFrameMagic).number(version).number(type).number(length).number(std::uint64_t{0});
  return out.take();
}

void expect_all(const std::vector<Outcome>& outcomes, Code code, const std::string& part) {
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(outcomes[r].code(), code) << r << ": " << outcomes[r].what();
    EXPECT_THAT(outcomes[r].what(), HasSubstr(part)) << r;
    EXPECT_THAT(outcomes[r].what(), HasSubstr("Next: ")) << r;
  }
}

TEST(Setup, AWrongRankCountIsToldToAll) {
  UniqueId id = UniqueId::create();
  auto outcomes = on_threads(4, [&](int rank) {
    if (rank == 3) std::this_thread::sleep_for(milliseconds(150));
    Bootstrap bootstrap(id, rank == 2 ? 5 : 4, rank, options());
  });
  expect_all(outcomes, Code::mismatch, "one of 5 ranks, rank 0 as one of 4");
}

TEST(Setup, TwoRanksWithOneNumberAreToldToAll) {
  UniqueId id = UniqueId::create();
  auto outcomes = on_threads(
      4, [&](int thread) { Bootstrap bootstrap(id, 4, thread == 3 ? 1 : thread, options()); });
  expect_all(outcomes, Code::mismatch, "Two processes came as rank 1");
}

TEST(Setup, ARankOutOfRangeIsToldToAll) {
  for (int wrong : {7, -3}) {
    UniqueId id = UniqueId::create();
    auto outcomes = on_threads(3, [&](int thread) {
      Bootstrap bootstrap(id, 3, thread == 2 ? wrong : thread, options());
    });
    expect_all(outcomes, Code::mismatch,
               "came as rank " + std::to_string(wrong) + "; ranks are 0 to 2");
  }
}

TEST(Setup, ARankOutOfRangeWithoutARankZeroDoesNotWait) {
  const UniqueId id = UniqueId::create();
  const auto start = Clock::now();
  const auto outcomes = on_threads(1, [&](int) { Bootstrap bootstrap(id, 3, 3, options(30000)); });
  expect_all(outcomes, Code::mismatch, "There is no rank 3; ranks are 0 to 2");
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
}

TEST(Setup, ARankThatCannotStartIsToldToAllAtOnce) {
  for (int victim : {0, 2}) {
    const UniqueId id = UniqueId::create();
    const auto start = Clock::now();
    const auto outcomes = on_threads(3, [&](int rank) {
      if (rank == victim) {
        const Error why(Code::invalid_argument, "its stream is missing", "make one");
        Bootstrap::give_up(id, 3, rank, why);
        throw Error(Code::invalid_argument,
                    "Rank " + std::to_string(rank) + " of 3 could not start: " + why.sentence(),
                    why.next_step());
      }
      Bootstrap bootstrap(id, 3, rank, options(30000));
    });
    expect_all(outcomes, Code::invalid_argument,
               "Rank " + std::to_string(victim) +
                   " of 3 could not start: its stream is missing. Next: make one");
    EXPECT_LT(Clock::now() - start, milliseconds(10000)) << "rank " << victim;
  }
}

TEST(Setup, GivingUpAloneEndsByItself) {
  const auto start = Clock::now();
  Bootstrap::give_up(UniqueId::create(), 2, 1, Error(Code::system, "alone"));
  Bootstrap::give_up(UniqueId::create(), 2, 0, Error(Code::system, "alone"));
  EXPECT_LT(Clock::now() - start, milliseconds(10000));
}

TEST(Setup, ASecondRankZeroIsToldToAll) {
  UniqueId id = UniqueId::create();
  auto outcomes = on_threads(3, [&](int thread) {
    if (thread == 2) std::this_thread::sleep_for(milliseconds(50));
    Bootstrap bootstrap(id, 3, thread == 2 ? 0 : thread, options());
  });
  expect_all(outcomes, Code::mismatch, "Two processes came as rank 0");
}

TEST(Setup, AMissingRankIsListedOnAll) {
  UniqueId id = UniqueId::create();
  auto start = Clock::now();
  auto outcomes = on_threads(
      3, [&](int rank) { Bootstrap bootstrap(id, 5, rank == 0 ? 0 : rank + 1, options(400)); });
  expect_all(outcomes, Code::timeout, "ranks 1, 4 of 5 ranks");
  EXPECT_LT(Clock::now() - start, milliseconds(2500));
}

TEST(Setup, AMissingRootIsNamed) {
  UniqueId id = UniqueId::create();
  auto outcomes = on_threads(1, [&](int) { Bootstrap bootstrap(id, 2, 1, options(300)); });
  expect_all(outcomes, Code::timeout, "Rank 1 could not reach rank 0");
  take_listener(decode(id).credentials.session);
  auto start = Clock::now();
  outcomes = on_threads(1, [&](int) { Bootstrap bootstrap(id, 2, 1, options(30000)); });
  expect_all(outcomes, Code::peer_failed, "Rank 0 refuses connections");
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
}

TEST(Setup, RankZeroElsewhereIsExplained) {
  UniqueId id = UniqueId::create();
  take_listener(decode(id).credentials.session);
  auto outcomes = on_threads(1, [&](int) { Bootstrap bootstrap(id, 2, 0, options()); });
  expect_all(outcomes, Code::invalid_argument, "listener of its UniqueId is not");
}

TEST(Setup, ALateRankIsToldSoAndDisturbsNobody) {
  UniqueId id = UniqueId::create();
  std::atomic<int> up = 0;
  std::atomic<bool> told = false;
  auto outcomes = on_threads(3, [&](int thread) {
    if (thread == 2) {
      while (up < 2) std::this_thread::sleep_for(milliseconds(5));
      try {
        Bootstrap bootstrap(id, 2, 1, options());
      } catch (...) {
        told = true;
        throw;
      }
      return;
    }
    Bootstrap bootstrap(id, 2, thread, options());
    ++up;
    for (int i = 0; i < 1000 && !told; ++i) std::this_thread::sleep_for(milliseconds(5));
    bootstrap.barrier();
    bootstrap.close();
  });
  EXPECT_EQ(outcomes[0].what() + outcomes[1].what(), "");
  EXPECT_EQ(outcomes[2].code(), Code::mismatch);
}

TEST(Setup, ARankThatDiesEndsItForAll) {
  UniqueId id = UniqueId::create();
  Processes ranks(4, [&](int rank) {
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(200));  // 1 and 2 have joined
      ::raise(SIGSTOP);
    }
    try {
      Bootstrap bootstrap(id, 4, rank, options());
    } catch (const Error& error) {
      return error.code() == Code::peer_failed &&
                     std::string(error.what()).find("Rank 2") != std::string::npos
                 ? 0
                 : 1;
    }
    return 2;
  });
  take_listener(decode(id).credentials.session);
  std::this_thread::sleep_for(milliseconds(400));
  ranks.send(2, SIGKILL);
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

TEST(Setup, AnotherSecretIsRefusedAndTheRestGoesOn) {
  if (!loopback_works()) GTEST_SKIP() << "loopback is down";
  LogLines log;
  UniqueId id = UniqueId::create();
  IdContent forged = decode(id);
  base::random_bytes(forged.credentials.secret);
  UniqueId wrong = encode(forged);
  std::atomic<bool> refused = false;
  auto outcomes = on_threads(3, [&](int thread) {
    if (thread == 2) {
      try {
        Bootstrap bootstrap(wrong, 2, 1, options());
      } catch (...) {
        refused = true;
        throw;
      }
    }
    if (thread == 1) {
      while (!refused) std::this_thread::sleep_for(milliseconds(5));
    }
    Bootstrap bootstrap(id, 2, thread, options());
    bootstrap.close();
  });
  EXPECT_EQ(outcomes[0].what() + outcomes[1].what(), "");
  EXPECT_EQ(outcomes[2].code(), Code::authentication);
  EXPECT_THAT(outcomes[2].what(), HasSubstr("refused this rank's secret"));
  EXPECT_EQ(log.count("does not know this job's secret"), 1) << log.all();
}

TEST(Setup, StrangersAreDroppedWithOneWarningEach) {
  if (!loopback_works()) GTEST_SKIP() << "loopback is down";
  LogLines log;
  UniqueId id = UniqueId::create();
  // Held open while the honest ranks meet: half-open, silent, garbage, 4 GiB, another version.
  std::vector<base::Fd> strangers;
  for (int i = 0; i < 5; ++i) strangers.push_back(connect_to(id));
  ASSERT_TRUE(strangers.back().valid());
  send_raw(strangers[1], bytes("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"));
  send_raw(strangers[2], header(kProtocolVersion, 1, std::uint64_t{4} << 30));
  Bytes other = header(9, 1, 8);
  other.resize(other.size() + 8 + kMacBytes);
  send_raw(strangers[3], other);
  Bytes half = header(kProtocolVersion, 1, 33);
  send_raw(strangers[4], std::span(half).first(10));
  Options quick = options();
  quick.handshake_timeout = milliseconds(400);
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, rank == 0 ? quick : options());
    for (int i = 0; i < 12; ++i) {
      std::this_thread::sleep_for(milliseconds(50));
      bootstrap.barrier();
    }
    bootstrap.close();
  }));
  std::string all = log.all();
  EXPECT_EQ(log.count("MARROW WARN"), 5) << all;
  EXPECT_EQ(log.count("dropped a connection from 127.0.0.1:"), 5) << all;
  EXPECT_EQ(log.count("did not say who it is within 400 ms"), 2) << all;
  EXPECT_EQ(log.count("not Marrow's protocol"), 1) << all;
  EXPECT_EQ(log.count("announced a frame of 4294967296 bytes"), 1) << all;
  EXPECT_EQ(log.count("speaks version 9"), 1) << all;
}

TEST(Setup, StrangersWhoSayNothingHoldNobodyUp) {
  UniqueId id = UniqueId::create();
  // First at both of rank 0's sockets, more than are held at a time, and there to the end.
  std::vector<base::Fd> strangers;
  const std::string name = unix_name(decode(id).credentials, 0);
  for (int i = 0; i < 300; ++i) {
    Connecting one = connect_unix(name);
    ASSERT_EQ(one.error, 0);
    strangers.push_back(std::move(one.fd));
    if (loopback_works()) strangers.push_back(connect_to(id));
  }
  const auto start = Clock::now();
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    EXPECT_LT(Clock::now() - start, milliseconds(2000));
    bootstrap.barrier();
    bootstrap.close();
  }));
}

TEST(Setup, NoiseAtThePortChangesNothing) {
  if (!loopback_works()) GTEST_SKIP() << "loopback is down";
  LogLines log;
  UniqueId id = UniqueId::create();
  std::atomic<bool> done = false;
  std::thread noise([&] {
    std::mt19937 random(42);
    while (!done) {
      base::Fd fd = connect_to(id);
      if (!fd) break;
      Bytes garbage(random() % 300);
      for (std::byte& b : garbage) b = std::byte(random());
      // Half of it begins like a frame, so that the parser gets further.
      if (random() % 2 == 0) {
        Bytes head =
            header(kProtocolVersion, static_cast<std::uint16_t>(random() % 17), random() % 200);
        garbage.insert(garbage.begin(), head.begin(), head.end());
      }
      send_raw(fd, garbage);
      if (random() % 3 == 0) {
        linger abort = {1, 0};  // a reset instead of an end
        ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  expect_all_ok(on_threads(3, [&](int rank) {
    if (rank == 2) std::this_thread::sleep_for(milliseconds(200));
    Bootstrap bootstrap(id, 3, rank, options());
    for (int i = 0; i < 50; ++i) bootstrap.allgather(bytes("x"));
    std::this_thread::sleep_for(milliseconds(200));
    for (int r = 0; r < 3; ++r) EXPECT_EQ(bootstrap.state(r), PeerState::alive);
    bootstrap.close();
    if (rank == 0) done = true;
  }));
  noise.join();
  EXPECT_LE(log.count("MARROW WARN"), 100);
}

/// Two channels over a socket pair, joined up to the point where both are established.
struct Pair {
  Pair() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    Credentials credentials{};
    client.emplace(base::Fd(fds[0]), "server", Channel::Role::client, credentials);
    server.emplace(base::Fd(fds[1]), "client", Channel::Role::server, credentials);
    client->write_some();
    server->read_some(frames);
    server->write_some();
    client->read_some(frames);
    EXPECT_TRUE(client->established() && server->established());
  }
  std::vector<Frame> frames;
  std::optional<Channel> client;
  std::optional<Channel> server;
};

TEST(Channel, FramesArriveIntact) {
  Pair pair;
  pair.client->send(FrameType::agree, bytes("vote"));
  pair.client->send(FrameType::heartbeat, {});
  pair.client->write_some();
  pair.server->read_some(pair.frames);
  ASSERT_EQ(pair.frames.size(), 2u);
  EXPECT_EQ(pair.frames[0].type, FrameType::agree);
  EXPECT_EQ(text(pair.frames[0].payload), "vote");
}

TEST(Channel, ChangedReplayedAndReflectedFramesAreRefused) {
  for (int attack = 0; attack < 4; ++attack) {
    Pair pair;
    pair.client->send(FrameType::agree, bytes("vote"));
    pair.client->write_some();
    Bytes frame(kHeaderBytes + 4 + kMacBytes);
    ASSERT_EQ(::recv(pair.server->fd(), frame.data(), frame.size(), 0),
              static_cast<ssize_t>(frame.size()));
    auto inject = [](Channel& into, int from, const Bytes& raw) {
      EXPECT_EQ(::send(from, raw.data(), raw.size(), 0), static_cast<ssize_t>(raw.size()));
      std::vector<Frame> out;
      into.read_some(out);
    };
    Channel& server = *pair.server;
    int from_client = pair.client->fd();
    if (attack == 0) {  // one bit of the payload
      frame[kHeaderBytes] ^= std::byte{1};
      EXPECT_THROW(inject(server, from_client, frame), ChannelError);
    } else if (attack == 1) {  // the same frame twice
      inject(server, from_client, frame);
      EXPECT_THROW(inject(server, from_client, frame), ChannelError);
    } else if (attack == 2) {  // sent back to its maker
      EXPECT_THROW(inject(*pair.client, server.fd(), frame), ChannelError);
    } else {  // on another connection
      Pair other;
      EXPECT_THROW(inject(*other.server, other.client->fd(), frame), ChannelError);
    }
  }
}

}  // namespace
}  // namespace marrow::bootstrap
