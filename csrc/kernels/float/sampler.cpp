// Loops of the sampler.
#include "kernels/parts.h"
#include "sample/sampler_kernels.h"

namespace quire::QUIRE_ISA {

extern const SamplerKernels sampler_kernels = {row_max,     exp_sum,    weigh,   weigh_roughly,
                                               count_above, keep_range, collect, draw};

}  // namespace quire::QUIRE_ISA
