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
  send(endpoint, kReplyMessage, &header, sizeof header, 0, payload,
       [table = table_, index = request.index, reading](int) {
         if (reading) table->end_read(index);
       });
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
  if (found.empty()) return UCS_OK;  // abandoned, or never asked for
  const ServedRead served = std::move(found.mapped());
  int status = checked_status(reply.status);
  if (status == 0 && nbytes != served.nbytes) status = kProtocolViolation;
  if (status == 0 && nbytes > 0) return worker->receive(served, data, parameters->recv_attr);
  worker->end_operation(served.read, status);
  return UCS_OK;
}

ucs_status_t Worker::receive(const ServedRead& served, void* data, std::uint64_t attributes) {
  const bool rendezvous = (attributes & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (!rendezvous && served.type == UCS_MEMORY_TYPE_HOST) {
    std::memcpy(served.destination, data, served.nbytes);
    end_operation(served.read, 0);
    return UCS_OK;
  }
  struct Receiving {
    Worker* worker;
    std::shared_ptr<Read> read;
  };
  auto receiving = std::make_unique<Receiving>(Receiving{this, served.read});
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.memory_type = served.type;
  params.user_data = receiving.get();
  params.cb.recv_am = [](void* request, ucs_status_t status, std::size_t, void* argument) {
    const std::unique_ptr<Receiving> ended(static_cast<Receiving*>(argument));
    ended->worker->library().ucp_request_free(request);
    ended->worker->end_operation(ended->read, status);
  };
  void* request = library().ucp_am_recv_data_nbx(handle_, data, served.destination, served.nbytes, &params);
  if (UCS_PTR_IS_PTR(request)) {
    (void)receiving.release();  // ended by the callback
    return UCS_INPROGRESS;
  }
  end_operation(served.read, UCS_PTR_RAW_STATUS(request));
  return UCS_OK;
}

}  // namespace tensorferry::transport
