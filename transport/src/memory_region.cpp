// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/memory_region.hpp"

#include <unistd.h>

#include <utility>

namespace tensorferry::transport {

std::shared_ptr<MemoryRegion> MemoryRegion::create(std::shared_ptr<Context> context, std::shared_ptr<Memory> memory,
                                                   ucs_memory_type_t memory_type) {
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = memory->data();
  params.length = memory->nbytes();
  params.memory_type = memory_type;
  ucp_mem_h handle = nullptr;
  context->library().check(context->library().ucp_mem_map(context->handle(), &params, &handle), "registering memory");
  return std::shared_ptr<MemoryRegion>(new MemoryRegion(std::move(context), std::move(memory), memory_type, handle));
}

MemoryRegion::MemoryRegion(std::shared_ptr<Context> context, std::shared_ptr<Memory> memory,
                           ucs_memory_type_t memory_type, ucp_mem_h handle)
    : context_(std::move(context)),
      memory_(std::move(memory)),
      memory_type_(memory_type),
      handle_(handle),
      owner_pid_(getpid()) {}

MemoryRegion::~MemoryRegion() {
  close();
}

Bytes MemoryRegion::pack_key() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (handle_ == nullptr) throw Error(kClosed, "the memory region is closed");
  const Library& library = context_->library();
  void* buffer = nullptr;
  std::size_t nbytes = 0;
  library.check(library.ucp_rkey_pack(context_->handle(), handle_, &buffer, &nbytes), "packing a remote key");
  const auto* first = static_cast<const std::uint8_t*>(buffer);
  Bytes key(first, first + nbytes);
  library.ucp_rkey_buffer_release(buffer);
  return key;
}

void MemoryRegion::close() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (handle_ == nullptr) return;
  if (getpid() == owner_pid_) context_->library().ucp_mem_unmap(context_->handle(), handle_);
  handle_ = nullptr;
}

}  // namespace tensorferry::transport
