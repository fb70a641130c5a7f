// SPDX-License-Identifier: Apache-2.0
#include "tensorferry/transport/memory.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "tensorferry/transport/peer_pool.hpp"

using namespace tensorferry::transport;
using namespace std::chrono_literals;

namespace {

constexpr Identifier kUid{7};
constexpr std::size_t kPool = 1 << 16;

// A producer in a process of its own, which writes one slot and tells its address.
struct Child {
  int pid;
  int to_child[2];
  int from_child[2];
  PoolAddress address{};
  Ticket ticket;

  Child() {
    REQUIRE(pipe(to_child) == 0);
    REQUIRE(pipe(from_child) == 0);
    pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      auto pool = Memory::allocate_shared(kPool);
      std::memset(pool->data(), 0x5a, kPool);
      SlotTable table(kPool, 8, kUid, true);
      const Ticket admitted = table.admit(0, kPool, 60s);
      const PoolAddress mine{getpid(), table.control()->descriptor(), pool->descriptor(), kUid, kPool, 8};
      if (write(from_child[1], &mine, sizeof mine) < 0 || write(from_child[1], &admitted, sizeof admitted) < 0)
        _exit(1);
      char command = 0;
      while (read(to_child[0], &command, 1) == 1) {
        if (command == 'w') table.withdraw(admitted.index, admitted.generation, false);
        if (command == 'r') table.withdraw(admitted.index, admitted.generation, true);
        if (command == 'c') table.close();
        if (write(from_child[1], &command, 1) < 0) break;
      }
      _exit(0);
    }
    REQUIRE(read(from_child[0], &address, sizeof address) == sizeof address);
    REQUIRE(read(from_child[0], &ticket, sizeof ticket) == sizeof ticket);
  }
  void tell(char command) {
    REQUIRE(write(to_child[1], &command, 1) == 1);
    REQUIRE(read(from_child[0], &command, 1) == 1);
  }
  void end(int signal) {
    if (pid <= 0) return;
    kill(pid, signal);
    waitpid(pid, nullptr, 0);
    pid = 0;
  }
  ~Child() {
    end(SIGKILL);
    for (const int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(fd);
  }
};

}  // namespace

TEST_CASE("private memory is readable, writable and zero") {
  const auto memory = Memory::allocate(3 << 20);
  CHECK(memory->nbytes() == 3 << 20);
  CHECK(memory->data()[memory->nbytes() - 1] == 0);
  memory->data()[0] = 1;
  CHECK(memory->descriptor() == -1);
}

TEST_CASE("memory that cannot be had is an error, not a crash") {
  CHECK_THROWS_AS(Memory::allocate(std::size_t{1} << 60), Error);
  CHECK_THROWS_AS(Memory::allocate_shared(std::size_t{1} << 62), Error);
}

TEST_CASE("shared memory can neither shrink nor be mapped writable by others") {
  const auto memory = Memory::allocate_shared(kPool);
  CHECK(ftruncate(memory->descriptor(), 0) != 0);
  const std::string path = "/proc/self/fd/" + std::to_string(memory->descriptor());
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    CHECK(mmap(nullptr, kPool, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    close(fd);
  }
}

TEST_CASE("another process's pool is read where it was written") {
  Child child;
  const auto peer = PeerPool::open(child.address);
  CHECK(peer->verify(child.ticket.index, child.ticket.generation) == 0);
  CHECK(peer->pool()->data()[kPool - 1] == 0x5a);
  CHECK(peer->verify(child.ticket.index, child.ticket.generation + 1) == kLeaseExpired);
  CHECK(peer->verify(0xffffffff, 1) == kLeaseExpired);
  child.tell('w');
  CHECK(peer->verify(child.ticket.index, child.ticket.generation) == kLeaseExpired);
}

TEST_CASE("another process's revoked slot is known as such") {
  Child child;
  const auto peer = PeerPool::open(child.address);
  child.tell('r');
  CHECK(peer->verify(child.ticket.index, child.ticket.generation) == kLeaseRevoked);
  CHECK(peer->verify(child.ticket.index, child.ticket.generation + 1) == kLeaseExpired);
}

TEST_CASE("a producer that closed is gone") {
  Child child;
  const auto peer = PeerPool::open(child.address);
  child.tell('c');
  CHECK(peer->alive() == kPeerGone);
  CHECK_THROWS_AS(PeerPool::open(child.address), Error);
}

TEST_CASE("a producer that was killed is gone, although its memory is still mapped") {
  Child child;
  const auto peer = PeerPool::open(child.address);
  child.end(SIGKILL);
  CHECK(peer->verify(child.ticket.index, child.ticket.generation) == kPeerGone);
  CHECK(peer->pool()->data()[0] == 0x5a);
  CHECK_THROWS_AS(PeerPool::open(child.address), Error);
}

TEST_CASE("only sealed memory of the right size, producer and process is mapped") {
  Child child;
  PoolAddress wrong = child.address;
  wrong.pool_nbytes /= 2;
  CHECK_THROWS_AS(PeerPool::open(wrong), Error);
  wrong = child.address;
  wrong.uid[0] ^= 1;
  CHECK_THROWS_AS(PeerPool::open(wrong), Error);
  wrong = child.address;
  wrong.slots += 1;
  CHECK_THROWS_AS(PeerPool::open(wrong), Error);
  wrong = child.address;
  wrong.pool_descriptor = child.from_child[1];  // a pipe: must not block either
  CHECK_THROWS_AS(PeerPool::open(wrong), Error);
  wrong = child.address;
  wrong.control_descriptor = 0;
  CHECK_THROWS_AS(PeerPool::open(wrong), Error);
  wrong = child.address;
  wrong.pid = 0x3fffffff;
  CHECK_THROWS_AS(PeerPool::open(wrong), Error);
}

TEST_CASE("a pool of one's own process can be mapped as well") {
  auto pool = Memory::allocate_shared(kPool);
  SlotTable table(kPool, 8, kUid, true);
  const Ticket ticket = table.admit(0, kPool, 60s);
  const auto peer = PeerPool::open({getpid(), table.control()->descriptor(), pool->descriptor(), kUid, kPool, 8});
  pool->data()[5] = 42;
  CHECK(peer->pool()->data()[5] == 42);
  CHECK(peer->verify(ticket.index, ticket.generation) == 0);
}
