// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "tensorferry/transport/memory_region.hpp"

namespace tensorferry::transport {

// The TCP socket behind an endpoint.
//
// UCX shows it nowhere, but it must be shut at times: when UCX closes an endpoint, even by force, it leaves
// the socket open for what the peer may still send, on both sides, for as long as the two workers live.
// The socket is UCX's: it is only ever shut, not closed, and UCX then finds the connection ended.
class TcpSocket {
 public:
  // What is known of its addresses: the port at which this process accepted it, or at which the peer did,
  // is among the bytes of a worker address.
  enum class Side { kAccepted, kConnected };

  TcpSocket() = default;

  // Runs `write`, which has UCX send something, and returns the socket that it was written to; an unknown
  // one if there is none, or more than one.  On the thread that progresses UCX: no other may write meanwhile.
  static TcpSocket written_by(const std::function<void()>& write, const Bytes& worker_address, Side side);

  bool known() const noexcept { return fd_ >= 0; }

  // Whether it is known and has not been closed.
  bool open() const noexcept;

  // Ends the connection, for both sides; what was not sent yet is dropped.
  void shut() const noexcept;

 private:
  TcpSocket(int fd, std::uint64_t cookie) : fd_(fd), cookie_(cookie) {}

  int fd_ = -1;
  std::uint64_t cookie_ = 0;  // the kernel's, different for each socket: file descriptors are used again
};

}  // namespace tensorferry::transport
