// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <string>

#include "peer_process.hpp"

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--peer") return tensorferry::transport::tests::serve_orders();
  return doctest::Context(argc, argv).run();
}
