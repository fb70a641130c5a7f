// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "tensorferry/transport/status.hpp"

namespace tensorferry::transport {

using Identifier = std::array<std::uint8_t, 16>;
using Mac = std::array<std::uint8_t, 32>;

enum class NotificationKind : std::uint8_t {
  kRelease = 1,  // a consumer needs the slot no longer
  kReject = 2,   // a consumer will not read the slot
  kDrained = 3,  // local: the last read of a withdrawn slot has ended
};

// What a peer, or the slot table itself, reports about a slot.
struct Notification {
  NotificationKind kind;
  std::uint32_t index;
  std::uint64_t generation;
  Identifier consumer;
  Mac mac;  // as it came: what it proves is the user's business
};

// A slot's generation word, as peers see it: the generation that the slot holds; after a revoke that
// generation with this bit; else 0.  Generations themselves are below it.
constexpr std::uint64_t kRevokedBit = std::uint64_t{1} << 63;

// 0 if a slot with this generation word still holds the generation; else kLeaseRevoked or kLeaseExpired.
inline int judge_word(std::uint64_t word, std::uint64_t generation) noexcept {
  if (word == (generation | kRevokedBit)) return kLeaseRevoked;
  return word == generation ? 0 : static_cast<int>(kLeaseExpired);
}

// What names a slot to a peer: `token` proves that the bearer was given the manifest.
struct Ticket {
  std::uint32_t index = 0;
  std::uint64_t generation = 0;
  Identifier token{};
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
};

// ---- on the wire: headers of active messages, in the byte order of the hosts ----------------

constexpr unsigned kReadMessage = 1;             // consumer → producer: ReadRequest, wants a reply
constexpr unsigned kReplyMessage = 2;            // producer → consumer: ReadReply, then the data
constexpr unsigned kNotifyMessage = 3;           // consumer → producer: NotifyRequest
constexpr std::uint32_t kProtocol = 0x7f546602;  // "this is tensorferry, messages version 2"

enum class ReadKind : std::uint32_t { kData = 0, kHello = 1 };

struct ReadRequest {
  std::uint32_t protocol;
  ReadKind kind;
  std::uint64_t request;  // random: names the request to the consumer
  std::uint64_t generation;
  std::uint64_t source;  // first byte, counted from the start of the slot
  std::uint64_t nbytes;
  Identifier token;  // of the slot; of the producer (its uid) for kHello
  std::uint32_t index;
  std::uint32_t reserved;  // 0
};

struct ReadReply {
  std::uint64_t request;
  std::int32_t status;  // 0 or one of Status
  std::uint32_t protocol;
};

struct NotifyRequest {
  std::uint32_t protocol;
  std::uint32_t kind;
  std::uint64_t generation;
  Identifier token;
  Identifier consumer;
  std::uint32_t index;
  std::uint32_t reserved;  // 0
  Mac mac;                 // 0 where there is no key
};

static_assert(sizeof(ReadRequest) == 64 && std::is_trivially_copyable_v<ReadRequest>);
static_assert(sizeof(ReadReply) == 16 && std::is_trivially_copyable_v<ReadReply>);
static_assert(sizeof(NotifyRequest) == 88 && std::is_trivially_copyable_v<NotifyRequest>);

}  // namespace tensorferry::transport
