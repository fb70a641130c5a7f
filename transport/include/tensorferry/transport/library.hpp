// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "tensorferry/transport/status.hpp"

namespace tensorferry::transport {

// Every UCP function that the core calls; all of them are in UCX 1.13.
#define TENSORFERRY_UCP_FUNCTIONS(X) \
  X(ucp_get_version)                 \
  X(ucp_get_version_string)          \
  X(ucp_config_read)                 \
  X(ucp_config_modify)               \
  X(ucp_config_release)              \
  X(ucp_init_version)                \
  X(ucp_cleanup)                     \
  X(ucp_worker_create)               \
  X(ucp_worker_destroy)              \
  X(ucp_worker_query)                \
  X(ucp_worker_release_address)      \
  X(ucp_worker_progress)             \
  X(ucp_worker_get_efd)              \
  X(ucp_worker_arm)                  \
  X(ucp_worker_flush_nbx)            \
  X(ucp_worker_set_am_recv_handler)  \
  X(ucp_ep_create)                   \
  X(ucp_ep_close_nbx)                \
  X(ucp_ep_query)                    \
  X(ucp_ep_print_info)               \
  X(ucp_ep_rkey_unpack)              \
  X(ucp_rkey_destroy)                \
  X(ucp_rkey_pack)                   \
  X(ucp_rkey_buffer_release)         \
  X(ucp_mem_map)                     \
  X(ucp_mem_unmap)                   \
  X(ucp_get_nbx)                     \
  X(ucp_am_send_nbx)                 \
  X(ucp_am_recv_data_nbx)            \
  X(ucp_request_free)                \
  X(ucp_request_check_status)        \
  X(ucs_status_string)

// A UCX library, chosen and opened at load time with local symbol visibility.
//
// It is never closed: UCX leaves threads and hooks behind that must not lose their code.
class Library {
 public:
  // Opens `path` (a file, or "libucp.so.0" for the system's).  The handlers of fatal signals
  // stay as they were.  Throws Error(kLibraryUnusable).
  static std::shared_ptr<const Library> load(const std::string& path);

  // Path of a libucp.so.0 that is mapped into this process already, or "".
  static std::string mapped_path();

  const std::string& path() const noexcept { return path_; }
  std::string version() const;
  bool older_than(unsigned minor) const;  // than 1.`minor`
  std::string describe(int status) const;

  // Throws Error(status) unless status is UCS_OK.
  void check(ucs_status_t status, const char* action) const;

#define TENSORFERRY_DECLARE(name) decltype(&::name) name = nullptr;
  TENSORFERRY_UCP_FUNCTIONS(TENSORFERRY_DECLARE)
#undef TENSORFERRY_DECLARE

 private:
  std::string path_;
};

}  // namespace tensorferry::transport
