// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>

#include "tensorferry/transport/library.hpp"

namespace tensorferry::transport {

using Settings = std::map<std::string, std::string>;

// A UCP context: the transports and devices that its workers may use.
//
// Thread-safe.  Memory regions and workers keep it alive.
class Context {
 public:
  // `defaults` hold where the environment has no UCX_<name>; `options` hold in any case.
  // Without `remote_memory` the context lacks the RMA feature: peers' gets and puts are dropped.
  static std::shared_ptr<Context> create(std::shared_ptr<const Library> library, const Settings& defaults,
                                         const Settings& options, bool remote_memory);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Library& library() const noexcept { return *library_; }
  ucp_context_h handle() const noexcept { return handle_; }
  bool remote_memory() const noexcept { return remote_memory_; }

 private:
  Context(std::shared_ptr<const Library> library, ucp_context_h handle, bool remote_memory);

  std::shared_ptr<const Library> library_;
  ucp_context_h handle_;
  bool remote_memory_;
  int owner_pid_;
};

}  // namespace tensorferry::transport
