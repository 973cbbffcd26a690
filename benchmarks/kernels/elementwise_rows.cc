#include "benchmarks/kernels/elementwise_rows.h"

#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace upipe::kernels {
namespace {

// Beyond the caches: a tensor is 16 MiB in bf16.
constexpr int64_t kTokens = 8192, kHeads = 8, kHeadDim = 128, kWidth = kHeads * kHeadDim;
constexpr int64_t kVocab = 32768, kLossTokens = 256;

struct Call {
  std::string name;
  OpParams params;
  std::vector<StridedCopyParams> refill;  // before each timed call
};

// Tensors of one storage type, and the calls on them.
class Calls {
 public:
  Calls(CpuBench& bench, DType dtype) : bench_(bench), dtype_(dtype) {}

  std::vector<Call> All() {
    AddNorms();
    AddRotations();
    AddMlp();
    AddVocabulary();
    AddMoves();
    if (dtype_ == DType::kFloat32) AddOptimizer();
    return std::move(calls_);
  }

 private:
  static constexpr DType kWide = DType::kFloat32;

  TensorView Matrix() { return bench_.Random(dtype_, {kTokens, kWidth}); }
  TensorView WideMatrix() { return bench_.Random(kWide, {kTokens, kWidth}); }
  TensorView Heads() { return bench_.Random(dtype_, {kTokens, kHeads, kHeadDim}); }
  void Add(std::string name, OpParams params, std::vector<StridedCopyParams> refill = {}) {
    calls_.push_back({std::move(name), std::move(params), std::move(refill)});
  }

  void AddNorms() {
    const TensorView weight = bench_.Random(dtype_, {kWidth});
    const TensorView dweight = bench_.Random(kWide, {kWidth});
    Add("rms_norm_fwd", RmsNormFwdParams{Matrix(), weight, Matrix()});
    Add("rms_norm_fwd, residual",
        RmsNormFwdParams{
            .x = Matrix(), .weight = weight, .y = Matrix(), .residual = Matrix(), .sum = Matrix()});
    Add("rms_norm_fwd, heads", RmsNormFwdParams{Heads(), weight.Rows(0, kHeadDim), Heads()});
    Add("rms_norm_bwd", RmsNormBwdParams{Matrix(), weight, Matrix(), Matrix(), dweight});
    Add("rms_norm_bwd, heads", RmsNormBwdParams{.x = Heads(),
                                                .weight = weight.Rows(0, kHeadDim),
                                                .dy = Heads(),
                                                .dx = Heads(),
                                                .dweight = dweight.Rows(0, kHeadDim),
                                                .accumulate = false});
  }

  TensorView Positions(int64_t count) {
    positions_.resize(kTokens * kHeads);
    std::iota(positions_.begin(), positions_.end(), int64_t{1} << 20);
    return TensorView::Vector(positions_.data(), DType::kInt64, count);
  }

  void AddRotations() {
    Add("rope, 8 heads", RopeParams{Heads(), Heads(), Positions(kTokens)});
    const auto one_head = [&] { return bench_.Random(dtype_, {kTokens * kHeads, 1, kHeadDim}); };
    Add("rope, 1 head", RopeParams{one_head(), one_head(), Positions(kTokens * kHeads)});
    Add("rope, 8 heads, into fp32 sums",
        RopeParams{.src = Heads(),
                   .dst = bench_.Random(kWide, {kTokens, kHeads, kHeadDim}),
                   .positions = Positions(kTokens),
                   .inverse = true,
                   .accumulate = true});
  }

  void AddMlp() {
    Add("swiglu_fwd", SwiGluFwdParams{Matrix(), Matrix(), Matrix()});
    // In place: its own results would soon be denormals.
    SwiGluBwdParams p;
    std::vector<StridedCopyParams> refill;
    for (TensorView* view : {&p.dout, &p.gate, &p.up}) {
      *view = Matrix();
      refill.push_back({Matrix().AsTensor3(), view->AsTensor3()});
    }
    Add("swiglu_bwd", p, std::move(refill));
    Add("row_dot", RowDotParams{Heads(), Heads(), bench_.Random(kWide, {kTokens, kHeads})});
    Add("column_sum", ColumnSumParams{Matrix(), bench_.Random(kWide, {kWidth})});
  }

