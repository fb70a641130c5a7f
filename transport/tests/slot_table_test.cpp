// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/slot_table.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <set>
#include <thread>

using namespace tensorferry::transport;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kPool = 1 << 20;
constexpr Identifier kUid{1, 2, 3};
constexpr Identifier kConsumer{9};

ReadRequest request_for(const Ticket& ticket, std::uint64_t source, std::uint64_t nbytes) {
  ReadRequest request{};
  request.protocol = kProtocol;
  request.index = ticket.index;
  request.generation = ticket.generation;
  request.token = ticket.token;
  request.source = source;
  request.nbytes = nbytes;
  return request;
}

NotifyRequest release_of(const Ticket& ticket) {
  NotifyRequest request{};
  request.kind = static_cast<std::uint32_t>(NotificationKind::kRelease);
  request.index = ticket.index;
  request.generation = ticket.generation;
  request.token = ticket.token;
  request.consumer = kConsumer;
  return request;
}

const ControlBlock& block(const SlotTable& table) {
  return *reinterpret_cast<const ControlBlock*>(table.control()->data());
}

struct Fixture {
  SlotTable table{kPool, 4, kUid, true};
  std::uint64_t offset = 0;
  int begin(const ReadRequest& request) { return table.begin_read(request, SlotTable::Clock::now(), offset); }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "an admitted slot can be read inside its bounds only") {
  const Ticket ticket = table.admit(4096, 1000, 60s);
  CHECK(begin(request_for(ticket, 0, 1000)) == 0);
  CHECK(offset == 4096);
  CHECK(begin(request_for(ticket, 999, 1)) == 0);
  CHECK(offset == 4096 + 999);
  CHECK(begin(request_for(ticket, 1000, 0)) == 0);
  CHECK(begin(request_for(ticket, 0, 1001)) == kAccessRefused);
  CHECK(begin(request_for(ticket, 1001, 0)) == kAccessRefused);
  CHECK(begin(request_for(ticket, ~0ULL, 2)) == kAccessRefused);
  CHECK(begin(request_for(ticket, 1, ~0ULL)) == kAccessRefused);
  CHECK(table.running_reads() == 3);
}

TEST_CASE_FIXTURE(Fixture, "a wrong token, index or generation is refused") {
  const Ticket ticket = table.admit(0, 1000, 60s);
  ReadRequest request = request_for(ticket, 0, 1);
  request.token[15] ^= 1;
  CHECK(begin(request) != 0);
  request = request_for(ticket, 0, 1);
  request.index = 4;
  CHECK(begin(request) != 0);
  request.index = 0xffffffff;
  CHECK(begin(request) != 0);
  request = request_for(ticket, 0, 1);
  request.generation += 1;
  CHECK(begin(request) == kAccessRefused);
  request.generation = 0;
  CHECK(begin(request) == kAccessRefused);
  CHECK(table.running_reads() == 0);
}

TEST_CASE_FIXTURE(Fixture, "a slot that was never admitted cannot be read with a zero token") {
  ReadRequest request{};
  request.protocol = kProtocol;
  CHECK(begin(request) == kAccessRefused);
}

TEST_CASE_FIXTURE(Fixture, "a lease that ran out refuses reads") {
  const Ticket ticket = table.admit(0, 1000, 60s);
  const auto later = SlotTable::Clock::now() + 61s;
  CHECK(table.begin_read(request_for(ticket, 0, 1), later, offset) == kLeaseExpired);
}

TEST_CASE_FIXTURE(Fixture, "a slot that peers do not get served is refused") {
  SlotTable unserved(kPool, 4, kUid, false);
  const Ticket ticket = unserved.admit(0, 10, 60s);
  CHECK(unserved.begin_read(request_for(ticket, 0, 1), SlotTable::Clock::now(), offset) == kAccessRefused);
}

TEST_CASE_FIXTURE(Fixture, "a range outside the pool is not admitted") {
  CHECK_THROWS_AS(table.admit(kPool, 1, 60s), Error);
  CHECK_THROWS_AS(table.admit(1, kPool, 60s), Error);
  CHECK_THROWS_AS(table.admit(~0ULL, 2, 60s), Error);
  CHECK_NOTHROW(table.admit(kPool, 0, 60s));
}

TEST_CASE_FIXTURE(Fixture, "the generation word follows the slot") {
  const Ticket first = table.admit(0, 10, 60s);
  CHECK(block(table).generations()[first.index] == first.generation);
  CHECK(table.withdraw(first.index, first.generation, false));
  CHECK(block(table).generations()[first.index] == 0);
  const Ticket second = table.admit(0, 10, 60s);
  CHECK(second.generation > first.generation);
  CHECK(std::memcmp(first.token.data(), second.token.data(), 16) != 0);
  CHECK(table.withdraw(first.index, first.generation, false));  // stale: nothing happens
  CHECK(block(table).generations()[second.index] == second.generation);
  CHECK(begin(request_for(first, 0, 1)) == kLeaseExpired);
}

