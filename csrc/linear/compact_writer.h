// Writes bfloat16 in 12 bits (compact.h). Knows bytes; knows no matrix.
#pragma once

#include <vector>

#include "linear/compact.h"

namespace quire {

// Writes a panel, step after step.
class CompactWriter {
 public:
  CompactWriter(int columns, char* panel) : columns_(columns), panel_(panel), to_(panel) {}

  // In this order: sample some values, eight at a time; choose the table that suits them; write all steps, pairs as in
  // bf16.
  void sample(const uint16_t* values);
  void choose_table();
  void step(const uint32_t (&pairs)[kCompactPairs][16]);
  // False if there are more than `most` escapes; `most` is at most max_escapes().
  bool finish(int most);

 private:
  int columns_;
  char* tail() const { return panel_ + size_t(columns_ / kCompactColumns) * kCompactBytes; }

  char *panel_, *to_;
  uint32_t counts_[128] = {};  // of magnitudes of high bytes
  // Magnitudes in the table: [least_, least_ + width_), and zero if that is not 8 of them.
  uint8_t least_ = 0, width_ = 8;
  std::vector<Escape> escapes_;
};

}  // namespace quire
