// SPDX-License-Identifier: Apache-2.0
// What the two files of softnic's front share: how a failure becomes errno and a sentence.
#pragma once

#include <cerrno>
#include <exception>
#include <new>
#include <string>

#include "marrow/error.hpp"
#include "softnic/objects.hpp"
#include "verbs/table.hpp"

namespace marrow::softnic {

/// Keeps the sentence for last_error and sets errno. @return error
int failed(int error, std::string sentence);
/// The sentence of the last failure on this thread.
const char* last_error();
/// errno that comes closest to a code.
int code_to_errno(Code code);

/// Runs `body`; turns what it throws into errno and last_error. @return its value, or `otherwise`
template <class Result, class Body>
Result guarded(Result otherwise, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    failed(code_to_errno(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    failed(ENOMEM, "softnic ran out of memory");
  } catch (const std::exception& error) {
    failed(EIO, error.what());
  }
  return otherwise;
}

inline Context& of(verbs::ibv_context* context) { return *static_cast<Context*>(context); }

/// Whether memory could be pinned, as the kernel finds out for a real NIC: the engine is a thread of this process
/// and would fault on what is not there. @return false with errno EFAULT
bool can_pin(const Context& context, const void* address, std::size_t bytes, unsigned access);

/// Enters the mlx5dv functions (front_devx.cpp) into the table.
void set_devx_functions(verbs::Table& table);

}  // namespace marrow::softnic
