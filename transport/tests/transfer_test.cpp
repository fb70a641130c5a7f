// SPDX-License-Identifier: Apache-2.0
// Two workers of one process, joined by UCX over tcp on the loopback device.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "fixtures.hpp"

using namespace tensorferry::transport;
using namespace tensorferry::transport::tests;

TEST_CASE("hello is answered by the right producer only") {
  Producer producer;
  Consumer consumer(producer);
  CHECK(outcome(consumer.endpoint->hello(kUid)) == 0);
  Identifier other = kUid;
  other[0] ^= 1;
  CHECK(outcome(consumer.endpoint->hello(other)) == kAccessRefused);
}

TEST_CASE("served reads bring exactly the bytes of the slot") {
  Producer producer;
  Consumer consumer(producer);
  for (const std::uint64_t nbytes : {1ull, 8ull, 4096ull, 65535ull, 262144ull, 262145ull, 1ull << 20, 16ull << 20}) {
    const Ticket ticket = producer.table->admit(512, nbytes, 60s);
    std::memset(consumer.memory->data(), 0, nbytes + 1);
    const auto read = consumer.endpoint->read_served(ticket, {{0, 0, nbytes}}, consumer.region);
    REQUIRE(outcome(read) == 0);
    CHECK(settles(read));
    CHECK(std::memcmp(consumer.memory->data(), producer.memory->data() + 512, nbytes) == 0);
    CHECK(consumer.memory->data()[nbytes] == 0);
    // The producer may still wait for the acknowledgement.
    if (!producer.table->withdraw(ticket.index, ticket.generation, false)) {
      CHECK(producer.table->notifications(20s).size() == 1);
    }
  }
}

TEST_CASE("a batch reads several spans, and none at all") {
  Producer producer;
  Consumer consumer(producer);
  const Ticket ticket = producer.table->admit(0, 1 << 20, 60s);
  const std::vector<Span> spans{{0, 100, 10}, {5000, 200, 300000}, {1 << 19, 400000, 1 << 19}};
  REQUIRE(outcome(consumer.endpoint->read_served(ticket, spans, consumer.region)) == 0);
  for (const Span& span : spans) {
    CHECK(std::memcmp(consumer.memory->data() + span.destination, producer.memory->data() + span.source, span.nbytes) ==
          0);
  }
  CHECK(outcome(consumer.endpoint->read_served(ticket, {}, consumer.region)) == 0);
  producer.table->withdraw(ticket.index, ticket.generation, false);
  CHECK(outcome(consumer.endpoint->read_served(ticket, {}, consumer.region)) == kLeaseExpired);
  const Ticket revoked = producer.table->admit(0, 1 << 20, 60s);
  producer.table->withdraw(revoked.index, revoked.generation, true);
  CHECK(outcome(consumer.endpoint->read_served(revoked, spans, consumer.region)) == kLeaseRevoked);
}

TEST_CASE("a read with a releaser gives the slot back if it ends well, and only then") {
  Producer producer(true);
  Consumer consumer(producer, true);
  const auto pool = consumer.endpoint->unpack(producer.region->pack_key(),
                                              reinterpret_cast<std::uint64_t>(producer.memory->data()), kPool);
  const auto& words = producer.table->control();
  const auto control = consumer.endpoint->unpack(producer.control->pack_key(),
                                                 reinterpret_cast<std::uint64_t>(words->data()), words->nbytes());
  const Releaser releaser{{9, 8, 7}, {6, 5}};
  const std::vector<Span> spans{{0, 0, 4096}};
  const auto read_in = [&](int way, const Ticket& ticket) {
    if (way == 0) return consumer.endpoint->read_served(ticket, spans, consumer.region, releaser);
    if (way == 1) return consumer.endpoint->read_served_into(ticket, spans, {consumer.memory}, releaser);
    return consumer.endpoint->read_remote(ticket, spans, consumer.region, pool, control, releaser);
  };
  for (int way : {0, 1, 2}) {
    const Ticket ticket = producer.table->admit(0, 4096, 60s);
    REQUIRE(outcome(read_in(way, ticket)) == 0);
    const auto told = producer.table->notifications(20s);
    REQUIRE(told.size() == 1);
    CHECK(told[0].kind == NotificationKind::kRelease);
    CHECK(told[0].generation == ticket.generation);
    CHECK(told[0].consumer == releaser.consumer);
    CHECK(told[0].mac == releaser.mac);
    Ticket stale = ticket;
    ++stale.generation;
    CHECK(outcome(read_in(way, stale)) != 0);
    CHECK(producer.table->notifications(200ms).empty());
    producer.table->withdraw(ticket.index, ticket.generation, false);
  }
}

