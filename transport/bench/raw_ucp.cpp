// SPDX-License-Identifier: Apache-2.0
// What UCX gives at best: one buffer read again and again between two processes, in the way of `rdma`
// access (get) or of `served` access (am), without anything around it.  Both sides look for progress
// without a pause.
//
//   raw_ucp serve LIBRARY NBYTES [NAME=VALUE...]
//   raw_ucp read LIBRARY NBYTES WORKER ADDRESS KEY get|am [NAME=VALUE...]
//
// `serve` prints a line of JSON with what `read` takes, and serves until its input ends.  `read` takes
// numbers from its input, reads so many times, and prints how long that took and whether every byte came.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "tensorferry/transport/context.hpp"
#include "tensorferry/transport/memory_region.hpp"

using namespace tensorferry::transport;

namespace {

using Seconds = std::chrono::duration<double>;

constexpr unsigned kRequest = 0;
constexpr unsigned kAnswer = 1;
constexpr int kLooksBetweenPolls = 4096;

std::string to_hex(const void* data, std::size_t nbytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < nbytes; ++i) {
    const unsigned byte = static_cast<const std::uint8_t*>(data)[i];
    text += {kDigits[byte / 16], kDigits[byte % 16]};
  }
  return text;
}

Bytes from_hex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// Every word is another.
void fill(std::uint8_t* data, std::size_t nbytes) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < nbytes; i += sizeof word) {
    word += 0x9E3779B97F4A7C15U;
    std::memcpy(data + i, &word, std::min(sizeof word, nbytes - i));
  }
}

// A worker, and the buffer that is read or read into, registered.
class Side {
 public:
  Side(const std::string& library, const Settings& settings, std::size_t nbytes)
      : context(Context::create(Library::load(library), {}, settings, true)),
        ucx(context->library()),
        region(MemoryRegion::create(context, Memory::allocate(nbytes), UCS_MEMORY_TYPE_HOST)) {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SINGLE;
    ucx.check(ucx.ucp_worker_create(context->handle(), &params, &worker), "creating a worker");
  }

  void on_message(unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    params.id = id;
    params.cb = callback;
    params.arg = this;
    ucx.check(ucx.ucp_worker_set_am_recv_handler(worker, &params), "setting a message handler");
  }

  void wait(ucs_status_ptr_t request, const char* action) {
    if (!UCS_PTR_IS_PTR(request)) return ucx.check(UCS_PTR_RAW_STATUS(request), action);
    ucs_status_t status;
    while ((status = ucx.ucp_request_check_status(request)) == UCS_INPROGRESS) ucx.ucp_worker_progress(worker);
    ucx.ucp_request_free(request);
    ucx.check(status, action);
  }

  std::uint8_t* data() const { return region->data(); }
  std::size_t nbytes() const { return region->nbytes(); }

  std::shared_ptr<Context> context;
  const Library& ucx;
  std::shared_ptr<MemoryRegion> region;
  ucp_worker_h worker = nullptr;
};

// ---- serve ------------------------------------------------------------------------------------

ucs_status_t answer(void* argument, const void*, std::size_t, void*, std::size_t,
                    const ucp_am_recv_param_t* parameters) {
  const auto* side = static_cast<Side*>(argument);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = const_cast<Library*>(&side->ucx);
  params.cb.send = [](void* request, ucs_status_t, void* library) {
    static_cast<const Library*>(library)->ucp_request_free(request);
  };
  const ucs_status_ptr_t sent =
      side->ucx.ucp_am_send_nbx(parameters->reply_ep, kAnswer, nullptr, 0, side->data(), side->nbytes(), &params);
  if (UCS_PTR_IS_ERR(sent)) side->ucx.check(UCS_PTR_STATUS(sent), "answering");
  return UCS_OK;
}

int serve(Side& side) {
  fill(side.data(), side.nbytes());
  side.on_message(kRequest, answer);
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
  side.ucx.check(side.ucx.ucp_worker_query(side.worker, &attributes), "asking for the worker's address");
  const Bytes key = side.region->pack_key();
  std::cout << R"({"version": ")" << side.ucx.version() << R"(", "worker": ")"
            << to_hex(attributes.address, attributes.address_length) << R"(", "key": ")"
            << to_hex(key.data(), key.size()) << R"(", "address": )" << reinterpret_cast<std::uintptr_t>(side.data())
            << "}" << std::endl;
  side.ucx.ucp_worker_release_address(side.worker, attributes.address);
  pollfd input{STDIN_FILENO, POLLIN, 0};
  for (;;) {
    for (int look = 0; look < kLooksBetweenPolls; ++look) side.ucx.ucp_worker_progress(side.worker);
    char byte;
    if (poll(&input, 1, 0) > 0 && ::read(STDIN_FILENO, &byte, 1) <= 0) return EXIT_SUCCESS;
  }
}

