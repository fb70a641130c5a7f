// SPDX-License-Identifier: Apache-2.0
// What is done for each of many tensors.  A payload may have thousands, and a few calls of Python for
// each take longer than their bytes do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dlpack.hpp"
#include "tensorferry/transport/copying.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tensorferry::bindings {
namespace {

using transport::Copy;

using Numbers = std::vector<std::uint64_t>;
using Shape = std::vector<std::int64_t>;
using TypeKey = std::tuple<std::uint8_t, std::uint8_t, std::uint16_t>;
using Type = std::pair<std::string, Shape>;
using Piece = std::tuple<nb::object, std::uintptr_t, std::uint64_t, std::uint64_t, Numbers>;

TypeKey key_of(const dlpack::DataType& type) {
  return {type.code, type.bits, type.lanes};
}

std::uint64_t itemsize_of(const dlpack::DataType& type) {
  return std::uint64_t{type.bits} * type.lanes / 8;
}

// None where it would be more than memory can hold: views may repeat an element any number of times.
std::optional<std::uint64_t> nbytes_of(const dlpack::DataType& type, const std::int64_t* shape, std::size_t ndim) {
  if (std::find(shape, shape + ndim, 0) != shape + ndim) return 0;
  std::uint64_t nbytes = itemsize_of(type);
  for (std::size_t i = 0; i < ndim; ++i) {
    if (shape[i] < 0 || __builtin_mul_overflow(nbytes, static_cast<std::uint64_t>(shape[i]), &nbytes)) return {};
  }
  if (nbytes >> 62 != 0) return {};
  return nbytes;
}

// Whether the elements lie in row-major order without gaps.
bool is_compact(const dlpack::Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

bool says_yes(PyObject* object, PyObject* method) {
  const nb::object answer = nb::steal(PyObject_CallMethodNoArgs(object, method));
  if (!answer.is_valid()) nb::raise_python_error();
  return answer.ptr() == Py_True;
}

// A Python object that C++ objects keep alive together; the last may go on any thread.
class Owner {
 public:
  explicit Owner(nb::handle object) : object_(object.inc_ref().ptr()) {}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    if (!nb::is_alive()) return;  // the interpreter has ended, and took all with it
    const nb::gil_scoped_acquire acquire;
    Py_DECREF(object_);
  }

 private:
  PyObject* object_;
};

// What a tensor over borrowed memory is made from; deletes itself.
struct View {
  dlpack::ManagedTensor managed;
  std::shared_ptr<Owner> owner;
  Shape shape, strides;
};

// Tensors as they were when they were described, in order.
class TensorList {
 public:
  struct Entry {
    std::uint32_t kind;
    std::uint64_t nbytes;
    const void* data;  // nullptr where it is not compact, or not on the CPU
  };

  std::vector<Entry> entries;
  std::vector<Type> types;  // in the order of their first tensor
  Numbers odd;              // places of values that are no plain tensors

  // Copies what is compact and on the CPU to its offset; returns the places of the others.
  std::vector<std::size_t> copy(std::uintptr_t address, std::uint64_t nbytes, const Numbers& offsets) const {
    if (offsets.size() != entries.size()) throw nb::value_error("there is not an offset for each tensor");
    std::vector<Copy> copies;
    std::vector<std::size_t> others;
    copies.reserve(entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const Entry& entry = entries[i];
      if (entry.nbytes == 0) continue;
      if (entry.nbytes > nbytes || offsets[i] > nbytes - entry.nbytes)
        throw nb::value_error("a tensor leaves the slot");
      if (entry.data == nullptr) {
        others.push_back(i);
      } else {
        copies.push_back({reinterpret_cast<void*>(address + offsets[i]), entry.data, entry.nbytes});
      }
    }
    const nb::gil_scoped_release release;
    transport::copy_all(copies);
    return others;
  }

  // Where the tensors begin, counted from an address; none where one is before it, strided or not on the CPU.
  std::optional<Numbers> offsets_from(std::uintptr_t address) const {
    Numbers offsets;
    offsets.reserve(entries.size());
    for (const Entry& entry : entries) {
      const auto start = reinterpret_cast<std::uintptr_t>(entry.data);
      if (entry.nbytes != 0 && (entry.data == nullptr || start < address)) return {};
      offsets.push_back(entry.nbytes == 0 ? 0 : start - address);
    }
    return offsets;
  }

  Numbers kinds() const {
    Numbers found(entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) found[i] = entries[i].kind;
    return found;
  }

