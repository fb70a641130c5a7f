// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace tensorferry::transport {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr int kFutureWriteSeal = 0x0010;  // F_SEAL_FUTURE_WRITE, absent from older headers

[[noreturn]] void fail(int status, const std::string& action, int error) {
  throw Error(status, action + ": " + std::strerror(error));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const noexcept { return fd_; }
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

}  // namespace

Memory::Memory(void* data, std::size_t nbytes, int descriptor, bool mapped)
    : data_(static_cast<std::uint8_t*>(data)), nbytes_(nbytes), descriptor_(descriptor), mapped_(mapped) {}

Memory::~Memory() {
  if (mapped_) munmap(data_, nbytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

std::shared_ptr<Memory> Memory::allocate(std::size_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) fail(kNoMemory, "allocating " + std::to_string(nbytes) + " bytes", errno);
  madvise(data, nbytes, MADV_HUGEPAGE);
  return std::shared_ptr<Memory>(new Memory(data, nbytes, -1, true));
}

std::shared_ptr<Memory> Memory::allocate_shared(std::size_t nbytes) {
  const std::string action = "allocating " + std::to_string(nbytes) + " bytes of shared memory";
  Descriptor fd(memfd_create("tensorferry", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.value() < 0) fail(kNoMemory, action, errno);
  if (ftruncate(fd.value(), static_cast<off_t>(nbytes)) != 0) fail(kNoMemory, action, errno);
  if (fcntl(fd.value(), F_ADD_SEALS, kSizeSeals) != 0) fail(kNoMemory, action, errno);
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.value(), 0);
  if (data == MAP_FAILED) fail(kNoMemory, action, errno);
  // From here on nobody else gets a writable mapping; kernels before 5.1 cannot promise that.
  fcntl(fd.value(), F_ADD_SEALS, kFutureWriteSeal);
  fcntl(fd.value(), F_ADD_SEALS, F_SEAL_SEAL);
  madvise(data, nbytes, MADV_HUGEPAGE);
  return std::shared_ptr<Memory>(new Memory(data, nbytes, fd.release(), true));
}

std::shared_ptr<Memory> Memory::map_peer(int pid, int descriptor, std::size_t nbytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  // O_NONBLOCK: a foreign manifest may name a FIFO, which must not block the open.
  Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (fd.value() < 0) fail(kPeerGone, "opening " + path, errno);
  struct stat info{};
  if (fstat(fd.value(), &info) != 0) fail(kPeerGone, "examining " + path, errno);
  const int seals = fcntl(fd.value(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals || info.st_uid != geteuid() ||
      static_cast<std::size_t>(info.st_size) != nbytes) {
    throw Error(kPeerGone, path + " is not a pool of " + std::to_string(nbytes) + " bytes");
  }
  void* data = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd.value(), 0);
  if (data == MAP_FAILED) fail(kNoMemory, "mapping " + path, errno);
  madvise(data, nbytes, MADV_HUGEPAGE);
  return std::shared_ptr<Memory>(new Memory(data, nbytes, -1, true));
}

std::shared_ptr<Memory> Memory::borrow(void* address, std::size_t nbytes) {
  return std::shared_ptr<Memory>(new Memory(address, nbytes, -1, false));
}

}  // namespace tensorferry::transport
