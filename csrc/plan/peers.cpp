// Messages between ranks: what all kinds share, and those through a shared mapping.
#include "plan/peers.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr size_t kPage = 4096;
constexpr int kSpins = 2000;  // before a rank yields its core, which its peer may need

struct alignas(64) Posted {
  std::atomic<uint64_t> message;
  std::atomic<uint64_t> floats[2];  // the lengths of this message and of the one before, as in slots
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct SharedPeers::Header {
  std::atomic<int32_t> gone;  // 1 + a rank that has ended; 0: none
  Posted posted[kMostRanks];  // by rank: the last message of which its part can be read
};

size_t SharedPeers::bytes(int size) {
  const size_t header = (sizeof(Header) + kPage - 1) / kPage * kPage;
  return header + size_t(size) * 2 * kSlotFloats * sizeof(float);
}

SharedPeers::SharedPeers(int fd, int rank, int size, double patience) : Peers(rank, size), patience_(patience) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "ranks share atomics, which must not be locks");
  mapped_ = bytes(size);
  struct stat about{};
  if (fstat(fd, &about) != 0 || size_t(about.st_size) < mapped_)
    throw std::invalid_argument("the shared memory of the ranks is too small");
  memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory_ == MAP_FAILED)
    throw std::runtime_error(std::string("the shared memory of the ranks cannot be mapped: ") + std::strerror(errno));
}

SharedPeers::~SharedPeers() { munmap(memory_, mapped_); }

void SharedPeers::begin(size_t n) {
  ++message_;
  floats_ = n;
}

float* SharedPeers::slot(int rank) {
  char* slots = static_cast<char*>(memory_) + (mapped_ - size_t(size()) * 2 * kSlotFloats * sizeof(float));
  return reinterpret_cast<float*>(slots) + (size_t(rank) * 2 + size_t(message_ % 2)) * kSlotFloats;
}

void SharedPeers::exchange() {
  Header& header = *static_cast<Header*>(memory_);
  header.posted[rank()].floats[message_ % 2].store(floats_, std::memory_order_relaxed);
  header.posted[rank()].message.store(message_, std::memory_order_release);
  for (int rank = 0; rank < size(); ++rank) {
    const std::atomic<uint64_t>& posted = header.posted[rank].message;
    std::chrono::steady_clock::time_point began{};
    for (int spins = 0; posted.load(std::memory_order_acquire) < message_; ++spins) {
      if (spins < kSpins) {
        relax();
        continue;
      }
      const int gone = header.gone.load(std::memory_order_relaxed);
      if (gone != 0) throw std::runtime_error("rank " + std::to_string(gone - 1) + " has ended");
      const auto now = std::chrono::steady_clock::now();
      if (spins == kSpins) began = now;
      if (std::chrono::duration<double>(now - began).count() > patience_)
        throw std::runtime_error("rank " + std::to_string(rank) + " has not answered for " +
                                 std::to_string(int(patience_)) + " s");
      sched_yield();
    }
    if (header.posted[rank].floats[message_ % 2].load(std::memory_order_relaxed) != floats_)
      throw std::runtime_error("rank " + std::to_string(rank) + " computes another step");
  }
}

void SharedPeers::abort(int rank) { static_cast<Header*>(memory_)->gone.store(rank + 1, std::memory_order_relaxed); }

Peers::Peers(int rank, int size) : rank_(rank), size_(size) {
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size)
    throw std::invalid_argument("there is no rank " + std::to_string(rank) + " of " + std::to_string(size));
}

void Peers::all_reduce(float* x, size_t n) {
  for (size_t first = 0; first < n; first += kSlotFloats) {
    const size_t count = std::min(kSlotFloats, n - first);
    begin(count);
    std::memcpy(slot(rank_), x + first, count * sizeof(float));
    exchange();
    float* y = x + first;
    const float* part = slot(0);
    std::copy(part, part + count, y);
    for (int rank = 1; rank < size_; ++rank) {
      part = slot(rank);
      for (size_t i = 0; i < count; ++i) y[i] += part[i];
    }
  }
}

void Peers::all_gather(const float* x, float* out, size_t rows, const std::vector<int>& widths) {
  size_t width = 0, widest = 1;
  for (const int part : widths) {
    width += size_t(part);
    widest = std::max(widest, size_t(part));
  }
  // Pieces of columns if not even one row fits in a slot.
  const size_t own = size_t(widths[size_t(rank_)]), columns = std::min(widest, kSlotFloats), most = kSlotFloats / columns;
  for (size_t row = 0; row < rows; row += most) {
    const size_t count = std::min(most, rows - row);
    for (size_t from = 0; from < widest; from += columns) {
      auto length = [&](size_t all) { return from < all ? std::min(columns, all - from) : 0; };
      begin(count * columns);
      float* to = slot(rank_);
      for (size_t r = 0; r < count; ++r) std::copy_n(x + (row + r) * own + from, length(own), to + r * columns);
      exchange();
      size_t first = 0;
      for (int rank = 0; rank < size_; ++rank) {
        const size_t part = size_t(widths[size_t(rank)]);
        const float* source = slot(rank);
        for (size_t r = 0; r < count; ++r)
          std::copy_n(source + r * columns, length(part), out + (row + r) * width + first + from);
        first += part;
      }
    }
  }
}

}  // namespace quire
