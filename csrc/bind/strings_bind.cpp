// Strings with a length before each (uint64, little-endian), as GGUF files hold them. Never reads past the buffer.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "bind/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The length of the string at `at`. Throws std::out_of_range unless all of it lies in the buffer.
uint64_t length_at(const Bytes& data, uint64_t at) {
  const uint64_t size = data.shape(0);
  if (at > size || size - at < 8) throw std::out_of_range("a string begins past the end");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | data.data()[at + i];
  if (length > size - at - 8) throw std::out_of_range("a string ends past the end");
  return length;
}

uint64_t strings_end(const Bytes& data, uint64_t at, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) at += 8 + length_at(data, at);
  return at;
}

nb::list read_strings(const Bytes& data, uint64_t at, uint64_t count) {
  strings_end(data, at, count);  // so that a wrong count allocates nothing
  nb::list strings;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t length = length_at(data, at);
    const char* text = reinterpret_cast<const char*>(data.data() + at + 8);
    nb::object made = nb::steal(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), nullptr));
    if (!made.is_valid()) throw nb::python_error();
    strings.append(made);
    at += 8 + length;
  }
  return strings;
}

}  // namespace

void bind_strings(nb::module_& m) {
  m.def("strings_end", &strings_end, "data"_a, "at"_a, "count"_a,
        "The byte behind `count` strings that begin at byte `at`. IndexError if the data ends before.");
  m.def("read_strings", &read_strings, "data"_a, "at"_a, "count"_a,
        "A list of `count` strings. IndexError if the data ends before, UnicodeDecodeError if they are not UTF-8.");
}

}  // namespace quire
