// SPDX-License-Identifier: Apache-2.0
// Random and nearly right requests of peers, while slots come and go.
//
// TENSORFERRY_FUZZ_MESSAGES sets how many (200000), TENSORFERRY_FUZZ_SEED which ones (1).
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "tensorferry/transport/slot_table.hpp"

using namespace tensorferry::transport;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kPool = 1 << 20;
constexpr std::uint32_t kSlots = 8;
constexpr Identifier kUid{0x5a, 1, 2, 3};
constexpr std::size_t kMaximumQueued = 1 << 16;

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::stoull(value) : otherwise;
}

// Draws values that hostile peers like: edges, neighbours of the right value, and noise.
class Chance {
 public:
  explicit Chance(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  template <typename Container>
  auto& of(Container& container) {
    return container[below(container.size())];
  }

  std::uint64_t number(std::uint64_t right) {
    constexpr std::uint64_t kEdges[] = {0, 1, 7, 63, 64, 4096, 1ULL << 31, 1ULL << 32, 1ULL << 62, 1ULL << 63, ~0ULL};
    switch (below(5)) {
      case 0:
        return kEdges[below(std::size(kEdges))];
      case 1:
        return right + below(3) - 1;
      case 2:
        return ~right + below(4);  // right + this is close to the overflow
      case 3:
        return right ^ 1ULL << below(64);
      default:
        return engine_();
    }
  }

  // Flips bits anywhere in a message, in fields that this test knows and in those that it does not.
  template <typename Message>
  void damage(Message& message) {
    static_assert(std::is_trivially_copyable_v<Message>);
    std::uint8_t bytes[sizeof message];
    std::memcpy(bytes, &message, sizeof message);
    for (std::uint64_t i = 1 + below(3); i > 0; --i)
      bytes[below(sizeof bytes)] ^= static_cast<std::uint8_t>(1 << below(8));
    if (one_in(20)) std::generate(bytes, bytes + sizeof bytes, [this] { return static_cast<std::uint8_t>(engine_()); });
    std::memcpy(&message, bytes, sizeof message);
  }

 private:
  std::mt19937_64 engine_;
};

template <typename Message>
Message naming(const Ticket& ticket) {
  Message message{};
  message.protocol = kProtocol;
  message.index = ticket.index;
  message.generation = ticket.generation;
  message.token = ticket.token;
  return message;
}

// What a message says about a slot may be wrong in one field, in any bit, or not at all.
template <typename Message>
Message nearly_naming(const Ticket& ticket, Chance& chance) {
  Message message = naming<Message>(ticket);
  switch (chance.below(6)) {
    case 0:
      message.index = static_cast<std::uint32_t>(chance.number(ticket.index));
      break;
    case 1:
      message.generation = chance.number(ticket.generation);
      break;
    case 2:
      message.token[chance.below(message.token.size())] ^= static_cast<std::uint8_t>(1 + chance.below(255));
      break;
    case 3:
      chance.damage(message);
      break;
    default:
      break;
  }
  return message;
}

ReadRequest nearly_reading(const Ticket& ticket, Chance& chance) {
  auto request = nearly_naming<ReadRequest>(ticket, chance);
  request.source = ticket.nbytes > 0 ? chance.below(ticket.nbytes) : 0;
  request.nbytes = ticket.nbytes - request.source;
  if (chance.one_in(3)) request.source = chance.number(request.source);
  if (chance.one_in(3)) request.nbytes = chance.number(request.nbytes);
  return request;
}

// The slot table as it is described, without its locks and its shared memory.
class Model {
 public:
  struct Slot {
    Ticket ticket;
    std::uint64_t readers = 0;
    bool live = true;
    bool revoked = false;
  };

  explicit Model(std::uint64_t seed) : chance(seed) {}

  void step() {
    switch (chance.below(16)) {
      case 0:
        admit();
        break;
      case 1:
        if (chance.one_in(2)) withdraw();
        break;
      case 2:
      case 3:
        end_read();
        break;
      case 4:
      case 5:
      case 6:
        report();
        break;
      case 7:
        greet();
        break;
      case 8:
        if (chance.one_in(50)) take_notifications();
        break;
      default:
        read();
    }
    REQUIRE(table.running_reads() == reads.size());
  }

