// SPDX-License-Identifier: Apache-2.0
// A producer and consumers over tcp on the loopback device.
#pragma once

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "tensorferry/transport/endpoint.hpp"
#include "tensorferry/transport/worker.hpp"

namespace tensorferry::transport::tests {

using namespace std::chrono_literals;

constexpr std::size_t kPool = 32 << 20;
constexpr Identifier kUid{1, 2, 3, 4};

inline std::shared_ptr<const Library> library() {
  const char* path = std::getenv("TENSORFERRY_TEST_UCX");
  return Library::load(path != nullptr ? path : "libucp.so.0");
}

inline std::shared_ptr<Context> make_context(bool remote_memory) {
  return Context::create(library(), {{"TCP_TX_SEG_SIZE", "256k"}, {"TCP_RX_SEG_SIZE", "256k"}},
                         {{"TLS", "tcp"}, {"NET_DEVICES", "lo"}}, remote_memory);
}

struct Producer {
  explicit Producer(bool remote_memory = false, std::size_t nbytes = kPool)
      : context(make_context(remote_memory)),
        memory(Memory::allocate_shared(nbytes)),
        region(MemoryRegion::create(context, memory, UCS_MEMORY_TYPE_HOST)),
        table(std::make_shared<SlotTable>(nbytes, 16, kUid, true)),
        control(MemoryRegion::create(context, table->control(), UCS_MEMORY_TYPE_HOST)),
        worker(Worker::create(context)) {
    for (std::size_t i = 0; i < nbytes; ++i) memory->data()[i] = static_cast<std::uint8_t>(i * 2654435761u >> 24);
    worker->serve(table, region);
  }
  std::shared_ptr<Context> context;
  std::shared_ptr<Memory> memory;
  std::shared_ptr<MemoryRegion> region;
  std::shared_ptr<SlotTable> table;
  std::shared_ptr<MemoryRegion> control;
  std::shared_ptr<Worker> worker;
};

struct Consumer {
  explicit Consumer(const Producer& producer, bool remote_memory = false)
      : Consumer(producer.worker->address(), remote_memory) {}
  explicit Consumer(const Bytes& address, bool remote_memory = false, std::size_t nbytes = kPool)
      : context(make_context(remote_memory)),
        memory(Memory::allocate(nbytes)),
        region(MemoryRegion::create(context, memory, UCS_MEMORY_TYPE_HOST)),
        worker(Worker::create(context)),
        endpoint(worker->connect(address)) {}
  std::shared_ptr<Context> context;
  std::shared_ptr<Memory> memory;
  std::shared_ptr<MemoryRegion> region;
  std::shared_ptr<Worker> worker;
  std::shared_ptr<Endpoint> endpoint;
};

inline int outcome(const std::shared_ptr<Read>& read, std::chrono::nanoseconds timeout = 20s) {
  try {
    return read->wait_for(timeout) ? 0 : static_cast<int>(kTimedOut);
  } catch (const Error& error) {
    return error.status();
  }
}

inline bool settles(const std::shared_ptr<Read>& read) {
  for (int i = 0; i < 2000 && !read->settled(); ++i) std::this_thread::sleep_for(5ms);
  return read->settled();
}

}  // namespace tensorferry::transport::tests
