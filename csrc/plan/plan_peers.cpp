// Ops of a plan that exchange activations with the other ranks: recording and running. Knows ops, buffers and Peers.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace quire {

namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace

int Plan::all_reduce(int x, std::shared_ptr<Peers> peers) {
  const Buffer in = checked(x, "the input of all_reduce");
  Op op{.kind = OpKind::all_reduce, .in = x};
  op.peers = std::move(peers);
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::all_gather(int x, std::vector<int> widths, std::shared_ptr<Peers> peers) {
  const Buffer in = checked(x, "the input of all_gather");
  int64_t width = 0;
  for (const int part : widths) {
    require(part >= 0, "all_gather: a width is negative");
    width += part;
  }
  require(!peers || (int(widths.size()) == peers->size() && widths[size_t(peers->rank())] == in.width),
          "all_gather: the widths are not those of the ranks");
  Op op{.kind = OpKind::all_gather, .in = x};
  op.widths = std::move(widths);
  op.peers = std::move(peers);
  return add_op(std::move(op), width, in.rows);
}

void Plan::execute_exchange(const Op& op) {
  const size_t rows = size_t(rows_of(op.out)), width = size_t(buffers_[size_t(op.out)].width);
  const float* in = data(op.in);
  float* out = data(op.out);
  if (op.kind == OpKind::all_gather) return op.peers->all_gather(in, out, rows, op.widths);
  if (in != out) std::copy_n(in, rows * width, out);
  op.peers->all_reduce(out, rows * width);
}

}  // namespace quire
