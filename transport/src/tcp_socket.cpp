// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/tcp_socket.hpp"

#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

namespace tensorferry::transport {
namespace {

constexpr std::uint8_t kEstablished = 1;  // the kernel's TCP_ESTABLISHED

struct Sample {
  int fd;
  std::uint64_t cookie;
  std::uint64_t written;
};

bool read_cookie(int fd, std::uint64_t& cookie) {
  socklen_t length = sizeof cookie;
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0;
}

// The bytes that were ever written to an established connection, sent or not.
bool read_written(int fd, std::uint64_t& written) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  if (length < offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans) return false;
  written = info.tcpi_bytes_sent - info.tcpi_bytes_retrans + info.tcpi_notsent_bytes;
  return info.tcpi_state == kEstablished;
}

// The port in network byte order, as it is in a worker address.
bool read_port(int fd, TcpSocket::Side side, std::array<std::uint8_t, 2>& port) {
  sockaddr_storage name{};
  socklen_t length = sizeof name;
  auto* address = reinterpret_cast<sockaddr*>(&name);
  const bool accepted = side == TcpSocket::Side::kAccepted;
  if ((accepted ? getsockname(fd, address, &length) : getpeername(fd, address, &length)) != 0) return false;
  if (name.ss_family != AF_INET && name.ss_family != AF_INET6) return false;
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  const auto* first = reinterpret_cast<const std::uint8_t*>(&name) + offsetof(sockaddr_in, sin_port);
  std::copy(first, first + port.size(), port.begin());
  return true;
}

std::vector<Sample> sample(const Bytes& worker_address, TcpSocket::Side side) {
  std::vector<Sample> samples;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/proc/self/fd"), closedir);
  while (directory != nullptr) {
    const dirent* entry = readdir(directory.get());
    if (entry == nullptr) break;
    Sample one{std::atoi(entry->d_name), 0, 0};  // "." is 0, which does no harm
    std::array<std::uint8_t, 2> port;
    if (!read_port(one.fd, side, port)) continue;
    const auto found = std::search(worker_address.begin(), worker_address.end(), port.begin(), port.end());
    if (found == worker_address.end()) continue;
    if (read_cookie(one.fd, one.cookie) && read_written(one.fd, one.written)) samples.push_back(one);
  }
  return samples;
}

}  // namespace

TcpSocket TcpSocket::written_by(const std::function<void()>& write, const Bytes& worker_address, Side side) {
  const std::vector<Sample> before = sample(worker_address, side);
  write();
  TcpSocket found;
  for (const Sample& one : before) {
    std::uint64_t cookie = 0;
    std::uint64_t written = 0;
    if (!read_cookie(one.fd, cookie) || cookie != one.cookie || !read_written(one.fd, written)) continue;
    if (written == one.written) continue;
    if (found.fd_ >= 0) return {};
    found = TcpSocket(one.fd, one.cookie);
  }
  return found;
}

bool TcpSocket::open() const noexcept {
  std::uint64_t cookie = 0;
  return fd_ >= 0 && read_cookie(fd_, cookie) && cookie == cookie_;
}

void TcpSocket::shut() const noexcept {
  if (!open()) return;
  const linger at_once{1, 0};  // a peer that reads nothing would keep what is queued for it
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  shutdown(fd_, SHUT_RDWR);
}

}  // namespace tensorferry::transport
