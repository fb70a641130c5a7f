// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/worker.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <utility>

#include "tensorferry/transport/endpoint.hpp"

namespace tensorferry::transport {
namespace {

// While it closes it looks this often.
constexpr std::chrono::microseconds kClosingPause{50};

}  // namespace

std::shared_ptr<Worker> Worker::create(std::shared_ptr<Context> context, std::function<void(Worker*)> destroy) {
  std::shared_ptr<Worker> worker(new Worker(std::move(context)), std::move(destroy));
  worker->start();
  return worker;
}

Worker::Worker(std::shared_ptr<Context> context) : context_(std::move(context)), owner_pid_(getpid()) {
  const Library& ucx = library();
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucx.check(ucx.ucp_worker_create(context_->handle(), &params, &handle_), "creating a UCX worker");
  try {
    ucx.check(ucx.ucp_worker_get_efd(handle_, &event_fd_), "asking for the worker's event");
    ucp_worker_attr_t attributes{};
    attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
    ucx.check(ucx.ucp_worker_query(handle_, &attributes), "asking for the worker's address");
    const auto* first = reinterpret_cast<const std::uint8_t*>(attributes.address);
    address_.assign(first, first + attributes.address_length);
    ucx.ucp_worker_release_address(handle_, attributes.address);
    wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_fd_ < 0) throw Error(kNoMemory, std::string("creating an event: ") + std::strerror(errno));
  } catch (...) {
    ucx.ucp_worker_destroy(handle_);
    throw;
  }
}

Worker::~Worker() {
  if (getpid() != owner_pid_) {
    // In a forked child the thread does not exist and UCX must not be touched: both are left alone.
    thread_.release();
    return;
  }
  close(std::chrono::nanoseconds::zero());
  ::close(wake_fd_);
}

void Worker::start() {
  const auto set_handler = [this](unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                        UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    params.id = id;
    params.cb = callback;
    params.arg = this;
    params.flags = UCP_AM_FLAG_PERSISTENT_DATA;
    library().check(library().ucp_worker_set_am_recv_handler(handle_, &params), "setting a message handler");
  };
  try {
    // UCX, up to 1.20 at least, looks up the handler of any id that a peer sends before it checks the id, and
    // before 1.17 UCX leaves some of them uninitialized: a peer could crash this process or make it call any address.
    // So every id of 16 bits gets a handler (2.5 MiB), the largest first; no id makes UCX log a warning then.
    constexpr unsigned kIds = 1U << 16;
    for (unsigned id = kIds; id-- > 0;) {
      set_handler(id, [](void*, const void*, std::size_t, void*, std::size_t, const ucp_am_recv_param_t*) {
        return UCS_OK;  // dropped
      });
    }
    set_handler(kReadMessage, on_read);
    set_handler(kReplyMessage, on_reply);
    set_handler(kNotifyMessage, on_notify);
  } catch (...) {
    library().ucp_worker_destroy(handle_);
    handle_ = nullptr;
    throw;
  }
  accepting_ = true;
  // Signals go to the threads of the program.
  sigset_t all;
  sigset_t previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  thread_ = std::make_unique<std::thread>([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  pthread_setname_np(thread_->native_handle(), "tensorferry-ucx");
}

bool Worker::post(Command command) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!accepting_) return false;
    commands_.push_back(std::move(command));
  }
  // Pairs with sleep(): either the thread sees the command, or we see that it sleeps.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_relaxed)) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
  }
  return true;
}

