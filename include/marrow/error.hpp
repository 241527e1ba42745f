// SPDX-License-Identifier: Apache-2.0
// One error type for the host API: a code a program can branch on, a sentence a person can read
// (peer, value), and the next step. The library never prints and never exits.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace marrow {

/// What went wrong, for programs. Append-only: values never change meaning. docs/errors.md lists
/// the cause and the fix of each.
enum class Code : std::uint32_t {
  ok = 0,                ///< nothing went wrong
  invalid_argument = 1,  ///< a value outside its documented range
  mismatch = 2,          ///< ranks disagree: rank count, window size, parameter, version
  timeout = 3,           ///< a deadline passed; the sentence names who was waited for
  peer_failed = 4,       ///< a peer's process or connection ended
  aborted = 5,           ///< this communicator was revoked
  unsupported = 6,       ///< the machine or build lacks something; the sentence names it
  authentication = 7,    ///< wrong secret, wrong user, or a tampered frame
  version = 8,           ///< another ABI or protocol version
  out_of_memory = 9,     ///< memory, locked memory, file descriptors or queue space ran out
  system = 10,           ///< an operating system call failed; the sentence has errno's text
  cuda = 11,             ///< a CUDA call failed; the sentence has CUDA's text
  network = 12,          ///< a NIC or a network reported an error completion
  internal = 13,         ///< a bug in Marrow
};

/// Stable lower-case name of a code, e.g. "peer_failed". Never null.
constexpr const char* name(Code code) noexcept {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid_argument: return "invalid_argument";
    case Code::mismatch: return "mismatch";
    case Code::timeout: return "timeout";
    case Code::peer_failed: return "peer_failed";
    case Code::aborted: return "aborted";
    case Code::unsupported: return "unsupported";
    case Code::authentication: return "authentication";
    case Code::version: return "version";
    case Code::out_of_memory: return "out_of_memory";
    case Code::system: return "system";
    case Code::cuda: return "cuda";
    case Code::network: return "network";
    case Code::internal: return "internal";
  }
  return "unknown";
}

/// Thrown by the host API. what() is "code: sentence Next: next step".
class Error : public std::runtime_error {
 public:
  /// @param code       what a program branches on
  /// @param sentence   what was attempted and what happened, with the peer and the values
  /// @param next_step  what to do about it; may be empty
  Error(Code code, std::string sentence, std::string next_step = {})
      : std::runtime_error(std::string(name(code)) + ": " + sentence +
                           (next_step.empty()         ? ""
                            : sentence.ends_with('.') ? " Next: "
                                                      : ". Next: ") +
                           next_step),
        code_(code),
        sentence_(std::move(sentence)),
        next_step_(std::move(next_step)) {}

  Code code() const noexcept { return code_; }
  const std::string& sentence() const noexcept { return sentence_; }
  const std::string& next_step() const noexcept { return next_step_; }

 private:
  Code code_;
  std::string sentence_;
  std::string next_step_;
};

}  // namespace marrow
