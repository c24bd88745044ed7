// Sums and gathers between processes that compute the same plan, each with its share of the weights. Knows no plan.
//
// A rank posts its part of a message in a slot of its own and waits until it can read the parts of all; then every rank
// adds them in the order of ranks, so all get the same bits. How parts get from rank to rank is up to the subclass.
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

  virtual ~Peers() = default;
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // x[i] = the sum of all ranks' x[i], in the order of ranks. Throws std::runtime_error if a rank is gone or does not answer
  // in time.
  void all_reduce(float* x, size_t n);
  // out [rows, sum of widths]: the columns of all ranks side by side, from x [rows, widths[rank]].
  void all_gather(const float* x, float* out, size_t rows, const std::vector<int>& widths);
  // Makes this rank, if it waits now or later, throw an error that names `rank`.
  virtual void abort(int rank) = 0;

 protected:
  Peers(int rank, int size);

  // Begins a message of `n` floats from each rank. Then slot(r) is where its part lies, or, after `exchange`, that of rank r.
  virtual void begin(size_t n) = 0;
  virtual float* slot(int rank) = 0;
  virtual void exchange() = 0;

 private:
  int rank_, size_;
};

// Ranks of one machine, which all map one file. A slot is written again only after the next message was posted by all, so
// its parts are read by then: two slots per rank are enough, and no lock is needed.
class SharedPeers : public Peers {
 public:
  // Maps the file `fd`, of at least bytes(size) zero bytes. Throws std::invalid_argument or std::runtime_error. A rank that
  // does not answer for `patience` seconds is an error.
  SharedPeers(int fd, int rank, int size, double patience);
  ~SharedPeers() override;

  static size_t bytes(int size);
  // Makes every rank throw.
  void abort(int rank) override;

 protected:
  void begin(size_t n) override;
  float* slot(int rank) override;
  void exchange() override;

 private:
  struct Header;

  void* memory_ = nullptr;
  size_t mapped_ = 0;
  double patience_;
  uint64_t message_ = 0;  // the number of the last one
  size_t floats_ = 0;     // and its length
};

}  // namespace quire
