// Sums and gathers between processes of one machine that compute the same plan, each with its share of the weights.
// Knows shared memory; knows no plan.
//
// All ranks map one file. A rank posts its part in a slot of its own and waits until all have posted; then every rank adds
// the parts in the order of ranks, so all get the same bits. A slot is written again only after the next message was posted
// by all, so the parts are read by then: two slots per rank are enough, and no lock is needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace quire {

class Peers {
 public:
  static constexpr size_t kSlotFloats = size_t{1} << 18;  // 1 MiB: longer messages go in pieces
  static constexpr int kMostRanks = 64;

  // Maps the file `fd`, of at least bytes(size) zero bytes. Throws std::invalid_argument or std::runtime_error.
  Peers(int fd, int rank, int size, double patience);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  static size_t bytes(int size);
  int rank() const { return rank_; }
  int size() const { return size_; }

  // x[i] = the sum of all ranks' x[i], in the order of ranks. Throws std::runtime_error if a rank is gone or does not answer
  // for `patience` seconds.
  void all_reduce(float* x, size_t n);
  // out [rows, sum of widths]: the columns of all ranks side by side, from x [rows, widths[rank]].
  void all_gather(const float* x, float* out, size_t rows, const std::vector<int>& widths);
  // Makes every rank that waits, now or later, throw an error that names `rank`.
  void abort(int rank);

 private:
  struct Header;
  float* slot(int rank) const;
  void post_and_wait();

  void* memory_ = nullptr;
  size_t mapped_ = 0;
  int rank_, size_;
  double patience_;
  uint64_t message_ = 0;  // the number of the last one
};

}  // namespace quire
