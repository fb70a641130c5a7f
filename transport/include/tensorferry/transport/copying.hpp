// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORFERRY_TRANSPORT_COPYING_HPP
#define TENSORFERRY_TRANSPORT_COPYING_HPP

#include <cstddef>
#include <vector>

namespace tensorferry::transport {

struct Copy {
  void* destination;
  const void* source;
  std::size_t nbytes;
};

// Makes all copies before it returns; no two may overlap.  From 8 MiB on the bytes are divided among
// up to four threads, as far as this process may use that many CPUs.
void copy_all(const std::vector<Copy>& copies);

}  // namespace tensorferry::transport

#endif  // TENSORFERRY_TRANSPORT_COPYING_HPP
