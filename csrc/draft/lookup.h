// Prompt lookup: where the end of a sequence occurred before. Knows token ids only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

struct Match {
  size_t end = 0;     // index after the match
  size_t length = 0;  // 0: there is none
};

// The longest match, of `low` to `high` tokens, of the last tokens of `tail` within `text`; of equal lengths the first
// that ends behind `from`, else the first of all. Reads `text` once.
Match find_last_tokens(const int32_t* text, size_t size, const int32_t* tail, size_t tail_size, size_t low, size_t high,
                       size_t from);

}  // namespace quire
