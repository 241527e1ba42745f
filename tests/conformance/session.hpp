// SPDX-License-Identifier: Apache-2.0
// One rank from row to row: its place, its machine, and a communicator that lives as long as the rows
// ask for the same one. Setting one up takes longer than most rows do.
#pragma once

#include <memory>
#include <string>

#include "conformance/machine.hpp"
#include "conformance/row.hpp"
#include "marrow/marrow.hpp"

namespace marrow::conformance {

class Session {
 public:
  explicit Session(int rank);

  /// Runs our rank of the row in this thread, always the same one. When the row asks for another
  /// communicator than the last did, rank 0 writes a new id to `id_file` and the others read it
  /// there. Returns what went wrong, or nothing; after a failure the session is of no more use.
  std::string run(const Row& row, const std::string& id_file);
  /// Closes the communicator, together with all other ranks; likewise.
  std::string close();

 private:
  void open(const Row& row, const std::string& id_file);
  std::string run_case(const Row& row);

  const int rank_;
  std::unique_ptr<Machine> machine_;
  Place place_ = Place::cpu();
  std::string key_;
  std::unique_ptr<Communicator> comm_;
};

}  // namespace marrow::conformance
