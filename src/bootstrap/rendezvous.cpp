// SPDX-License-Identifier: Apache-2.0
// Makes one UniqueId known to all ranks without MPI or a store: through a file, or by deriving it from
// a shared secret. A file is believed only if this user owns it, nobody else can read it and the
// listener it names answers: what a crashed job left behind has no listener any more.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "base/deadline.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "bootstrap/environment.hpp"
#include "bootstrap/host.hpp"
#include "bootstrap/id.hpp"

namespace marrow::bootstrap {
namespace {

using base::cat;
using base::Deadline;
using base::Fd;
using std::chrono::milliseconds;

constexpr std::size_t kMinimumSecret = 16;
constexpr std::size_t kMaximumSecret = 4096;
constexpr milliseconds kLook{20};                 // between two looks at the file
constexpr milliseconds kAnswer{1000};             // a remote listener's time to accept a connection
constexpr std::uint32_t kFileMagic = 0x5257524d;  // "MRWR" in memory

/// Opens a file that only this user can read; an invalid Fd when there is none.
Fd open_private(const std::string& path, const char* what) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) {
    if (errno == ENOENT) return fd;
    base::throw_errno(cat("opening ", what, " ", path));
  }
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) base::throw_errno(cat("reading the owner of ", path));
  if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    throw Error(
        Code::authentication,
        cat(what, " ", path, " is not a file that only this user (", ::geteuid(),
            ") can read: owner ", status.st_uid, ", mode ", std::oct, status.st_mode & 07777, "."),
        cat("remove it, or: chown it to this user and chmod 600 ", path, "."));
  }
  return fd;
}

Bytes read_all(const Fd& fd, std::size_t limit) {
  Bytes out(limit);
  std::size_t used = 0;
  while (used < limit) {
    ssize_t got = ::read(fd.get(), out.data() + used, limit - used);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    used += static_cast<std::size_t>(got);
  }
  out.resize(used);
  return out;
}

// --- file:// ----------------------------------------------------------------------------------

void write_file(const std::string& path, const UniqueId& id) {
  Writer content;
  content.number(kFileMagic).number(this_host_id()).raw(id.bytes());
  std::string temporary = cat(path, ".", base::random_name(8));
  Fd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) {
    base::throw_errno(cat("creating the rendezvous file ", temporary),
                      "name a folder that exists and that this user can write to.");
  }
  auto view = content.view();
  bool written = ::write(fd.get(), view.data(), view.size()) == static_cast<ssize_t>(view.size());
  if (!written || ::rename(temporary.c_str(), path.c_str()) != 0) {
    int error = errno;
    ::unlink(temporary.c_str());
    throw base::system_error(error, cat("writing the rendezvous file ", path));
  }
}

/// Whether somebody listens where the id says.
bool answers(const IdContent& id, bool same_host) {
  auto hello = [&](Connecting started) {
    Channel(std::move(started.fd), "rank 0", Channel::Role::client, id.credentials, true)
        .write_some();
    return true;
  };
  if (same_host) {
    Connecting started = connect_unix(unix_name(id.credentials, 0));
    if (started.error == EAGAIN) return true;  // its backlog is full
    if (started.error == 0) return hello(std::move(started));
    return false;
  }
  for (const IpAddress& address : id.addresses) {
    Connecting started = connect_tcp({address, id.port});
    if (started.error == EINPROGRESS) {
      pollfd entry = {started.fd.get(), POLLOUT, 0};
      ::poll(&entry, 1, static_cast<int>(kAnswer.count()));
      started.error = entry.revents == 0 ? ETIMEDOUT : connect_error(started.fd.get());
    }
    if (started.error == 0) return hello(std::move(started));
  }
  return false;
}

UniqueId read_file(const std::string& path, int rank, Deadline deadline) {
  const char* state = "does not exist";
  for (;;) {
    if (Fd fd = open_private(path, "The rendezvous file")) {
      Bytes content = read_all(fd, 4096);
      state = "is not a rendezvous file";
      if (content.size() == 4 + 8 + UniqueId::kSize) {
        Reader in(content);
        auto magic = in.number<std::uint32_t>();
        auto host = in.number<std::uint64_t>();
        if (magic == kFileMagic) {
          UniqueId id = UniqueId::from_bytes(in.take(UniqueId::kSize));
          if (answers(decode(id), host == this_host_id())) return id;
          state = "was left by a job that is gone";
        }
      }
    }
    if (deadline.expired()) {
      throw Error(Code::timeout,
                  cat("Rank ", rank, " waited in vain for rank 0 at the rendezvous file ", path,
                      ": the file ", state, "."),
                  "see whether rank 0 started and uses the same file, or raise "
                  "MARROW_BOOTSTRAP_TIMEOUT.");
    }
    std::this_thread::sleep_for(std::min(kLook, deadline.remaining() + milliseconds(1)));
  }
}

