// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/endpoint.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <regex>
#include <utility>

#include "tensorferry/transport/worker.hpp"

namespace tensorferry::transport {

namespace {

NotifyRequest notification(NotificationKind kind, const Ticket& ticket, const Identifier& consumer, const Mac& mac) {
  NotifyRequest message{};
  message.protocol = kProtocol;
  message.kind = static_cast<std::uint32_t>(kind);
  message.index = ticket.index;
  message.generation = ticket.generation;
  message.token = ticket.token;
  message.consumer = consumer;
  message.mac = mac;
  return message;
}

std::unique_ptr<NotifyRequest> release_by(const std::optional<Releaser>& releaser, const Ticket& ticket) {
  if (!releaser) return nullptr;
  return std::make_unique<NotifyRequest>(
      notification(NotificationKind::kRelease, ticket, releaser->consumer, releaser->mac));
}

std::vector<std::string> lanes(const Library& ucx, ucp_ep_h endpoint) {
  std::array<ucp_transport_entry_t, 16> entries{};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports = {entries.data(), entries.size(), sizeof entries.front()};
  ucx.check(ucx.ucp_ep_query(endpoint, &attributes), "asking for the transports");
  std::vector<std::string> found;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    const ucp_transport_entry_t& entry = entries[i];
    if (entry.transport_name == nullptr || entry.device_name == nullptr) continue;
    found.push_back(std::string(entry.transport_name) + "/" + entry.device_name);
  }
  return found;
}

// UCX 1.13 tells nobody but who reads what it prints: "#    lane[0]:  2:tcp/lo.0 md[1]  -> ...".
std::vector<std::string> lanes_printed(const Library& ucx, ucp_ep_h endpoint) {
  char* text = nullptr;
  std::size_t length = 0;
  FILE* stream = open_memstream(&text, &length);
  if (stream == nullptr) throw Error(kNoMemory, "asking for the transports");
  ucx.ucp_ep_print_info(endpoint, stream);
  fclose(stream);
  const std::string printed(text, length);
  std::free(text);
  static const std::regex lane(R"(lane\[\d+\]:\s+\d+:(\S+/\S+?)(\.\d+)?\s)");
  std::vector<std::string> found;
  for (auto one = std::sregex_iterator(printed.begin(), printed.end(), lane); one != std::sregex_iterator(); ++one) {
    found.push_back((*one)[1]);
  }
  return found;
}

}  // namespace

// ---- any thread -------------------------------------------------------------------------------

Endpoint::Endpoint(std::shared_ptr<Worker> worker, std::shared_ptr<Connection> connection)
    : worker_(std::move(worker)), connection_(std::move(connection)) {}

Endpoint::~Endpoint() {
  if (getpid() != worker_->owner_pid_) return;
  worker_->post([worker = worker_.get(), connection = connection_] { worker->close_connection(*connection, false); });
}

int Endpoint::failure() const noexcept {
  return connection_->failure.load(std::memory_order_acquire);
}

std::shared_ptr<Read> Endpoint::hello(const Identifier& uid) {
  auto read = std::make_shared<Read>(worker_, nullptr);
  ReadRequest header{};
  header.protocol = kProtocol;
  header.kind = ReadKind::kHello;
  header.token = uid;
  const bool posted = worker_->post([worker = worker_.get(), connection = connection_, read, header] {
    worker->begin(read, connection, 1);
    worker->request(read, header, nullptr, UCS_MEMORY_TYPE_HOST);
  });
  if (!posted) read->abandon(kClosed);
  return read;
}

std::shared_ptr<Read> Endpoint::read_served(const Ticket& ticket, const std::vector<Span>& spans,
                                            std::shared_ptr<MemoryRegion> destination,
                                            const std::optional<Releaser>& releaser) {
  if (destination == nullptr && !spans.empty()) throw Error(kAccessRefused, "there is no landing memory");
  std::vector<std::uint8_t*> targets;
  for (const Span& span : spans) {
    Read::check(ticket, span, destination->nbytes());
    targets.push_back(destination->data() + span.destination);
  }
  const ucs_memory_type_t type = destination ? destination->memory_type() : UCS_MEMORY_TYPE_HOST;
  auto read = std::make_shared<Read>(worker_, std::move(destination));
  read->release_ = release_by(releaser, ticket);
  request_all(read, ticket, spans, std::move(targets), type);
  return read;
}

