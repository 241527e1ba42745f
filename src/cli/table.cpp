// SPDX-License-Identifier: Apache-2.0
#include "cli/table.hpp"

#include <algorithm>

namespace marrow::cli {

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text(const std::string& prefix) const {
  std::vector<std::size_t> width;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t widest = columns_[c].title.size() + (c == 0 ? prefix.size() : 0);
    for (const auto& row : rows_) widest = std::max(widest, row[c].size());
    width.push_back(widest);
  }
  std::string out;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string pad(width[c] - cells[c].size(), ' ');
      text += columns_[c].right ? pad + cells[c] : cells[c] + pad;
      if (c + 1 < cells.size()) text += "  ";
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  std::vector<std::string> heading;
  for (const Column& column : columns_) heading.push_back(column.title);
  heading[0] = prefix + heading[0];
  line(heading);
  for (const auto& row : rows_) line(row);
  return out;
}

std::string Table::markdown() const {
  const auto escaped = [](const std::string& cell) {
    std::string text;
    for (const char c : cell) text += c == '|' ? std::string("\\|") : std::string(1, c);
    return text;
  };
  std::string out = "|";
  for (const Column& column : columns_) out += " " + column.title + " |";
  out += "\n|";
  for (const Column& column : columns_) out += column.right ? "---:|" : "---|";
  out += "\n";
  for (const auto& row : rows_) {
    out += "|";
    for (const std::string& cell : row) out += " " + escaped(cell) + " |";
    out += "\n";
  }
  return out;
}

}  // namespace marrow::cli
