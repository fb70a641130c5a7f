// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/pacing.hpp"

#include <algorithm>

namespace tensorferry::transport {
namespace {

// On up to so many CPUs the two ends of a bulk transfer often land on one and take turns instead of working
// side by side, which made reads of 16 MiB two to three times as long.
constexpr int kCrowded = 8;

constexpr std::chrono::microseconds kShortestSpin{25};

}  // namespace

Pacing::Pacing(std::size_t few_cpus) {
  if (sched_getaffinity(0, sizeof allowed_, &allowed_) == 0) cpus_ = CPU_COUNT(&allowed_);
  few_ = cpus_ != 0 && static_cast<std::size_t>(cpus_) <= few_cpus;
}

void Pacing::begin_bulk() {
  if (bulk_) return;
  bulk_ = true;
  if (side_ < 0 || cpus_ < 2 || cpus_ > kCrowded) return;
  cpu_set_t half;
  CPU_ZERO(&half);
  int position = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed_) && position++ % 2 == side_) CPU_SET(cpu, &half);
  }
  sched_setaffinity(0, sizeof half, &half);
}

void Pacing::end_bulk() {
  if (!bulk_) return;
  bulk_ = false;
  // Small messages are fastest where the thread that waits for them is: waking another CPU takes long.
  if (side_ >= 0 && cpus_ >= 2 && cpus_ <= kCrowded) sched_setaffinity(0, sizeof allowed_, &allowed_);
}

std::chrono::nanoseconds Pacing::spin() const noexcept {
  if (bulk_) return kLongestSpin;
  // On few CPUs a spinning thread takes the time of the one whose work it waits for.
  return few_ ? std::chrono::nanoseconds::zero() : spin_;
}

void Pacing::slept(std::chrono::nanoseconds idle) noexcept {
  if (idle <= kLongestSpin) {
    spin_ = std::clamp<std::chrono::nanoseconds>(2 * spin_, kShortestSpin, kLongestSpin);
  } else {
    spin_ /= 2;
    if (spin_ < kShortestSpin) spin_ = std::chrono::nanoseconds::zero();
  }
}

}  // namespace tensorferry::transport