  // Tokens of a fixed permutation, so that rows of the table are not neighbours.
  TensorView Tokens(std::vector<int32_t>& tokens, int64_t count, int64_t vocab) {
    tokens.resize(count);
    for (int64_t t = 0; t < count; ++t) tokens[t] = static_cast<int32_t>(t * 7919 % vocab);
    return TensorView::Vector(tokens.data(), DType::kInt32, count);
  }

  void AddVocabulary() {
    const TensorView tokens = Tokens(tokens_, kTokens, kTokens);
    Add("embedding_fwd", EmbeddingFwdParams{tokens, Matrix(), Matrix()});
    Add("embedding_bwd", EmbeddingBwdParams{tokens, Matrix(), WideMatrix()});
    CrossEntropyParams p = {.logits = bench_.Random(kWide, {kLossTokens, kVocab}),
                            .labels = Tokens(labels_, kLossTokens, kVocab),
                            .loss_and_count = TensorView::Vector(loss_, DType::kFloat64, 2)};
    Add("cross_entropy", p);
    p.dlogits = bench_.Random(dtype_, {kLossTokens, kVocab});
    Add("cross_entropy, gradient", p);
  }

  void AddMoves() {
    const auto copy = [](TensorView from, TensorView to, bool accumulate) {
      return StridedCopyParams{from.AsTensor3(), to.AsTensor3(), accumulate};
    };
    Add("copy", copy(Matrix(), Matrix(), false));
    Add("copy, accumulate", copy(Matrix(), Matrix(), true));
    if (dtype_ == kWide) return;
    Add("cast from fp32", copy(WideMatrix(), Matrix(), false));
    Add("cast to fp32", copy(Matrix(), WideMatrix(), false));
    Add("accumulate into fp32", copy(Matrix(), WideMatrix(), true));
  }

  void AddOptimizer() {
    const auto vector = [&] { return bench_.Random(kWide, {kTokens * kWidth}); };
    Add("sum_of_squares",
        SumOfSquaresParams{vector(), TensorView::Vector(loss_, DType::kFloat64, 1)});
    TensorView v = vector();
    bench_.Seconds(FillParams{v, 1.0});
    Add("adamw", AdamWParams{.param = vector(),
                             .grad = vector(),
                             .m = vector(),
                             .v = v,
                             .scale = TensorView::Vector(&scale_, DType::kFloat32, 1),
                             .skip = TensorView::Vector(&skip_, DType::kInt32, 1),
                             .lr = 1e-4f});
  }

  CpuBench& bench_;
  const DType dtype_;
  std::vector<Call> calls_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> tokens_, labels_;
  double loss_[2] = {};
  float scale_ = 1;
  int32_t skip_ = 0;
};

}  // namespace

void AppendElementwiseRows(CpuBench& bench, DType dtype, int repeats,
                           nlohmann::ordered_json& rows) {
  Calls calls(bench, dtype);
  for (const Call& call : calls.All()) {
    const OpCost cost = Cost(call.params);
    const double bytes = cost.bytes_read + cost.bytes_written;
    rows.push_back(RatioRow(
        {{"op", call.name},
         {"dtype", NameOf(dtype)},
         {"mbytes", 1e-6 * bytes},
         {"yardstick", "memcpy of as many bytes"}},
        "gigabytes_per_second", repeats,
        [&] {
          for (const StridedCopyParams& copy : call.refill) bench.Seconds(copy);
          return 1e-9 * bytes / bench.Seconds(call.params);
        },
        [&] { return bench.MemcpyRate(bytes); }));
  }
}

}  // namespace upipe::kernels
