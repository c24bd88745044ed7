// The parts of the Python module, each bound by the file that owns it.
#pragma once

#include <nanobind/nanobind.h>

namespace quire {

void bind_attention(nanobind::module_& m);
void bind_draft(nanobind::module_& m);
void bind_peers(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_strings(nanobind::module_& m);

}  // namespace quire