UniqueId meet_at_file(const LaunchInfo& launch, const std::string& path,
                      const base::Parameters& parameters, Deadline deadline) {
  if (launch.rank != 0) return read_file(path, launch.rank, deadline);
  UniqueId id = create_id(parameters, path);
  try {
    write_file(path, id);
  } catch (...) {
    take_listener(decode(id).credentials.session);
    throw;
  }
  return id;
}

/// A folder of this user in the temporary folder, for jobs on one host.
std::string private_file(const std::string& job_key) {
  const char* temporary = std::getenv("TMPDIR");
  std::string folder =
      cat(temporary != nullptr && *temporary != '\0' ? temporary : "/tmp", "/marrow-", ::geteuid());
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    base::throw_errno(cat("making the folder ", folder), "set TMPDIR or MARROW_RENDEZVOUS.");
  }
  struct stat status = {};
  if (::lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
      status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    throw Error(Code::authentication, cat(folder, " is not a private folder of this user."),
                "remove it, or set MARROW_RENDEZVOUS.");
  }
  base::Digest name = base::sha256(std::as_bytes(std::span(job_key)));
  return cat(folder, "/job-", base::hex(std::span(name).first(12)));
}

// --- tcp:// -----------------------------------------------------------------------------------

struct HostAndPort {
  std::string host;
  std::uint16_t port;
};

HostAndPort parse_tcp(const std::string& url) {
  std::string_view rest = std::string_view(url).substr(std::strlen("tcp://"));
  std::size_t colon = rest.rfind(':');
  unsigned port = 0;
  std::string host;
  if (colon != std::string_view::npos) {
    std::string_view digits = rest.substr(colon + 1);
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (error != std::errc() || end != digits.data() + digits.size()) port = 0;
    host = rest.substr(0, colon);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  }
  if (host.empty() || port == 0 || port > 65535) {
    throw Error(Code::invalid_argument, cat("MARROW_RENDEZVOUS=", url, " is not tcp://host:port."),
                "write it like tcp://node17:29400 or tcp://[2001:db8::1]:29400.");
  }
  return {host, static_cast<std::uint16_t>(port)};
}

/// Whether the user gave an address. What a name means differs from host to host (a host's own name is
/// often 127.0.1.1 to itself), so behind any other name than localhost rank 0 listens everywhere.
bool is_exact(const std::string& host) {
  in6_addr ignored;
  return host == "localhost" || ::inet_pton(AF_INET, host.c_str(), &ignored) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

Bytes read_secret(const std::string& path) {
  Fd fd = open_private(path, "The secret file");
  if (!fd) {
    throw Error(Code::invalid_argument, cat("MARROW_SECRET_FILE=", path, " does not exist."),
                cat("make it: (umask 077; head -c 32 /dev/urandom > ", path,
                    "), and copy it to all hosts."));
  }
  Bytes secret = read_all(fd, kMaximumSecret);
  if (secret.size() < kMinimumSecret) {
    throw Error(Code::invalid_argument,
                cat("MARROW_SECRET_FILE=", path, " has ", secret.size(), " bytes; at least ",
                    kMinimumSecret, " are needed."),
                "put 32 random bytes into it, the same on all hosts.");
  }
  return secret;
}

/// How often this process met at `url` as `rank` before: the communicators of one job that meet at one
/// place, one after the other, must not be taken for each other.
std::uint64_t meeting_number(const std::string& url, int rank) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, std::uint64_t> meetings;
  std::lock_guard lock(mutex);
  return meetings[{url, rank}]++;
}

void check_unprotected(const std::string& url, const IpAddress& address, bool own,
                       const base::Parameters& parameters) {
  std::string interfaces = base::parameter_string("MARROW_SOCKET_IFNAME", parameters);
  if (!is_loopback(address)) {
    bool named = !interfaces.empty();
    if (named && own) {
      std::vector<IpAddress> mine = interface_addresses(interfaces);
      named = std::find(mine.begin(), mine.end(), address) != mine.end();
    }
    if (!named) {
      throw Error(Code::authentication,
                  cat("MARROW_RENDEZVOUS=", url, " (", to_text(address),
                      ") would let anybody on the network join: there is no MARROW_SECRET_FILE."),
                  "set MARROW_SECRET_FILE, or name the interface of a trusted network in "
                  "MARROW_SOCKET_IFNAME.");
    }
  }
  static std::once_flag warned;
  std::call_once(warned, [&] {
    MARROW_WARN(bootstrap, "MARROW_RENDEZVOUS=", url, " without MARROW_SECRET_FILE: whoever can ",
                is_loopback(address) ? "log in to this host" : "reach this network",
                " can join the job.");
  });
}