// ---- read -------------------------------------------------------------------------------------

class Reader : public Side {
 public:
  Reader(const std::string& library, const Settings& settings, std::size_t nbytes, const Bytes& peer,
         std::uint64_t address, const Bytes& key)
      : Side(library, settings, nbytes), address_(address), expected_(nbytes) {
    fill(expected_.data(), nbytes);
    on_message(kAnswer, on_answer);
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(peer.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t) { std::_Exit(EXIT_FAILURE); };
    ucx.check(ucx.ucp_ep_create(worker, &params, &endpoint_), "connecting");
    ucx.check(ucx.ucp_ep_rkey_unpack(endpoint_, key.data(), &key_), "unpacking the key");
  }

  // Returns the seconds of one read.
  double get() {
    const auto started = std::chrono::steady_clock::now();
    const ucp_request_param_t params{};
    wait(ucx.ucp_get_nbx(endpoint_, data(), nbytes(), address_, key_, &params), "reading");
    return Seconds(std::chrono::steady_clock::now() - started).count();
  }

  double ask() {
    const auto started = std::chrono::steady_clock::now();
    arrived_ = false;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_AM_SEND_FLAG_REPLY;
    wait(ucx.ucp_am_send_nbx(endpoint_, kRequest, nullptr, 0, nullptr, 0, &params), "asking");
    while (!arrived_) ucx.ucp_worker_progress(worker);
    return Seconds(std::chrono::steady_clock::now() - started).count();
  }

  bool identical() {
    const bool same = std::memcmp(data(), expected_.data(), nbytes()) == 0;
    std::memset(data(), 0, nbytes());
    return same;
  }

 private:
  static ucs_status_t on_answer(void* argument, const void*, std::size_t, void* answer, std::size_t nbytes,
                                const ucp_am_recv_param_t* parameters) {
    auto* reader = static_cast<Reader*>(argument);
    if (nbytes != reader->nbytes()) std::_Exit(EXIT_FAILURE);
    if ((parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      std::memcpy(reader->data(), answer, nbytes);
      reader->arrived_ = true;
      return UCS_OK;
    }
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.user_data = reader;
    params.cb.recv_am = [](void* request, ucs_status_t status, std::size_t, void* user) {
      auto* self = static_cast<Reader*>(user);
      self->ucx.ucp_request_free(request);
      if (status != UCS_OK) std::_Exit(EXIT_FAILURE);
      self->arrived_ = true;
    };
    const ucs_status_ptr_t request =
        reader->ucx.ucp_am_recv_data_nbx(reader->worker, answer, reader->data(), nbytes, &params);
    if (UCS_PTR_IS_ERR(request)) std::_Exit(EXIT_FAILURE);
    if (request == nullptr) reader->arrived_ = true;
    return UCS_INPROGRESS;
  }

  std::uint64_t address_;
  Bytes expected_;
  ucp_ep_h endpoint_ = nullptr;
  ucp_rkey_h key_ = nullptr;
  bool arrived_ = false;
};

int read(Reader& reader, bool by_get) {
  for (int count; std::cin >> count;) {
    double seconds = 0;
    bool identical = true;
    for (; count > 0; --count) {
      seconds += by_get ? reader.get() : reader.ask();
      identical = reader.identical() && identical;
    }
    std::cout << R"({"seconds": )" << seconds << R"(, "identical": )" << (identical ? "true" : "false") << "}"
              << std::endl;
  }
  return EXIT_SUCCESS;
}

Settings settings_from(char** first, char** last) {
  Settings settings;
  for (; first != last; ++first) {
    const std::string word = *first;
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) throw Error(kProtocolViolation, word + " is not NAME=VALUE");
    settings[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return settings;
}

int run(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  std::cout.precision(9);
  int status = EXIT_FAILURE;
  if (role == "serve" && argc >= 4) {
    Side side(argv[2], settings_from(argv + 4, argv + argc), std::stoul(argv[3]));
    status = serve(side);
  } else if (role == "read" && argc >= 8) {
    Reader reader(argv[2], settings_from(argv + 8, argv + argc), std::stoul(argv[3]), from_hex(argv[4]),
                  std::stoul(argv[5]), from_hex(argv[6]));
    status = read(reader, std::strcmp(argv[7], "get") == 0);
  } else {
    std::cerr << "usage: raw_ucp serve LIBRARY NBYTES [NAME=VALUE...]\n"
                 "       raw_ucp read LIBRARY NBYTES WORKER ADDRESS KEY get|am [NAME=VALUE...]\n";
  }
  std::cout.flush();
  std::_Exit(status);  // the operating system ends the connections, as it would those of a killed process
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "raw_ucp: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