TEST_CASE("a read that was given up gives no slot back") {
  Producer producer;
  for (int round = 0; round < 20; ++round) {
    const Ticket ticket = producer.table->admit(0, 1 << 20, 60s);
    Consumer consumer(producer);
    REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
    const auto read = consumer.endpoint->read_served(ticket, {{0, 0, 1 << 20}}, consumer.region, Releaser{{1}, {2}});
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    read->abandon(kCancelled);
    const std::size_t expected = outcome(read, 0s) == 0;
    CHECK(settles(read));
    std::size_t releases = 0;
    for (const auto& one : producer.table->notifications(expected ? 20s : 100ms)) {
      releases += one.kind == NotificationKind::kRelease;
    }
    CHECK(releases == expected);
    if (!producer.table->withdraw(ticket.index, ticket.generation, false)) producer.table->notifications(20s);
  }
}

TEST_CASE("served reads land in memory that is registered with nobody") {
  Producer producer;
  Consumer consumer(producer);
  const Ticket ticket = producer.table->admit(0, 1 << 20, 60s);
  std::vector<std::uint8_t> small(100, 0xee);
  std::vector<std::uint8_t> large(700001, 0xee);
  const auto lent = [](std::vector<std::uint8_t>& bytes) { return Memory::borrow(bytes.data(), bytes.size()); };
  const auto read =
      consumer.endpoint->read_served_into(ticket, {{7, 0, 99}, {1000, 1, 700000}}, {lent(small), lent(large)});
  REQUIRE(outcome(read) == 0);
  REQUIRE(settles(read));
  CHECK(std::memcmp(small.data(), producer.memory->data() + 7, 99) == 0);
  CHECK(std::memcmp(large.data() + 1, producer.memory->data() + 1000, 700000) == 0);
  CHECK(small[99] == 0xee);
  CHECK(large[0] == 0xee);
  CHECK_THROWS_AS(consumer.endpoint->read_served_into(ticket, {{0, 0, 101}}, {lent(small)}), Error);
  CHECK_THROWS_AS(consumer.endpoint->read_served_into(ticket, {{0, 100, 1}}, {lent(small)}), Error);
  CHECK_THROWS_AS(consumer.endpoint->read_served_into(ticket, {{1 << 20, 0, 1}}, {lent(small)}), Error);
  CHECK_THROWS_AS(consumer.endpoint->read_served_into(ticket, {{0, 0, 1}}, {}), Error);
}

TEST_CASE("a served read of one's own making is refused and the producer lives on") {
  Producer producer;
  Consumer consumer(producer);
  const Ticket ticket = producer.table->admit(4096, 4096, 60s);
  const auto attempt = [&](Ticket forged, std::uint64_t source, std::uint64_t nbytes) {
    forged.nbytes = kPool;  // what the consumer's own check would allow
    return outcome(consumer.endpoint->read_served(forged, {{source, 0, nbytes}}, consumer.region));
  };
  CHECK(attempt(ticket, 0, 4097) == kAccessRefused);
  CHECK(attempt(ticket, 4096, 1) == kAccessRefused);
  Ticket forged = ticket;
  forged.token[3] ^= 0x80;
  CHECK(attempt(forged, 0, 1) != 0);
  forged = ticket;
  forged.generation += 1;
  CHECK(attempt(forged, 0, 1) == kAccessRefused);
  forged = ticket;
  forged.index = 77;
  CHECK(attempt(forged, 0, 1) != 0);
  CHECK(attempt(ticket, 0, 4096) == 0);
}