void Worker::call(const Command& command) {
  std::promise<void> promise;
  std::future<void> outcome = promise.get_future();
  const bool posted = post([&] {
    try {
      command();
      promise.set_value();
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  });
  if (!posted) throw Error(kClosed, "the worker is closed");
  outcome.get();
}

std::shared_ptr<Endpoint> Worker::connect(const Bytes& address) {
  auto connection = std::make_shared<Connection>();
  connection->worker = this;
  call([&] {
    if (table_ == nullptr) pacing_->take_side(1);
    open_connection(connection, address);
  });
  return std::make_shared<Endpoint>(shared_from_this(), std::move(connection));
}

void Worker::serve(std::shared_ptr<SlotTable> table, std::shared_ptr<MemoryRegion> pool) {
  call([&] {
    pacing_->take_side(0);
    table_ = std::move(table);
    pool_ = std::move(pool);
  });
}

void Worker::close(std::chrono::nanoseconds timeout) {
  const std::lock_guard<std::mutex> guard(close_mutex_);
  if (thread_ == nullptr) return;
  post([this, timeout] {
    stopping_ = true;
    stop_deadline_ = Clock::now() + timeout;
  });
  thread_->join();
  thread_.reset();
}

void Worker::run() {
  pacing_.emplace();
  bool closing = false;
  for (;;) {
    bool busy = run_commands();
    while (library().ucp_worker_progress(handle_) != 0) busy = true;
    busy = sweep_failed() || busy;
    busy = reap_closed() || busy;
    const Clock::time_point now = Clock::now();
    cut_off_overdue(now);
    if (stopping_) {
      const bool expired = now >= stop_deadline_;
      const bool serving = table_ != nullptr && table_->running_reads() > 0;
      if (!closing && (expired || !serving)) {
        closing = true;
        for (auto& [key, connection] : std::unordered_map(connections_)) close_connection(*connection, expired);
      }
      if (expired) break;
      if (closing && closing_.empty() && sends_running_ == 0 && all_answered(now)) break;
      if (!busy) std::this_thread::sleep_for(kClosingPause);
      continue;
    }
    if (busy) {
      last_active_ = now;
      continue;
    }
    // Whoever waited for the last transfer may need this CPU now.
    if (reads_.empty() && serving_.empty()) pacing_->end_bulk();
    if (now - last_active_ >= pacing_->spin()) {
      sleep();
      const Clock::time_point woken = Clock::now();
      pacing_->slept(woken - last_active_);
      last_active_ = woken;
    }
  }
  shut_down();
}

bool Worker::run_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    commands.swap(commands_);
  }
  for (const Command& command : commands) command();
  return !commands.empty();
}

void Worker::sleep() {
  sleeping_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool idle;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    idle = commands_.empty();
  }
  // Arming tells some RDMA devices, Soft-RoCE for one, to signal only what completes from then on.  So what completed
  // just before is looked for once more.
  if (idle && library().ucp_worker_arm(handle_) == UCS_OK && library().ucp_worker_progress(handle_) == 0) {
    pollfd events[2] = {{event_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    // Who is being served may have to be cut off, with no event to say so.  And a peer that connects without
    // UCX's error handling and leaves makes UCX 1.22 forget to signal connections that come later.
    poll(events, 2, table_ == nullptr ? -1 : static_cast<int>(kLook.count()));
  }
  sleeping_.store(false, std::memory_order_relaxed);
  std::uint64_t count;
  [[maybe_unused]] const ssize_t drained = read(wake_fd_, &count, sizeof count);
}

// UCX 1.13 aborts where a worker is destroyed while what it answers to a peer that connects is still queued.
// So this waits until it is on its way, for a second at most: the peer may have stopped.
bool Worker::all_answered(Clock::time_point now) {
  if (table_ == nullptr || !library().older_than(14)) return true;
  if (answers_ == nullptr) {
    if (answers_deadline_ != Clock::time_point{}) return true;
    answers_deadline_ = now + std::chrono::seconds(1);
    const ucp_request_param_t parameters{};
    answers_ = library().ucp_worker_flush_nbx(handle_, &parameters);
    if (UCS_PTR_IS_ERR(answers_)) answers_ = nullptr;
    if (answers_ == nullptr) return true;
  }
  return now >= answers_deadline_ || library().ucp_request_check_status(answers_) != UCS_INPROGRESS;
}

// The last thing the thread does: nobody may post any more, and what UCX did not finish by itself
// is finished by destroying the worker.
void Worker::shut_down() {
  std::vector<Command> late;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    accepting_ = false;
    late.swap(commands_);
  }
  for (const Command& command : late) command();
  for (auto& [key, connection] : std::unordered_map(connections_)) close_connection(*connection, true);
  for (int round = 0; round < 1000 && !closing_.empty(); ++round) {
    library().ucp_worker_progress(handle_);
    reap_closed();
  }
  for (const auto& connection : closing_) {
    library().ucp_request_free(connection->closing);  // or destroying the worker aborts (UCX 1.13)
    for (const auto& key : connection->keys) library().ucp_rkey_destroy(key->handle);
  }
  if (answers_ != nullptr) library().ucp_request_free(answers_);
  library().ucp_worker_destroy(handle_);
  handle_ = nullptr;
  served_.clear();
  for (const std::shared_ptr<Read>& read : reads_) {
    read->finish(kClosed);
    read->settled_.store(true, std::memory_order_release);
    read->connection_.reset();
  }
  reads_.clear();
  for (const auto& connection : closing_) {
    connection->reads.clear();
    if (connection->closed) connection->closed->set_value();
  }
  closing_.clear();
  pool_.reset();
}

std::uint64_t Worker::random_word() {
  if (random_.empty()) {
    random_.resize(64);
    fill_random(random_.data(), random_.size() * sizeof random_.front());
  }
  const std::uint64_t word = random_.back();
  random_.pop_back();
  return word;
}

}  // namespace tensorferry::transport
