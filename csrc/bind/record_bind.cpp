// Encodes recorded operations into a plan. Reads the fields of each record (devices/ops.py) by name; knows no step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>

#include "bind/bindings.h"
#include "linear/matrix.h"
#include "plan/peers.h"
#include "plan/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Weight = std::shared_ptr<PackedMatrix>;

// A record, or a struct in one. An operand is the number of its buffer; a field that is None is -1, 0 or empty.
class Record {
 public:
  explicit Record(nb::object object) : object_(std::move(object)) {}

  Record inner(const char* name) const { return Record(field(name)); }
  nb::object field(const char* name) const { return object_.attr(name); }
  bool is_none() const { return object_.is_none(); }
  int buffer(const char* name) const { return get(name, -1); }
  int number(const char* name) const { return get(name, 0); }
  float real(const char* name) const { return get(name, 0.0f); }
  bool flag(const char* name) const { return nb::cast<bool>(field(name)); }
  std::string text(const char* name) const { return get(name, std::string()); }
  bool is(const char* name, const char* value) const { return text(name) == value; }
  std::vector<float> floats(const char* name) const { return values<float>(name); }
  std::vector<int32_t> integers(const char* name) const { return values<int32_t>(name); }
  Weight weight(const char* name) const { return to_weight(field(name)); }
  std::vector<Weight> weights(const char* name) const {
    std::vector<Weight> found;
    for (nb::handle weight : field(name)) found.push_back(to_weight(weight));
    return found;
  }
  Activation activation(const char* name) const;
  NormParams norm(const char* name) const;

  static Weight to_weight(nb::handle matrix) {
    if (nb::hasattr(matrix, "packed")) return nb::cast<Weight>(matrix.attr("packed"));
    const auto type = nb::cast<std::string>(matrix.type().attr("__name__"));
    throw std::invalid_argument("the native backend got a weight of " + type + "; load the model with it");
  }

 private:
  template <class T>
  T get(const char* name, T absent) const {
    const nb::object value = field(name);
    return value.is_none() ? absent : nb::cast<T>(value);
  }

  // The elements of an array of any shape.
  template <class T>
  std::vector<T> values(const char* name) const {
    const nb::object value = field(name);
    if (value.is_none()) return {};
    const auto array = nb::cast<nb::ndarray<const T, nb::c_contig, nb::device::cpu>>(value);
    return {array.data(), array.data() + array.size()};
  }

  nb::object object_;
};

Activation Record::activation(const char* name) const {
  static const std::map<std::string, Activation> known{
      {"", Activation::none},       {"silu", Activation::silu},         {"gelu", Activation::gelu},
      {"relu", Activation::relu},   {"gelu_tanh", Activation::gelu_tanh}, {"relu2", Activation::relu2},
      {"sigmoid", Activation::sigmoid}, {"softplus", Activation::softplus},
      {"clamped_swiglu", Activation::clamped_swiglu},
      {"clamped_silu", Activation::clamped_silu}};
  const auto found = known.find(text(name));
  if (found == known.end()) throw std::invalid_argument("the native backend has no activation '" + text(name) + "'");
  return found->second;
}

NormParams Record::norm(const char* name) const {
  const nb::object value = field(name);
  return value.is_none() ? NormParams{} : norm_params(value);
}

int apply(Plan& plan, const Record& op) {
  const nb::object function = op.field("function");
  std::vector<float> parameters;
  for (nb::handle name : function.attr("__struct_fields__")) {
    const nb::object value = nb::getattr(function, name);
    if (!nb::isinstance<nb::tuple>(value)) {
      parameters.push_back(nb::cast<float>(value));
      continue;
    }
    for (nb::handle each : value) parameters.push_back(nb::cast<float>(each));
  }
  return plan.elementwise(nb::cast<std::string>(function.type().attr("__name__")), op.buffer("x"),
                          std::move(parameters));
}

StatePlace state_place(const Record& op) { return {op.number("layer"), op.number("state")}; }

int delta_rule(Plan& plan, const Record& op) {
  return plan.delta_rule(op.buffer("qkv"), op.buffer("steps"), op.buffer("beta"),
                         {.rates = op.floats("rates"),
                          .skip = {},
                          .key_heads = op.number("key_heads"),
                          .heads = op.number("value_heads"),
                          .rows = op.number("key_dim"),
                          .columns = op.number("value_dim"),
                          .bound = op.real("bound")},
                         state_place(op));
}

int state_space(Plan& plan, const Record& op) {
  return plan.state_space(op.buffer("xbc"), op.buffer("dt"),
                          {.rates = op.floats("rates"),
                           .skip = op.floats("skip"),
                           .key_heads = op.number("groups"),
                           .heads = op.number("heads"),
                           .rows = op.number("state_dim"),
                           .columns = op.number("head_dim"),
                           .least = op.real("least"),
                           .most = op.real("most")},
                          state_place(op));
}