std::shared_ptr<Read> Endpoint::read_served_into(const Ticket& ticket, const std::vector<Span>& spans,
                                                 std::vector<std::shared_ptr<Memory>> memories,
                                                 const std::optional<Releaser>& releaser) {
  if (memories.size() != spans.size()) throw Error(kAccessRefused, "every span needs a memory of its own");
  std::vector<std::uint8_t*> targets;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    Read::check(ticket, spans[i], memories[i]->nbytes());
    targets.push_back(memories[i]->data() + spans[i].destination);
  }
  auto read = std::make_shared<Read>(worker_, nullptr);
  read->memories_ = std::move(memories);
  read->release_ = release_by(releaser, ticket);
  request_all(read, ticket, spans, std::move(targets), UCS_MEMORY_TYPE_HOST);
  return read;
}

void Endpoint::request_all(const std::shared_ptr<Read>& read, const Ticket& ticket, const std::vector<Span>& spans,
                           std::vector<std::uint8_t*> targets, ucs_memory_type_t type) {
  ReadRequest header{};
  header.protocol = kProtocol;
  header.kind = ReadKind::kData;
  header.index = ticket.index;
  header.generation = ticket.generation;
  header.token = ticket.token;
  if (!spans.empty()) read->validation_ = std::make_unique<ReadRequest>(header);
  const bool posted = worker_->post(
      [worker = worker_.get(), connection = connection_, read, header, spans, targets = std::move(targets), type] {
        worker->begin(read, connection, spans.empty() ? 1 : spans.size());
        if (spans.empty()) worker->request(read, header, nullptr, type);  // validates the ticket only
        for (std::size_t i = 0; i < spans.size(); ++i) {
          ReadRequest request = header;
          request.source = spans[i].source;
          request.nbytes = spans[i].nbytes;
          worker->request(read, request, targets[i], type);
        }
      });
  if (!posted) read->abandon(kClosed);
}

std::shared_ptr<Read> Endpoint::read_remote(const Ticket& ticket, const std::vector<Span>& spans,
                                            std::shared_ptr<MemoryRegion> destination,
                                            std::shared_ptr<const RemoteKey> pool,
                                            std::shared_ptr<const RemoteKey> control,
                                            const std::optional<Releaser>& releaser) {
  const std::uint64_t word = sizeof(ControlBlock) + std::uint64_t{ticket.index} * sizeof(std::uint64_t);
  if (!pool->covers(ticket.offset, ticket.nbytes) || !control->covers(word, sizeof(std::uint64_t))) {
    throw Error(kAccessRefused, "the ticket leaves the peer's memory");
  }
  for (const Span& span : spans) Read::check(ticket, span, destination->nbytes());
  auto read = std::make_shared<Read>(worker_, std::move(destination));
  read->release_ = release_by(releaser, ticket);
  read->expected_word_ = ticket.generation;
  read->word_key_ = control;
  read->word_address_ = control->address + word;
  const bool posted =
      worker_->post([worker = worker_.get(), connection = connection_, read, spans, pool, offset = ticket.offset] {
        worker->begin(read, connection, spans.size() + 1);
        for (const Span& span : spans) {
          worker->get(read, read->destination_->data() + span.destination, span.nbytes,
                      pool->address + offset + span.source, *pool, read->destination_->memory_type());
        }
        worker->end_operation(read, 0);  // stands for the posting itself: the word is read after all of them
      });
  if (!posted) read->abandon(kClosed);
  return read;
}

std::shared_ptr<const RemoteKey> Endpoint::unpack(const Bytes& key, std::uint64_t address, std::uint64_t nbytes) {
  std::shared_ptr<RemoteKey> unpacked;
  worker_->call([&] {
    const Library& ucx = worker_->library();
    const int failure = connection_->failure.load(std::memory_order_relaxed);
    if (failure != 0 || connection_->handle == nullptr) throw Error(failure, "unpacking a key: the peer is lost");
    ucp_rkey_h handle = nullptr;
    ucx.check(ucx.ucp_ep_rkey_unpack(connection_->handle, key.data(), &handle), "unpacking a remote key");
    unpacked = std::make_shared<RemoteKey>(RemoteKey{handle, address, nbytes});
    connection_->keys.push_back(unpacked);
  });
  return unpacked;
}

