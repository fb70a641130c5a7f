// SPDX-License-Identifier: Apache-2.0
// What consumers in other processes do to a producer: stop, die, come and go.
#include <doctest/doctest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "fixtures.hpp"
#include "peer_process.hpp"

using namespace tensorferry::transport;
using namespace tensorferry::transport::tests;

namespace {

constexpr std::uint64_t kSlot = 128 << 20;  // more than socket buffers hold

std::size_t open_files() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

std::size_t resident_kib() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 0;  // sanitizers keep freed memory
#endif
  std::ifstream file("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  file >> total >> resident;
  return resident * 4;
}

// Whether as many files are open as before, or fewer, soon.
bool closes_down_to(std::size_t files) {
  for (int i = 0; i < 2000 && open_files() > files; ++i) std::this_thread::sleep_for(5ms);
  return open_files() <= files;
}

// Starts reads until the consumer is stopped in the middle of one.
void stop_in_a_read(Producer& producer, PeerProcess& peer, const Order& order) {
  for (int turn = 0; turn < 200; ++turn) {
    peer.start(order);
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (turn % 100)));
    peer.signal(SIGSTOP);
    std::this_thread::sleep_for(producer.table->running_reads() > 0 ? 500ms : 20ms);
    if (producer.table->running_reads() > 0) return;
    peer.signal(SIGCONT);
    REQUIRE(peer.result().status == 0);
  }
  FAIL("no read was caught running");
}

}  // namespace

TEST_CASE("a consumer that stops in the middle of a read holds a withdrawn slot for a bounded time") {
  Producer producer(false, kSlot + kPool);
  PeerProcess stopped(producer.worker->address());
  PeerProcess honest(producer.worker->address());
  for (const bool revoked : {true, false}) {
    std::memset(producer.memory->data(), 1, kSlot);
    const Ticket ticket = producer.table->admit(0, kSlot, 600s);
    const Ticket other = producer.table->admit(kSlot, 1 << 20, 600s);
    std::memset(producer.memory->data() + kSlot, 3, 1 << 20);
    const Order order{Order::Kind::kRead, 1, 0, ticket};
    const Order honest_order{Order::Kind::kRead, 3, 0, other};
    REQUIRE(honest.call(honest_order).status == 0);
    stop_in_a_read(producer, stopped, order);
    const auto started = std::chrono::steady_clock::now();
    REQUIRE_FALSE(producer.table->withdraw(ticket.index, ticket.generation, revoked));
    std::vector<Notification> drained;
    while (drained.empty() && std::chrono::steady_clock::now() - started < 60s) {
      const Answer answer = honest.call(honest_order);
      CHECK(answer.status == 0);
      CHECK(answer.wrong == 0);
      drained = producer.table->notifications(50ms);
    }
    const auto took = std::chrono::steady_clock::now() - started;
    MESSAGE("the slot came back after ms: " << std::chrono::duration_cast<std::chrono::milliseconds>(took).count());
    REQUIRE(drained.size() == 1);
    CHECK(drained[0].kind == NotificationKind::kDrained);
    CHECK(took >= SlotTable::kGrace - 100ms);
    CHECK(producer.table->running_reads() == 0);
    std::memset(producer.memory->data(), 2, kSlot);  // the next owner writes
    CHECK(honest.call(honest_order).status == 0);
    stopped.signal(SIGCONT);
    const Answer answer = stopped.result();
    MESSAGE("the consumer that was cut off gets " << answer.status);
    CHECK(answer.status != 0);
    CHECK(answer.wrong == 0);
    CHECK(stopped.call(honest_order).status == 0);  // it connects anew and goes on
    producer.table->withdraw(other.index, other.generation, false);
  }
}

TEST_CASE("connections that were closed or given up leave nothing open on either side") {
  Producer producer;
  Consumer consumer(producer);
  REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
  const Ticket ticket = producer.table->admit(0, 16 << 20, 600s);
  const std::size_t files = open_files();
  const std::size_t resident = resident_kib();
  for (int turn = 0; turn < 60; ++turn) {
    const auto endpoint = consumer.worker->connect(producer.worker->address());
    REQUIRE(outcome(endpoint->hello(kUid)) == 0);
    const auto read = endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region);
    if (turn % 2 == 0) {
      CHECK(outcome(read) == 0);
      endpoint->close(20s);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(150 * turn));
      read->abandon(kCancelled);
      REQUIRE(settles(read));
    }
  }
  CHECK(closes_down_to(files));
  CHECK(resident_kib() < resident + (32 << 10));
  CHECK(outcome(consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region)) == 0);
}

TEST_CASE("consumers that come and go, and those that are killed, leave nothing with the producer") {
  Producer producer;
  std::memset(producer.memory->data(), 1, kPool);
  const Order order{Order::Kind::kRead, 1, 0, producer.table->admit(0, 16 << 20, 600s)};
  Order visits = order;
  visits.kind = Order::Kind::kVisits;
  PeerProcess peer(producer.worker->address());
  visits.count = 10;
  REQUIRE(peer.call(visits).status == 0);
  const std::size_t files = open_files();
  const std::size_t resident = resident_kib();
  visits.count = 30;
  const Answer answer = peer.call(visits);
  CHECK(answer.status == 0);
  CHECK(answer.wrong == 0);
  CHECK(closes_down_to(files));
  for (int turn = 0; turn < 6; ++turn) {
    PeerProcess victim(producer.worker->address());
    REQUIRE(victim.call({Order::Kind::kHello}).status == 0);
    victim.start(order);
    std::this_thread::sleep_for(std::chrono::milliseconds(turn));
    victim.kill();
  }
  CHECK(closes_down_to(files));
  CHECK(resident_kib() < resident + (16 << 10));
  CHECK(producer.table->running_reads() == 0);
  CHECK(peer.call(order).status == 0);
}
