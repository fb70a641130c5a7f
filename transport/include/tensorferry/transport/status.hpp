// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucs/type/status.h>

#include <stdexcept>
#include <string>

namespace tensorferry::transport {

// Outcomes that UCX has no code for; UCX's own are above -128.
enum Status : int {
  kLeaseExpired = -1001,       // the slot does not hold this generation (any more)
  kAccessRefused = -1002,      // token, bounds or kind of a request are wrong
  kProtocolViolation = -1003,  // a peer's message has the wrong form
  kTimedOut = -1004,           // the caller's deadline passed
  kCancelled = -1005,          // cancelled from this side
  kClosed = -1006,             // the object was closed by its owner
  kPeerGone = -1007,           // a peer on this host has closed or died
  kLibraryUnusable = -1008,    // no usable UCX library at this path
  kNoMemory = -1009,           // the operating system refused memory
  kLeaseRevoked = -1010,       // the producer took the publication back
};

// The one exception of the core; `status()` is a ucs_status_t or a Status.
class Error : public std::runtime_error {
 public:
  Error(int status, const std::string& what) : std::runtime_error(what), status_(status) {}
  int status() const noexcept { return status_; }

 private:
  int status_;
};

}  // namespace tensorferry::transport
