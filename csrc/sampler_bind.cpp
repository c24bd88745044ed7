// Python bindings of the native sampler. Knows numpy arrays; knows no request.
#include <nanobind/nanobind.h>

#include "bindings.h"

namespace quire {

void bind_sampler(nanobind::module_&) {}

}  // namespace quire
