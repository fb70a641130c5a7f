// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORFERRY_TRANSPORT_PACING_HPP
#define TENSORFERRY_TRANSPORT_PACING_HPP

#include <sched.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tensorferry::transport {

// How long a progress thread looks for work before it sleeps, and on which CPUs it runs.
//
// One thread's; it must be made by it.
class Pacing {
 public:
  // Transfers from here on are bulk: their bytes keep the threads at both ends busy for longer than it takes
  // the scheduler to find out that they should not share a CPU.
  static constexpr std::uint64_t kBulk = 512 << 10;

  static constexpr std::chrono::microseconds kLongestSpin{200};

  explicit Pacing(std::size_t few_cpus = 3);

  // Says which end of transfers this thread is at: the serving one or the reading one.
  void take_side(unsigned side) noexcept { side_ = static_cast<int>(side % 2); }

  // Begins bulk, until end_bulk(): where there are few CPUs, the two ends keep to different ones.
  void begin_bulk();
  void end_bulk();

  // For how long to look for work after the last was done.
  std::chrono::nanoseconds spin() const noexcept;

  // Says how long it was from the last work to the next, and that the thread slept meanwhile.
  void slept(std::chrono::nanoseconds idle) noexcept;

 private:
  cpu_set_t allowed_{};
  int cpus_ = 0;  // 0 where they cannot be told
  bool few_;
  int side_ = -1;
  bool bulk_ = false;
  std::chrono::nanoseconds spin_{0};
};

}  // namespace tensorferry::transport

#endif  // TENSORFERRY_TRANSPORT_PACING_HPP