  void finish() {
    while (!reads.empty()) end_read();
    for (const Slot& slot : slots) {
      if (slot.live) REQUIRE(table.withdraw(slot.ticket.index, slot.ticket.generation, false));
    }
    take_notifications();
    REQUIRE(table.running_reads() == 0);
    // Every slot came back: as many as there are can be admitted, and not one more.
    for (std::uint32_t i = 0; i < kSlots; ++i) table.admit(0, 1, 1h);
    REQUIRE_THROWS_AS(table.admit(0, 1, 1h), Error);
  }

  std::uint64_t accepted_reads = 0;
  std::uint64_t accepted_reports = 0;
  std::uint64_t refused = 0;
  std::uint64_t revoked = 0;
  std::uint64_t drained = 0;

 private:
  template <typename Message>
  static bool names(const Ticket& ticket, const Message& message) {
    return ticket.index == message.index && ticket.generation == message.generation && ticket.token == message.token;
  }

  template <typename Message>
  Slot* held(const Message& message) {
    for (Slot& slot : slots) {
      if (slot.live && names(slot.ticket, message)) return &slot;
    }
    return nullptr;
  }

  int expected_status(const ReadRequest& request, bool late) {
    if (const Slot* slot = held(request); slot != nullptr) {
      if (late) return kLeaseExpired;
      const std::uint64_t nbytes = slot->ticket.nbytes;
      return request.source <= nbytes && request.nbytes <= nbytes - request.source ? 0 : kAccessRefused;
    }
    for (const Slot& last : lasts) {
      if (last.revoked && !last.live && names(last.ticket, request)) return kLeaseRevoked;
    }
    return request.generation != 0 && request.generation <= generation ? kLeaseExpired : kAccessRefused;
  }

  // Mostly a slot that lives; else one of the past, whose memory others may have by now, or none.
  Ticket some_ticket() {
    if (!slots.empty() && !chance.one_in(4)) return chance.of(slots).ticket;
    if (!past.empty() && !chance.one_in(4)) return chance.one_in(2) ? chance.of(past) : chance.of(lasts).ticket;
    return Ticket{static_cast<std::uint32_t>(chance.below(kSlots)), chance.below(generation + 2), {}, 0, 64};
  }

  void admit() {
    const std::uint64_t offset = chance.one_in(8) ? chance.number(kPool) : chance.below(kPool);
    const std::uint64_t nbytes =
        chance.one_in(8) ? chance.number(kPool - offset) : chance.below(kPool - offset % kPool);
    const bool fits = offset <= kPool && nbytes <= kPool - offset;
    if (!fits || slots.size() == kSlots) {
      REQUIRE_THROWS_AS(table.admit(offset, nbytes, 1h), Error);
      return;
    }
    const Ticket ticket = table.admit(offset, nbytes, 1h);
    REQUIRE(ticket.generation > generation);
    for (const Slot& slot : slots) REQUIRE(slot.ticket.index != ticket.index);  // also those that still drain
    generation = ticket.generation;
    slots.push_back({ticket});
    lasts[ticket.index] = slots.back();
    check_word(ticket.index, ticket.generation);
  }

  void withdraw() {
    const Ticket ticket = some_ticket();
    const bool revoked = chance.one_in(2);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Slot& slot = slots[i];
      if (!slot.live || slot.ticket.index != ticket.index || slot.ticket.generation != ticket.generation) continue;
      REQUIRE(table.withdraw(ticket.index, ticket.generation, revoked) == (slot.readers == 0));
      check_word(ticket.index, revoked ? ticket.generation | kRevokedBit : 0);
      slot.live = false;
      slot.revoked = revoked;
      lasts[ticket.index] = slot;
      if (slot.readers == 0) forget(i);
      return;
    }
    // Of what is over already, or was never there, nothing changes.
    REQUIRE(table.withdraw(ticket.index, ticket.generation, revoked));
    REQUIRE(table.withdraw(static_cast<std::uint32_t>(chance.number(ticket.index)) | kSlots, generation, revoked));
  }

  void check_word(std::uint32_t index, std::uint64_t word) const {
    REQUIRE(reinterpret_cast<const ControlBlock*>(table.control()->data())->generations()[index] == word);
  }