UniqueId meet_at_tcp(const LaunchInfo& launch, const std::string& url,
                     const base::Parameters& parameters) {
  HostAndPort place = parse_tcp(url);
  std::string secret_file = base::parameter_string("MARROW_SECRET_FILE", parameters);
  Bytes secret = secret_file.empty() ? Bytes() : read_secret(secret_file);
  std::uint64_t number = meeting_number(url, launch.rank);

  IdContent content;
  std::string_view purpose = "marrow rendezvous";
  base::Digest digest = base::hmac_sha256(
      secret, {std::as_bytes(std::span(purpose)), std::as_bytes(std::span(&number, 1)),
               std::as_bytes(std::span(url))});
  content.credentials.secret = digest;
  // The session number is public: it must not be a piece of the secret.
  base::Digest session = base::sha256(digest);
  std::memcpy(&content.credentials.session, session.data(), sizeof(content.credentials.session));
  content.addresses = resolve(place.host);
  content.port = place.port;
  if (secret.empty()) {
    check_unprotected(url, content.addresses.front(), launch.rank == 0, parameters);
  }
  const bool exact = is_exact(place.host);
  // A job that meets on loopback is on this host: none of its ranks listens anywhere else.
  content.restricted = secret.empty() || (exact && is_loopback(content.addresses.front()));
  if (launch.rank == 0) {
    std::optional<IpAddress> only;
    if (content.restricted || exact) only = content.addresses.front();
    keep_listener(content.credentials.session,
                  open_listener(content.credentials, 0, content.addresses, only, place.port));
  }
  return encode(content);
}

UniqueId meet_at(const LaunchInfo& launch, const std::string& url,
                 const base::Parameters& parameters, Deadline deadline) {
  if (url.starts_with("tcp://")) return meet_at_tcp(launch, url, parameters);
  if (url.starts_with("file:///")) {
    return meet_at_file(launch, url.substr(std::strlen("file://")), parameters, deadline);
  }
  throw Error(Code::invalid_argument,
              cat("MARROW_RENDEZVOUS=", url, " is neither tcp://host:port nor file:///path."),
              "write one of these two forms.");
}

}  // namespace

UniqueId rendezvous(const LaunchInfo& launch, const base::Parameters& parameters) {
  Deadline deadline =
      Deadline::after(base::parameter_duration("MARROW_BOOTSTRAP_TIMEOUT", parameters));
  if (launch.nranks == 1) return create_id(parameters);
  std::string url = base::parameter_string("MARROW_RENDEZVOUS", parameters);
  if (!url.empty()) return meet_at(launch, url, parameters, deadline);

  const char* master = std::getenv("MASTER_ADDR");
  const char* master_port = std::getenv("MASTER_PORT");
  std::string_view host = master != nullptr ? master : "";
  bool one_host =
      launch.local_size == launch.nranks ||
      (launch.local_size == 0 && (host == "localhost" || host == "127.0.0.1" || host == "::1"));
  if (one_host) return meet_at_file(launch, private_file(launch.job_key), parameters, deadline);

  bool secret = !base::parameter_string("MARROW_SECRET_FILE", parameters).empty();
  if (launch.source == "torchrun" && secret && !host.empty() && master_port != nullptr) {
    std::int64_t port = base::parse_int(master_port, "Variable MASTER_PORT=") + 1;
    bool v6 = host.find(':') != std::string_view::npos;
    return meet_at(launch, cat("tcp://", v6 ? "[" : "", host, v6 ? "]:" : ":", port), parameters,
                   deadline);
  }
  throw Error(
      Code::invalid_argument,
      cat(launch.source, " started ", launch.nranks, " ranks, ",
          launch.local_size == 0 ? std::string("an unknown number")
                                 : std::to_string(launch.local_size),
          " of them on this host, and nothing says where they meet."),
      "set MARROW_RENDEZVOUS=tcp://<host of rank 0>:<free port> and MARROW_SECRET_FILE on all "
      "ranks, or broadcast a UniqueId with what the program has (MPI, a torch store).");
}

}  // namespace marrow::bootstrap
