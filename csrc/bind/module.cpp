// quire._native: the Python face of the kernels. Checks what comes from Python; knows no model and no scheduler.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bindings.h"
#include "simd/isa.h"
#include "kernels/kernels.h"
#include "simd/probe.h"
#include "plan/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_native, m) {
  using namespace quire;
  nb::set_leak_warnings(false);  // objects alive at exit are not an error
  m.def("available_isas", &available_isas, "Instruction sets that this CPU can run, best first.");
  m.def("resolve_isa", &resolve_isa, "isa"_a, "The set that 'auto' means, or the given one if it can run.");
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that run kernels; one pool per backend.")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &ThreadPool::threads);
  m.def("measure_read_bandwidth", &measure_read_bandwidth, "bytes"_a, "threads"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second at which `threads` threads read a buffer of `bytes`; takes less than 0.3 s.");
  m.def("measure_peak", &measure_peak, "kind"_a, "threads"_a, "isa"_a = "auto",
        nb::call_guard<nb::gil_scoped_release>(),
        "Operations per second (a multiply-add is two) of kind 'fp32', 'bf16' or 'int8' on an instruction set; 0 where "
        "it has no instruction for the kind; takes less than 0.3 s.");
  bind_attention(m);
  bind_peers(m);
  bind_plan(m);
  nb::class_<Turn>(m, "Turn").def_ro("seconds", &Turn::seconds).def_ro("limit", &Turn::limit);
  m.def("compare_linear", &compare_linear, "isa"_a, "pool"_a, "weights"_a, "rows"_a, "kind"_a, "rounds"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Turns of products of `rows` rows with `weights`, and of a limit: 'read' (bytes per second) or as "
        "measure_peak.");
  bind_sampler(m);
  bind_draft(m);
  bind_strings(m);
}