std::vector<std::string> Endpoint::transports() {
  std::vector<std::string> found;
  worker_->call([&] {
    if (connection_->handle == nullptr) throw Error(failure(), "asking for the transports: the peer is lost");
    const Library& ucx = worker_->library();
    found = ucx.older_than(14) ? lanes_printed(ucx, connection_->handle) : lanes(ucx, connection_->handle);
  });
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void Endpoint::notify(NotificationKind kind, const Ticket& ticket, const Identifier& consumer, const Mac& mac) {
  worker_->post([worker = worker_.get(), connection = connection_,
                 message = notification(kind, ticket, consumer, mac)] { worker->notify(*connection, message); });
}

void Endpoint::close(std::chrono::nanoseconds timeout) {
  auto closed = std::make_shared<std::promise<void>>();
  std::future<void> done = closed->get_future();
  const bool posted = worker_->post([worker = worker_.get(), connection = connection_, closed] {
    if (connection->handle == nullptr) {
      closed->set_value();
      return;
    }
    connection->closed = closed;
    worker->close_connection(*connection, false);
  });
  if (posted) done.wait_for(timeout);
}

// ---- progress thread --------------------------------------------------------------------------

constexpr std::size_t kAddressPadding = 8 << 10;

void Worker::open_connection(const std::shared_ptr<Connection>& connection, const Bytes& address) {
  // UCX asserts that it knows the version, and reads as far as the address says that it goes: an address from a
  // peer may be cut off, and must not end in somebody else's memory.
  constexpr std::uint8_t kVersion = 0x0f;
  if (address.empty() || (address.front() & kVersion) > 1) {
    throw Error(UCS_ERR_INVALID_ADDR, "connecting to the peer: this is no worker address");
  }
  Bytes padded = address;
  padded.resize(address.size() + kAddressPadding);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(padded.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_failure;
  params.err_handler.arg = connection.get();
  library().check(library().ucp_ep_create(handle_, &params, &connection->handle), "connecting to the peer");
  connection->address = address;
  connections_.emplace(connection.get(), connection);
}

// UCX calls this inside progress: it only marks, sweep_failed() closes.
void Worker::on_failure(void* argument, ucp_ep_h, ucs_status_t status) {
  auto* connection = static_cast<Connection*>(argument);
  connection->lost = true;
  int none = 0;
  if (connection->failure.compare_exchange_strong(none, status, std::memory_order_acq_rel)) {
    connection->worker->failed_.push_back(connection);
  }
}

bool Worker::sweep_failed() {
  if (failed_.empty()) return false;
  std::vector<Connection*> failed;
  failed.swap(failed_);
  for (Connection* connection : failed) close_connection(*connection, true);
  return true;
}

// After this nothing new is posted on the connection.  What UCX has posted ends by its callbacks.
void Worker::close_connection(Connection& connection, bool force) {
  if (connection.handle == nullptr) return;
  int none = 0;
  connection.failure.compare_exchange_strong(none, kClosed, std::memory_order_acq_rel);
  const int status = connection.failure.load(std::memory_order_relaxed);
  for (const std::shared_ptr<Read>& read : std::unordered_set(connection.reads)) {
    if (read->finish(status)) force = true;
    drop_requests(read);
  }

  // A peer that is answering an emulated get must not lose its connection: UCX would abort it.
  if (force && context_->remote_memory()) connection.socket = {};
  if (force && !stopping_) {
    // UCX finds the connection ended, reads what has come before, and lets go of its memory.
    connection.socket.shut();
    for (int round = 0; round < kRounds && connection.socket.open() && !connection.lost; ++round) {
      library().ucp_worker_progress(handle_);
    }
  }
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  void* request = library().ucp_ep_close_nbx(connection.handle, &params);
  connection.handle = nullptr;
  const auto held = connections_.extract(&connection);
  if (UCS_PTR_IS_PTR(request)) connection.closing = request;
  if (!held.empty()) closing_.push_back(held.mapped());
}

bool Worker::reap_closed() {
  bool reaped = false;
  for (std::size_t i = 0; i < closing_.size();) {
    Connection& connection = *closing_[i];
    if (connection.closing != nullptr && library().ucp_request_check_status(connection.closing) != UCS_INPROGRESS) {
      library().ucp_request_free(connection.closing);
      connection.closing = nullptr;
    }
    if (connection.closing != nullptr) {
      ++i;
      continue;
    }
    for (const auto& key : connection.keys) library().ucp_rkey_destroy(key->handle);
    connection.keys.clear();
    connection.socket.shut();  // UCX leaves it open
    if (connection.closed) connection.closed->set_value();
    connection.closed.reset();
    closing_[i] = std::move(closing_.back());
    closing_.pop_back();
    reaped = true;
  }
  return reaped;
}

}  // namespace tensorferry::transport
