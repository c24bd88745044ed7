// Notes the maxima of blocks of columns right after a product wrote them; `best` finds the largest logit of each row from
// them. Knows rows of floats; knows no product and no plan.
#pragma once

#include "kernels/kernels.h"

// Compiled once for all groups of kernels that a set combines (kernels/float/rowwise.cpp).
namespace quire::QUIRE_FLOAT_ISA {

// Maxima of rows [first, last), of the blocks of columns [begin, end); `begin` is a multiple of kMaximaColumns.
void note_maxima(const LinearArgs& a, int first, int last, int begin, int end);

}  // namespace quire::QUIRE_FLOAT_ISA

namespace quire::QUIRE_ISA {
using QUIRE_FLOAT_ISA::note_maxima;
}
