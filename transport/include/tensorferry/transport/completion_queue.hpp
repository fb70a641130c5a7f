// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tensorferry::transport {

// Numbers of things that have happened to reads, for one thread that waits for many of them.
//
// Thread-safe.  Progress threads push, and never wait for whoever takes.
class CompletionQueue {
 public:
  void push(std::uint64_t number);

  // Waits for numbers and takes all there are; empty on timeout and after wake().
  std::vector<std::uint64_t> take(std::chrono::nanoseconds timeout);

  // Makes a take() that is running, or else the next one, return at once.
  void wake();

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::uint64_t> numbers_;
  bool woken_ = false;
};

}  // namespace tensorferry::transport
