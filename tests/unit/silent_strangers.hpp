// SPDX-License-Identifier: Apache-2.0
// Processes of this user that are no rank: they connect to a socket at which descriptors are passed
// (base/unix_fds.hpp), first of all, and say nothing or stop half way.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/unix_fds.hpp"

namespace marrow::test {

/// Abstract names of this process's sockets that begin so.
inline std::vector<std::string> own_unix_sockets(const std::string& prefix) {
  std::set<std::string> mine;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error))
    mine.insert(std::filesystem::read_symlink(entry.path(), error).string());
  std::vector<std::string> names;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string field, inode, name;
    for (int i = 0; i < 6; ++i) fields >> field;
    fields >> inode >> name;
    if (name.rfind("@" + prefix, 0) == 0 && mine.count("socket:[" + inode + "]") != 0)
      names.push_back(name.substr(1));
  }
  return names;
}

/// Connects, and sends one descriptor of 300: the rest never comes.
inline base::Fd half_a_message(const std::string& name, base::Deadline deadline) {
  base::Fd socket = base::unix_connect(name, deadline);
  std::array<std::uint32_t, 4> header = {0x4d464453, 300, 1, 0};  // PacketHeader of unix_fds.cpp
  iovec part{header.data(), sizeof header};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = STDIN_FILENO;
  std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) < 0)
    throw std::runtime_error("half a message could not be sent");
  return socket;
}

/// Some who say nothing and some who stop half way. They stay connected while the result lives.
inline std::vector<base::Fd> silent_strangers(const std::string& name) {
  const auto deadline = base::Deadline::after(std::chrono::milliseconds(2000));
  std::vector<base::Fd> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(base::unix_connect(name, deadline));
    all.push_back(half_a_message(name, deadline));
  }
  return all;
}

}  // namespace marrow::test
