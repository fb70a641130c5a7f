// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tensorferry/transport/completion_queue.hpp"
#include "tensorferry/transport/memory_region.hpp"
#include "tensorferry/transport/notification.hpp"
#include "tensorferry/transport/remote_key.hpp"

namespace tensorferry::transport {

class Worker;
struct Connection;

// `nbytes` from `source` in the remote slot to `destination` in the local region.
struct Span {
  std::uint64_t source;
  std::uint64_t destination;
  std::uint64_t nbytes;
};

// A batch of reads posted as one.
//
// It ends for the caller with the first error, the last success, the deadline, or cancel(),
// whichever comes first.  It is settled once UCX has let go of the destination, which it keeps
// alive until then.
class Read : public std::enable_shared_from_this<Read> {
 public:
  Read(const std::shared_ptr<Worker>& worker, std::shared_ptr<MemoryRegion> destination);
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;

  // False if the time is up and the batch is still running.  Throws Error on any failure.
  bool wait_for(std::chrono::nanoseconds timeout);

  // Gives the batch up with this status; has no effect once it has ended.
  void abandon(int status);

  bool settled() const noexcept { return settled_.load(std::memory_order_acquire); }

  // Pushes `number` once the batch has ended for the caller; at once if it has already.  A second
  // watcher takes the place of the first.
  void watch(std::shared_ptr<CompletionQueue> queue, std::uint64_t number);

 private:
  friend class Worker;
  friend class Endpoint;

  // Throws Error(kAccessRefused) if the span leaves the slot, or memory of `room` bytes.
  static void check(const Ticket& ticket, const Span& span, std::uint64_t room);

  // Ends the batch for the caller; false if it had ended before.  `first` is done when that is certain, and
  // before anyone is woken: who wakes up may take this thread's CPU for as long as it likes.
  bool finish(int status, const std::function<void()>& first = {});
  bool finished();

  // Weak: the worker keeps its running reads alive, and must not die on its own thread.
  const std::weak_ptr<Worker> worker_;
  const Library& library_;
  const std::shared_ptr<MemoryRegion> destination_;
  std::vector<std::shared_ptr<Memory>> memories_;  // or these, one for each span
  // Progress thread only, once the batch is posted.
  std::shared_ptr<Connection> connection_;
  std::size_t outstanding_ = 0;
  int error_ = 0;                        // the first one
  std::vector<std::uint64_t> requests_;  // served reads without an answer
  std::chrono::steady_clock::time_point begun_{};
  std::unique_ptr<NotifyRequest> release_;     // to be sent once the batch has ended well for the caller
  std::unique_ptr<ReadRequest> validation_;    // to be sent after the data if that took long
  std::shared_ptr<const RemoteKey> word_key_;  // set while the generation word is still to be read
  std::uint64_t word_address_ = 0;
  std::uint64_t word_ = 0;
  std::uint64_t expected_word_ = 0;

  std::mutex mutex_;
  std::condition_variable ended_;
  std::shared_ptr<CompletionQueue> watcher_;
  std::uint64_t number_ = 0;  // to be pushed there
  bool finished_ = false;
  int status_ = 0;
  std::atomic<bool> settled_{false};
};

}  // namespace tensorferry::transport
