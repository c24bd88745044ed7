// Kernels of a set that multiplies pairs of bfloat16 (CMakeLists.txt defines QUIRE_ISA and the -m flags).
#include "simd/pair_kernels.h"