TEST_CASE("spans outside the slot or the landing memory never leave the consumer") {
  Producer producer;
  Consumer consumer(producer);
  const Ticket ticket = producer.table->admit(0, 4096, 60s);
  CHECK_THROWS_AS(consumer.endpoint->read_served(ticket, {{0, 0, 4097}}, consumer.region), Error);
  CHECK_THROWS_AS(consumer.endpoint->read_served(ticket, {{~0ull, 0, 2}}, consumer.region), Error);
  CHECK_THROWS_AS(consumer.endpoint->read_served(ticket, {{0, kPool, 1}}, consumer.region), Error);
  CHECK_THROWS_AS(consumer.endpoint->read_served(ticket, {{0, ~0ull, 2}}, consumer.region), Error);
}

TEST_CASE("remote reads check the generation after the data") {
  Producer producer(true);
  Consumer consumer(producer, true);
  REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
  const auto pool = consumer.endpoint->unpack(producer.region->pack_key(),
                                              reinterpret_cast<std::uint64_t>(producer.region->data()), kPool);
  const auto control =
      consumer.endpoint->unpack(producer.control->pack_key(), reinterpret_cast<std::uint64_t>(producer.control->data()),
                                producer.control->nbytes());
  for (const std::uint64_t nbytes : {1ull, 4096ull, 1ull << 20, 16ull << 20}) {
    const Ticket ticket = producer.table->admit(4096, nbytes, 60s);
    const auto read = consumer.endpoint->read_remote(ticket, {{0, 0, nbytes}}, consumer.region, pool, control);
    REQUIRE(outcome(read) == 0);
    CHECK(std::memcmp(consumer.memory->data(), producer.memory->data() + 4096, nbytes) == 0);
    producer.table->withdraw(ticket.index, ticket.generation, false);
    CHECK(outcome(consumer.endpoint->read_remote(ticket, {{0, 0, nbytes}}, consumer.region, pool, control)) ==
          kLeaseExpired);
    CHECK(outcome(consumer.endpoint->read_remote(ticket, {}, consumer.region, pool, control)) == kLeaseExpired);
  }
  const Ticket revoked = producer.table->admit(0, 4096, 60s);
  producer.table->withdraw(revoked.index, revoked.generation, true);
  CHECK(outcome(consumer.endpoint->read_remote(revoked, {{0, 0, 4096}}, consumer.region, pool, control)) ==
        kLeaseRevoked);
  Ticket outside = producer.table->admit(0, 1, 60s);
  outside.offset = kPool;
  CHECK_THROWS_AS(consumer.endpoint->read_remote(outside, {{0, 0, 1}}, consumer.region, pool, control), Error);
  outside.offset = 0;
  outside.index = 1 << 20;
  CHECK_THROWS_AS(consumer.endpoint->read_remote(outside, {{0, 0, 1}}, consumer.region, pool, control), Error);
}

TEST_CASE("notifications arrive") {
  Producer producer;
  Consumer consumer(producer);
  const Ticket ticket = producer.table->admit(0, 4096, 60s);
  const Identifier me{42};
  const Mac mac{1, 2, 3};
  consumer.endpoint->notify(NotificationKind::kRelease, ticket, me, mac);
  const auto taken = producer.table->notifications(20s);
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].kind == NotificationKind::kRelease);
  CHECK(taken[0].generation == ticket.generation);
  CHECK(taken[0].consumer == me);
  CHECK(taken[0].mac == mac);
}

TEST_CASE("closing an endpoint delivers what was queued on it") {
  Producer producer;
  const Ticket ticket = producer.table->admit(0, 4096, 60s);
  {
    Consumer consumer(producer);
    consumer.endpoint->notify(NotificationKind::kReject, ticket, {}, {});
    consumer.worker->close(10s);
  }
  const auto taken = producer.table->notifications(20s);
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].kind == NotificationKind::kReject);
}

TEST_CASE("a producer that closes ends reads with an error, and later ones at once") {
  auto producer = std::make_unique<Producer>();
  Consumer consumer(*producer);
  REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
  const Ticket ticket = producer->table->admit(0, 1 << 20, 60s);
  producer->table->close();
  CHECK(outcome(consumer.endpoint->read_served(ticket, {{0, 0, 1 << 20}}, consumer.region)) == kPeerGone);
  producer->worker->close(1s);
  const auto read = consumer.endpoint->read_served(ticket, {{0, 0, 1 << 20}}, consumer.region);
  CHECK(outcome(read) != 0);
  CHECK(settles(read));
  CHECK(consumer.endpoint->failure() != 0);
}

