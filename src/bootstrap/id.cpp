// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/id.hpp"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/sha256.hpp"
#include "base/text.hpp"

namespace marrow {
namespace bootstrap {
namespace {

using base::cat;

constexpr std::uint32_t kIdMagic = 0x4957524d;  // "MRWI" in memory
constexpr std::uint16_t kIdVersion = 1;
constexpr std::size_t kChecksumBytes = 8;
constexpr std::uint8_t kRestricted = 1;
constexpr std::uint8_t kListenerFirst = 2;

struct Kept {
  std::mutex mutex;
  std::map<std::uint64_t, Listener> listeners;
};

Kept& kept() {
  static Kept instance;
  return instance;
}

std::span<const std::byte> checked_part(std::span<const std::byte> bytes) {
  return bytes.first(UniqueId::kSize - kChecksumBytes);
}

}  // namespace

UniqueId encode(const IdContent& content) {
  Writer out;
  std::size_t count = std::min(content.addresses.size(), kMaxAddresses);
  std::uint8_t flags = static_cast<std::uint8_t>((content.restricted ? kRestricted : 0) |
                                                 (content.listener_first ? kListenerFirst : 0));
  out.number(kIdMagic).number(kIdVersion).number(static_cast<std::uint8_t>(count)).number(flags);
  out.number(content.credentials.session).raw(content.credentials.secret);
  out.number(content.port).number(std::uint16_t{0}).number(std::uint32_t{0});
  for (std::size_t i = 0; i < kMaxAddresses; ++i) {
    out.raw(std::as_bytes(std::span(i < count ? content.addresses[i] : IpAddress{})));
  }
  base::Digest digest = base::sha256(out.view());
  out.raw(std::span(digest).first(kChecksumBytes));
  return UniqueId::from_bytes(out.view());
}

IdContent decode(const UniqueId& id) {
  Reader in(id.bytes());
  auto magic = in.number<std::uint32_t>();
  auto version = in.number<std::uint16_t>();
  auto count = in.number<std::uint8_t>();
  auto flags = in.number<std::uint8_t>();
  if (magic != kIdMagic) {
    throw Error(Code::invalid_argument, "These 128 bytes are not a UniqueId.",
                "take them from UniqueId::create() of rank 0 and broadcast them before use.");
  }
  if (version != kIdVersion) {
    throw Error(
        Code::version,
        cat("This UniqueId has version ", version, "; this library reads ", kIdVersion, "."),
        "use one version of Marrow on all ranks.");
  }
  base::Digest digest = base::sha256(checked_part(id.bytes()));
  if (!std::equal(digest.begin(), digest.begin() + kChecksumBytes,
                  id.bytes().end() - kChecksumBytes) ||
      count > kMaxAddresses) {
    throw Error(Code::invalid_argument, "This UniqueId was damaged on its way.",
                "broadcast all 128 bytes, as bytes.");
  }
  IdContent out;
  out.restricted = (flags & kRestricted) != 0;
  out.listener_first = (flags & kListenerFirst) != 0;
  out.credentials.session = in.number<std::uint64_t>();
  auto secret = in.take(out.credentials.secret.size());
  std::copy(secret.begin(), secret.end(), out.credentials.secret.begin());
  out.port = in.number<std::uint16_t>();
  in.take(6);
  for (std::size_t i = 0; i < count; ++i) {
    IpAddress address;
    auto raw = in.take(address.size());
    std::memcpy(address.data(), raw.data(), raw.size());
    out.addresses.push_back(address);
  }
  return out;
}

std::string unix_name(const Credentials& credentials, int rank) {
  std::string_view purpose = "marrow unix name";
  base::Digest digest =
      base::hmac_sha256(credentials.secret, {std::as_bytes(std::span(purpose)),
                                             std::as_bytes(std::span(&credentials.session, 1)),
                                             std::as_bytes(std::span(&rank, 1))});
  return "marrow-" + base::hex(std::span(digest).first(16));
}

Listener open_listener(const Credentials& credentials, int rank, std::vector<IpAddress> addresses,
                       const std::optional<IpAddress>& restrict_to, std::uint16_t port) {
  Listener out;
  out.port = port;
  out.tcp = listen_tcp(restrict_to, out.port);
  try {
    out.unix_socket = listen_unix(unix_name(credentials, rank));
  } catch (const Error& error) {
    // Two ranks with one number end here first; rank 0 will tell them in better words.
    MARROW_INFO(bootstrap, "no Unix socket for rank ", rank, ": ", error.what());
  }
  out.addresses = std::move(addresses);
  if (out.addresses.size() > kMaxAddresses) out.addresses.resize(kMaxAddresses);
  out.owner = ::getpid();
  return out;
}

UniqueId create_id(const base::Parameters& parameters, const std::string& rendezvous_file) {
  IdContent content;
  base::random_bytes(content.credentials.secret);
  content.credentials.session = base::random_u64();
  content.listener_first = true;
  Listener listener =
      open_listener(content.credentials, 0,
                    interface_addresses(base::parameter_string("MARROW_SOCKET_IFNAME", parameters)),
                    std::nullopt);
  content.addresses = listener.addresses;
  content.port = listener.port;
  listener.rendezvous_file = rendezvous_file;
  keep_listener(content.credentials.session, std::move(listener));
  return encode(content);
}

void keep_listener(std::uint64_t session, Listener listener) {
  std::lock_guard lock(kept().mutex);
  kept().listeners.insert_or_assign(session, std::move(listener));
}

std::optional<Listener> take_listener(std::uint64_t session) {
  std::lock_guard lock(kept().mutex);
  auto node = kept().listeners.extract(session);
  if (node.empty()) return std::nullopt;
  return std::move(node.mapped());
}

void drop_inherited_listener(std::uint64_t session) {
  std::lock_guard lock(kept().mutex);
  auto found = kept().listeners.find(session);
  if (found != kept().listeners.end() && found->second.owner != ::getpid()) {
    kept().listeners.erase(found);
  }
}

}  // namespace bootstrap

void UniqueId::discard() const noexcept {
  try {
    bootstrap::take_listener(bootstrap::decode(*this).credentials.session);
  } catch (const std::exception&) {  // not an id: nothing was opened for it
  }
}

UniqueId UniqueId::create() { return bootstrap::create_id({}); }

UniqueId UniqueId::from_bytes(std::span<const std::byte> bytes) {
  if (bytes.size() != kSize) {
    throw Error(Code::invalid_argument,
                base::cat("A UniqueId has ", kSize, " bytes; these are ", bytes.size(), "."),
                "broadcast all of them, as bytes.");
  }
  UniqueId id;
  std::copy(bytes.begin(), bytes.end(), id.bytes_.begin());
  bootstrap::decode(id);
  return id;
}

}  // namespace marrow
