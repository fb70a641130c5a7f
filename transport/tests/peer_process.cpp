// SPDX-License-Identifier: Apache-2.0
#include "peer_process.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "fixtures.hpp"

namespace tensorferry::transport::tests {
namespace {

constexpr std::size_t kRoom = 256 << 20;

bool read_all(int fd, void* data, std::size_t nbytes) {
  auto* cursor = static_cast<char*>(data);
  while (nbytes > 0) {
    const ssize_t got = ::read(fd, cursor, nbytes);
    if (got <= 0) return false;
    cursor += got;
    nbytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_all(int fd, const void* data, std::size_t nbytes) {
  return ::write(fd, data, nbytes) == static_cast<ssize_t>(nbytes);  // small: pipes take it whole
}

Answer read_whole(Consumer& consumer, const Order& order) {
  std::memset(consumer.memory->data(), 0, order.ticket.nbytes);
  const auto read = consumer.endpoint->read_served(order.ticket, {{0, 0, order.ticket.nbytes}}, consumer.region);
  const Answer posted;
  if (order.kind == Order::Kind::kRead && !write_all(STDOUT_FILENO, &posted, sizeof posted)) _exit(1);
  Answer answer;
  answer.status = outcome(read, 120s);
  if (answer.status == 0) {
    const std::uint8_t* first = consumer.memory->data();
    answer.wrong = order.ticket.nbytes -
                   static_cast<std::uint64_t>(std::count(first, first + order.ticket.nbytes, order.expected));
  }
  return answer;
}

}  // namespace

PeerProcess::PeerProcess(const Bytes& address) {
  int to_child[2];
  int from_child[2];
  REQUIRE(pipe2(to_child, O_CLOEXEC) == 0);
  REQUIRE(pipe2(from_child, O_CLOEXEC) == 0);
  pid_ = fork();
  REQUIRE(pid_ >= 0);
  if (pid_ == 0) {
    // Not a call of UCX between fork and exec: this process has threads.
    dup2(to_child[0], STDIN_FILENO);
    dup2(from_child[1], STDOUT_FILENO);
    execl("/proc/self/exe", "transport_tests", "--peer", static_cast<char*>(nullptr));
    _exit(127);
  }
  close(to_child[0]);
  close(from_child[1]);
  to_ = to_child[1];
  from_ = from_child[0];
  const std::uint64_t length = address.size();
  REQUIRE(write_all(to_, &length, sizeof length));
  REQUIRE(write_all(to_, address.data(), length));
}

PeerProcess::~PeerProcess() {
  kill();
  close(to_);
  close(from_);
}

void PeerProcess::start(const Order& order) {
  REQUIRE(write_all(to_, &order, sizeof order));
  if (order.kind == Order::Kind::kRead) result();
}

bool PeerProcess::answered(std::chrono::milliseconds timeout) {
  pollfd event{from_, POLLIN, 0};
  return poll(&event, 1, static_cast<int>(timeout.count())) == 1;
}

Answer PeerProcess::result() {
  Answer answer;
  REQUIRE(answered(120s));
  REQUIRE(read_all(from_, &answer, sizeof answer));
  return answer;
}

Answer PeerProcess::call(const Order& order) {
  start(order);
  return result();
}

void PeerProcess::signal(int number) {
  ::kill(pid_, number);
}

void PeerProcess::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

int serve_orders() {
  std::uint64_t length = 0;
  if (!read_all(STDIN_FILENO, &length, sizeof length)) return 1;
  Bytes address(length);
  if (!read_all(STDIN_FILENO, address.data(), length)) return 1;
  Consumer consumer(address, false, kRoom);
  Order order;
  while (read_all(STDIN_FILENO, &order, sizeof order)) {
    Answer answer;
    if (consumer.endpoint->failure() != 0) consumer.endpoint = consumer.worker->connect(address);
    if (order.kind == Order::Kind::kHello) answer.status = outcome(consumer.endpoint->hello(kUid));
    if (order.kind == Order::Kind::kRead) answer = read_whole(consumer, order);
    for (std::uint32_t i = 0; order.kind == Order::Kind::kVisits && i < order.count && answer.status == 0; ++i) {
      Consumer visitor(address);
      answer.status = outcome(visitor.endpoint->hello(kUid));
      if (answer.status == 0) answer = read_whole(visitor, order);
      visitor.worker->close(5s);
    }
    if (!write_all(STDOUT_FILENO, &answer, sizeof answer)) return 1;
  }
  consumer.worker->close(5s);
  return 0;
}

}  // namespace tensorferry::transport::tests
