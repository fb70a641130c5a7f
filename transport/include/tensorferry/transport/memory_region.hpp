// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tensorferry/transport/context.hpp"
#include "tensorferry/transport/memory.hpp"

namespace tensorferry::transport {

using Bytes = std::vector<std::uint8_t>;

// Memory registered with one context.
//
// It keeps its context and its memory alive.  Deregistering does not invalidate the bytes.
class MemoryRegion {
 public:
  static std::shared_ptr<MemoryRegion> create(std::shared_ptr<Context> context, std::shared_ptr<Memory> memory,
                                              ucs_memory_type_t memory_type);
  ~MemoryRegion();
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;

  // Packs the key that lets a peer read the region.  Throws Error(kClosed).
  Bytes pack_key() const;

  // Deregisters.  No read may be running on the region.  Idempotent.
  void close();

  const std::shared_ptr<Memory>& memory() const noexcept { return memory_; }
  ucs_memory_type_t memory_type() const noexcept { return memory_type_; }
  std::uint8_t* data() const noexcept { return memory_->data(); }
  std::size_t nbytes() const noexcept { return memory_->nbytes(); }

 private:
  MemoryRegion(std::shared_ptr<Context> context, std::shared_ptr<Memory> memory, ucs_memory_type_t memory_type,
               ucp_mem_h handle);

  std::shared_ptr<Context> context_;
  std::shared_ptr<Memory> memory_;
  ucs_memory_type_t memory_type_;
  mutable std::mutex mutex_;
  ucp_mem_h handle_;
  int owner_pid_;
};

}  // namespace tensorferry::transport