  Numbers sizes() const {
    Numbers found(entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) found[i] = entries[i].nbytes;
    return found;
  }
};

// Tensors of one Python type, taken and made without a call of Python for each.
class TensorExchange {
 public:
  // Returns none where the type has no exchange API of a version that is known here, or where it cannot
  // describe one of the examples, whose dtypes have these names.
  static std::unique_ptr<TensorExchange> of(const nb::type_object& type,
                                            const std::vector<std::pair<std::string, nb::object>>& examples) {
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->version.major != dlpack::kMajor) api = api->previous;
    if (api == nullptr || api->tensor_from_object == nullptr) return nullptr;
    std::unique_ptr<TensorExchange> exchange(new TensorExchange(type, *api));
    for (const auto& [name, example] : examples) {
      dlpack::Tensor tensor;
      if (!exchange->take(example.ptr(), tensor)) return nullptr;
      exchange->names_[key_of(tensor.dtype)] = name;
      exchange->dtypes_[name] = tensor.dtype;
    }
    return exchange;
  }

  TensorList describe(const nb::list& values) const {
    TensorList list;
    std::map<std::pair<TypeKey, Shape>, std::uint32_t> known;
    const std::pair<TypeKey, Shape>* last = nullptr;
    std::uint32_t last_kind = 0;
    list.entries.reserve(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      PyObject* value = values[i].ptr();
      dlpack::Tensor tensor;
      std::optional<std::uint64_t> nbytes;
      if (is_plain(value, tensor))
        nbytes = nbytes_of(tensor.dtype, tensor.shape, static_cast<std::size_t>(tensor.ndim));
      if (!nbytes) {
        list.odd.push_back(i);
        continue;
      }
      const TypeKey key = key_of(tensor.dtype);
      const auto same = [&](const std::pair<TypeKey, Shape>& type) {
        return type.first == key && type.second.size() == static_cast<std::size_t>(tensor.ndim) &&
               std::equal(type.second.begin(), type.second.end(), tensor.shape);
      };
      if (last == nullptr || !same(*last)) {
        std::pair<TypeKey, Shape> type{key, Shape(tensor.shape, tensor.shape + tensor.ndim)};
        const auto [place, is_new] = known.emplace(std::move(type), list.types.size());
        if (is_new) list.types.emplace_back(names_.at(key), place->first.second);
        last = &place->first;
        last_kind = place->second;
      }
      const bool here = tensor.device.type == dlpack::kCpu && is_compact(tensor);
      list.entries.push_back(
          {last_kind, *nbytes, here ? static_cast<char*>(tensor.data) + tensor.byte_offset : nullptr});
    }
    return list;
  }

  // Returns a list with a tensor at each place that a piece has, over the piece's memory.
  nb::list views(const std::vector<Piece>& pieces, const std::vector<Type>& types, const Numbers& kinds,
                 const Numbers& offsets) const {
    if (kinds.size() != offsets.size()) throw nb::value_error("there is not an offset for each tensor");
    std::vector<dlpack::DataType> dtypes;
    std::vector<Shape> strides;
    Numbers sizes;
    for (const auto& [name, shape] : types) {
      const auto found = dtypes_.find(name);
      if (found == dtypes_.end()) throw nb::value_error(("there is no dtype " + name).c_str());
      dtypes.push_back(found->second);
      const auto nbytes = nbytes_of(found->second, shape.data(), shape.size());
      if (!nbytes) throw nb::value_error("a tensor has more elements than memory can hold");
      sizes.push_back(*nbytes);
      Shape row_major(shape.size());
      std::int64_t stride = 1;
      for (std::size_t i = shape.size(); i-- > 0;) {
        row_major[i] = stride;
        stride *= std::max<std::int64_t>(shape[i], 1);
      }
      strides.push_back(std::move(row_major));
    }
    const nb::object made = nb::steal(PyList_New(static_cast<Py_ssize_t>(kinds.size())));
    if (!made.is_valid()) nb::raise_python_error();
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), nb::none().release().ptr());
    }
    for (const auto& [owner, address, nbytes, start, places] : pieces) {
      const auto shared = std::make_shared<Owner>(owner);
      for (const std::uint64_t place : places) {
        const std::uint64_t offset = offsets.at(place) - start;
        const std::size_t kind = kinds[place];
        if (sizes.at(kind) > nbytes || offset > nbytes - sizes[kind])
          throw nb::value_error("a tensor leaves its piece");
        auto* view = new View{{}, shared, types[kind].second, strides[kind]};
        view->managed = {{dlpack::kMajor, 0},
                         view,
                         [](dlpack::ManagedTensor* self) { delete static_cast<View*>(self->manager); },
                         0,
                         {reinterpret_cast<void*>(address + offset),
                          {dlpack::kCpu, 0},
                          static_cast<std::int32_t>(view->shape.size()),
                          dtypes[kind],
                          view->shape.data(),
                          view->strides.data(),
                          0}};
        void* object = nullptr;
        if (api_.managed_to_object(&view->managed, &object) != 0) nb::raise_python_error();
        PyList_SetItem(made.ptr(), static_cast<Py_ssize_t>(place), static_cast<PyObject*>(object));
      }
    }
    return nb::list(made);
  }

 private:
  TensorExchange(const nb::type_object& type, const dlpack::ExchangeApi& api) : type_(type), api_(api) {}

  // Borrows a tensor of exactly this type; false where that cannot be described.
  bool take(PyObject* value, dlpack::Tensor& tensor) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != type_.ptr()) return false;
    if (api_.tensor_from_object(value, &tensor) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // As take, but also false for other dtypes, and where bytes are not what the tensor's values are.
  bool is_plain(PyObject* value, dlpack::Tensor& tensor) const {
    if (!take(value, tensor) || names_.find(key_of(tensor.dtype)) == names_.end()) return false;
    if (says_yes(value, is_neg_.ptr())) return false;
    return tensor.dtype.code != dlpack::kComplex || !says_yes(value, is_conj_.ptr());
  }

  nb::object type_;
  const dlpack::ExchangeApi& api_;  // static in the framework
  std::map<TypeKey, std::string> names_;
  std::map<std::string, dlpack::DataType> dtypes_;
  nb::object is_neg_ = nb::steal(PyUnicode_InternFromString("is_neg"));
  nb::object is_conj_ = nb::steal(PyUnicode_InternFromString("is_conj"));
};

