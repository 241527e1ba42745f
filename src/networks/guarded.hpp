// SPDX-License-Identifier: Apache-2.0
// Where C++ ends: a network's functions have C signatures, so every exception becomes a code and a
// sentence. The sentence is kept per thread, for last_error().
#pragma once

#include <exception>
#include <new>
#include <string>

#include "marrow/error.hpp"
#include "marrow/network.h"

namespace marrow::networks {

inline std::string& last_sentence() {
  thread_local std::string sentence;
  return sentence;
}

inline const char* last_error() { return last_sentence().c_str(); }

inline int to_network(Code code) {
  switch (code) {
    case Code::invalid_argument: return MARROW_NETWORK_INVALID;
    case Code::timeout: return MARROW_NETWORK_TIMEOUT;
    case Code::peer_failed: return MARROW_NETWORK_PEER_FAILED;
    case Code::unsupported: return MARROW_NETWORK_UNSUPPORTED;
    case Code::out_of_memory: return MARROW_NETWORK_NO_MEMORY;
    default: return MARROW_NETWORK_ERROR;
  }
}

/// "sentence; next step", for whoever has room for one string.
inline std::string one_sentence(const Error& error) {
  std::string text = error.sentence();
  if (text.ends_with('.')) text.pop_back();  // more follows: a next step here, a cause above
  if (!error.next_step().empty()) text += "; " + error.next_step();
  return text;
}

/// @return what body returns, or a negative code with last_error() set
template <class Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    last_sentence() = one_sentence(error);
    return to_network(error.code());
  } catch (const std::bad_alloc&) {
    last_sentence() = "out of memory (a smaller ring or window, or a higher ulimit -v, helps)";
    return MARROW_NETWORK_NO_MEMORY;
  } catch (const std::exception& error) {
    last_sentence() = error.what();
    return MARROW_NETWORK_ERROR;
  }
}

}  // namespace marrow::networks
