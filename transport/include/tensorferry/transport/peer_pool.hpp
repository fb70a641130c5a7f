// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "tensorferry/transport/memory.hpp"
#include "tensorferry/transport/slot_table.hpp"

namespace tensorferry::transport {

// How a process of the same user on this host finds a producer's shared pool.
struct PoolAddress {
  int pid;
  int control_descriptor;
  int pool_descriptor;
  Identifier uid;
  std::uint64_t pool_nbytes;
  std::uint32_t slots;
};

// Another process's pool, mapped read-only.
//
// Thread-safe.  It watches the process by a pidfd, so a pool whose producer has died is known as
// such at once, although its memory stays readable.
class PeerPool {
 public:
  // Throws Error(kPeerGone) where the process or its memory is not, or is no pool of this uid.
  static std::shared_ptr<PeerPool> open(const PoolAddress& address);
  ~PeerPool();
  PeerPool(const PeerPool&) = delete;
  PeerPool& operator=(const PeerPool&) = delete;

  // 0 while the slot holds this generation and the producer lives; kLeaseExpired, kLeaseRevoked or kPeerGone.
  // Data copied before the call is the ticket's if and only if this returns 0.
  int verify(std::uint32_t index, std::uint64_t generation) const;

  // 0 or kPeerGone.
  int alive() const;

  const std::shared_ptr<Memory>& pool() const noexcept { return pool_; }

 private:
  PeerPool(int process, std::shared_ptr<Memory> control, std::shared_ptr<Memory> pool);
  const ControlBlock& block() const { return *reinterpret_cast<const ControlBlock*>(control_->data()); }

  int process_;
  std::shared_ptr<Memory> control_;
  std::shared_ptr<Memory> pool_;
};

}  // namespace tensorferry::transport
