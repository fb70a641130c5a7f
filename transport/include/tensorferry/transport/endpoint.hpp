// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensorferry/transport/notification.hpp"
#include "tensorferry/transport/read.hpp"
#include "tensorferry/transport/remote_key.hpp"

namespace tensorferry::transport {

// Who gives a slot back.
struct Releaser {
  Identifier consumer;
  Mac mac;
};

// The way to one peer's worker; error handling mode PEER.
//
// Thread-safe.  It keeps its worker alive; the worker's progress thread owns the UCP endpoint
// and its unpacked keys, and closes them together when the endpoint fails or is dropped.
class Endpoint {
 public:
  Endpoint(std::shared_ptr<Worker> worker, std::shared_ptr<Connection> connection);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // 0, or why the peer can no longer be reached.
  int failure() const noexcept;

  // Asks the peer whether it is the producer `uid`.
  std::shared_ptr<Read> hello(const Identifier& uid);

  // Asks the producer for the spans of a slot; it validates the ticket before it answers.  With no
  // spans only the ticket is validated.  Throws Error(kAccessRefused) for a span outside.
  // With a releaser, here and in the other reads, the slot is given back as soon as the read has ended
  // well for the caller: by the progress thread, before anyone who waits had to wake up.
  std::shared_ptr<Read> read_served(const Ticket& ticket, const std::vector<Span>& spans,
                                    std::shared_ptr<MemoryRegion> destination,
                                    const std::optional<Releaser>& releaser = std::nullopt);

  // The same into host memory that is registered with nobody: span i lands in memories[i], which the
  // read keeps alive.  For transports that receive by copying, such as tcp.
  std::shared_ptr<Read> read_served_into(const Ticket& ticket, const std::vector<Span>& spans,
                                         std::vector<std::shared_ptr<Memory>> memories,
                                         const std::optional<Releaser>& releaser = std::nullopt);

  // Reads the spans by one-sided gets, then the slot's generation word, which must match.
  std::shared_ptr<Read> read_remote(const Ticket& ticket, const std::vector<Span>& spans,
                                    std::shared_ptr<MemoryRegion> destination, std::shared_ptr<const RemoteKey> pool,
                                    std::shared_ptr<const RemoteKey> control,
                                    const std::optional<Releaser>& releaser = std::nullopt);

  // Unpacks a key for `nbytes` at `address` in the peer.  Blocks; throws Error.
  std::shared_ptr<const RemoteKey> unpack(const Bytes& key, std::uint64_t address, std::uint64_t nbytes);

  // What UCX has chosen to reach the peer by, each as "transport/device", for example "tcp/eth0"; settled once the peer
  // has answered.  Blocks; throws Error.
  std::vector<std::string> transports();

  // Queues a notification; it is dropped if the peer is lost.
  void notify(NotificationKind kind, const Ticket& ticket, const Identifier& consumer, const Mac& mac);

  // Flushes what was queued for up to `timeout`, then closes.  Idempotent.
  void close(std::chrono::nanoseconds timeout);

 private:
  void request_all(const std::shared_ptr<Read>& read, const Ticket& ticket, const std::vector<Span>& spans,
                   std::vector<std::uint8_t*> targets, ucs_memory_type_t type);

  std::shared_ptr<Worker> worker_;
  std::shared_ptr<Connection> connection_;
};

}  // namespace tensorferry::transport