  void forget(std::size_t i) {
    past.push_back(slots[i].ticket);
    if (past.size() > 100) past.erase(past.begin());
    slots.erase(slots.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void read() {
    const ReadRequest request = nearly_reading(some_ticket(), chance);
    const bool late = chance.one_in(10);
    std::uint64_t pool_offset = ~0ULL;
    const int status = table.begin_read(request, SlotTable::Clock::now() + (late ? 2h : 0h), pool_offset);
    REQUIRE(status == expected_status(request, late));
    if (status != 0) {
      REQUIRE(pool_offset == ~0ULL);
      ++(status == kLeaseRevoked ? revoked : refused);
      return;
    }
    Slot* slot = held(request);
    REQUIRE(pool_offset >= slot->ticket.offset);
    REQUIRE(pool_offset - slot->ticket.offset <= slot->ticket.nbytes - request.nbytes);
    REQUIRE(pool_offset + request.nbytes <= kPool);
    reads.push_back(slot->ticket);
    ++slot->readers;
    ++accepted_reads;
  }

  void end_read() {
    if (reads.empty()) return;
    const std::size_t which = chance.below(reads.size());
    const Ticket ticket = reads[which];
    reads.erase(reads.begin() + static_cast<std::ptrdiff_t>(which));
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Slot& slot = slots[i];
      if (slot.ticket.generation != ticket.generation) continue;
      table.end_read(ticket.index);
      if (--slot.readers == 0 && !slot.live) {
        queue.push_back({NotificationKind::kDrained, ticket.index, ticket.generation, {}, {}});
        ++drained;
        forget(i);
      }
      return;
    }
    FAIL("a slot was forgotten while a read of it was running");
  }

  void report() {
    auto request = nearly_naming<NotifyRequest>(some_ticket(), chance);
    request.kind = 1 + static_cast<std::uint32_t>(chance.below(2));  // the handler lets no other kinds through
    request.consumer[chance.below(16)] = static_cast<std::uint8_t>(chance.below(256));
    const bool flood = chance.one_in(4000);
    for (std::size_t i = 0; i < (flood ? kMaximumQueued + 10 : 1); ++i) {
      table.report(request);
      if (held(request) == nullptr) {
        ++refused;
      } else if (queue.size() < kMaximumQueued) {
        queue.push_back({static_cast<NotificationKind>(request.kind), request.index, request.generation,
                         request.consumer, request.mac});
        ++accepted_reports;
      }
    }
  }

  void greet() {
    ReadRequest hello{};
    hello.kind = ReadKind::kHello;
    hello.token = kUid;
    if (chance.one_in(2)) chance.damage(hello);
    REQUIRE((table.greet(hello) == 0) == (hello.token == kUid));
  }

  void take_notifications() {
    const auto taken = table.notifications(0s);
    REQUIRE(taken.size() == queue.size());
    // What peers sent is bounded; the table's own notices are by the producer's own withdrawals.
    const auto own = [](const Notification& notice) { return notice.kind == NotificationKind::kDrained; };
    REQUIRE(taken.size() <= kMaximumQueued + static_cast<std::size_t>(std::count_if(taken.begin(), taken.end(), own)));
    for (std::size_t i = 0; i < taken.size(); ++i) {
      const bool same = taken[i].kind == queue[i].kind && taken[i].index == queue[i].index &&
                        taken[i].generation == queue[i].generation && taken[i].consumer == queue[i].consumer &&
                        taken[i].mac == queue[i].mac;
      REQUIRE(same);
    }
    queue.clear();
  }

  Chance chance;
  SlotTable table{kPool, kSlots, kUid, true};
  std::vector<Slot> slots;         // those that live, and those that still drain
  std::array<Slot, kSlots> lasts;  // who had each entry last
  std::vector<Ticket> past;
  std::vector<Ticket> reads;  // that are running
  std::deque<Notification> queue;
  std::uint64_t generation = 0;
};

}  // namespace