int linear(Plan& plan, const Record& op) {
  Weight weight = op.weight("weight");
  if (weight->view().gated) throw std::invalid_argument("a gated weight is for GatedLinear");
  return plan.linear(op.buffer("x"), std::move(weight), op.floats("bias"), op.activation("activation"),
                     op.buffer("residual"), 0);
}

int gated_linear(Plan& plan, const Record& op) {
  Weight weight = op.weight("weight");
  if (!weight->view().gated) throw std::invalid_argument("GatedLinear needs a weight made by gated_matrix");
  return plan.linear(op.buffer("x"), std::move(weight), op.floats("bias"), op.activation("activation"), -1,
                     op.real("limit"));
}

int head_linear(Plan& plan, const Record& op) {
  return plan.head_linear(op.buffer("x"), op.weights("weights"), op.floats("bias"), op.activation("activation"));
}

int attend(Plan& plan, const Record& op) {
  const Record a = op.inner("attention");
  return plan.attention(op.buffer("q"), op.number("layer"), op.number("num_heads"),
                        {a.real("scale"), a.number("window"), a.number("chunk"), a.number("ahead"), a.real("cap"),
                         a.floats("slopes"), a.floats("sinks"), a.floats("bias")},
                        op.buffer("scores"), op.buffer("chosen"),
                        {.further = op.buffer("entries"), .size = op.number("pool"), .groups = op.number("groups")});
}

int store_keys(Plan& plan, const Record& op) {
  const Record rope = op.inner("rope");
  plan.store_keys(op.buffer("x"), op.buffer("gates"), op.number("layer"), op.norm("norm"),
                  rope.is_none() ? std::vector<float>{} : rope.floats("inv_freq"), rope.is_none() ? 0 : rope.real("scale"),
                  op.floats("bias"), {.further = op.buffer("raw"), .size = op.number("size"), .overlap = op.flag("overlap")});
  return op.buffer("x");
}

int choose(Plan& plan, const Record& op) {
  return plan.choose(op.buffer("q"), op.buffer("weights"), op.number("layer"), op.number("num_heads"), op.real("scale"),
                     {.size = op.number("size"),
                      .groups = op.number("groups"),
                      .top_k = op.number("top_k"),
                      .local = op.number("local"),
                      .tail = op.flag("tail"),
                      .relu = op.flag("relu")});
}

int route(Plan& plan, const Record& op) {
  const Record r = op.inner("routing");
  return plan.route(op.buffer("scores"), {.num_experts = r.number("num_experts"),
                                          .top_k = r.number("top_k"),
                                          .sigmoid = r.is("scoring", "sigmoid"),
                                          .root_softplus = r.is("scoring", "root_softplus"),
                                          .softmax_after = r.flag("softmax_after"),
                                          .renormalize = r.flag("renormalize"),
                                          .correct_logits = r.flag("correct_logits"),
                                          .sparse_mixer = r.real("sparse_mixer"),
                                          .scale = r.real("scale"),
                                          .floor = r.real("floor"),
                                          .num_groups = r.number("num_groups"),
                                          .top_groups = r.number("top_groups"),
                                          .group_sum = r.flag("group_sum"),
                                          .correction = op.floats("correction"),
                                          .weight_scales = op.floats("weight_scales"),
                                          .shared = r.flag("shared"),
                                          .shared_gate = r.flag("shared_gate")},
                    op.buffer("ids"));
}

int run_experts(Plan& plan, const Record& op) {
  std::vector<ExpertWeights> experts;
  for (nb::handle each : op.field("experts")) {
    const Record e(nb::borrow(each));
    experts.emplace_back();
    if (!e.is_none())
      experts.back() = {e.weight("up"), e.weight("down"), e.floats("up_bias"), e.floats("down_bias"), e.real("limit")};
  }
  return plan.experts(op.buffer("x"), op.buffer("routes"), std::move(experts), op.activation("activation"),
                      op.flag("weigh_inputs"));
}

std::shared_ptr<Peers> peers(const Record& op) {
  const nb::object value = op.field("peers");
  return value.is_none() ? nullptr : nb::cast<std::shared_ptr<Peers>>(value);
}

using Encoder = int (*)(Plan&, const Record&);

