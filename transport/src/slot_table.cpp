// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/slot_table.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <string>

namespace tensorferry::transport {
namespace {

// The holder of a token may send what it likes, as often as it likes: the queue is bounded.
constexpr std::size_t kMaximumQueued = 1 << 16;

bool equal_in_constant_time(const Identifier& a, const Identifier& b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

void fill_random(void* data, std::size_t nbytes) {
  auto* cursor = static_cast<std::uint8_t*>(data);
  while (nbytes > 0) {
    const ssize_t got = getrandom(cursor, nbytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(kNoMemory, std::string("reading random bytes: ") + std::strerror(errno));
    cursor += got;
    nbytes -= static_cast<std::size_t>(got);
  }
}

SlotTable::SlotTable(std::uint64_t pool_nbytes, std::uint32_t slots, const Identifier& uid, bool serves)
    : pool_nbytes_(pool_nbytes),
      uid_(uid),
      serves_(serves),
      control_(Memory::allocate_shared(ControlBlock::nbytes(slots))),
      slots_(slots) {
  auto* control = new (control_->data()) ControlBlock{};
  control->magic = ControlBlock::kMagic;
  control->uid = uid;
  control->pool_nbytes = pool_nbytes;
  control->slots = slots;
  control->open.store(1, std::memory_order_release);
  for (std::uint32_t index = 0; index < slots; ++index) free_.push_back(index);
}

Ticket SlotTable::admit(std::uint64_t offset, std::uint64_t nbytes, Clock::duration lease) {
  if (offset > pool_nbytes_ || nbytes > pool_nbytes_ - offset) {
    throw Error(kAccessRefused, "the slot leaves the pool");
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) throw Error(kClosed, "the slot table is closed");
  if (free_.empty()) throw Error(kNoMemory, "all " + std::to_string(slots_.size()) + " slots are taken");
  const std::uint32_t index = free_.front();
  Slot& slot = slots_[index];
  slot.ticket.index = index;
  slot.ticket.offset = offset;
  slot.ticket.nbytes = nbytes;
  fill_random(slot.ticket.token.data(), slot.ticket.token.size());
  slot.ticket.generation = next_generation_++;
  slot.deadline = Clock::now() + lease;
  slot.admitted = true;
  slot.revoked = false;
  free_.pop_front();
  block().generations()[index].store(slot.ticket.generation, std::memory_order_release);
  return slot.ticket;
}

bool SlotTable::withdraw(std::uint32_t index, std::uint64_t generation, bool revoked) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (index >= slots_.size()) return true;
  Slot& slot = slots_[index];
  if (!slot.admitted || slot.ticket.generation != generation) return true;
  retire(index, revoked);
  return slot.readers == 0;
}

void SlotTable::retire(std::uint32_t index, bool revoked) {
  Slot& slot = slots_[index];
  slot.admitted = false;
  slot.revoked = revoked;
  slot.withdrawn = Clock::now();
  // The word changes before the memory can: a reader that still finds its generation afterwards
  // has read nothing newer.  The fence keeps later writes of the pool behind this store.
  const std::uint64_t word = revoked ? slot.ticket.generation | kRevokedBit : 0;
  block().generations()[index].store(word, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (slot.readers == 0) free_.push_back(index);
}

// Whether this is the last ticket that was made for the slot, which may have been withdrawn since.
bool SlotTable::names(std::uint32_t index, std::uint64_t generation, const Identifier& token) const {
  if (index >= slots_.size() || generation == 0) return false;
  const Ticket& ticket = slots_[index].ticket;
  return ticket.generation == generation && equal_in_constant_time(ticket.token, token);
}

int SlotTable::begin_read(const ReadRequest& request, Clock::time_point now, std::uint64_t& pool_offset) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) return kPeerGone;
  if (!serves_) return kAccessRefused;
  if (!names(request.index, request.generation, request.token)) {
    // A past generation is what a late reader shows; anything else was never handed out.
    return request.generation != 0 && request.generation < next_generation_ ? kLeaseExpired : kAccessRefused;
  }
  Slot& slot = slots_[request.index];
  if (!slot.admitted) return slot.revoked ? kLeaseRevoked : kLeaseExpired;
  if (now >= slot.deadline) return kLeaseExpired;
  if (request.source > slot.ticket.nbytes || request.nbytes > slot.ticket.nbytes - request.source) {
    return kAccessRefused;
  }
  ++slot.readers;
  ++running_reads_;
  pool_offset = slot.ticket.offset + request.source;
  return 0;
}

void SlotTable::end_read(std::uint32_t index) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Slot& slot = slots_[index];
  --running_reads_;
  if (--slot.readers > 0 || slot.admitted) return;
  free_.push_back(index);
  enqueue({NotificationKind::kDrained, index, slot.ticket.generation, {}, {}});
}

int SlotTable::overdue(std::uint32_t index, Clock::time_point now) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  const Slot& slot = slots_[index];
  if (slot.admitted || now - slot.withdrawn < kGrace) return 0;
  return closed_ ? kPeerGone : slot.revoked ? kLeaseRevoked : kLeaseExpired;
}

int SlotTable::greet(const ReadRequest& request) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) return kPeerGone;
  return equal_in_constant_time(request.token, uid_) ? 0 : kAccessRefused;
}

void SlotTable::report(const NotifyRequest& request) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!names(request.index, request.generation, request.token)) return;
  if (!slots_[request.index].admitted || queue_.size() >= kMaximumQueued) return;
  enqueue(
      {static_cast<NotificationKind>(request.kind), request.index, request.generation, request.consumer, request.mac});
}

void SlotTable::enqueue(const Notification& notification) {
  queue_.push_back(notification);
  arrived_.notify_one();
}

std::vector<Notification> SlotTable::notifications(Clock::duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  arrived_.wait_until(lock, Clock::now() + timeout, [this] { return !queue_.empty() || woken_ || closed_; });
  woken_ = false;
  std::vector<Notification> taken(queue_.begin(), queue_.end());
  queue_.clear();
  return taken;
}

void SlotTable::wake() {
  const std::lock_guard<std::mutex> guard(mutex_);
  woken_ = true;
  arrived_.notify_all();
}

void SlotTable::close() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) return;
  closed_ = true;
  block().open.store(0, std::memory_order_release);
  for (std::uint32_t index = 0; index < slots_.size(); ++index) {
    if (slots_[index].admitted) retire(index, false);
  }
  arrived_.notify_all();
}

std::uint64_t SlotTable::running_reads() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return running_reads_;
}

}  // namespace tensorferry::transport
