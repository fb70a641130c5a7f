// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tensorferry/transport/status.hpp"

namespace tensorferry::transport {

// Bytes that somebody owns: mapped by us, or lent by the caller.
//
// The bytes stay valid until the last shared_ptr is gone, whatever is closed before.
class Memory {
 public:
  // Private anonymous memory, huge pages where the kernel gives them.
  static std::shared_ptr<Memory> allocate(std::size_t nbytes);

  // Memory that processes of the same user on this host can map by `descriptor()`.  Its size is
  // sealed: nobody can make a mapping of it fault.  It needs no file system and leaves nothing behind.
  static std::shared_ptr<Memory> allocate_shared(std::size_t nbytes);

  // Maps, read-only, what `/proc/<pid>/fd/<descriptor>` refers to, which must be sealed memory of
  // `nbytes` that belongs to this user.  Throws Error(kPeerGone) where it is not there.
  static std::shared_ptr<Memory> map_peer(int pid, int descriptor, std::size_t nbytes);

  // Memory of the caller, who keeps it valid and gives its type.
  static std::shared_ptr<Memory> borrow(void* address, std::size_t nbytes);

  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uint8_t* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  int descriptor() const noexcept { return descriptor_; }

 private:
  Memory(void* data, std::size_t nbytes, int descriptor, bool mapped);

  std::uint8_t* data_;
  std::size_t nbytes_;
  int descriptor_;
  bool mapped_;
};

}  // namespace tensorferry::transport
