// SPDX-License-Identifier: Apache-2.0
// Bytes as what arrives on a bootstrap connection: from a stranger (noise, or a real hello and then
// noise) and from a peer that knows the secret but sends nonsense. Nothing crashes, no length is
// believed before it is checked, and no frame comes out that was not authenticated.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/id.hpp"
#include "bootstrap/service.hpp"
#include "marrow/error.hpp"
#include "marrow/unique_id.hpp"

namespace {

using namespace marrow::bootstrap;  // NOLINT: the part under test

struct Wire {
  Wire() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
      std::abort();
    near.reset(ends[0]);
    far.reset(ends[1]);
  }
  marrow::base::Fd near, far;
};

constexpr Credentials kCredentials{};

/// Reads whatever is there. @return frames; 0 after an error, which ends the connection
std::size_t receive(Channel& channel, std::vector<Frame>& frames) {
  try {
    channel.read_some(frames);
    channel.write_some();
  } catch (const ChannelError&) {
    frames.clear();
  } catch (const Malformed&) {
    frames.clear();
  }
  return frames.size();
}

void send_all(int fd, const std::uint8_t* data, std::size_t size) {
  [[maybe_unused]] const ssize_t sent = ::send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/// A stranger's bytes, at once or in two pieces.
void stranger(Channel::Role role, const std::uint8_t* data, std::size_t size) {
  Wire wire;
  Channel channel(std::move(wire.near), "fuzz", role, kCredentials);
  std::vector<Frame> frames;
  const std::size_t first = size > 1 ? data[0] * (size - 1) / 255 : size;
  send_all(wire.far.get(), data, first);
  receive(channel, frames);
  send_all(wire.far.get(), data + first, size - first);
  receive(channel, frames);
  // Without the secret a client may hear a refusal, a server nothing.
  for (const Frame& frame : frames) {
    if (role == Channel::Role::server || frame.type != FrameType::reject) std::abort();
  }
}

/// A peer that belongs here: frames with valid MACs, payloads from the input. They come out unchanged,
/// and taking them apart throws Malformed at worst.
void member(const std::uint8_t* data, std::size_t size) {
  Wire wire;
  Channel server(std::move(wire.near), "fuzz", Channel::Role::server, kCredentials);
  Channel client(std::move(wire.far), "fuzz", Channel::Role::client, kCredentials);
  std::vector<Frame> frames, ignored;
  client.write_some();
  receive(server, frames);
  receive(client, ignored);
  if (!server.established() || !client.established()) std::abort();
  std::vector<Bytes> sent;
  while (size > 2 && sent.size() < 16) {
    const std::size_t length = std::min<std::size_t>(size - 2, data[1]);
    const auto bytes = std::as_bytes(std::span(data + 2, length));
    client.send(static_cast<FrameType>(data[0] % 16), bytes);
    sent.emplace_back(bytes.begin(), bytes.end());
    data += 2 + length;
    size -= 2 + length;
  }
  client.write_some();
  frames.clear();
  if (receive(server, frames) != sent.size()) std::abort();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (frames[i].payload != sent[i]) std::abort();
    try {
      Reader in(frames[i].payload);
      switch (frames[i].type) {
        case FrameType::join:
          in.take(9);
          PeerInfo::read(in);
          break;
        case FrameType::reject: read_error(in); break;
        case FrameType::decide:
        case FrameType::status:
          in.number<std::uint64_t>();
          in.ranks();
          break;
        default:
          for (;;) in.bytes();
      }
    } catch (const Malformed&) {
    }
  }
}

/// Bytes as a UniqueId.
void id(const std::uint8_t* data, std::size_t size) {
  try {
    decode(marrow::UniqueId::from_bytes(std::as_bytes(std::span(data, size))));
  } catch (const marrow::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::uint8_t kind = data[0];
  ++data;
  --size;
  switch (kind % 4) {
    case 0: stranger(Channel::Role::server, data, size); break;
    case 1: stranger(Channel::Role::client, data, size); break;
    case 2: member(data, size); break;
    default: id(data, size);
  }
  return 0;
}
