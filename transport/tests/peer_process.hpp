// SPDX-License-Identifier: Apache-2.0
// A consumer in a process of its own, which a test may stop and kill.
#pragma once

#include <chrono>
#include <cstdint>

#include "tensorferry/transport/memory_region.hpp"
#include "tensorferry/transport/notification.hpp"

namespace tensorferry::transport::tests {

struct Order {
  enum class Kind : std::uint8_t {
    kHello = 1,
    kRead = 2,    // the whole ticket; every byte must be `expected`
    kVisits = 3,  // `count` times: connect with a new worker, say hello, read the ticket, close
  };
  Kind kind;
  std::uint8_t expected = 0;
  std::uint32_t count = 0;
  Ticket ticket{};
};

struct Answer {
  int status = 0;           // the first that is not 0
  std::uint64_t wrong = 0;  // bytes that were read with success and are not as expected
};

class PeerProcess {
 public:
  // Starts this program once more, as a consumer of the worker at `address`.
  explicit PeerProcess(const Bytes& address);
  ~PeerProcess();  // kills it
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  void start(const Order& order);  // returns once the read is posted, if it is one
  bool answered(std::chrono::milliseconds timeout);
  Answer result();
  Answer call(const Order& order);
  void signal(int number);
  void kill();

 private:
  int pid_;
  int to_;
  int from_;
};

// What the other process does.
int serve_orders();

}  // namespace tensorferry::transport::tests
