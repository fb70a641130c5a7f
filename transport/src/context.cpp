// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/context.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace tensorferry::transport {
namespace {

// The oldest API whose functions and fields the core relies on.
constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 12;

// UCX before 1.17 looks up a transport's settings without the transport's name, for every transport
// that has such a setting; its environment variables have the name in all versions.
std::string name_in_this_version(const Library& library, const std::string& name) {
  if (!library.older_than(17)) return name;
  for (const char* transport : {"TCP_", "POSIX_", "SYSV_", "CMA_", "SELF_"}) {
    if (name.rfind(transport, 0) == 0) return name.substr(std::strlen(transport));
  }
  return name;
}

class Config {
 public:
  explicit Config(const Library& library) : library_(library) {
    library.check(library.ucp_config_read(nullptr, nullptr, &handle_), "reading UCX settings");
  }
  ~Config() { library_.ucp_config_release(handle_); }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;

  void modify(const std::string& name, const std::string& value) {
    const std::string known = name_in_this_version(library_, name);
    const ucs_status_t status = library_.ucp_config_modify(handle_, known.c_str(), value.c_str());
    if (status != UCS_OK) {
      throw Error(status, "UCX does not take " + name + "=" + value + ": " + library_.ucs_status_string(status));
    }
  }
  ucp_config_t* handle() const noexcept { return handle_; }

 private:
  const Library& library_;
  ucp_config_t* handle_ = nullptr;
};

}  // namespace

std::shared_ptr<Context> Context::create(std::shared_ptr<const Library> library, const Settings& defaults,
                                         const Settings& options, bool remote_memory) {
  Config config(*library);
  Settings unset = defaults;
  // When a peer vanishes in the middle of a zero-copy send over tcp, UCX 1.13 completes it twice and
  // aborts: a consumer could kill the producer.  From 1.16 on other protocols are the default.
  if (library->older_than(16)) unset.emplace("ZCOPY_THRESH", "inf");
  for (const auto& [name, value] : unset) {
    if (std::getenv(("UCX_" + name).c_str()) == nullptr) config.modify(name, value);
  }
  for (const auto& [name, value] : options) config.modify(name, value);

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (remote_memory) params.features |= UCP_FEATURE_RMA;
  params.mt_workers_shared = 1;

  ucp_context_h handle = nullptr;
  library->check(library->ucp_init_version(kApiMajor, kApiMinor, &params, config.handle(), &handle),
                 "creating a UCX context");
  return std::shared_ptr<Context>(new Context(std::move(library), handle, remote_memory));
}

Context::Context(std::shared_ptr<const Library> library, ucp_context_h handle, bool remote_memory)
    : library_(std::move(library)), handle_(handle), remote_memory_(remote_memory), owner_pid_(getpid()) {}

Context::~Context() {
  if (getpid() == owner_pid_) library_->ucp_cleanup(handle_);
}

}  // namespace tensorferry::transport
