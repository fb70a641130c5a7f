// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/library.hpp"

#include <dlfcn.h>
#include <link.h>
#include <signal.h>

#include <array>
#include <filesystem>
#include <map>
#include <mutex>

namespace tensorferry::transport {
namespace {

constexpr const char* kSoname = "libucp.so.0";

// UCX installs handlers when it is loaded, of fatal signals and of SIGHUP, with which it would debug itself;
// the process keeps its own.
class SignalHandlers {
 public:
  SignalHandlers() {
    for (int number = 1; number < NSIG; ++number) known_[number] = sigaction(number, nullptr, &saved_[number]) == 0;
  }
  ~SignalHandlers() {
    for (int number = 1; number < NSIG; ++number) {
      if (known_[number]) sigaction(number, &saved_[number], nullptr);
    }
  }
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  std::array<struct sigaction, NSIG> saved_{};
  std::array<bool, NSIG> known_{};
};

std::string origin(void* handle) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return {};
  return map->l_name;
}

std::filesystem::path directory(const std::string& path) {
  std::error_code error;  // a path that cannot be resolved is compared as it is
  const auto resolved = std::filesystem::canonical(path, error);
  return (error ? std::filesystem::path(path) : resolved).parent_path();
}

// The functions of libucs come by libucp's dependencies, which the dynamic linker resolves by
// SONAME: a libucs of another build may have been first, and the pair would not fit.
void require_one_build(void* ucp, const std::string& path) {
  void* ucs = dlopen("libucs.so.0", RTLD_NOLOAD | RTLD_LAZY);
  if (ucs == nullptr) return;
  const std::string ucs_path = origin(ucs);
  dlclose(ucs);
  if (directory(origin(ucp)) != directory(ucs_path)) {
    throw Error(kLibraryUnusable, path + " cannot be used: this process has loaded " + ucs_path +
                                      " of another UCX already; choose that one, or load it later");
  }
}

std::mutex library_mutex;

}  // namespace

std::string Library::mapped_path() {
  void* handle = dlopen(kSoname, RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr) return {};
  std::string path = origin(handle);
  dlclose(handle);
  return path;
}

std::shared_ptr<const Library> Library::load(const std::string& path) {
  static std::map<std::string, std::shared_ptr<const Library>> loaded;
  const std::lock_guard<std::mutex> guard(library_mutex);
  if (const auto found = loaded.find(path); found != loaded.end()) return found->second;

  const SignalHandlers handlers;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Error(kLibraryUnusable, std::string("cannot load UCX: ") + dlerror());
  auto library = std::make_shared<Library>();
  library->path_ = origin(handle);
  require_one_build(handle, library->path_);
#define TENSORFERRY_RESOLVE(name)                                            \
  library->name = reinterpret_cast<decltype(&::name)>(dlsym(handle, #name)); \
  if (library->name == nullptr)                                              \
    throw Error(kLibraryUnusable, library->path_ + " has no " #name "; UCX 1.13 or newer is needed");
  TENSORFERRY_UCP_FUNCTIONS(TENSORFERRY_RESOLVE)
#undef TENSORFERRY_RESOLVE
  loaded.emplace(path, library);
  return library;
}

bool Library::older_than(unsigned minor) const {
  unsigned its_major = 0;
  unsigned its_minor = 0;
  unsigned its_release = 0;
  ucp_get_version(&its_major, &its_minor, &its_release);
  return its_major == 1 && its_minor < minor;
}

std::string Library::version() const {
  return ucp_get_version_string();
}

std::string Library::describe(int status) const {
  switch (status) {
    case kLeaseExpired:
      return "the slot no longer holds this publication";
    case kLeaseRevoked:
      return "the producer has revoked this publication";
    case kAccessRefused:
      return "the producer refused the read";
    case kProtocolViolation:
      return "the peer's message has the wrong form";
    case kTimedOut:
      return "timed out";
    case kCancelled:
      return "cancelled";
    case kClosed:
      return "closed";
    case kPeerGone:
      return "the producer has closed or died";
    default:
      return ucs_status_string(static_cast<ucs_status_t>(status));
  }
}

void Library::check(ucs_status_t status, const char* action) const {
  if (status != UCS_OK) throw Error(status, std::string(action) + ": " + ucs_status_string(status));
}

}  // namespace tensorferry::transport
