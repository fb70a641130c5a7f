// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/peer_pool.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace tensorferry::transport {

std::shared_ptr<PeerPool> PeerPool::open(const PoolAddress& address) {
  const int process = static_cast<int>(syscall(SYS_pidfd_open, address.pid, 0));
  if (process < 0) {
    throw Error(kPeerGone, "process " + std::to_string(address.pid) + ": " + std::strerror(errno));
  }
  std::shared_ptr<PeerPool> peer;
  try {
    auto control = Memory::map_peer(address.pid, address.control_descriptor, ControlBlock::nbytes(address.slots));
    auto pool = Memory::map_peer(address.pid, address.pool_descriptor, address.pool_nbytes);
    peer.reset(new PeerPool(process, std::move(control), std::move(pool)));
  } catch (...) {
    close(process);
    throw;
  }
  const ControlBlock& block = peer->block();
  // The process is alive after its memory was opened: the number was not another process's.
  if (block.magic != ControlBlock::kMagic || block.uid != address.uid || block.slots != address.slots ||
      block.pool_nbytes != address.pool_nbytes || peer->alive() != 0) {
    throw Error(kPeerGone, "process " + std::to_string(address.pid) + " is not this producer");
  }
  return peer;
}

PeerPool::PeerPool(int process, std::shared_ptr<Memory> control, std::shared_ptr<Memory> pool)
    : process_(process), control_(std::move(control)), pool_(std::move(pool)) {}

PeerPool::~PeerPool() {
  close(process_);
}

int PeerPool::alive() const {
  pollfd event{process_, POLLIN, 0};
  const bool died = poll(&event, 1, 0) != 0;
  return died || block().open.load(std::memory_order_acquire) != 1 ? kPeerGone : 0;
}

int PeerPool::verify(std::uint32_t index, std::uint64_t generation) const {
  // Loads of the data come before the load of the word (see SlotTable::retire).
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (const int status = alive(); status != 0) return status;
  if (index >= block().slots) return kLeaseExpired;
  return judge_word(block().generations()[index].load(std::memory_order_acquire), generation);
}

}  // namespace tensorferry::transport
