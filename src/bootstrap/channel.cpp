// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/channel.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/random.hpp"
#include "base/text.hpp"

namespace marrow::bootstrap {
namespace {

using base::cat;

constexpr std::size_t kReadStep = 64 << 10;
constexpr int kReadsPerCall = 16;  // one busy connection must not starve the others

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t type;
  std::uint64_t length;
  std::uint64_t sequence;
};
static_assert(sizeof(Header) == kHeaderBytes);

base::Digest derive(const Credentials& credentials, std::string_view purpose,
                    std::span<const std::byte> a = {}, std::span<const std::byte> b = {}) {
  return base::hmac_sha256(
      credentials.secret,
      {std::as_bytes(std::span(purpose)), std::as_bytes(std::span(&credentials.session, 1)), a, b});
}

}  // namespace

Channel::Channel(base::Fd fd, std::string where, Role role, const Credentials& credentials,
                 bool probe)
    : fd_(std::move(fd)),
      guard_(fd_.get()),
      where_(std::move(where)),
      role_(role),
      credentials_(credentials),
      probe_(probe),
      hello_key_(derive(credentials, "marrow hello")) {
  base::random_bytes(role == Role::client ? client_nonce_ : server_nonce_);
  if (role == Role::client) {
    Writer hello;
    hello.raw(client_nonce_).number(static_cast<std::uint8_t>(probe));
    queue(FrameType::hello, hello.view(), &hello_key_, 0);
  }
}

base::Digest Channel::mac(std::span<const std::byte> key, bool from_client,
                          std::span<const std::byte> header,
                          std::span<const std::byte> payload) const {
  // The direction is covered so that a frame cannot be sent back to whoever made it.
  std::byte direction{static_cast<unsigned char>(from_client ? 'c' : 's')};
  return base::hmac_sha256(key, {std::span(&direction, 1), header, payload});
}

void Channel::derive_session_key() {
  session_key_ = derive(credentials_, "marrow frames", client_nonce_, server_nonce_);
}

void Channel::queue(FrameType type, std::span<const std::byte> payload, const base::Digest* key,
                    std::uint64_t sequence) {
  Header header = {kFrameMagic, kProtocolVersion, static_cast<std::uint16_t>(type), payload.size(),
                   sequence};
  auto head = std::as_bytes(std::span(&header, 1));
  base::Digest tag{};
  if (key != nullptr) tag = mac(*key, role_ == Role::client, head, payload);
  Bytes frame;
  frame.reserve(head.size() + payload.size() + tag.size());
  frame.insert(frame.end(), head.begin(), head.end());
  frame.insert(frame.end(), payload.begin(), payload.end());
  frame.insert(frame.end(), tag.begin(), tag.end());
  out_.push_back(std::move(frame));
}

void Channel::send(FrameType type, std::span<const std::byte> payload) {
  queue(type, payload, &session_key_, send_sequence_++);
}

void Channel::send_unauthenticated_reject(Code code, const std::string& sentence) {
  Writer payload;
  payload.number(static_cast<std::uint32_t>(code)).text(sentence).text("");
  queue(FrameType::reject, payload.view(), nullptr, 0);
}

