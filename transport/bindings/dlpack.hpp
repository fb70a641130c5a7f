// SPDX-License-Identifier: Apache-2.0
// The part of DLPack's ABI (major version 1) that tensors are taken and given by: facts of the
// DLPack specification, under our names.
#ifndef TENSORFERRY_BINDINGS_DLPACK_HPP
#define TENSORFERRY_BINDINGS_DLPACK_HPP

#include <cstdint>

namespace tensorferry::dlpack {

inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint8_t kComplex = 5;  // type code
inline constexpr std::uint8_t kFloat = 2, kBfloat = 4;

struct Version {
  std::uint32_t major, minor;
};

struct Device {
  std::int32_t type, id;
};

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; none where the tensor is compact
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;  // of a lower major version, or none
  int (*allocate)(Tensor*, ManagedTensor**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, ManagedTensor**);
  int (*managed_to_object)(ManagedTensor*, void**);  // takes the tensor over, also when it fails
  int (*tensor_from_object)(void*, Tensor*);         // borrows from the object; may be none
  int (*current_stream)(std::int32_t, std::int32_t, void**);
};

}  // namespace tensorferry::dlpack

#endif  // TENSORFERRY_BINDINGS_DLPACK_HPP
