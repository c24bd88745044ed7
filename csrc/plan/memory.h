// Large anonymous memory, 2 MiB aligned with huge pages advised, zero until written. Knows nothing about its content.
#pragma once

#include <cstddef>

// For small functions shared by per-ISA code: never emitted, so that no copy of the wrong instruction set is linked.
#define QUIRE_INLINE [[gnu::always_inline]] inline
#define QUIRE_INLINE_LAMBDA __attribute__((always_inline))

namespace quire {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  // Reserves `bytes`; physical memory is allocated on first touch. Throws std::bad_alloc.
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace quire
