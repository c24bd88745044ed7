// The parts of the Python module, each bound by the file that owns it.
#pragma once

#include <nanobind/nanobind.h>

#include "plan/plan.h"

namespace quire {

void bind_attention(nanobind::module_& m);
void bind_draft(nanobind::module_& m);
void bind_peers(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_recording(nanobind::class_<Plan>& plan);
void bind_sampler(nanobind::module_& m);
void bind_strings(nanobind::module_& m);

// The parameters of a norm (Norm in devices/operands.py).
NormParams norm_params(nanobind::handle norm);

}  // namespace quire
