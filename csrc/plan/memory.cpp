// Anonymous mappings behind HugeBuffer. Knows nothing about their content.
#include "plan/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

namespace quire {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

HugeBuffer::HugeBuffer(size_t bytes) {
  if (bytes == 0) return;
  // Small buffers need no huge page and would waste most of one.
  const size_t align = bytes >= kHugePage / 2 ? kHugePage : 4096;
  const size_t rounded = (bytes + align - 1) / align * align;
  mapped_ = rounded + (align > 4096 ? align : 0);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(mapping_) + align - 1) / align * align);
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  if (align == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);  // only advice: a refusal costs speed
#endif
}

HugeBuffer::~HugeBuffer() {
  if (mapping_) munmap(mapping_, mapped_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace quire
