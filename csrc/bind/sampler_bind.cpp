// Python bindings of the native sampler. Knows numpy arrays; knows no request.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "bind/bindings.h"
#include "simd/isa.h"
#include "kernels/kernels.h"
#include "sample/sampler.h"

namespace nb = nanobind;

namespace quire {

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

void check_logits(const Sampler& sampler, const Logits& logits) {
  check(logits.shape(1) == size_t(sampler.vocab_size()), "a row of logits must have one value per token");
  check(logits.shape(1) == 1 || logits.stride(1) == 1, "the logits of a row must be contiguous");
  check(logits.shape(0) <= 1 || logits.stride(0) >= 0, "rows of logits must ascend in memory");
}

nb::tuple to_python(const Logprobs& l) { return nb::make_tuple(l.token, l.logprob, l.rank, l.top_ids, l.top); }

// (tokens, [(row, whether its logits were finite)] of failed rows, [(row, TokenLogprobs fields)])
nb::tuple sample(Sampler& sampler, const Logits& logits, const std::vector<int32_t>& slots,
                 const std::vector<int64_t>& positions, const std::optional<std::vector<int32_t>>& drafts,
                 const std::optional<Masks>& masks,
                 const std::optional<Vector<int32_t>>& best) {
  check_logits(sampler, logits);
  const size_t rows = logits.shape(0);
  check(slots.size() == rows && positions.size() == rows && (!drafts || drafts->size() == rows) &&
            (!best || best->shape(0) == rows),
        "slots, positions, drafts and best must have one entry for each of the rows");
  for (size_t i = 0; best && i < rows; ++i)
    check(best->data()[i] < sampler.vocab_size(), "a best token is outside the vocabulary");
  check(!masks || (masks->shape(0) == rows && masks->shape(1) == (size_t(sampler.vocab_size()) + 31) / 32),
        "token masks must be [rows, one bit for each token]");
  std::vector<RowResult> results;
  {
    const nb::gil_scoped_release release;
    results = sampler.sample({logits.data(), size_t(logits.stride(0)), int(rows), slots.data(), positions.data(),
                              drafts ? drafts->data() : nullptr, masks ? masks->data() : nullptr,
                              best ? best->data() : nullptr});
  }
  nb::list tokens, faults, logprobs;
  for (size_t i = 0; i < rows; ++i) {
    tokens.append(results[i].token);
    if (results[i].fault != RowResult::Fault::none)
      faults.append(nb::make_tuple(i, results[i].fault == RowResult::Fault::nothing_allowed));
    if (results[i].has_logprobs) logprobs.append(nb::make_tuple(i, to_python(results[i].logprobs)));
  }
  return nb::make_tuple(tokens, faults, logprobs);
}

nb::list logprobs(Sampler& sampler, const Logits& logits, const Vector<int32_t>& targets, int num_top) {
  check_logits(sampler, logits);
  check(targets.shape(0) == logits.shape(0), "targets must have one entry per row");
  check(0 <= num_top && num_top <= sampler.vocab_size(), "num_top must be at most the vocabulary size");
  for (size_t i = 0; i < targets.shape(0); ++i)
    check(0 <= targets.data()[i] && targets.data()[i] < sampler.vocab_size(), "a target is outside the vocabulary");
  std::vector<Logprobs> results;
  {
    const nb::gil_scoped_release release;
    results = sampler.logprobs(logits.data(), size_t(logits.stride(0)), int(logits.shape(0)), targets.data(), num_top);
  }
  nb::list out;
  for (const Logprobs& l : results) out.append(to_python(l));
  return out;
}

void bind_params(nb::module_& m) {
  nb::class_<SlotRules>(m, "SlotRules", "The lists of a request, which its slots share.")
      .def(nb::init<int, std::vector<int32_t>, const std::vector<int32_t>&, SlotRules::Words,
                    std::vector<std::pair<int32_t, float>>>(),
           nb::arg("vocab_size"), nb::arg("stop_ids"), nb::arg("allowed"), nb::arg("bad_words"), nb::arg("bias"));
  nb::class_<PromptTokens>(m, "PromptTokens", "The tokens of a prompt, which its slots share.")
      .def(nb::init<int, std::vector<int32_t>, bool>(), nb::arg("vocab_size"), nb::arg("prompt"),
           nb::arg("penalised"));
  nb::class_<SlotParams>(m, "SlotParams", "How a slot is sampled; see quire.devices.sampling.SlotSampling.")
      .def(nb::init<>())
      .def_rw("seed", &SlotParams::seed)
      .def_rw("greedy", &SlotParams::greedy)
      .def_rw("temperature", &SlotParams::temperature)
      .def_rw("top_k", &SlotParams::top_k)
      .def_rw("top_p", &SlotParams::top_p)
      .def_rw("low_scaled", &SlotParams::low_scaled)
      .def_rw("repetition_penalty", &SlotParams::repetition_penalty)
      .def_rw("frequency_penalty", &SlotParams::frequency_penalty)
      .def_rw("presence_penalty", &SlotParams::presence_penalty)
      .def_rw("min_tokens", &SlotParams::min_tokens)
      .def_rw("wants_logprobs", &SlotParams::wants_logprobs)
      .def_rw("num_top", &SlotParams::num_top)
      .def_rw("output", &SlotParams::output)
      .def_rw("rules", &SlotParams::rules)
      .def_rw("prompt", &SlotParams::prompt);
}

}  // namespace

void bind_sampler(nb::module_& m) {
  bind_params(m);
  nb::class_<Sampler>(m, "Sampler", "Draws tokens by slot; see quire.devices.cpu.sampler.NativeSampler.")
      .def(
          "__init__",
          [](Sampler* self, ThreadPool& pool, const std::string& isa, int vocab_size) {
            new (self) Sampler(pool, *kernels_for(resolve_isa(isa)).sampler, vocab_size);
          },
          nb::arg("pool"), nb::arg("isa"), nb::arg("vocab_size"), nb::keep_alive<1, 2>())
      .def("set", &Sampler::set, nb::arg("slot"), nb::arg("params"))
      .def("clear", &Sampler::clear, nb::arg("slot"))
      .def("extend", &Sampler::extend, nb::arg("slot"), nb::arg("tokens"))
      .def("retract", &Sampler::retract, nb::arg("slot"), nb::arg("count"))
      .def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("slots"), nb::arg("positions"),
           nb::arg("drafts").none(), nb::arg("masks").none(), nb::arg("best").none())
      .def("logprobs", &logprobs, nb::arg("logits").noconvert(), nb::arg("targets"), nb::arg("num_top"));
}

}  // namespace quire
