// SPDX-License-Identifier: Apache-2.0
// A client that calls UCX by itself, bound by nothing that ours checks, against a served worker.
//
// TENSORFERRY_HOSTILE_MESSAGES sets how many random messages it sends (20000), TENSORFERRY_FUZZ_SEED
// which ones (1).
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tensorferry/transport/endpoint.hpp"
#include "tensorferry/transport/worker.hpp"

using namespace tensorferry::transport;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPool = 4 << 20;
constexpr std::size_t kHuge = 64 << 20;
constexpr std::size_t kGrowth = 128 << 20;  // allocators and UCX's pools of descriptors stay far below it
constexpr Identifier kUid{9, 8, 7, 6};
constexpr std::uint8_t kGiven = 0x11;
constexpr std::uint8_t kSecret = 0x5a;

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::stoull(value) : otherwise;
}

std::shared_ptr<const Library> library() {
  const char* path = std::getenv("TENSORFERRY_TEST_UCX");
  return Library::load(path != nullptr ? path : "libucp.so.0");
}

std::shared_ptr<Context> make_context(bool remote_memory) {
  return Context::create(library(), {}, {{"TLS", "tcp"}, {"NET_DEVICES", "lo"}}, remote_memory);
}

std::size_t resident_nbytes() {
  unsigned long pages = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r"); file != nullptr) {
    if (std::fscanf(file, "%*s %lu", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return pages * 4096;
}

// A producer with one slot that the attacker was given and one that it was not.
struct Target {
  explicit Target(bool remote_memory = false)
      : context(make_context(remote_memory)),
        memory(Memory::allocate_shared(kPool)),
        region(MemoryRegion::create(context, memory, UCS_MEMORY_TYPE_HOST)),
        table(std::make_shared<SlotTable>(kPool, 16, kUid, true)),
        worker(Worker::create(context)) {
    std::memset(memory->data(), kGiven, kPool / 2);
    std::memset(memory->data() + kPool / 2, kSecret, kPool / 2);
    given = table->admit(0, kPool / 2, 1h);
    secret = table->admit(kPool / 2, kPool / 2, 1h);
    worker->serve(table, region);
    before.assign(memory->data(), memory->data() + kPool);
  }

  bool unchanged() const { return std::memcmp(memory->data(), before.data(), kPool) == 0; }

  // Nothing of it is other than before, and an honest consumer gets its bytes.
  void check_unharmed() {
    CHECK(unchanged());
    for (int i = 0; i < 4000 && table->running_reads() > 0; ++i) std::this_thread::sleep_for(5ms);
    CHECK(table->running_reads() == 0);
    CHECK(table->notifications(0s).empty());
    const auto own = make_context(false);
    const auto landing = Memory::allocate(kPool);
    const auto destination = MemoryRegion::create(own, landing, UCS_MEMORY_TYPE_HOST);
    const auto reader = Worker::create(own);
    const auto endpoint = reader->connect(worker->address());
    const auto read = endpoint->read_served(secret, {{0, 0, kPool / 2}}, destination);
    CHECK(read->wait_for(60s));
    CHECK(std::memcmp(landing->data(), memory->data() + kPool / 2, kPool / 2) == 0);
    endpoint->close(5s);
    reader->close(5s);
  }

  std::shared_ptr<Context> context;
  std::shared_ptr<Memory> memory;
  std::shared_ptr<MemoryRegion> region;
  std::shared_ptr<SlotTable> table;
  std::shared_ptr<Worker> worker;
  Ticket given;
  Ticket secret;
  std::vector<std::uint8_t> before;
};

// Functions of UCX that the core has no use for.
template <typename Function>
Function* more_of_ucx(const char* name) {
  void* handle = dlopen(library()->path().c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* function = reinterpret_cast<Function*>(dlsym(handle, name));
  REQUIRE(static_cast<bool>(function));
  return function;
}

// UCX by hand, on the thread of the test: context, worker, endpoint and memory of the attacker's own.
class Attacker {
 public:
  explicit Attacker(const Bytes& address, ucp_err_handling_mode_t mode = UCP_ERR_HANDLING_MODE_PEER) {
    ucp_config_t* config = nullptr;
    ucx.check(ucx.ucp_config_read(nullptr, nullptr, &config), "config");
    ucx.check(ucx.ucp_config_modify(config, "TLS", "tcp"), "TLS");
    ucx.check(ucx.ucp_config_modify(config, "NET_DEVICES", "lo"), "NET_DEVICES");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_AMO64 | UCP_FEATURE_TAG;
    ucx.check(ucx.ucp_init_version(1, 12, &params, config, &context_), "context");
    ucx.ucp_config_release(config);
    ucp_worker_params_t worker_params{};
    ucx.check(ucx.ucp_worker_create(context_, &worker_params, &worker_), "worker");
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kReplyMessage;
    handler.cb = on_reply;
    handler.arg = this;
    ucx.check(ucx.ucp_worker_set_am_recv_handler(worker_, &handler), "handler");
    ucp_ep_params_t endpoint{};
    endpoint.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    endpoint.address = reinterpret_cast<const ucp_address_t*>(address.data());
    endpoint.err_mode = mode;
    endpoint.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) { static_cast<Attacker*>(self)->failed_ = true; };
    endpoint.err_handler.arg = this;
    ucx.check(ucx.ucp_ep_create(worker_, &endpoint, &endpoint_), "endpoint");
    ucp_mem_map_params_t map{};
    map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    map.address = memory_.data();
    map.length = memory_.size();
    ucx.check(ucx.ucp_mem_map(context_, &map, &region_), "region");
    void* packed = nullptr;
    std::size_t nbytes = 0;
    ucx.check(ucx.ucp_rkey_pack(context_, region_, &packed, &nbytes), "pack");
    const ucs_status_t status = ucx.ucp_ep_rkey_unpack(endpoint_, packed, &key_);
    ucx.ucp_rkey_buffer_release(packed);
    ucx.check(status, "unpack");
  }

  ~Attacker() {
    ucx.ucp_rkey_destroy(key_);
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* closing = ucx.ucp_ep_close_nbx(endpoint_, &params);
    if (UCS_PTR_IS_PTR(closing)) {
      const auto deadline = Clock::now() + 20s;
      while (ucx.ucp_request_check_status(closing) == UCS_INPROGRESS && Clock::now() < deadline) progress();
      ucx.ucp_request_free(closing);
    }
    ucx.ucp_mem_unmap(context_, region_);
    ucx.ucp_worker_destroy(worker_);
    ucx.ucp_cleanup(context_);
  }
  Attacker(const Attacker&) = delete;
  Attacker& operator=(const Attacker&) = delete;

  // Sends a message; the payload is whatever the attacker has.
  void send(unsigned id, std::vector<std::uint8_t> header, std::size_t payload, std::uint32_t flags) {
    REQUIRE(payload <= memory_.size());
    auto sending = std::make_unique<Sending>(Sending{this, std::move(header)});
    const auto params = parameters(sending.get(), flags);
    ended_now(ucx.ucp_am_send_nbx(endpoint_, id, sending->header.data(), sending->header.size(), memory_.data(),
                                  payload, &params),
              sending);
  }

  template <typename Message>
  void send_message(unsigned id, const Message& message, std::uint32_t flags = UCP_AM_SEND_FLAG_REPLY) {
    const auto* first = reinterpret_cast<const std::uint8_t*>(&message);
    send(id, {first, first + sizeof message}, 0, flags);
  }

  void put(const void* target, std::size_t nbytes) {
    static auto* const put_nbx = more_of_ucx<decltype(ucp_put_nbx)>("ucp_put_nbx");
    auto sending = std::make_unique<Sending>(Sending{this, {}});
    const auto params = parameters(sending.get(), 0);
    ended_now(put_nbx(endpoint_, memory_.data(), nbytes, reinterpret_cast<std::uint64_t>(target), key_, &params),
              sending);
  }

  void add(const void* target) {
    static auto* const atomic_op = more_of_ucx<decltype(ucp_atomic_op_nbx)>("ucp_atomic_op_nbx");
    auto sending = std::make_unique<Sending>(Sending{this, {}});
    auto params = parameters(sending.get(), 0);
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    params.datatype = ucp_dt_make_contig(8);
    ended_now(atomic_op(endpoint_, UCP_ATOMIC_OP_ADD, memory_.data(), 1, reinterpret_cast<std::uint64_t>(target), key_,
                        &params),
              sending);
  }

  void tag(std::size_t nbytes) {
    static auto* const tag_send = more_of_ucx<decltype(ucp_tag_send_nbx)>("ucp_tag_send_nbx");
    auto sending = std::make_unique<Sending>(Sending{this, {}});
    const auto params = parameters(sending.get(), 0);
    ended_now(tag_send(endpoint_, memory_.data(), nbytes, 1, &params), sending);
  }

  void progress() {
    if (ucx.ucp_worker_progress(worker_) == 0) std::this_thread::yield();
  }

  // Progresses until at most this many operations are running; false after 60 s.
  bool drain(std::size_t most = 0) {
    const auto deadline = Clock::now() + 60s;
    while (running_ > most && Clock::now() < deadline) progress();
    return running_ <= most;
  }

  // Whether the producer answers on this connection: then it has seen all that was sent before.
  bool answered() {
    ReadRequest hello{};
    hello.protocol = kProtocol;
    hello.kind = ReadKind::kHello;
    hello.token = kUid;
    hello.request = ++asked_;
    send_message(kReadMessage, hello);
    const auto deadline = Clock::now() + 60s;
    while (answers_.count(asked_) == 0 && Clock::now() < deadline && !failed_) progress();
    return answers_.count(asked_) == 1;
  }

  bool saw_secret() const noexcept { return saw_secret_; }
  std::uint64_t replies() const noexcept { return replies_; }

 private:
  struct Sending {
    Attacker* attacker;
    std::vector<std::uint8_t> header;
  };

  ucp_request_param_t parameters(Sending* sending, std::uint32_t flags) {
    ++running_;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = flags;
    params.user_data = sending;
    params.cb.send = [](void* request, ucs_status_t, void* argument) {
      const std::unique_ptr<Sending> ended(static_cast<Sending*>(argument));
      --ended->attacker->running_;
      ended->attacker->ucx.ucp_request_free(request);
    };
    return params;
  }

  void ended_now(void* request, std::unique_ptr<Sending>& sending) {
    if (UCS_PTR_IS_PTR(request)) {
      (void)sending.release();  // the callback's
    } else {
      --running_;
    }
  }

  static ucs_status_t on_reply(void* argument, const void* header, std::size_t nbytes, void* data, std::size_t length,
                               const ucp_am_recv_param_t* parameters) {
    auto* self = static_cast<Attacker*>(argument);
    ReadReply reply{};
    if (nbytes == sizeof reply) std::memcpy(&reply, header, sizeof reply);
    ++self->replies_;
    if (reply.request <= self->asked_) self->answers_.insert(reply.request);
    // What the rendezvous protocol announces is never fetched: only small answers are seen.
    if ((parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 && length > 0 &&
        std::memchr(data, kSecret, length) != nullptr) {
      self->saw_secret_ = true;
    }
    return UCS_OK;
  }

  const std::shared_ptr<const Library> library_ = library();
  const Library& ucx = *library_;
  std::vector<std::uint8_t> memory_ = std::vector<std::uint8_t>(kHuge, 0xee);
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  ucp_mem_h region_ = nullptr;
  ucp_rkey_h key_ = nullptr;
  std::size_t running_ = 0;
  std::uint64_t replies_ = 0;
  std::uint64_t asked_ = 0;
  std::set<std::uint64_t> answers_;
  bool failed_ = false;
  bool saw_secret_ = false;
};

template <typename Message>
Message naming(const Ticket& ticket) {
  Message message{};
  message.protocol = kProtocol;
  message.index = ticket.index;
  message.generation = ticket.generation;
  message.token = ticket.token;
  return message;
}

constexpr unsigned kIds[] = {0,  kReadMessage, kReplyMessage, kNotifyMessage, 4, 5, 7, 8, 31, 63, 64,
                             65, 66,           1000,          65535};
constexpr std::size_t kHeaders[] = {0, 1, 15, 16, 17, 63, 64, 65, 87, 88, 89, 1000, 4096};
constexpr std::uint32_t kFlags[] = {0, UCP_AM_SEND_FLAG_REPLY, UCP_AM_SEND_FLAG_EAGER,
                                    UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_RNDV};

// What attackers like: right but for one field, and noise.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }
  template <typename Item, std::size_t count>
  Item of(const Item (&items)[count]) {
    return items[below(count)];
  }

  void send(Attacker& attacker, const Target& target) {
    switch (below(4)) {
      case 0:
        return noise(attacker);
      case 1:
        return notify(attacker, target);
      case 2:
        return hello(attacker);
      default:
        return read(attacker, target);
    }
  }

 private:
  void noise(Attacker& attacker) {
    constexpr std::size_t kPayloads[] = {0, 0, 1, 64, 5000, 100000};
    std::vector<std::uint8_t> header(of(kHeaders));
    for (std::uint8_t& byte : header) byte = static_cast<std::uint8_t>(engine_());
    const std::uint32_t protocol = kProtocol;
    if (header.size() >= sizeof protocol && below(2) == 0) std::memcpy(header.data(), &protocol, sizeof protocol);
    attacker.send(of(kIds), std::move(header), of(kPayloads), of(kFlags));
  }

  // The slot is right, its token is not.
  void notify(Attacker& attacker, const Target& target) {
    auto message = naming<NotifyRequest>(below(2) == 0 ? target.given : target.secret);
    message.kind = static_cast<std::uint32_t>(below(5));
    message.token[below(16)] ^= static_cast<std::uint8_t>(1 << below(8));
    attacker.send_message(kNotifyMessage, message, of(kFlags));
  }

  void hello(Attacker& attacker) {
    ReadRequest message{};
    message.protocol = kProtocol;
    message.kind = static_cast<ReadKind>(below(4));
    message.token = kUid;
    message.request = ~engine_() | 1ULL << 63;
    message.nbytes = engine_();
    if (below(2) == 0) message.token[below(16)] ^= 1;
    attacker.send_message(kReadMessage, message);
  }

  // A read of the slot that it was given, or of the other with that slot's token, of too much.
  void read(Attacker& attacker, const Target& target) {
    constexpr std::uint64_t kEdges[] = {0,          1,          64,         kPool / 2,  kPool / 2 + 1, kPool,
                                        1ULL << 32, 1ULL << 40, 1ULL << 62, 1ULL << 63, ~0ULL};
    auto message = naming<ReadRequest>(target.given);
    message.request = engine_() | 1ULL << 63;
    message.source = of(kEdges);
    message.nbytes = of(kEdges);
    if (below(2) == 0) message.index = below(2) == 0 ? target.secret.index : static_cast<std::uint32_t>(engine_());
    if (below(3) == 0) message.generation = below(2) == 0 ? target.secret.generation : engine_();
    attacker.send_message(kReadMessage, message);
  }

  std::mt19937_64 engine_;
};

}  // namespace

TEST_CASE("hostile: messages of the wrong form are dropped") {
  Target target;
  {
    Attacker attacker(target.worker->address());
    REQUIRE(attacker.answered());
    const std::size_t before = resident_nbytes();
    for (const unsigned id : kIds) {
      for (const std::size_t header : kHeaders) {
        for (const std::uint32_t flags : kFlags) {
          for (const std::size_t payload : {0, 1, 9000, 300000}) {
            if (payload > 0 || header > 0) attacker.send(id, std::vector<std::uint8_t>(header, 0x7f), payload, flags);
            REQUIRE(attacker.drain(64));
          }
        }
      }
    }
    REQUIRE(attacker.drain());
    CHECK(attacker.answered());
    CHECK(attacker.replies() == 2);  // to the two honest questions
    CHECK(resident_nbytes() < before + kGrowth);
  }
  target.check_unharmed();
}

TEST_CASE("hostile: large payloads that nobody asked for are not received") {
  for (const auto mode : {UCP_ERR_HANDLING_MODE_PEER, UCP_ERR_HANDLING_MODE_NONE}) {
    CAPTURE(mode);
    Target target;
    {
      Attacker attacker(target.worker->address(), mode);
      REQUIRE(attacker.answered());
      const std::size_t before = resident_nbytes();
      for (int round = 0; round < 5; ++round) {
        for (const unsigned id : {0u, kReadMessage, kReplyMessage, kNotifyMessage, 4u, 1000u}) {
          for (const std::size_t header : {16, 64, 88}) {
            attacker.send(id, std::vector<std::uint8_t>(header, 0), kHuge,
                          UCP_AM_SEND_FLAG_RNDV | UCP_AM_SEND_FLAG_REPLY);
          }
        }
      }
      // 5 GiB and more were offered: were they received, they would be here, or the wait would be long.
      REQUIRE(attacker.drain());
      CHECK(attacker.answered());
      CHECK(resident_nbytes() < before + kGrowth);
    }
    target.check_unharmed();
  }
}

TEST_CASE("hostile: random messages") {
  const std::uint64_t messages = setting("TENSORFERRY_HOSTILE_MESSAGES", 20000);
  const std::uint64_t seed = setting("TENSORFERRY_FUZZ_SEED", 1);
  Target target;
  {
    Noise noise(seed);
    Attacker attacker(target.worker->address());
    REQUIRE(attacker.answered());
    for (int i = 0; i < 2000; ++i) noise.send(attacker, target);
    REQUIRE(attacker.drain());
    REQUIRE(attacker.answered());
    const std::size_t before = resident_nbytes();
    for (std::uint64_t i = 0; i < messages; ++i) {
      noise.send(attacker, target);
      if (i % 16 == 0) attacker.progress();
      REQUIRE(attacker.drain(64));
      if (i % 1000 == 0) REQUIRE(attacker.answered());
    }
    REQUIRE(attacker.drain());
    CHECK(attacker.answered());
    CHECK(attacker.replies() > messages / 10);  // else little of this came to a handler
    CHECK_FALSE(attacker.saw_secret());
    const std::size_t after = resident_nbytes();
    CHECK(after < before + kGrowth);
    MESSAGE(messages << " messages, " << attacker.replies() << " replies, resident memory "
                     << (static_cast<double>(after) - static_cast<double>(before)) / (1 << 20) << " MiB more");
  }
  target.check_unharmed();
}

TEST_CASE("hostile: forged notifications are not queued, hellos are answered each once") {
  Target target;
  {
    Attacker attacker(target.worker->address());
    REQUIRE(attacker.answered());
    for (int i = 0; i < 20000; ++i) {
      auto message = naming<NotifyRequest>(target.secret);
      message.kind = 1 + static_cast<std::uint32_t>(i % 3);
      message.token = target.given.token;
      attacker.send_message(kNotifyMessage, message, 0);
      ReadRequest hello{};
      hello.protocol = kProtocol;
      hello.kind = ReadKind::kHello;
      hello.token = kUid;
      hello.request = ~0ULL;
      attacker.send_message(kReadMessage, hello);
      attacker.progress();
      REQUIRE(attacker.drain(64));
    }
    REQUIRE(attacker.drain());
    CHECK(attacker.answered());
    CHECK(attacker.replies() == 20002);
  }
  target.check_unharmed();
}

TEST_CASE("hostile: whoever leaves without error handling does not make the producer deaf to others") {
  for (int round = 0; round < 3; ++round) {
    Target target;
    {
      Attacker attacker(target.worker->address(), UCP_ERR_HANDLING_MODE_NONE);
      REQUIRE(attacker.answered());
    }
    target.check_unharmed();
    target.check_unharmed();
  }
}

TEST_CASE("hostile: puts, atomics and tagged messages find no handler in a served worker") {
  Target target;
  {
    Attacker attacker(target.worker->address());
    REQUIRE(attacker.answered());
    for (const std::size_t nbytes : {1, 64, 4096, 1 << 20}) attacker.put(target.memory->data() + 4096, nbytes);
    attacker.put(nullptr, 64);
    attacker.tag(64);
    attacker.tag(1 << 20);
    CHECK(attacker.answered());
    CHECK(target.unchanged());
  }
  {
    // UCX 1.22 ends the attacker's own connection here, as it finds no way to send these.
    Attacker attacker(target.worker->address());
    REQUIRE(attacker.answered());
    for (int i = 0; i < 10; ++i) attacker.add(target.memory->data() + 8);
    attacker.add(nullptr);
    attacker.answered();
  }
  target.check_unharmed();
}

TEST_CASE("hostile: the same put writes the memory of an rdma worker over tcp") {
  // Shows that the attack above bites where UCX emulates remote memory access.
  Target target(true);
  Attacker attacker(target.worker->address());
  REQUIRE(attacker.answered());
  attacker.put(target.memory->data() + 4096, 64);
  CHECK(attacker.answered());
  CHECK_FALSE(target.unchanged());
  CHECK(target.memory->data()[4096] == 0xee);
}
