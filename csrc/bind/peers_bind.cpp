// Python bindings of connections between ranks: through memory, and through an exchange that Python implements.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "bind/bindings.h"
#include "plan/peers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using FloatVector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Ranks whose messages a Python object passes on: exchange(parts [size, n]) fills in the rows of the others.
class ExchangingPeers : public Peers {
 public:
  ExchangingPeers(nb::object exchange, int rank, int size) : Peers(rank, size), object_(std::move(exchange)) {}
  ~ExchangingPeers() override {
    const nb::gil_scoped_acquire hold;
    object_.reset();
  }

  void abort(int rank) override {
    const nb::gil_scoped_acquire hold;
    object_.attr("abort")(rank);
  }

 protected:
  void begin(size_t n) override {
    floats_ = n;
    parts_.resize(n * size_t(size()));
  }
  float* slot(int rank) override { return parts_.data() + size_t(rank) * floats_; }
  void exchange() override {
    const nb::gil_scoped_acquire hold;
    try {
      using Parts = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
      const Parts parts(parts_.data(), {size_t(size()), floats_});
      object_.attr("exchange")(nb::cast(parts, nb::rv_policy::reference));
    } catch (const nb::python_error& error) {
      throw std::runtime_error(error.what());
    }
  }

 private:
  nb::object object_;
  size_t floats_ = 0;
  std::vector<float> parts_;  // [size, floats_]
};

}  // namespace

void bind_peers(nb::module_& m) {
  nb::class_<Peers>(m, "Peers", "A rank's connection to the others, with which it adds and gathers activations.")
      .def(nb::new_([](int fd, int rank, int size, double patience) -> std::shared_ptr<Peers> {
             return std::make_shared<SharedPeers>(fd, rank, size, patience);
           }),
           "fd"_a, "rank"_a, "size"_a, "patience"_a, "Through a shared file of `bytes` zero bytes.")
      .def_static(
          "over",
          [](nb::object exchange, int rank, int size) -> std::shared_ptr<Peers> {
            return std::make_shared<ExchangingPeers>(std::move(exchange), rank, size);
          },
          "exchange"_a, "rank"_a, "size"_a, "Through an object with `exchange` and `abort`.")
      .def_static("bytes", &SharedPeers::bytes, "size"_a, "Bytes of the shared file.")
      .def_prop_ro("rank", &Peers::rank)
      .def_prop_ro("size", &Peers::size)
      .def("abort", &Peers::abort, "rank"_a, "End all waiting, because this rank has gone.")
      .def(
          "all_reduce",
          [](Peers& peers, const FloatVector& x) {
            const nb::gil_scoped_release release;
            peers.all_reduce(x.data(), x.size());
          },
          "x"_a.noconvert(), "Sum x over all ranks, in place.");
}

}  // namespace quire
