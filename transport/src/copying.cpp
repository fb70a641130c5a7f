// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/copying.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

namespace tensorferry::transport {
namespace {

constexpr std::size_t kMostThreads = 4;
// A thread takes some 30 us to start, a CPU 100 us and more to copy this.
constexpr std::size_t kShare = std::size_t{4} << 20;

std::size_t cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;  // more CPUs than fit into the set
  return static_cast<std::size_t>(CPU_COUNT(&set));
}

// Copies the bytes from first to last, counted through all copies.
void copy_range(const std::vector<Copy>& copies, std::size_t first, std::size_t last) {
  std::size_t start = 0;
  for (const Copy& copy : copies) {
    const std::size_t end = start + copy.nbytes;
    const std::size_t from = std::max(first, start), to = std::min(last, end);
    if (from < to) {
      std::memcpy(static_cast<char*>(copy.destination) + (from - start),
                  static_cast<const char*>(copy.source) + (from - start), to - from);
    }
    if (end >= last) return;
    start = end;
  }
}

}  // namespace

void copy_all(const std::vector<Copy>& copies) {
  std::size_t total = 0;
  for (const Copy& copy : copies) total += copy.nbytes;
  std::size_t shares = 1;
  if (total >= 2 * kShare) shares = std::min({kMostThreads, cpus(), total / kShare});
  const std::size_t share = (total / shares + 4095) / 4096 * 4096;
  std::vector<std::thread> threads;
  std::size_t first = 0;
  try {
    for (; threads.size() + 1 < shares; first += share) {
      threads.emplace_back([&copies, first, share] { copy_range(copies, first, first + share); });
    }
  } catch (const std::system_error&) {
    // No thread to be had: the rest is copied here.
  }
  copy_range(copies, first, total);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tensorferry::transport
