// Unpacks columns of blocks: codes, values, and numbers that are scaled later.
#include "kernels/parts.h"
#include "linear/blocks/columns.h"

namespace quire::QUIRE_ISA {

template <BlockKind kind>
constexpr UnpackCodes* codes_unpacker() {
  if constexpr (holds_floats(kind)) return nullptr;
  else return unpack_codes<kind>;
}

extern UnpackCodes* const kUnpackCodes[] = {
#define QUIRE_UNPACK(name, columns, bytes, head, head_bytes) codes_unpacker<BlockKind::name>(),
    QUIRE_BLOCK_KINDS(QUIRE_UNPACK)
#undef QUIRE_UNPACK
};

template <BlockKind kind>
constexpr UnpackFloats* floats_unpacker() {
  if constexpr (kHasValues<kind>) return unpack_floats<kind>;
  else if constexpr (table_bits(kind) > 0) return unpack_tables<table_bits(kind)>;
  else return nullptr;
}

extern UnpackFloats* const kUnpackFloats[] = {
#define QUIRE_FLOATS(name, columns, bytes, head, head_bytes) floats_unpacker<BlockKind::name>(),
    QUIRE_BLOCK_KINDS(QUIRE_FLOATS)
#undef QUIRE_FLOATS
};

template <BlockKind kind>
constexpr SummedNumbers summed_numbers() {
  if constexpr (sum_columns<kind>() > 0) return {sum_columns<kind>(), unpack_floats<kind, true>};
  else return {};
}

extern const SummedNumbers kSummedNumbers[] = {
#define QUIRE_NUMBERS(name, columns, bytes, head, head_bytes) summed_numbers<BlockKind::name>(),
    QUIRE_BLOCK_KINDS(QUIRE_NUMBERS)
#undef QUIRE_NUMBERS
};

void unpack_values(const BlockPanel& panel, int k, int columns, float* out) {
  if (UnpackFloats* unpack = kUnpackFloats[int(panel.kind)]) return unpack(panel.data, k, columns, out);
  alignas(64) char codes[kChunkBytes];
  kUnpackCodes[int(panel.kind)](panel.data, k, columns, codes);
  const CodeShape& shape = codes_of(panel.kind);
  const V zero = set1(float(shape.zero));
  const char* at = codes;
  for (int column = 0; column < columns; column += shape.group) {
    const float* header = reinterpret_cast<const float*>(at);
    const V scale = load(header), minimum = load(header + 16);
    at += kGroupHeader;
    for (int i = 0; i < shape.group; i += 4, at += 64) {
      const I four = iload(at);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        const V value = scale * (unsigned_byte<decltype(j)::value>(four) - zero);
        store(out + size_t(column + i + j.value) * 16, shape.minima ? value - minimum : value);
      });
    }
  }
}

// All 16 rows of a panel, each of w.cols values, to `rows`; null: not wanted.
void unpack_block_panel(const MatrixView& w, int panel, float* const (&rows)[16]) {
  alignas(64) float values[kChunkColumns * 16];
  const BlockPanel from = Blocks::panel(w, panel);
  for (int k = 0; k < w.cols; k += kChunkColumns) {
    const int columns = min_of(kChunkColumns, w.padded_cols() - k), present = min_of(columns, w.cols - k);
    unpack_values(from, k, columns, values);
    for (int lane = 0; lane < 16; ++lane)
      for (int i = 0; rows[lane] && i < present; ++i) rows[lane][k + i] = values[i * 16 + lane];
  }
}

}  // namespace quire::QUIRE_ISA
