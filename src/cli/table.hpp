// SPDX-License-Identifier: Apache-2.0
// The one table printer: columns as wide as their widest cell, numbers to the right.
#pragma once

#include <string>
#include <vector>

namespace marrow::cli {

class Table {
 public:
  struct Column {
    std::string title;
    bool right = false;  ///< numbers
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// Missing cells are empty.
  void add(std::vector<std::string> cells);
  /// Lines with two spaces between columns. @param prefix  put before the heading, e.g. "# "
  std::string text(const std::string& prefix = {}) const;
  /// A Markdown table.
  std::string markdown() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace marrow::cli