// By type of record. An operation of the list that is not here cannot run on this backend.
const std::map<std::string, Encoder>& encoders() {
  using P = Plan&;
  using R = const Record&;
  static const std::map<std::string, Encoder> known{
      {"Receive", [](P p, R op) { return p.receive(op.number("columns")); }},
      {"Embed", [](P p, R op) { return p.embed(op.weight("table"), op.real("scale")); }},
      {"EmbedPositions", [](P p, R op) { return p.embed_positions(op.weight("table"), op.number("offset")); }},
      {"Add", [](P p, R op) { return p.add(op.buffer("x"), op.buffer("other"), op.real("scale")); }},
      {"Scale", [](P p, R op) { return p.scale(op.buffer("x"), op.real("scale"), op.real("cap")); }},
      {"Multiply", [](P p, R op) { return p.multiply(op.buffer("x"), op.buffer("factors")); }},
      {"Apply", apply},
      {"Combine",
       [](P p, R op) {
         const int parts = nb::cast<int>(op.field("factors").attr("shape")[1]);
         return p.combine(op.buffer("x"), op.floats("factors"), parts, op.buffer("residual"));
       }},
      {"Mix",
       [](P p, R op) {
         return p.mix(op.buffer("x"), op.buffer("factors"), op.number("vectors"), op.buffer("residual"));
       }},
      {"CompareParts",
       [](P p, R op) {
         return p.compare_parts(op.buffer("x"), op.buffer("other"), op.number("parts"), op.real("scale"), op.real("floor"));
       }},
      {"MatchRMS", [](P p, R op) { return p.match_rms(op.buffer("x"), op.buffer("like"), op.real("floor")); }},
      {"Normalize", [](P p, R op) { return p.norm(op.buffer("x"), op.norm("norm"), op.number("groups")); }},
      {"Linear", linear},
      {"GatedLinear", gated_linear},
      {"HeadLinear", head_linear},
      {"RopeAngles",
       [](P p, R op) {
         const Record rope = op.inner("rope");
         return p.rope(rope.floats("inv_freq"), rope.real("scale"));
       }},
      {"StoreKV",
       [](P p, R op) {
         return p.store_kv(op.buffer("qkv"), op.number("layer"), op.number("num_heads"), op.buffer("angles"),
                           op.norm("q_norm"), op.norm("k_norm"), op.norm("v_norm"));
       }},
      {"PrepareQueries",
       [](P p, R op) {
         return p.queries(op.buffer("q"), op.number("num_heads"), op.buffer("angles"), op.norm("norm"));
       }},
      {"StoreLatent",
       [](P p, R op) {
         return p.store_latent(op.buffer("kv"), op.buffer("q_latent"), op.buffer("q_rope"), op.number("layer"),
                               op.buffer("angles"), op.norm("norm"));
       }},
      {"RelativeScores",
       [](P p, R op) {
         return p.relative_scores(op.buffer("by_query"), op.buffer("by_key"), op.number("num_heads"),
                                  op.integers("places"), op.real("scale"));
       }},
      {"Attend", attend},
      {"StoreKeys", store_keys},
      {"Choose", choose},
      {"Convolve",
       [](P p, R op) {
         return p.convolve(op.buffer("x"), op.floats("weight"), op.floats("bias"), op.activation("activation"),
                           op.number("dilation"), state_place(op));
       }},
      {"EmbedNgrams",
       [](P p, R op) {
         return p.embed_ngrams(op.weights("tables"), nb::cast<std::vector<int64_t>>(op.field("multipliers")),
                               op.number("end"), state_place(op));
       }},
      {"DeltaRule", delta_rule},
      {"StateSpace", state_space},
      {"SelectiveScan",
       [](P p, R op) {
         return p.selective_scan(op.buffer("x"), op.buffer("dt"), op.buffer("bc"), op.floats("rates"), op.floats("skip"),
                                 state_place(op));
       }},
      {"GatedRecurrence",
       [](P p, R op) {
         return p.gated_recurrence(op.buffer("x"), op.buffer("input_gate"), op.buffer("rate_gate"), op.floats("rates"),
                                   state_place(op));
       }},
      {"Route", route},
      {"RunExperts", run_experts},
      {"AllReduce", [](P p, R op) { return p.all_reduce(op.buffer("x"), peers(op)); }},
      {"AllGather",
       [](P p, R op) {
         return p.all_gather(op.buffer("x"), nb::cast<std::vector<int>>(op.field("widths")), peers(op));
       }},
      {"SelectRows", [](P p, R op) { return p.select_rows(op.buffer("x")); }},
      {"Tap",
       [](P p, R op) {
         p.tap(op.buffer("x"));
         return op.buffer("x");
       }},
  };
  return known;
}

int record(Plan& plan, nb::handle op) {
  const auto type = nb::cast<std::string>(op.type().attr("__name__"));
  const auto found = encoders().find(type);
  if (found == encoders().end()) throw std::invalid_argument("the native backend has no operation " + type);
  return found->second(plan, Record(nb::borrow(op)));
}

}  // namespace

NormParams norm_params(nb::handle norm) {
  const Record r(nb::borrow(norm));
  const bool own_head = nb::cast<int>(r.field("weight").attr("ndim")) == 2;
  return {r.is("kind", "rms"), r.floats("weight"), r.floats("bias"), r.real("eps"), own_head, r.flag("after_rope")};
}

void bind_recording(nb::class_<Plan>& plan) {
  plan.def("record", &record, "op"_a, "Append an operation whose operands are numbers of buffers; returns its buffer.")
      .def_static(
          "operations",
          [] {
            nb::list names;
            for (const auto& [name, encoder] : encoders()) names.append(name);
            return names;
          },
          "Names of the operations that a plan can have.")
      .def("begin_head", &Plan::begin_head, "hidden"_a)
      .def("tap", &Plan::tap, "x"_a)
      .def("finish", &Plan::finish, "logits"_a)
      .def("width", &Plan::width, "buffer"_a);
}

}  // namespace quire
