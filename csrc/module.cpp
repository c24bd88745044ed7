// quire._native: the Python face of the kernels. Checks what comes from Python; knows no model and no scheduler.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "isa.h"
#include "kernels.h"
#include "thread_pool.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  using namespace quire;
  m.def("available_isas", &available_isas, "Instruction sets that this CPU can run, best first.");
  m.def("resolve_isa", &resolve_isa, nb::arg("isa"), "The set that 'auto' means, or the given one if it can run.");
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that run kernels; one per backend.")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("threads", &ThreadPool::threads);
  bind_sampler(m);
}
