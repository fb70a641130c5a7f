// SPDX-License-Identifier: Apache-2.0
// The Python face of the core: arguments are converted and named, the GIL is released where a call
// may block, and nothing is decided here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "tensorferry/transport/endpoint.hpp"
#include "tensorferry/transport/peer_pool.hpp"
#include "tensorferry/transport/worker.hpp"

namespace nb = nanobind;
using namespace nb::literals;
namespace tf = tensorferry::transport;

namespace {

using Seconds = std::chrono::duration<double>;
using SpanTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;
using ByteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig>;

std::chrono::nanoseconds duration(double seconds) {
  const Seconds bounded(std::clamp(seconds, 0.0, 1e9));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(bounded);
}

nb::bytes to_python(const tf::Bytes& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

template <std::size_t N>
nb::bytes to_python(const std::array<std::uint8_t, N>& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

tf::Bytes bytes_of(const nb::bytes& bytes) {
  const auto* first = static_cast<const std::uint8_t*>(bytes.data());
  return tf::Bytes(first, first + bytes.size());
}

template <typename Array>
Array array_of(const nb::bytes& bytes) {
  Array array;
  if (bytes.size() != array.size()) {
    throw nb::value_error(("bytes of length " + std::to_string(array.size()) + " are needed here").c_str());
  }
  std::memcpy(array.data(), bytes.data(), array.size());
  return array;
}

tf::Identifier identifier_of(const nb::bytes& bytes) {
  return array_of<tf::Identifier>(bytes);
}

tf::Ticket ticket_of(std::uint32_t index, std::uint64_t generation, const nb::bytes& token, std::uint64_t offset,
                     std::uint64_t nbytes) {
  return tf::Ticket{index, generation, identifier_of(token), offset, nbytes};
}

std::vector<tf::Span> spans_of(const std::vector<SpanTuple>& tuples) {
  std::vector<tf::Span> spans;
  spans.reserve(tuples.size());
  for (const auto& [source, destination, nbytes] : tuples) spans.push_back({source, destination, nbytes});
  return spans;
}

// An array over memory that keeps the memory alive.
ByteArray array_over(const std::shared_ptr<tf::Memory>& memory, std::uint64_t offset, std::uint64_t nbytes) {
  if (offset > memory->nbytes() || nbytes > memory->nbytes() - offset) {
    throw nb::value_error("the view leaves the memory");
  }
  auto* owner = new std::shared_ptr<tf::Memory>(memory);
  const nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<tf::Memory>*>(p); });
  const std::size_t shape[1] = {nbytes};
  return ByteArray(memory->data() + offset, 1, shape, capsule);
}

// Waits without the GIL, in slices, so that Ctrl-C and other signals are seen.
bool wait(tf::Read& read, double timeout) {
  constexpr std::chrono::milliseconds kSlice{50};
  const auto deadline = std::chrono::steady_clock::now() + duration(timeout);
  for (;;) {
    const auto left = deadline - std::chrono::steady_clock::now();
    bool ended;
    {
      const nb::gil_scoped_release release;
      const auto slice = std::min<std::chrono::nanoseconds>(left, kSlice);
      ended = read.wait_for(std::max(slice, std::chrono::nanoseconds::zero()));
    }
    if (ended) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (left <= std::chrono::nanoseconds::zero()) return false;
  }
}

// Its thread ends in here, and takes the GIL to let go of what Python gave it.
void destroy_worker(tf::Worker* worker) {
  std::optional<nb::gil_scoped_release> release;
  if (PyGILState_Check()) release.emplace();
  delete worker;
}

// Reads take who releases the slot as a consumer and a MAC, or none.
using ReleaserTuple = std::optional<std::pair<nb::bytes, nb::bytes>>;

std::optional<tf::Releaser> releaser_of(const ReleaserTuple& releaser) {
  if (!releaser) return std::nullopt;
  return tf::Releaser{identifier_of(releaser->first), array_of<tf::Mac>(releaser->second)};
}

// Endpoint.release() and reject().
auto notify(tf::NotificationKind kind) {
  return [kind](tf::Endpoint& self, std::uint32_t index, std::uint64_t generation, const nb::bytes& token,
                const nb::bytes& consumer, const nb::bytes& mac) {
    self.notify(kind, ticket_of(index, generation, token, 0, 0), identifier_of(consumer), array_of<tf::Mac>(mac));
  };
}

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

}  // namespace