// Places ranges one after another, each at a multiple of the alignment; empty ones take no place.
std::pair<Numbers, std::uint64_t> lay_out(const Numbers& sizes, std::uint64_t alignment) {
  Numbers offsets;
  offsets.reserve(sizes.size());
  std::uint64_t end = 0;
  for (const std::uint64_t nbytes : sizes) {
    const std::uint64_t offset = nbytes == 0 ? end : (end + alignment - 1) / alignment * alignment;
    offsets.push_back(offset);
    end = offset + nbytes;
  }
  return {std::move(offsets), end};
}

// Cuts places, given in ascending order of their offsets, into chunks of small neighbours and large ones alone;
// returns the first of each chunk and the one after its last.
std::vector<std::pair<std::size_t, std::size_t>> chunks(const Numbers& places, const Numbers& offsets,
                                                        const Numbers& sizes, std::uint64_t small, std::uint64_t most) {
  std::vector<std::pair<std::size_t, std::size_t>> found;
  for (std::size_t first = 0; first < places.size();) {
    std::size_t last = first + 1;
    if (sizes.at(places[first]) <= small) {
      const std::uint64_t limit = offsets.at(places[first]) + most;
      while (last < places.size() && sizes.at(places[last]) <= small &&
             offsets.at(places[last]) + sizes[places[last]] <= limit) {
        ++last;
      }
    }
    found.emplace_back(first, last);
    first = last;
  }
  return found;
}

// Zeroes what lies between ranges; those without bytes have no place.
void clear_gaps(std::uintptr_t address, std::uint64_t nbytes, const Numbers& offsets, const Numbers& sizes) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  ranges.reserve(offsets.size());
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (sizes.at(i) == 0) continue;
    if (sizes[i] > nbytes || offsets[i] > nbytes - sizes[i]) throw nb::value_error("a tensor leaves the slot");
    ranges.emplace_back(offsets[i], sizes[i]);
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  std::uint64_t end = 0;
  for (const auto& [offset, length] : ranges) {
    if (offset > end) std::memset(reinterpret_cast<void*>(address + end), 0, offset - end);
    end = offset + length;
  }
}

// Looks for the first tensor that is not where it may be.  Sizes are below 2^63, and offsets at most the
// slot's.  "unordered" is no fault by itself: tensors may overlap, and must be looked at in order.
std::pair<std::string, std::size_t> find_misplaced(const Numbers& kinds, const Numbers& offsets,
                                                   const Numbers& type_sizes, const Numbers& itemsizes,
                                                   std::uint64_t slot_offset, std::uint64_t slot_nbytes) {
  if (kinds.size() != offsets.size() || type_sizes.size() != itemsizes.size()) {
    throw nb::value_error("the columns are of different lengths");
  }
  std::uint64_t end = 0;
  std::size_t unordered = kinds.size();
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] >= type_sizes.size()) throw nb::value_error("a tensor is of no type that is there");
    const std::uint64_t nbytes = type_sizes[kinds[i]], itemsize = itemsizes[kinds[i]];
    if (nbytes > slot_nbytes || offsets[i] > slot_nbytes - nbytes) return {"outside", i};
    if (nbytes == 0) continue;
    if (offsets[i] % itemsize != 0 || slot_offset % itemsize != 0) return {"misaligned", i};
    if (offsets[i] < end && unordered == kinds.size()) unordered = i;
    end = offsets[i] + nbytes;
  }
  if (unordered != kinds.size()) return {"unordered", unordered};
  return {"", 0};
}