TEST_CASE_FIXTURE(Fixture, "who is late for a revoked slot is told so, and only with the token") {
  const Ticket ticket = table.admit(0, 10, 60s);
  CHECK(table.withdraw(ticket.index, ticket.generation, true));
  const std::uint64_t word = block(table).generations()[ticket.index];
  CHECK(word == (ticket.generation | kRevokedBit));
  CHECK(judge_word(word, ticket.generation) == kLeaseRevoked);
  CHECK(judge_word(word, ticket.generation + 1) == kLeaseExpired);
  CHECK(judge_word(word, word) == kLeaseRevoked);  // a forged generation with the bit is never right
  CHECK(begin(request_for(ticket, 0, 1)) == kLeaseRevoked);
  ReadRequest forged = request_for(ticket, 0, 1);
  forged.token[0] ^= 1;
  CHECK(begin(forged) == kLeaseExpired);
  CHECK(table.withdraw(ticket.index, ticket.generation, false));  // the first reason stays
  CHECK(begin(request_for(ticket, 0, 1)) == kLeaseRevoked);
  table.report(release_of(ticket));
  CHECK(table.notifications(0s).empty());
}

TEST_CASE_FIXTURE(Fixture, "the reason is known until the slot is used again, which takes as long as it can") {
  const Ticket revoked = table.admit(0, 10, 60s);
  table.withdraw(revoked.index, revoked.generation, true);
  for (int i = 0; i < 3; ++i) {
    const Ticket next = table.admit(0, 10, 60s);
    CHECK(next.index != revoked.index);
    table.withdraw(next.index, next.generation, false);
    CHECK(begin(request_for(revoked, 0, 1)) == kLeaseRevoked);
  }
  const Ticket again = table.admit(0, 10, 60s);
  CHECK(again.index == revoked.index);
  CHECK(begin(request_for(revoked, 0, 1)) == kLeaseExpired);
  CHECK(judge_word(block(table).generations()[again.index], revoked.generation) == kLeaseExpired);
}

TEST_CASE_FIXTURE(Fixture, "a slot with readers drains after it was withdrawn, and is not reused before") {
  const Ticket ticket = table.admit(0, 10, 60s);
  CHECK(begin(request_for(ticket, 0, 10)) == 0);
  CHECK(begin(request_for(ticket, 0, 10)) == 0);
  CHECK_FALSE(table.withdraw(ticket.index, ticket.generation, false));
  CHECK(begin(request_for(ticket, 0, 10)) == kLeaseExpired);
  std::set<std::uint32_t> others;
  for (int i = 0; i < 3; ++i) others.insert(table.admit(0, 1, 60s).index);
  CHECK(others.count(ticket.index) == 0);
  CHECK_THROWS_AS(table.admit(0, 1, 60s), Error);
  table.end_read(ticket.index);
  CHECK(table.notifications(0s).empty());
  table.end_read(ticket.index);
  const auto drained = table.notifications(0s);
  REQUIRE(drained.size() == 1);
  CHECK(drained[0].kind == NotificationKind::kDrained);
  CHECK(drained[0].generation == ticket.generation);
  CHECK(table.admit(0, 1, 60s).index == ticket.index);
}

TEST_CASE_FIXTURE(Fixture, "a notification needs the token and is not taken for a past generation") {
  const Ticket ticket = table.admit(0, 10, 60s);
  NotifyRequest forged = release_of(ticket);
  forged.token[0] ^= 1;
  table.report(forged);
  CHECK(table.notifications(0s).empty());
  table.report(release_of(ticket));
  const auto taken = table.notifications(0s);
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].consumer == kConsumer);
  table.withdraw(ticket.index, ticket.generation, false);
  table.report(release_of(ticket));
  CHECK(table.notifications(0s).empty());
}

TEST_CASE_FIXTURE(Fixture, "a flood of notifications is bounded") {
  const Ticket ticket = table.admit(0, 10, 60s);
  for (int i = 0; i < 100000; ++i) table.report(release_of(ticket));
  CHECK(table.notifications(0s).size() == 65536);
}

TEST_CASE_FIXTURE(Fixture, "waiting for notifications ends by a notification, a wake, a close or the time") {
  const Ticket ticket = table.admit(0, 10, 60s);
  std::thread reporter([&] {
    std::this_thread::sleep_for(20ms);
    table.report(release_of(ticket));
    std::this_thread::sleep_for(20ms);
    table.wake();
    std::this_thread::sleep_for(20ms);
    table.close();
  });
  CHECK(table.notifications(10s).size() == 1);
  CHECK(table.notifications(10s).empty());
  CHECK(table.notifications(10s).empty());
  CHECK(table.notifications(1ms).empty());
  reporter.join();
}

TEST_CASE_FIXTURE(Fixture, "a closed table refuses everything and says so in shared memory") {
  const Ticket ticket = table.admit(0, 10, 60s);
  CHECK(block(table).open == 1);
  table.close();
  CHECK(block(table).open == 0);
  CHECK(block(table).generations()[ticket.index] == 0);
  CHECK(begin(request_for(ticket, 0, 1)) == kPeerGone);
  CHECK_THROWS_AS(table.admit(0, 1, 60s), Error);
}

TEST_CASE("admitting, reading and withdrawing from several threads keeps the books") {
  SlotTable table(kPool, 64, kUid, true);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const Ticket ticket = table.admit(0, 100, 60s);
        std::uint64_t offset;
        if (table.begin_read(request_for(ticket, 0, 100), SlotTable::Clock::now(), offset) != 0) std::abort();
        if (table.withdraw(ticket.index, ticket.generation, false)) std::abort();
        table.end_read(ticket.index);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(table.running_reads() == 0);
  CHECK(table.notifications(0s).size() == 8000);
}
