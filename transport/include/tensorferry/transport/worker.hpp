// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tensorferry/transport/context.hpp"
#include "tensorferry/transport/pacing.hpp"
#include "tensorferry/transport/read.hpp"
#include "tensorferry/transport/remote_key.hpp"
#include "tensorferry/transport/slot_table.hpp"
#include "tensorferry/transport/tcp_socket.hpp"

namespace tensorferry::transport {

class Endpoint;

// An endpoint as the progress thread sees it; everything but `failure` belongs to that thread.
struct Connection {
  Worker* worker = nullptr;
  ucp_ep_h handle = nullptr;
  std::atomic<int> failure{0};
  bool lost = false;                           // UCX has noticed it
  void* closing = nullptr;                     // the close request while it runs
  std::shared_ptr<std::promise<void>> closed;  // set once it has ended
  std::vector<std::shared_ptr<RemoteKey>> keys;
  std::unordered_set<std::shared_ptr<Read>> reads;  // not settled yet
  Bytes address;
  TcpSocket socket;
  int tries = 0;  // to find the socket
};

// A UCP worker and the one thread that touches it.
//
// Other threads post commands; the progress thread runs them, progresses UCX, spins briefly after
// activity and then sleeps on the worker's event.  It never calls out of the core.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  using Clock = std::chrono::steady_clock;
  using Command = std::function<void()>;

  // `destroy` deletes the worker when its last owner goes.  That waits for the thread to end, so the caller must not
  // hold a lock then that the thread may need to let go of a region, a read or a table.
  static std::shared_ptr<Worker> create(std::shared_ptr<Context> context,
                                        std::function<void(Worker*)> destroy = std::default_delete<Worker>());
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Where peers reach this worker.
  const Bytes& address() const noexcept { return address_; }
  const Library& library() const noexcept { return context_->library(); }

  // Makes an endpoint to a peer's worker address.  The peer is contacted in the background.
  std::shared_ptr<Endpoint> connect(const Bytes& address);

  // Answers reads and takes notifications for the slots of `table`, whose pool is `pool`.
  void serve(std::shared_ptr<SlotTable> table, std::shared_ptr<MemoryRegion> pool);

  // Lets served reads end and queued messages leave for up to `timeout`, then closes every endpoint
  // and ends the thread.  Reads that are running end with kClosed, and are settled on return.
  void close(std::chrono::nanoseconds timeout);

 private:
  friend class Endpoint;
  friend class Read;
  struct ServedRead {
    std::shared_ptr<Read> read;
    std::uint8_t* destination;
    std::uint64_t nbytes;
    ucs_memory_type_t type;
  };
  // A read that is being answered: UCX reads the slot until its send has ended.
  struct Serving {
    ucp_ep_h endpoint;  // the one that UCX made for the peer; alive as long as the send
    std::uint64_t request;
    std::uint32_t index;
    bool cut = false;
  };

  // What is known of an endpoint that UCX made for a peer.
  struct Peer {
    TcpSocket socket;
    int tries = 0;
  };
  static constexpr int kTries = 4;  // over other transports there is no socket to be found
  static constexpr std::size_t kPeers = 64;
  static constexpr int kRounds = 1000;

  // How often the thread of a worker that serves looks for what no event tells it.
  static constexpr std::chrono::milliseconds kLook{500};

  explicit Worker(std::shared_ptr<Context> context);

  // Runs `command` on the progress thread; false if the worker is closed.
  bool post(Command command);
  // The same, and waits for it.  Throws what it throws; Error(kClosed) if the worker is closed.
  void call(const Command& command);

  void start();
  void run();
  bool run_commands();
  void sleep();
  bool all_answered(Clock::time_point now);
  void shut_down();

  // Progress thread: endpoints.
  void open_connection(const std::shared_ptr<Connection>& connection, const Bytes& address);
  void close_connection(Connection& connection, bool force);
  bool sweep_failed();
  bool reap_closed();
  static void on_failure(void* argument, ucp_ep_h endpoint, ucs_status_t status);

