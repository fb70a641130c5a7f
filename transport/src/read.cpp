// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/read.hpp"

#include <utility>

#include "tensorferry/transport/worker.hpp"

namespace tensorferry::transport {

// ---- any thread -------------------------------------------------------------------------------

Read::Read(const std::shared_ptr<Worker>& worker, std::shared_ptr<MemoryRegion> destination)
    : worker_(worker), library_(worker->library()), destination_(std::move(destination)) {}

void Read::check(const Ticket& ticket, const Span& span, std::uint64_t room) {
  const bool in_slot = span.source <= ticket.nbytes && span.nbytes <= ticket.nbytes - span.source;
  const bool in_memory = span.destination <= room && span.nbytes <= room - span.destination;
  if (!in_slot || !in_memory) throw Error(kAccessRefused, "a span leaves the slot or the landing memory");
}

bool Read::wait_for(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (!ended_.wait_until(lock, deadline, [this] { return finished_; })) return false;
  if (status_ != 0) throw Error(status_, library_.describe(status_));
  return true;
}

void Read::abandon(int status) {
  if (!finish(status)) return;
  const std::shared_ptr<Worker> worker = worker_.lock();
  const bool posted =
      worker && worker->post([worker = worker.get(), self = shared_from_this()] { worker->abandon(self); });
  // Without a worker nothing was posted, or everything was settled when the worker closed.
  if (!posted) settled_.store(true, std::memory_order_release);
}

void Read::watch(std::shared_ptr<CompletionQueue> queue, std::uint64_t number) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!finished_) {
      watcher_ = std::move(queue);
      number_ = number;
      return;
    }
  }
  queue->push(number);
}

bool Read::finish(int status, const std::function<void()>& first) {
  std::shared_ptr<CompletionQueue> watcher;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (finished_) return false;
    finished_ = true;
    status_ = status;
    watcher = std::move(watcher_);
  }
  if (first) first();
  ended_.notify_all();
  if (watcher != nullptr) watcher->push(number_);
  return true;
}

bool Read::finished() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return finished_;
}

// ---- progress thread --------------------------------------------------------------------------

namespace {

// A producer cuts a read off no sooner than its grace after it was asked: data that came in half
// of that time is the slot's.
constexpr SlotTable::Clock::duration kTrust = SlotTable::kGrace / 2;

// Travels through UCX as the user data of one get or receive.
struct Pending {
  Worker* worker;
  std::shared_ptr<Read> read;
};

}  // namespace

void Worker::begin(const std::shared_ptr<Read>& read, const std::shared_ptr<Connection>& connection,
                   std::size_t operations) {
  read->connection_ = connection;
  read->outstanding_ = operations;
  read->begun_ = Clock::now();
  reads_.insert(read);
  connection->reads.insert(read);
}

void Worker::request(const std::shared_ptr<Read>& read, ReadRequest header, std::uint8_t* destination,
                     ucs_memory_type_t type) {
  if (read->connection_->handle == nullptr) return end_operation(read, read->connection_->failure.load());
  if (header.nbytes >= Pacing::kBulk) pacing_->begin_bulk();
  // The number is random, so that a peer cannot answer in place of another.
  header.request = random_word();
  served_.emplace(header.request, ServedRead{read, destination, header.nbytes, type});
  read->requests_.push_back(header.request);
  send(read->connection_->handle, kReadMessage, &header, sizeof header, UCP_AM_SEND_FLAG_REPLY, {},
       [this, read, id = header.request](int status) {
         if (status != 0 && served_.erase(id) != 0) end_operation(read, status);
       });
}

void Worker::get(const std::shared_ptr<Read>& read, void* destination, std::uint64_t nbytes, std::uint64_t address,
                 const RemoteKey& key, ucs_memory_type_t type) {
  if (read->connection_->handle == nullptr) return end_operation(read, read->connection_->failure.load());
  if (nbytes >= Pacing::kBulk) pacing_->begin_bulk();
  auto* pending = new Pending{this, read};
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.memory_type = type;
  params.user_data = pending;
  params.cb.send = [](void* request, ucs_status_t status, void* argument) {
    const std::unique_ptr<Pending> ended(static_cast<Pending*>(argument));
    ended->worker->library().ucp_request_free(request);
    ended->worker->end_operation(ended->read, status);
  };
  void* request = library().ucp_get_nbx(read->connection_->handle, destination, nbytes, address, key.handle, &params);
  if (UCS_PTR_IS_PTR(request)) return;
  delete pending;
  end_operation(read, UCS_PTR_RAW_STATUS(request));
}

void Worker::end_operation(const std::shared_ptr<Read>& shared, int status) {
  const std::shared_ptr<Read> read = shared;  // the caller's may die with what is erased below
  // A lost connection says more than the code that each of its operations ends with.
  const int failure = read->connection_->failure.load(std::memory_order_relaxed);
  if (status != 0) fail(read, failure != 0 ? failure : status);
  if (--read->outstanding_ > 0) return;
  if (read->error_ == 0 && read->validation_ != nullptr && !read->finished() && Clock::now() - read->begun_ > kTrust) {
    // The producer may have cut this read off long ago.  Over tcp nothing comes after that; but a device
    // that reads the producer's memory by itself would not notice, so the producer is asked once more.
    const std::unique_ptr<ReadRequest> header = std::move(read->validation_);
    read->outstanding_ = 1;
    return request(read, *header, nullptr, UCS_MEMORY_TYPE_HOST);
  }
  if (read->error_ == 0 && read->word_key_ != nullptr && !read->finished()) {
    // Only now, with all data here, does the word say what that data belongs to.
    const std::shared_ptr<const RemoteKey> key = std::move(read->word_key_);
    read->outstanding_ = 1;
    return get(read, &read->word_, sizeof read->word_, read->word_address_, *key, UCS_MEMORY_TYPE_HOST);
  }
  // Served reads have no word, and expect none.
  const int outcome = read->error_ != 0 ? read->error_ : judge_word(read->word_, read->expected_word_);
  read->finish(outcome, [&] {
    if (outcome == 0 && read->release_ != nullptr) notify(*read->connection_, *read->release_);
  });
  read->settled_.store(true, std::memory_order_release);
  read->connection_->reads.erase(read);
  read->connection_.reset();
  reads_.erase(read);
}

// Ends the batch for the caller, if it has not failed before; its operations end by themselves.
void Worker::fail(const std::shared_ptr<Read>& read, int status) {
  if (read->error_ != 0) return;
  read->error_ = status;
  read->finish(status);
  drop_requests(read);
}

// Forgets requests that have no answer yet: whatever still comes for them is refused.
void Worker::drop_requests(const std::shared_ptr<Read>& read) {
  std::vector<std::uint64_t> requests;
  requests.swap(read->requests_);
  std::size_t dropped = 0;
  for (const std::uint64_t id : requests) dropped += served_.erase(id);
  for (; dropped > 0; --dropped) end_operation(read, kCancelled);
}

void Worker::abandon(const std::shared_ptr<Read>& read) {
  if (read->settled()) return;
  const std::shared_ptr<Connection> connection = read->connection_;
  drop_requests(read);
  if (read->settled() || connection == nullptr) return;
  for (const std::shared_ptr<Read>& other : connection->reads) {
    if (!other->finished()) return;
  }
  // UCX still holds the destination and nothing else needs this connection: closing it gives the
  // memory back, however long the peer stays silent.
  close_connection(*connection, true);
}

}  // namespace tensorferry::transport
