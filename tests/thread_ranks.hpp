// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of a test that makes its communicators itself.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "marrow/unique_id.hpp"

namespace marrow::test {

/// Runs body(rank, id) as nranks threads; rethrows the lowest rank's failure.
template <class Body>
void run_as_threads(int nranks, Body&& body) {
  const UniqueId id = UniqueId::create();
  std::vector<std::exception_ptr> failures(nranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < nranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, id);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// Runs body(rank, id) as nranks threads; returns what each returned or threw.
template <class Body>
std::vector<std::string> as_threads(int nranks, Body&& body) {
  std::vector<std::string> results(nranks);
  run_as_threads(nranks, [&](int rank, const UniqueId& id) {
    try {
      results[rank] = body(rank, id);
    } catch (const std::exception& error) {
      results[rank] = std::string("threw ") + error.what();
    }
  });
  return results;
}

}  // namespace marrow::test
