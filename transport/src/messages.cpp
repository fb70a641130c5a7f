// SPDX-License-Identifier: Apache-2.0
// The active messages of a worker, all on its progress thread.
#include <cstring>
#include <utility>

#include "tensorferry/transport/worker.hpp"

namespace tensorferry::transport {
namespace {

// A message on its way: UCX reads the header until the send has ended.
struct Outgoing {
  Worker* worker;
  std::uint64_t* running;
  std::array<std::uint8_t, 88> header;
  std::function<void(int)> done;

  void end(int status) {
    --*running;
    done(status);
  }
};
static_assert(sizeof(ReadRequest) <= 88 && sizeof(NotifyRequest) <= 88);

template <typename Header>
bool parse(const void* header, std::size_t nbytes, Header& parsed) {
  if (nbytes != sizeof parsed) return false;
  std::memcpy(&parsed, header, sizeof parsed);
  return parsed.protocol == kProtocol;
}

// A status from a peer is one that a producer may send, or the peer breaks the rules.
int checked_status(std::int32_t status) {
  switch (status) {
    case 0:
    case kLeaseExpired:
    case kLeaseRevoked:
    case kAccessRefused:
    case kPeerGone:
      return status;
    default:
      return kProtocolViolation;
  }
}

}  // namespace

void Worker::send(ucp_ep_h endpoint, unsigned id, const void* header, std::size_t header_nbytes, std::uint32_t flags,
                  const Payload& payload, std::function<void(int)> done) {
  auto outgoing = std::make_unique<Outgoing>();
  outgoing->worker = this;
  outgoing->running = &sends_running_;
  outgoing->done = std::move(done);
  std::memcpy(outgoing->header.data(), header, header_nbytes);
  ++sends_running_;

  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.flags = flags;
  params.memory_type = payload.type;
  params.user_data = outgoing.get();
  params.cb.send = [](void* request, ucs_status_t status, void* argument) {
    const std::unique_ptr<Outgoing> ended(static_cast<Outgoing*>(argument));
    ended->worker->library().ucp_request_free(request);
    ended->end(status);
  };
  void* request = library().ucp_am_send_nbx(endpoint, id, outgoing->header.data(), header_nbytes, payload.data,
                                            payload.nbytes, &params);
  if (UCS_PTR_IS_PTR(request)) {
    (void)outgoing.release();  // ended by the callback
  } else {
    outgoing->end(UCS_PTR_RAW_STATUS(request));
  }
}

// ---- the producer's side ----------------------------------------------------------------------

ucs_status_t Worker::on_read(void* argument, const void* header, std::size_t header_nbytes, void*, std::size_t nbytes,
                             const ucp_am_recv_param_t* parameters) {
  auto* worker = static_cast<Worker*>(argument);
  ReadRequest request;
  const bool replies = (parameters->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  // What has the wrong form is dropped: there is nobody to trust with an answer.
  if (!replies || nbytes != 0 || !parse(header, header_nbytes, request)) return UCS_OK;
  std::uint64_t pool_offset = 0;
  int status = kAccessRefused;
  if (worker->table_ != nullptr) {
    if (request.kind == ReadKind::kHello) {
      status = worker->table_->greet(request);
      request.nbytes = 0;
    } else if (request.kind == ReadKind::kData) {
      status = worker->table_->begin_read(request, SlotTable::Clock::now(), pool_offset);
    }
  }
  worker->reply(parameters->reply_ep, request, status, pool_offset);
  return UCS_OK;
}

void Worker::reply(ucp_ep_h endpoint, const ReadRequest& request, int status, std::uint64_t pool_offset) {
  const ReadReply header{request.request, status, kProtocol};
  const bool reading = status == 0 && request.kind == ReadKind::kData;
  Payload payload;
  if (reading && request.nbytes > 0) payload = {pool_->data() + pool_offset, request.nbytes, pool_->memory_type()};
  std::function<void(int)> done = [](int) {};
  if (reading) {
    if (request.nbytes >= Pacing::kBulk) pacing_->begin_bulk();
    const auto serving = serving_.insert(serving_.end(), {endpoint, request.request, request.index});
    done = [this, serving](int) {
      table_->end_read(serving->index);
      serving_.erase(serving);
    };
  }
  Peer& peer = peers_[endpoint];
  const auto answer = [&] { send(endpoint, kReplyMessage, &header, sizeof header, 0, payload, done); };
  // UCX uses the memory of endpoints again, and a new connection begins with a hello.
  if (request.kind == ReadKind::kHello || (peer.socket.known() && !peer.socket.open())) peer = {};
  if (peer.socket.open() || peer.tries >= kTries) return answer();
  ++peer.tries;
  peer.socket = TcpSocket::written_by(answer, address_, TcpSocket::Side::kAccepted);
  forget_peers();
}

// A notification is dropped where the peer is lost.
void Worker::notify(const Connection& connection, const NotifyRequest& message) {
  if (connection.handle == nullptr) return;
  send(connection.handle, kNotifyMessage, &message, sizeof message, 0, {}, [](int) {});
}

// Endpoints that UCX made for peers go away without a word.
void Worker::forget_peers() {
  if (peers_.size() < peers_limit_) return;
  for (auto one = peers_.begin(); one != peers_.end();)
    one = one->second.socket.open() ? std::next(one) : peers_.erase(one);
  peers_limit_ = 2 * peers_.size() + kPeers;
}

// A peer that does not take what it asked for would hold the slot as long as it likes.
void Worker::cut_off_overdue(Clock::time_point now) {
  if (serving_.empty() || now - looked_ < kLook) return;
  looked_ = now;
  std::unordered_set<ucp_ep_h> stuck;
  for (const Serving& one : serving_) {
    if (!one.cut && table_->overdue(one.index, now) != 0) stuck.insert(one.endpoint);
  }
  for (const ucp_ep_h endpoint : stuck) cut_off(endpoint, now);
}

// Ends the connection, by which UCX ends all sends on it.  Closing an endpoint that UCX made by itself would
// not do: UCX may have destroyed it already, and its tcp transport then uses memory that it has freed (1.22).
void Worker::cut_off(ucp_ep_h endpoint, Clock::time_point now) {
  std::vector<ReadReply> farewells;
  for (Serving& one : serving_) {
    if (one.endpoint != endpoint || one.cut) continue;
    one.cut = true;
    if (const int status = table_->overdue(one.index, now); status != 0) {
      farewells.push_back({one.request, status, kProtocol});
    }
  }
  // The endpoint is alive: one of its sends has not ended.
  const auto say = [&] {
    for (const ReadReply& one : farewells) send(endpoint, kReplyMessage, &one, sizeof one, 0, {}, [](int) {});
  };
  TcpSocket socket = peers_[endpoint].socket;
  if (socket.open()) {
    say();
  } else {
    socket = TcpSocket::written_by(say, address_, TcpSocket::Side::kAccepted);
  }
  socket.shut();
}

ucs_status_t Worker::on_notify(void* argument, const void* header, std::size_t header_nbytes, void*, std::size_t nbytes,
                               const ucp_am_recv_param_t*) {
  auto* worker = static_cast<Worker*>(argument);
  NotifyRequest request;
  if (worker->table_ == nullptr || nbytes != 0 || !parse(header, header_nbytes, request)) return UCS_OK;
  const auto kind = static_cast<NotificationKind>(request.kind);
  if (kind == NotificationKind::kRelease || kind == NotificationKind::kReject) worker->table_->report(request);
  return UCS_OK;
}

// ---- the consumer's side ----------------------------------------------------------------------

ucs_status_t Worker::on_reply(void* argument, const void* header, std::size_t header_nbytes, void* data,
                              std::size_t nbytes, const ucp_am_recv_param_t* parameters) {
  auto* worker = static_cast<Worker*>(argument);
  ReadReply reply;
  if (!parse(header, header_nbytes, reply)) return UCS_OK;
  auto found = worker->served_.extract(reply.request);
  if (found.empty()) {  // abandoned, never asked for, or cut off
    if (reply.status != 0) worker->on_cut_off(reply.request, checked_status(reply.status));
    return UCS_OK;
  }
  const ServedRead served = std::move(found.mapped());
  if (reply.status == 0) worker->locate(*served.read->connection_);
  int status = checked_status(reply.status);
  if (status == 0 && nbytes != served.nbytes) status = kProtocolViolation;
  if (status == 0 && nbytes > 0) return worker->receive(reply.request, served, data, parameters->recv_attr);
  worker->end_operation(served.read, status);
  return UCS_OK;
}

// Learns which socket the connection uses, by sending something that means nothing.
void Worker::locate(Connection& connection) {
  if (connection.handle == nullptr || connection.tries >= kTries || connection.socket.open()) return;
  ++connection.tries;
  const NotifyRequest nothing{kProtocol, 0, 0, {}, {}, 0, 0, {}};
  connection.socket = TcpSocket::written_by(
      [&] { send(connection.handle, kNotifyMessage, &nothing, sizeof nothing, 0, {}, [](int) {}); }, connection.address,
      TcpSocket::Side::kConnected);
}

// The producer takes back what it is sending, and will close the connection.
void Worker::on_cut_off(std::uint64_t id, int status) {
  const auto found = receiving_.find(id);
  if (found == receiving_.end()) return;
  Connection* connection = found->second->connection_.get();
  fail(found->second, status);
  on_failure(connection, nullptr, UCS_ERR_CONNECTION_RESET);
}

ucs_status_t Worker::receive(std::uint64_t id, const ServedRead& served, void* data, std::uint64_t attributes) {
  const bool rendezvous = (attributes & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (!rendezvous && served.type == UCS_MEMORY_TYPE_HOST) {
    std::memcpy(served.destination, data, served.nbytes);
    end_operation(served.read, 0);
    return UCS_OK;
  }
  struct Receiving {
    Worker* worker;
    std::shared_ptr<Read> read;
    std::uint64_t id;
  };
  auto receiving = std::make_unique<Receiving>(Receiving{this, served.read, id});
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.memory_type = served.type;
  params.user_data = receiving.get();
  params.cb.recv_am = [](void* request, ucs_status_t status, std::size_t, void* argument) {
    const std::unique_ptr<Receiving> ended(static_cast<Receiving*>(argument));
    ended->worker->library().ucp_request_free(request);
    ended->worker->receiving_.erase(ended->id);
    ended->worker->end_operation(ended->read, status);
  };
  receiving_.emplace(id, served.read);  // before UCX may call back
  void* request = library().ucp_am_recv_data_nbx(handle_, data, served.destination, served.nbytes, &params);
  if (UCS_PTR_IS_PTR(request)) {
    (void)receiving.release();  // ended by the callback
    return UCS_INPROGRESS;
  }
  receiving_.erase(id);
  end_operation(served.read, UCS_PTR_RAW_STATUS(request));
  return UCS_OK;
}

}  // namespace tensorferry::transport
