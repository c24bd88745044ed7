#include "draft/lookup.h"

#include <algorithm>

namespace quire {

Match find_last_tokens(const int32_t* text, size_t size, const int32_t* tail, size_t tail_size, size_t low, size_t high,
                       size_t from) {
  Match before, behind;  // the best that ends at `from` or before it, and behind it
  high = std::min(high, tail_size);
  if (high < low || low == 0) return before;
  const int32_t last = tail[tail_size - 1];
  for (size_t i = low - 1; i < size; ++i) {
    if (text[i] != last) continue;
    size_t length = 1;
    const size_t most = std::min(high, i + 1);
    while (length < most && text[i - length] == tail[tail_size - 1 - length]) ++length;
    Match& best = i < from ? before : behind;
    if (length >= low && length > best.length) best = {i + 1, length};
    if (behind.length == high) break;
    if (from == 0 && best.length == high) break;
  }
  return behind.length >= before.length ? behind : before;
}

}  // namespace quire