// Groups places, given in ascending order of their offsets, into ranges without large gaps.
std::vector<std::tuple<std::uint64_t, std::uint64_t, Numbers>> regions(const Numbers& places, const Numbers& offsets,
                                                                       const Numbers& sizes, std::uint64_t most_gap) {
  std::vector<std::tuple<std::uint64_t, std::uint64_t, Numbers>> found;
  std::uint64_t end = 0;
  for (const std::uint64_t place : places) {
    const std::uint64_t offset = offsets.at(place), nbytes = sizes.at(place);
    if (found.empty() || offset > end + most_gap) found.emplace_back(offset, 0, Numbers());
    auto& [start, length, members] = found.back();
    members.push_back(place);
    end = offset + nbytes;
    length = end - start;
  }
  return found;
}

}  // namespace
}  // namespace tensorferry::bindings

NB_MODULE(_tensors, m) {
  using namespace tensorferry::bindings;
  // Tensors keep memory of ours alive, and they may be alive when the interpreter ends.
  nb::set_leak_warnings(false);
  m.doc() = "What is done for each of many tensors: describing, copying, making views of memory.";

  nb::class_<TensorList>(m, "TensorList", "What was found out about tensors; they must stay alive and as they are.")
      .def_prop_ro("kinds", &TensorList::kinds, "The place in types of each tensor.")
      .def_prop_ro("sizes", &TensorList::sizes, "Bytes of each tensor.")
      .def_prop_ro(
          "types",
          [](const TensorList& self) {
            nb::list types;
            for (const auto& [name, shape] : self.types) {
              nb::list sizes;
              for (const std::int64_t size : shape) sizes.append(size);
              types.append(nb::make_tuple(name, nb::tuple(sizes)));
            }
            return types;
          },
          nb::sig("def types(self) -> list[tuple[str, tuple[int, ...]]]"),
          "Each name of a dtype with each shape, once.")
      .def_ro("odd", &TensorList::odd, "Places of the values that are no plain tensors, and described nowhere else.")
      .def("offsets_from", &TensorList::offsets_from, "address"_a,
           "Where the tensors begin; None where one is before the address, strided or not on the CPU.")
      .def("copy", &TensorList::copy, "address"_a, "nbytes"_a, "offsets"_a,
           "Copies tensors into memory; returns the places of those that are strided or not on the CPU.");

  nb::class_<TensorExchange>(m, "TensorExchange", "Takes and makes many tensors at once.")
      .def_static("of", &TensorExchange::of, "type"_a, "examples"_a,
                  nb::sig("def of(type: type, examples: collections.abc.Sequence[tuple[str, object]]) -> "
                          "TensorExchange | None"),
                  "None where the type has no DLPack exchange API, or it does not know an example's dtype.")
      .def("describe", &TensorExchange::describe, "values"_a,
           nb::sig("def describe(self, values: list[typing.Any]) -> TensorList"))
      .def("views", &TensorExchange::views, "pieces"_a, "types"_a, "kinds"_a, "offsets"_a,
           nb::sig("def views(self, pieces: collections.abc.Sequence[tuple[object, int, int, int, "
                   "collections.abc.Sequence[int]]], types: collections.abc.Sequence[tuple[str, "
                   "collections.abc.Sequence[int]]], kinds: collections.abc.Sequence[int], offsets: "
                   "collections.abc.Sequence[int]) -> list[typing.Any]"),
           "Tensors on the CPU, None at places that no piece has.  A piece is memory: its owner, which the tensors "
           "keep alive, address and bytes, the offset of its first byte, and the places of the tensors in it.");

  m.def("lay_out", &lay_out, "sizes"_a, "alignment"_a, "Offsets of ranges one after another, and their end.");
  m.def("find_misplaced", &find_misplaced, "kinds"_a, "offsets"_a, "type_sizes"_a, "itemsizes"_a, "slot_offset"_a,
        "slot_nbytes"_a, "The fault of a tensor, or '', and its place: 'outside', 'misaligned' or 'unordered'.");
  m.def("regions", &regions, "places"_a, "offsets"_a, "sizes"_a, "most_gap"_a,
        "First byte, bytes and places of each range of neighbours.");
  m.def("clear_gaps", &clear_gaps, "address"_a, "nbytes"_a, "offsets"_a, "sizes"_a, "Zeroes what is between ranges.");
  m.def("chunks", &chunks, "places"_a, "offsets"_a, "sizes"_a, "small"_a, "most"_a, "Chunks of small neighbours.");
  m.def(
      "copy",
      [](std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes) {
        const nb::gil_scoped_release release;
        tensorferry::transport::copy_all(
            {{reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), nbytes}});
      },
      "destination"_a, "source"_a, "nbytes"_a, "Copies bytes between addresses, with several threads where it pays.");
}
