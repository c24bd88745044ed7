// Anonymous mappings behind HugeBuffer. Knows nothing about their content.
#include "plan/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

namespace quire {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
}

HugeBuffer::HugeBuffer(size_t bytes) {
  if (bytes == 0) return;
  // A last huge page that is not nearly full would waste memory: small pages take its place.
  const size_t huge = (bytes + kHugePage / 8) / kHugePage * kHugePage;
  const size_t align = huge ? kHugePage : kPage;
  const size_t rounded = std::max(huge, (bytes + kPage - 1) / kPage * kPage);
  mapped_ = rounded + (align - kPage);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(mapping_) + align - 1) / align * align);
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, huge, MADV_HUGEPAGE);  // only advice: a refusal costs speed
#endif
#ifdef MADV_NOHUGEPAGE
  if (rounded > huge) madvise(static_cast<char*>(data_) + huge, rounded - huge, MADV_NOHUGEPAGE);
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
