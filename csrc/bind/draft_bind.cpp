// Python bindings of drafters that look tokens up. Knows numpy arrays; knows no request.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind/bindings.h"
#include "draft/lookup.h"
#include "draft/suffix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple find(const Tokens& text, const Tokens& tail, size_t low, size_t high, size_t from) {
  const Match match = find_last_tokens(text.data(), text.shape(0), tail.data(), tail.shape(0), low, high, from);
  return nb::make_tuple(match.end, match.length);
}

nb::tuple draft(const SuffixTree& tree, const Tokens& context, int max_tokens, double factor, double offset,
                float min_probability) {
  const SuffixDraft found =
      tree.draft(context.data(), context.shape(0), {max_tokens, factor, offset, min_probability});
  return nb::make_tuple(found.tokens, found.probabilities, found.score, found.match_length);
}

}  // namespace

void bind_draft(nb::module_& m) {
  m.def("find_last_tokens", &find, "text"_a, "tail"_a, "low"_a, "high"_a, "start"_a = 0,
        nb::sig("def find_last_tokens(text: array.array[int] | numpy.typing.NDArray[numpy.int32], "
                "tail: array.array[int] | numpy.typing.NDArray[numpy.int32], low: int, high: int, start: int = 0) "
                "-> tuple[int, int]"),
        "(end, length) of the longest match of the last low..high tokens of `tail` in `text`; of equal lengths the "
        "first that ends behind `start`, else the first. Length 0: none.");
  nb::class_<SuffixTree>(m, "SuffixTree", "Counts of the token strings of a set of sequences, up to a depth.")
      .def(nb::init<int>(), "max_depth"_a)
      .def(
          "extend",
          [](SuffixTree& tree, int64_t sequence, const std::vector<int32_t>& tokens) {
            tree.extend(sequence, tokens.data(), tokens.size());
          },
          "sequence"_a, "tokens"_a)
      .def("close", &SuffixTree::close, "sequence"_a)
      .def("remove", &SuffixTree::remove, "sequence"_a)
      .def("draft", &draft, "context"_a, "max_tokens"_a, "factor"_a, "offset"_a, "min_probability"_a,
           nb::sig("def draft(self, context: array.array[int] | numpy.typing.NDArray[numpy.int32], max_tokens: int, "
                   "factor: float, offset: float, min_probability: float) "
                   "-> tuple[list[int], list[float], float, int]"),
           "(tokens, probability of each with all before it, their sum, length of the match)")
      .def("sound", &SuffixTree::sound)
      .def_prop_ro("num_sequences", &SuffixTree::num_sequences)
      .def_prop_ro("nbytes", &SuffixTree::bytes);
}

}  // namespace quire