NB_MODULE(_transport, m) {
  // Objects that are still alive when the interpreter ends are nobody's mistake: exit, fork, gc.freeze().
  nb::set_leak_warnings(false);
  m.doc() = "UCX underneath tensorferry: contexts, workers, endpoints, memory regions and reads.";

  static PyObject* error_type = PyErr_NewException("tensorferry._transport.TransportError", PyExc_Exception, nullptr);
  m.attr("TransportError") = nb::borrow(error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const tf::Error& error) {
      nb::object instance = nb::borrow(error_type)(error.what());
      instance.attr("status") = error.status();
      PyErr_SetObject(error_type, instance.ptr());
    }
  });

  m.attr("LEASE_EXPIRED") = static_cast<int>(tf::kLeaseExpired);
  m.attr("LEASE_REVOKED") = static_cast<int>(tf::kLeaseRevoked);
  m.attr("ACCESS_REFUSED") = static_cast<int>(tf::kAccessRefused);
  m.attr("PROTOCOL_VIOLATION") = static_cast<int>(tf::kProtocolViolation);
  m.attr("TIMED_OUT") = static_cast<int>(tf::kTimedOut);
  m.attr("CANCELLED") = static_cast<int>(tf::kCancelled);
  m.attr("CLOSED") = static_cast<int>(tf::kClosed);
  m.attr("PEER_GONE") = static_cast<int>(tf::kPeerGone);
  m.attr("LIBRARY_UNUSABLE") = static_cast<int>(tf::kLibraryUnusable);
  m.attr("NO_MEMORY") = static_cast<int>(tf::kNoMemory);

  nb::enum_<ucs_memory_type_t>(m, "MemoryType", "Where the bytes of a memory region are.")
      .value("HOST", UCS_MEMORY_TYPE_HOST)
      .value("CUDA", UCS_MEMORY_TYPE_CUDA);

  nb::class_<tf::Library>(m, "Library", "A UCX library that was opened at load time.")
      .def_static(
          "load", [](const std::string& path) { return std::const_pointer_cast<tf::Library>(tf::Library::load(path)); },
          "path"_a)
      .def_static("mapped_path", &tf::Library::mapped_path, "Path of a libucp that this process has loaded, or ''.")
      .def_prop_ro("path", &tf::Library::path)
      .def_prop_ro("version", &tf::Library::version)
      .def("describe", &tf::Library::describe, "status"_a);

  nb::class_<tf::Context>(m, "Context", "A UCP context: the transports and devices that workers may use.")
      .def_static(
          "create",
          [](const std::shared_ptr<tf::Library>& library, const tf::Settings& defaults, const tf::Settings& options,
             bool remote_memory) { return tf::Context::create(library, defaults, options, remote_memory); },
          "library"_a, nb::kw_only(), "defaults"_a, "options"_a, "remote_memory"_a, ReleaseGil());

  nb::class_<tf::Memory>(m, "Memory", "Bytes that stay valid until the last view of them is gone.")
      .def_static("allocate", &tf::Memory::allocate, "nbytes"_a)
      .def_static("allocate_shared", &tf::Memory::allocate_shared, "nbytes"_a)
      .def_static(
          "borrow",
          [](std::uintptr_t address, std::size_t nbytes, const nb::object& /*owner*/) {
            return tf::Memory::borrow(reinterpret_cast<void*>(address), nbytes);
          },
          "address"_a, "nbytes"_a, "owner"_a, nb::keep_alive<0, 3>())
      .def_prop_ro("nbytes", &tf::Memory::nbytes)
      .def_prop_ro("descriptor", &tf::Memory::descriptor)
      .def_prop_ro("address", [](const tf::Memory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def("array", [](const std::shared_ptr<tf::Memory>& self) { return array_over(self, 0, self->nbytes()); });

  nb::class_<tf::MemoryRegion>(m, "MemoryRegion", "Memory registered with one context.")
      .def_static("create", &tf::MemoryRegion::create, "context"_a, "memory"_a, "memory_type"_a, ReleaseGil())
      .def("pack_key", [](const tf::MemoryRegion& self) { return to_python(self.pack_key()); })
      .def("close", &tf::MemoryRegion::close, ReleaseGil())
      .def_prop_ro("memory", &tf::MemoryRegion::memory);

  nb::class_<tf::SlotTable>(m, "SlotTable", "Which parts of a pool peers may read now.")
      .def(
          "__init__",
          [](tf::SlotTable* self, std::uint64_t pool_nbytes, std::uint32_t slots, const nb::bytes& uid, bool serves) {
            new (self) tf::SlotTable(pool_nbytes, slots, identifier_of(uid), serves);
          },
          nb::kw_only(), "pool_nbytes"_a, "slots"_a, "uid"_a, "serves"_a)
      .def(
          "admit",
          [](tf::SlotTable& self, std::uint64_t offset, std::uint64_t nbytes, double lease) {
            const tf::Ticket ticket = self.admit(offset, nbytes, duration(lease));
            return std::make_tuple(ticket.index, ticket.generation, to_python(ticket.token));
          },
          "offset"_a, "nbytes"_a, "lease"_a, "Returns index, generation and token.")
      .def("withdraw", &tf::SlotTable::withdraw, "index"_a, "generation"_a, nb::kw_only(), "revoked"_a)
      .def(
          "notifications",
          [](tf::SlotTable& self, double timeout) {
            std::vector<tf::Notification> taken;
            {
              const nb::gil_scoped_release release;
              taken = self.notifications(duration(timeout));
            }
            nb::list list;
            for (const tf::Notification& one : taken) {
              list.append(nb::make_tuple(static_cast<int>(one.kind), one.index, one.generation, to_python(one.consumer),
                                         to_python(one.mac)));
            }
            return list;
          },
          "timeout"_a, nb::sig("def notifications(self, timeout: float) -> list[tuple[int, int, int, bytes, bytes]]"),
          "Waits; returns tuples of kind, index, generation, consumer and MAC.")
      .def("wake", &tf::SlotTable::wake)
      .def("close", &tf::SlotTable::close)
      .def_prop_ro("running_reads", &tf::SlotTable::running_reads)
      .def_prop_ro("control", &tf::SlotTable::control);

  nb::class_<tf::RemoteKey>(m, "RemoteKey", "What opens a peer's memory on one endpoint.");

  nb::class_<tf::CompletionQueue>(m, "CompletionQueue", "Numbers of what happened to reads, for one thread.")
      .def(nb::init<>())
      .def(
          "take",
          [](tf::CompletionQueue& self, double timeout) {
            const nb::gil_scoped_release release;
            return self.take(duration(timeout));
          },
          "timeout"_a, "Waits; returns all numbers there are, none on timeout and after wake().")
      .def("wake", &tf::CompletionQueue::wake);

  nb::class_<tf::Read>(m, "Read", "A batch of reads posted as one.")
      .def("wait", &wait, "timeout"_a, "True once all bytes are here, False when the time is up first.")
      .def("abandon", &tf::Read::abandon, "status"_a, ReleaseGil())
      .def("watch", &tf::Read::watch, "queue"_a, "number"_a, "Pushes the number once wait() would not wait any more.")
      .def_prop_ro("settled", &tf::Read::settled);

  nb::class_<tf::Endpoint>(m, "Endpoint", "The way to one peer's worker.")
      .def_prop_ro("failure", &tf::Endpoint::failure)
      .def(
          "hello", [](tf::Endpoint& self, const nb::bytes& uid) { return self.hello(identifier_of(uid)); }, "uid"_a)
      .def(
          "read_served",
          [](tf::Endpoint& self, std::uint32_t index, std::uint64_t generation, const nb::bytes& token,
             std::uint64_t offset, std::uint64_t nbytes, const std::vector<SpanTuple>& spans,
             const std::shared_ptr<tf::MemoryRegion>& destination, const ReleaserTuple& releaser) {
            return self.read_served(ticket_of(index, generation, token, offset, nbytes), spans_of(spans), destination,
                                    releaser_of(releaser));
          },
          "index"_a, "generation"_a, "token"_a, "offset"_a, "nbytes"_a, "spans"_a, "destination"_a,
          "releaser"_a = nb::none())
      .def(
          "read_served_into",
          [](tf::Endpoint& self, std::uint32_t index, std::uint64_t generation, const nb::bytes& token,
             std::uint64_t offset, std::uint64_t nbytes, const std::vector<SpanTuple>& spans,
             const std::vector<std::shared_ptr<tf::Memory>>& memories, const ReleaserTuple& releaser) {
            return self.read_served_into(ticket_of(index, generation, token, offset, nbytes), spans_of(spans), memories,
                                         releaser_of(releaser));
          },
          "index"_a, "generation"_a, "token"_a, "offset"_a, "nbytes"_a, "spans"_a, "memories"_a,
          "releaser"_a = nb::none(), "The caller keeps what the memories borrow alive until the read is settled.")
      .def(
          "read_remote",
          [](tf::Endpoint& self, std::uint32_t index, std::uint64_t generation, const nb::bytes& token,
             std::uint64_t offset, std::uint64_t nbytes, const std::vector<SpanTuple>& spans,
             const std::shared_ptr<tf::MemoryRegion>& destination, const std::shared_ptr<tf::RemoteKey>& pool,
             const std::shared_ptr<tf::RemoteKey>& control, const ReleaserTuple& releaser) {
            return self.read_remote(ticket_of(index, generation, token, offset, nbytes), spans_of(spans), destination,
                                    pool, control, releaser_of(releaser));
          },
          "index"_a, "generation"_a, "token"_a, "offset"_a, "nbytes"_a, "spans"_a, "destination"_a, "pool"_a,
          "control"_a, "releaser"_a = nb::none())
      .def(
          "unpack",
          [](tf::Endpoint& self, const nb::bytes& key, std::uint64_t address, std::uint64_t nbytes) {
            const tf::Bytes packed = bytes_of(key);
            const nb::gil_scoped_release release;
            return std::const_pointer_cast<tf::RemoteKey>(self.unpack(packed, address, nbytes));
          },
          "key"_a, "address"_a, "nbytes"_a)
      .def("transports", &tf::Endpoint::transports, ReleaseGil())
      .def("release", notify(tf::NotificationKind::kRelease), "index"_a, "generation"_a, "token"_a, "consumer"_a,
           "mac"_a)
      .def("reject", notify(tf::NotificationKind::kReject), "index"_a, "generation"_a, "token"_a, "consumer"_a, "mac"_a)
      .def(
          "close", [](tf::Endpoint& self, double timeout) { self.close(duration(timeout)); }, "timeout"_a,
          ReleaseGil());

  nb::class_<tf::Worker>(m, "Worker", "A UCP worker and the one thread that touches it.")
      .def_static(
          "create",
          [](std::shared_ptr<tf::Context> context) { return tf::Worker::create(std::move(context), destroy_worker); },
          "context"_a, ReleaseGil())
      .def_prop_ro("address", [](const tf::Worker& self) { return to_python(self.address()); })
      .def(
          "connect",
          [](tf::Worker& self, const nb::bytes& address) {
            const tf::Bytes bytes = bytes_of(address);
            const nb::gil_scoped_release release;
            return self.connect(bytes);
          },
          "address"_a)
      .def("serve", &tf::Worker::serve, "table"_a, "pool"_a, ReleaseGil())
      .def("close", [](tf::Worker& self, double timeout) { self.close(duration(timeout)); }, "timeout"_a, ReleaseGil());

  nb::class_<tf::PeerPool>(m, "PeerPool", "Another process's pool, mapped read-only.")
      .def_static(
          "open",
          [](int pid, int control, int pool, const nb::bytes& uid, std::uint64_t pool_nbytes, std::uint32_t slots) {
            return tf::PeerPool::open({pid, control, pool, identifier_of(uid), pool_nbytes, slots});
          },
          nb::kw_only(), "pid"_a, "control_descriptor"_a, "pool_descriptor"_a, "uid"_a, "pool_nbytes"_a, "slots"_a)
      .def("verify", &tf::PeerPool::verify, "index"_a, "generation"_a)
      .def("alive", &tf::PeerPool::alive)
      .def(
          "array",
          [](const tf::PeerPool& self, std::uint64_t offset, std::uint64_t nbytes) {
            return array_over(self.pool(), offset, nbytes);
          },
          "offset"_a, "nbytes"_a);
}