TEST_CASE("an abandoned read settles, keeps its error, and what comes late is dropped") {
  Producer producer;
  Consumer consumer(producer);
  REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
  const Ticket ticket = producer.table->admit(0, 16 << 20, 60s);
  for (int round = 0; round < 50; ++round) {
    const auto read = consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region);
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    read->abandon(kCancelled);
    const int status = outcome(read, 0s);
    CHECK((status == kCancelled || status == 0));
    REQUIRE(settles(read));
    if (consumer.endpoint->failure() != 0) consumer.endpoint = consumer.worker->connect(producer.worker->address());
  }
  const auto read = consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region);
  CHECK(outcome(read) == 0);
  CHECK(std::memcmp(consumer.memory->data(), producer.memory->data(), 16 << 20) == 0);
}

TEST_CASE("a worker that closes ends its reads, and they are settled") {
  Producer producer;
  Consumer consumer(producer);
  REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
  const Ticket ticket = producer.table->admit(0, 16 << 20, 60s);
  std::vector<std::shared_ptr<Read>> reads;
  for (int i = 0; i < 20; ++i) {
    reads.push_back(consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region));
  }
  consumer.worker->close(0s);
  for (const auto& read : reads) {
    outcome(read, 0s);
    CHECK(read->settled());
  }
  const auto late = consumer.endpoint->read_served(ticket, {{0, 0, 1}}, consumer.region);
  CHECK(outcome(late) == kClosed);
  CHECK(late->settled());
  CHECK_THROWS_AS(consumer.worker->connect(producer.worker->address()), Error);
}

TEST_CASE("a dropped endpoint and worker clean up after themselves with reads running") {
  Producer producer;
  const Ticket ticket = producer.table->admit(0, 16 << 20, 60s);
  for (int round = 0; round < 10; ++round) {
    Consumer consumer(producer);
    REQUIRE(outcome(consumer.endpoint->hello(kUid)) == 0);
    auto read = consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region);
    if (round % 2 == 0) read.reset();
    consumer.endpoint.reset();
  }
  producer.worker->close(5s);
  CHECK(producer.table->running_reads() == 0);
}

TEST_CASE("a consumer that vanishes while it connects does the producer no harm") {
  if (library()->version() < "1.14") {
    MESSAGE("skipped: UCX " << library()->version() << " aborts the producer by an assertion of its own");
    return;
  }
  Producer producer;
  const Ticket ticket = producer.table->admit(0, 16 << 20, 60s);
  for (int round = 0; round < 20; ++round) {
    Consumer consumer(producer);
    const auto read = consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region);
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    consumer.worker->close(0s);
  }
  Consumer consumer(producer);
  CHECK(outcome(consumer.endpoint->read_served(ticket, {{0, 0, 16 << 20}}, consumer.region)) == 0);
}

TEST_CASE("many threads read through one endpoint") {
  Producer producer;
  Consumer consumer(producer);
  const Ticket ticket = producer.table->admit(0, 1 << 20, 60s);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::uint64_t mine = t << 20;
      for (std::uint64_t i = 1; i <= 100; ++i) {
        const std::uint64_t nbytes = i * 9973;
        const auto read = consumer.endpoint->read_served(ticket, {{i, mine, nbytes}}, consumer.region);
        if (outcome(read) != 0 ||
            std::memcmp(consumer.memory->data() + mine, producer.memory->data() + i, nbytes) != 0) {
          ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("unusable libraries and settings are errors") {
  CHECK_THROWS_AS(Library::load("/nonexistent/libucp.so.0"), Error);
  CHECK_THROWS_AS(Library::load("libc.so.6"), Error);
  CHECK_THROWS_AS(Context::create(library(), {}, {{"TLS", "no_such_transport"}}, false), Error);
  CHECK(Library::mapped_path() == library()->path());
  CHECK_FALSE(library()->version().empty());
}
