// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/pacing.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "tensorferry/transport/copying.hpp"

using namespace tensorferry::transport;
using namespace std::chrono_literals;

namespace {

cpu_set_t allowed_now() {
  cpu_set_t set;
  REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
  return set;
}

}  // namespace

TEST_CASE("a thread spins for longer the more often work comes soon, and not at all if it does not") {
  Pacing pacing(0);
  CHECK(pacing.spin() == 0ns);
  pacing.slept(100us);
  CHECK(pacing.spin() == 25us);
  for (int i = 0; i < 10; ++i) pacing.slept(100us);
  CHECK(pacing.spin() == Pacing::kLongestSpin);
  for (int i = 0; i < 10; ++i) pacing.slept(1s);
  CHECK(pacing.spin() == 0ns);
}

TEST_CASE("on few CPUs a thread spins only in bulk") {
  Pacing pacing(CPU_SETSIZE);
  for (int i = 0; i < 10; ++i) pacing.slept(100us);
  CHECK(pacing.spin() == 0ns);
  pacing.begin_bulk();
  CHECK(pacing.spin() == Pacing::kLongestSpin);
  pacing.end_bulk();
  CHECK(pacing.spin() == 0ns);
}

TEST_CASE("the two sides of a bulk transfer share no CPU where there are few, and may use all afterwards") {
  std::thread([] {  // a thread of its own, whose CPUs nobody else cares about
    const cpu_set_t before = allowed_now();
    const int cpus = CPU_COUNT(&before);
    cpu_set_t halves[2];
    for (unsigned side : {0u, 1u}) {
      Pacing pacing;
      pacing.take_side(side);
      pacing.begin_bulk();
      pacing.begin_bulk();
      halves[side] = allowed_now();
      pacing.end_bulk();
      const cpu_set_t after = allowed_now();
      CHECK(CPU_EQUAL(&after, &before));
    }
    cpu_set_t both;
    CPU_AND(&both, &halves[0], &halves[1]);
    if (cpus >= 2 && cpus <= 8) {
      CHECK(CPU_COUNT(&both) == 0);
    } else {
      CHECK(CPU_EQUAL(&both, &before));
    }
  })
      .join();
}

TEST_CASE("copies of any sizes are whole, divided or not") {
  for (const std::size_t unit : {std::size_t{1}, std::size_t{1000}, std::size_t{3} << 20}) {
    std::vector<std::vector<char>> sources, destinations;
    for (std::size_t i = 0; i < 9; ++i) {
      const std::size_t nbytes = i * unit + (i % 2);
      sources.emplace_back(nbytes, static_cast<char>(i + 1));
      destinations.emplace_back(nbytes + 1, '\0');
    }
    std::vector<Copy> copies;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      copies.push_back({destinations[i].data(), sources[i].data(), sources[i].size()});
    }
    copy_all(copies);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      CHECK(std::memcmp(destinations[i].data(), sources[i].data(), sources[i].size()) == 0);
      CHECK(destinations[i].back() == '\0');
    }
  }
  copy_all({});
}
