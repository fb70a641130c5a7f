// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "tensorferry/transport/memory.hpp"
#include "tensorferry/transport/notification.hpp"

namespace tensorferry::transport {

// What a mapped peer reads first, and after each copy; shared memory, written by the producer only.
struct ControlBlock {
  static constexpr std::uint64_t kMagic = 0x0131595252454654;  // "TFERRY1", version 1
  std::uint64_t magic;
  Identifier uid;
  std::uint64_t pool_nbytes;
  std::uint64_t slots;
  std::atomic<std::uint32_t> open;  // 1 until the producer closes
  std::uint8_t padding[20];
  // After it: `slots` generation words; see kRevokedBit.

  static std::size_t nbytes(std::uint64_t slots) { return sizeof(ControlBlock) + slots * sizeof(std::uint64_t); }
  std::atomic<std::uint64_t>* generations() { return reinterpret_cast<std::atomic<std::uint64_t>*>(this + 1); }
  const std::atomic<std::uint64_t>* generations() const {
    return reinterpret_cast<const std::atomic<std::uint64_t>*>(this + 1);
  }
};
static_assert(sizeof(ControlBlock) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

// Which parts of a pool peers may read now, and who is reading them.
//
// A slot is admitted, read by any number of served reads, withdrawn, and free again once the
// last of them has ended.  Every method may be called from any thread.
class SlotTable {
 public:
  using Clock = std::chrono::steady_clock;

  // How long a read that is running when its slot is withdrawn may go on.  Nobody is promised that it
  // may: this lets those end that are nearly there, and bounds what a stopped consumer can hold.
  static constexpr Clock::duration kGrace = std::chrono::seconds(5);

  SlotTable(std::uint64_t pool_nbytes, std::uint32_t slots, const Identifier& uid, bool serves);
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;

  // Throws Error(kNoMemory) if every slot is taken, Error(kAccessRefused) for a range outside the
  // pool, Error(kClosed).
  Ticket admit(std::uint64_t offset, std::uint64_t nbytes, Clock::duration lease);

  // No read of the slot begins after this.  True if none is running; else a kDrained follows.
  // `revoked` is what late readers are told, until the slot is admitted again.
  bool withdraw(std::uint32_t index, std::uint64_t generation, bool revoked);

  // 0 and the pool offset of the first byte, or why the request is refused.  After 0 the slot is
  // held until end_read().
  int begin_read(const ReadRequest& request, Clock::time_point now, std::uint64_t& pool_offset);
  void end_read(std::uint32_t index);

  // 0, or with what status a running read of the slot must be cut off now.
  int overdue(std::uint32_t index, Clock::time_point now) const;

  // 0 if the hello names this producer.
  int greet(const ReadRequest& request) const;

  // Queues a peer's notification if it proves the slot's token; drops it otherwise.
  void report(const NotifyRequest& request);

  // Waits for notifications; empty on timeout, after wake(), and once closed.
  std::vector<Notification> notifications(Clock::duration timeout);
  void wake();

  // Withdraws every slot and marks the control block closed.
  void close();
  std::uint64_t running_reads() const;

  const std::shared_ptr<Memory>& control() const noexcept { return control_; }
  const Identifier& uid() const noexcept { return uid_; }

 private:
  struct Slot {
    Ticket ticket;
    Clock::time_point deadline;
    std::uint32_t readers = 0;
    bool admitted = false;
    bool revoked = false;  // why it is not admitted any more
    Clock::time_point withdrawn;
  };

  ControlBlock& block() const { return *reinterpret_cast<ControlBlock*>(control_->data()); }
  bool names(std::uint32_t index, std::uint64_t generation, const Identifier& token) const;
  void retire(std::uint32_t index, bool revoked);
  void enqueue(const Notification& notification);

  const std::uint64_t pool_nbytes_;
  const Identifier uid_;
  const bool serves_;
  std::shared_ptr<Memory> control_;

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Slot> slots_;
  std::deque<std::uint32_t> free_;     // first out is what was freed first, so that its last ticket is known for long
  std::uint64_t next_generation_ = 1;  // never comes near kRevokedBit
  std::uint64_t running_reads_ = 0;
  std::deque<Notification> queue_;
  bool woken_ = false;
  bool closed_ = false;
};

// Fills with bytes from the kernel's random source.
void fill_random(void* data, std::size_t nbytes);

}  // namespace tensorferry::transport