  // Progress thread: reads.
  void begin(const std::shared_ptr<Read>& read, const std::shared_ptr<Connection>& connection, std::size_t operations);
  void request(const std::shared_ptr<Read>& read, ReadRequest header, std::uint8_t* destination,
               ucs_memory_type_t type);
  void get(const std::shared_ptr<Read>& read, void* destination, std::uint64_t nbytes, std::uint64_t address,
           const RemoteKey& key, ucs_memory_type_t type);
  void end_operation(const std::shared_ptr<Read>& read, int status);
  void fail(const std::shared_ptr<Read>& read, int status);
  void drop_requests(const std::shared_ptr<Read>& read);
  void abandon(const std::shared_ptr<Read>& read);
  void notify(const Connection& connection, const NotifyRequest& message);

  // Progress thread: messages.
  struct Payload {
    const void* data = nullptr;
    std::size_t nbytes = 0;
    ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
  };
  void send(ucp_ep_h endpoint, unsigned id, const void* header, std::size_t header_nbytes, std::uint32_t flags,
            const Payload& payload, std::function<void(int)> done);
  static ucs_status_t on_read(void* argument, const void* header, std::size_t header_nbytes, void* data,
                              std::size_t nbytes, const ucp_am_recv_param_t* parameters);
  static ucs_status_t on_reply(void* argument, const void* header, std::size_t header_nbytes, void* data,
                               std::size_t nbytes, const ucp_am_recv_param_t* parameters);
  static ucs_status_t on_notify(void* argument, const void* header, std::size_t header_nbytes, void* data,
                                std::size_t nbytes, const ucp_am_recv_param_t* parameters);
  void reply(ucp_ep_h endpoint, const ReadRequest& request, int status, std::uint64_t pool_offset);
  void cut_off_overdue(Clock::time_point now);
  void cut_off(ucp_ep_h endpoint, Clock::time_point now);
  void forget_peers();
  void locate(Connection& connection);
  void on_cut_off(std::uint64_t id, int status);
  ucs_status_t receive(std::uint64_t id, const ServedRead& served, void* data, std::uint64_t attributes);
  std::uint64_t random_word();

  const std::shared_ptr<Context> context_;
  const int owner_pid_;
  ucp_worker_h handle_ = nullptr;
  int event_fd_ = -1;
  int wake_fd_ = -1;
  Bytes address_;
  std::unique_ptr<std::thread> thread_;

  std::mutex mutex_;  // guards commands_ and accepting_
  std::vector<Command> commands_;
  bool accepting_ = false;
  std::atomic<bool> sleeping_{false};
  std::mutex close_mutex_;

  // Progress thread only.
  bool stopping_ = false;
  std::optional<Pacing> pacing_;
  Clock::time_point stop_deadline_{};
  void* answers_ = nullptr;  // the request of all_answered
  Clock::time_point answers_deadline_{};
  Clock::time_point last_active_{};
  std::unordered_map<Connection*, std::shared_ptr<Connection>> connections_;
  std::vector<std::shared_ptr<Connection>> closing_;
  std::vector<Connection*> failed_;
  std::unordered_map<std::uint64_t, ServedRead> served_;                // requests without an answer
  std::unordered_map<std::uint64_t, std::shared_ptr<Read>> receiving_;  // requests whose data is coming
  std::list<Serving> serving_;
  std::unordered_map<ucp_ep_h, Peer> peers_;
  std::size_t peers_limit_ = kPeers;
  Clock::time_point looked_{};  // for reads that are overdue
  std::unordered_set<std::shared_ptr<Read>> reads_;
  std::uint64_t sends_running_ = 0;
  std::vector<std::uint64_t> random_;
  std::shared_ptr<SlotTable> table_;
  std::shared_ptr<MemoryRegion> pool_;
};

}  // namespace tensorferry::transport
