// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of a test that makes its communicators itself.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "marrow/unique_id.hpp"

namespace marrow::test {

/// Runs body(rank, id) as nranks threads; returns what each returned or threw.
template <class Body>
std::vector<std::string> as_threads(int nranks, Body&& body) {
  const UniqueId id = UniqueId::create();
  std::vector<std::string> results(nranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < nranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        results[rank] = body(rank, id);
      } catch (const std::exception& error) {
        results[rank] = std::string("threw ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace marrow::test