bool Channel::write_some() {
  while (!out_.empty()) {
    const Bytes& front = out_.front();
    ssize_t sent = ::send(fd_.get(), front.data() + out_offset_, front.size() - out_offset_,
                          MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    out_offset_ += static_cast<std::size_t>(sent);
    if (out_offset_ == front.size()) {
      out_.pop_front();
      out_offset_ = 0;
    }
  }
  return true;
}

bool Channel::read_some(std::vector<Frame>& out) {
  for (int i = 0; i < kReadsPerCall; ++i) {
    if (in_.size() < in_used_ + kReadStep) in_.resize(in_used_ + kReadStep);
    ssize_t got = ::recv(fd_.get(), in_.data() + in_used_, kReadStep, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) return false;
    in_used_ += static_cast<std::size_t>(got);
    bytes_received_ += static_cast<std::size_t>(got);
    parse(out);
    if (static_cast<std::size_t>(got) < kReadStep) return true;
  }
  return true;
}

void Channel::parse(std::vector<Frame>& out) {
  std::size_t at = 0;
  while (in_used_ - at >= kHeaderBytes) {
    Header header;
    std::memcpy(&header, in_.data() + at, sizeof(header));
    auto type = static_cast<FrameType>(header.type);
    if (header.magic != kFrameMagic) {
      throw ChannelError(Code::network, "sent bytes that are not Marrow's protocol");
    }
    // A refusal must be readable across versions and without a key; nothing else is.
    bool plain_reject = role_ == Role::client && !established_ && type == FrameType::reject;
    if (header.version != kProtocolVersion && !plain_reject) {
      throw ChannelError(Code::version,
                         cat("speaks version ", header.version,
                             " of the bootstrap protocol; this is version ", kProtocolVersion));
    }
    std::size_t limit = fresh_ ? kMaxPayload : kMaxStrangerPayload;
    if (header.length > limit) {
      throw ChannelError(Code::network, cat("announced a frame of ", header.length,
                                            " bytes; at most ", limit, " are accepted"));
    }
    auto length = static_cast<std::size_t>(header.length);
    std::size_t whole = kHeaderBytes + length + kMacBytes;
    if (in_used_ - at < whole) break;
    auto bytes = std::span<const std::byte>(in_).subspan(at, whole);
    auto head = bytes.first(kHeaderBytes);
    auto payload = bytes.subspan(kHeaderBytes, length);
    auto tag = bytes.last(kMacBytes);
    bool from_client = role_ == Role::server;
    at += whole;
    if (plain_reject) {
      out.push_back({type, Bytes(payload.begin(), payload.end())});
      break;
    }
    if (!established_) {
      if (type != FrameType::hello || header.sequence != 0) {
        throw ChannelError(Code::network, "did not begin with a hello");
      }
      if (role_ == Role::client) {
        if (payload.size() != server_nonce_.size()) throw Malformed("a hello of the wrong size");
        std::copy(payload.begin(), payload.end(), server_nonce_.begin());
        derive_session_key();
      }
      const base::Digest& key = role_ == Role::client ? session_key_ : hello_key_;
      if (!base::constant_time_equal(tag, mac(key, from_client, head, payload))) {
        throw ChannelError(Code::authentication, "does not know this job's secret");
      }
      on_hello(payload);
      continue;
    }
    if (!base::constant_time_equal(tag, mac(session_key_, from_client, head, payload))) {
      throw ChannelError(Code::authentication, "sent a frame whose MAC is wrong");
    }
    if (header.sequence != receive_sequence_) {
      throw ChannelError(Code::authentication, cat("sent frame ", header.sequence, " where frame ",
                                                   receive_sequence_, " was due"));
    }
    ++receive_sequence_;
    fresh_ = true;
    out.push_back({type, Bytes(payload.begin(), payload.end())});
  }
  if (at != 0) {
    std::copy(in_.begin() + static_cast<std::ptrdiff_t>(at),
              in_.begin() + static_cast<std::ptrdiff_t>(in_used_), in_.begin());
    in_used_ -= at;
    if (in_used_ == 0 && in_.size() > (1 << 20)) Bytes().swap(in_);
  }
}

void Channel::on_hello(std::span<const std::byte> payload) {
  if (role_ == Role::server) {
    Reader reader(payload);
    auto nonce = reader.take(client_nonce_.size());
    std::copy(nonce.begin(), nonce.end(), client_nonce_.begin());
    probe_ = reader.number<std::uint8_t>() != 0;
    derive_session_key();
    queue(FrameType::hello, server_nonce_, &session_key_, 0);
  } else {
    fresh_ = true;  // the server's hello is under the session key, which covers my nonce
  }
  established_ = true;
}

}  // namespace marrow::bootstrap