TEST_CASE("whatever peers send, the slot table does what its model does") {
  const std::uint64_t messages = setting("TENSORFERRY_FUZZ_MESSAGES", 200000);
  Model model(setting("TENSORFERRY_FUZZ_SEED", 1));
  for (std::uint64_t i = 0; i < messages; ++i) model.step();
  model.finish();
  MESSAGE(messages << " messages: " << model.accepted_reads << " reads and " << model.accepted_reports
                   << " notifications accepted, " << model.refused << " refused, " << model.revoked
                   << " told of a revoke, " << model.drained << " slots drained");
  // Each way of a request must have been taken often, or this shows little.
  CHECK(model.accepted_reads > messages / 100);
  CHECK(model.accepted_reports > messages / 100);
  CHECK(model.refused > messages / 10);
  CHECK(model.revoked > messages / 1000);
  CHECK(model.drained > messages / 1000);
}

TEST_CASE("memory is not reused under any read, whatever peers send at once") {
  // One page for each slot, with the generation that it was given for; readers see no other one.
  constexpr std::uint64_t kPage = 4096;
  constexpr int kPeers = 3;
  const std::uint64_t messages = setting("TENSORFERRY_FUZZ_MESSAGES", 200000) / 4;
  const std::uint64_t seed = setting("TENSORFERRY_FUZZ_SEED", 1);
  SlotTable table(kPool, kSlots, kUid, true);
  std::array<std::atomic<std::uint64_t>, kSlots> pages{};
  std::mutex mutex;
  std::array<Ticket, kSlots> tickets{};
  std::atomic<std::uint64_t> wrong{0}, reads{0};
  std::atomic<int> running{kPeers};

  std::vector<std::thread> peers;
  for (int peer = 0; peer < kPeers; ++peer) {
    peers.emplace_back([&, peer] {
      Chance chance(seed * 1000 + static_cast<std::uint64_t>(peer));
      for (std::uint64_t i = 0; i < messages; ++i) {
        Ticket ticket;
        {
          const std::lock_guard<std::mutex> guard(mutex);
          ticket = chance.of(tickets);
        }
        if (chance.one_in(4)) {
          auto notice = nearly_naming<NotifyRequest>(ticket, chance);
          notice.kind = 1;
          table.report(notice);
          continue;
        }
        const ReadRequest request = nearly_reading(ticket, chance);
        std::uint64_t pool_offset = 0;
        if (table.begin_read(request, SlotTable::Clock::now(), pool_offset) != 0) continue;
        reads.fetch_add(1);
        const std::uint64_t page = (pool_offset - request.source) / kPage;
        if (pool_offset + request.nbytes > (page + 1) * kPage) wrong.fetch_add(1);
        for (int look = 0; look < 3; ++look) {
          if (pages[page % kSlots].load() != request.generation) wrong.fetch_add(1);
        }
        table.end_read(request.index);
      }
      running.fetch_sub(1);
    });
  }

  // The producer: gives a page out again only when it is free by the table's own word.
  Chance chance(seed);
  enum class Page { kFree, kLive, kDraining };
  std::array<Page, kSlots> states{};
  std::uint64_t drained = 0, expected = 0;
  std::array<Ticket, kSlots> given{};
  const auto collect = [&](SlotTable::Clock::duration timeout) {
    for (const Notification& notice : table.notifications(timeout)) {
      if (notice.kind != NotificationKind::kDrained) continue;
      ++drained;
      for (std::size_t page = 0; page < kSlots; ++page) {
        if (given[page].generation != notice.generation) continue;
        if (states[page] != Page::kDraining) wrong.fetch_add(1);  // drained twice, or never withdrawn
        states[page] = Page::kFree;
      }
    }
  };
  while (running.load() > 0) {
    const std::size_t page = chance.below(kSlots);
    if (states[page] == Page::kLive) {
      const bool free = table.withdraw(given[page].index, given[page].generation, chance.one_in(2));
      if (!free) ++expected;
      states[page] = free ? Page::kFree : Page::kDraining;
    }
    if (states[page] == Page::kFree) {
      pages[page].store(0);
      given[page] = table.admit(page * kPage, kPage - chance.below(2), 1h);
      // Nobody has the ticket yet, as before a manifest has been sent.
      pages[page].store(given[page].generation);
      states[page] = Page::kLive;
      const std::lock_guard<std::mutex> guard(mutex);
      tickets[page] = given[page];
    }
    collect(0s);
  }
  for (auto& thread : peers) thread.join();
  collect(0s);
  CHECK(wrong == 0);
  CHECK(drained == expected);
  CHECK(table.running_reads() == 0);
  CHECK(reads > messages / 100);
}
