// SPDX-License-Identifier: Apache-2.0
// On the wire: 1 and the result, or 0, the error's code and its sentence.
#include "bootstrap/together.hpp"

#include <exception>
#include <new>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "bootstrap/wire.hpp"
#include "marrow/error.hpp"

namespace marrow::bootstrap {
namespace {

using base::cat;

struct Failure {
  std::exception_ptr own;
  Code code;
  std::string sentence;
};

/// The exception that is being handled, as something that can be told.
Failure failure_of(const std::string& what) {
  try {
    throw;
  } catch (const Error& error) {
    return {std::current_exception(), error.code(), error.sentence()};
  } catch (const std::bad_alloc&) {
    const Error error = base::no_memory(what);
    return {std::make_exception_ptr(error), error.code(), error.sentence()};
  } catch (const std::exception& error) {
    return {std::current_exception(), Code::internal, error.what()};
  }
}

}  // namespace

std::vector<Bytes> gather_together(Bootstrap& bootstrap, const std::string& what,
                                   const std::function<Bytes()>& step) {
  Writer mine;
  std::exception_ptr own;
  try {
    const Bytes result = step();
    mine.number(std::uint8_t{1}).raw(result);
  } catch (...) {
    const Failure failure = failure_of(what);
    own = failure.own;
    mine = {};
    mine.number(std::uint8_t{0}).number(static_cast<std::uint32_t>(failure.code));
    mine.text(failure.sentence);
  }
  std::vector<Bytes> all = bootstrap.allgather(mine.view());
  if (own) std::rethrow_exception(own);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;  // masked
    if (all[rank][0] == std::byte{0}) {
      Reader in(std::span(all[rank]).subspan(1));
      const auto code = static_cast<Code>(in.number<std::uint32_t>());
      throw Error(code, cat(what, " failed on rank ", rank, ": ", in.text()),
                  "see that rank's error for the next step");
    }
    all[rank].erase(all[rank].begin());
  }
  return all;
}

void together(Bootstrap& bootstrap, const std::string& what, const std::function<void()>& step) {
  gather_together(bootstrap, what, [&] {
    step();
    return Bytes{};
  });
}

}  // namespace marrow::bootstrap
