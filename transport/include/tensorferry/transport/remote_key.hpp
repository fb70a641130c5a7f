// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>

namespace tensorferry::transport {

// What opens a peer's registered memory to gets on one endpoint.  The endpoint's connection owns
// the UCP key and destroys it when it closes; the range is checked before each get.
struct RemoteKey {
  ucp_rkey_h handle;
  std::uint64_t address;  // first byte, in the peer
  std::uint64_t nbytes;

  bool covers(std::uint64_t offset, std::uint64_t length) const noexcept {
    return offset <= nbytes && length <= nbytes - offset;
  }
};

}  // namespace tensorferry::transport
