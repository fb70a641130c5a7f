// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/completion_queue.hpp"

namespace tensorferry::transport {

void CompletionQueue::push(std::uint64_t number) {
  const std::lock_guard<std::mutex> guard(mutex_);
  numbers_.push_back(number);
  arrived_.notify_one();
}

std::vector<std::uint64_t> CompletionQueue::take(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  arrived_.wait_until(lock, deadline, [this] { return !numbers_.empty() || woken_; });
  woken_ = false;
  std::vector<std::uint64_t> taken;
  taken.swap(numbers_);
  return taken;
}

void CompletionQueue::wake() {
  const std::lock_guard<std::mutex> guard(mutex_);
  woken_ = true;
  arrived_.notify_one();
}

}  // namespace tensorferry::transport
