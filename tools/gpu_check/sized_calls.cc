#include "tools/gpu_check/sized_calls.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::gpu_check {
namespace {

using kernels::DType;
using kernels::TensorView;

constexpr DType kS = DType::kBFloat16;
constexpr DType kW = DType::kFloat32;

// Makes tensors of a call until one cannot be had.
class Tensors {
 public:
  explicit Tensors(CheckDevice& device) : device_(device) {}
  TensorView Normal(DType dtype, std::initializer_list<int64_t> dims, double stddev = 1) {
    const TensorView view = Empty(dtype, dims);
    if (status_.ok()) status_ = device_.FillNormal(view, ++seed_, stddev);
    return view;
  }
  TensorView Filled(DType dtype, std::initializer_list<int64_t> dims, double value) {
    const TensorView view = Empty(dtype, dims);
    if (status_.ok()) status_ = device_.Fill(view, value);
    return view;
  }
  TensorView Empty(DType dtype, std::initializer_list<int64_t> dims) {
    if (!status_.ok()) return {};
    auto view = device_.Tensor(dtype, dims);
    if (view.ok()) return *view;
    status_ = view.status();
    return {};
  }
  template <typename T>
  TensorView Given(DType dtype, const std::vector<T>& values) {
    const TensorView view = Empty(dtype, {static_cast<int64_t>(values.size())});
    if (status_.ok()) status_ = device_.Upload(view, values.data());
    return view;
  }
  const absl::Status& status() const { return status_; }

 private:
  CheckDevice& device_;
  absl::Status status_;
  uint64_t seed_ = 0;
};

std::function<absl::Status()> Renew(CheckDevice& device, std::vector<TensorView> views) {
  return [&device, views] {
    uint64_t seed = 1000;
    for (const TensorView& view : views) {
      UPIPE_RETURN_IF_ERROR(device.FillNormal(view, ++seed));
    }
    return absl::OkStatus();
  };
}

std::string Sizes(std::initializer_list<int64_t> dims) {
  std::string text;
  for (const int64_t dim : dims) absl::StrAppend(&text, text.empty() ? "[" : ", ", dim);
  return text + "]";
}

CallSpec RmsNormForward(int64_t tokens, int64_t width) {
  return {absl::StrCat("RMSNorm with residual ", Sizes({tokens, width})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::RmsNormFwdParams p = {.x = t.Normal(kS, {tokens, width}),
                                                 .weight = t.Normal(kS, {width}),
                                                 .y = t.Empty(kS, {tokens, width}),
                                                 .residual = t.Normal(kS, {tokens, width}),
                                                 .sum = t.Empty(kS, {tokens, width})};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.y, p.sum}};
          }};
}

CallSpec RmsNormBackward(int64_t tokens, int64_t width) {
  return {absl::StrCat("RMSNorm backward ", Sizes({tokens, width})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::RmsNormBwdParams p = {.x = t.Normal(kS, {tokens, width}),
                                                 .weight = t.Normal(kS, {width}),
                                                 .dy = t.Normal(kW, {tokens, width}),
                                                 .dx = t.Normal(kS, {tokens, width}),
                                                 .dweight = t.Normal(kW, {width})};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.dx, p.dweight}, Renew(device, {p.dx, p.dweight})};
          }};
}

CallSpec Rope(int64_t tokens, int64_t heads, int64_t head_dim) {
  return {absl::StrCat("RoPE ", Sizes({tokens, heads, head_dim})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            std::vector<int64_t> positions(tokens);
            for (int64_t i = 0; i < tokens; ++i) positions[i] = 5'000'000 + i;
            const kernels::RopeParams p = {.src = t.Normal(kS, {tokens, heads, head_dim}),
                                           .dst = t.Empty(kS, {tokens, heads, head_dim}),
                                           .positions = t.Given(DType::kInt64, positions),
                                           .config = {.theta = 500000.0, .scaling = {}}};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.dst}};
          }};
}

CallSpec SwiGluForward(int64_t tokens, int64_t width) {
  return {absl::StrCat("SwiGLU ", Sizes({tokens, width})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::SwiGluFwdParams p = {.gate = t.Normal(kS, {tokens, width}),
                                                .up = t.Normal(kS, {tokens, width}),
                                                .out = t.Empty(kS, {tokens, width})};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.out}};
          }};
}

CallSpec SwiGluBackward(int64_t tokens, int64_t width) {
  return {absl::StrCat("SwiGLU backward ", Sizes({tokens, width})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::SwiGluBwdParams p = {.dout = t.Normal(kS, {tokens, width}),
                                                .gate = t.Normal(kS, {tokens, width}),
                                                .up = t.Normal(kS, {tokens, width})};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.dout, p.gate, p.up}, Renew(device, {p.dout, p.gate, p.up})};
          }};
}

CallSpec AdamW(int64_t elements) {
  return {absl::StrCat("AdamW ", Sizes({elements})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::AdamWParams p = {.param = t.Normal(kW, {elements}),
                                            .grad = t.Normal(kW, {elements}),
                                            .m = t.Normal(kW, {elements}),
                                            .v = t.Filled(kW, {elements}, 1),
                                            .scale = t.Filled(kW, {1}, 0.5),
                                            .skip = t.Filled(DType::kInt32, {1}, 0),
                                            .lr = 1e-4f,
                                            .weight_decay = 0.1f};
            UPIPE_RETURN_IF_ERROR(t.status());
            const auto renew = Renew(device, {p.param, p.m});
            return SizedCall{p, {p.param, p.m, p.v}, [&device, p, renew] {
                               UPIPE_RETURN_IF_ERROR(device.Fill(p.v, 1));
                               return renew();
                             }};
          }};
}

CallSpec CrossEntropy(int64_t tokens, int64_t vocab) {
  return {absl::StrCat("cross-entropy with gradient ", Sizes({tokens, vocab})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            std::vector<int32_t> labels(tokens);
            for (int64_t i = 0; i < tokens; ++i) {
              labels[i] = static_cast<int32_t>(i * 7919 % vocab);
            }
            const kernels::CrossEntropyParams p = {
                .logits = t.Normal(kW, {tokens, vocab}, 3),
                .labels = t.Given(DType::kInt32, labels),
                .dlogits = t.Empty(kS, {tokens, vocab}),
                .loss_and_count = t.Filled(DType::kFloat64, {2}, 0)};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.dlogits, p.loss_and_count}, [&device, p] {
                               return device.Fill(p.loss_and_count, 0);
                             }};
          }};
}

CallSpec SumOfSquares(int64_t elements) {
  return {absl::StrCat("sum of squares ", Sizes({elements})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::SumOfSquaresParams p = {t.Normal(kW, {elements}),
                                                   t.Filled(DType::kFloat64, {1}, 0)};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.out}, [&device, p] { return device.Fill(p.out, 0); }};
          }};
}

// [tokens, heads, head_dim] to the blocks of an all-to-all, [heads, tokens, head_dim].
CallSpec Pack(int64_t tokens, int64_t heads, int64_t head_dim) {
  return {absl::StrCat("pack for all-to-all ", Sizes({tokens, heads, head_dim})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const TensorView src = t.Normal(kS, {tokens, heads, head_dim});
            const TensorView blocks = t.Empty(kS, {heads, tokens, head_dim});
            UPIPE_RETURN_IF_ERROR(t.status());
            const TensorView dst = TensorView::Tensor3(blocks.data, kS, {tokens, heads, head_dim},
                                                       head_dim, tokens * head_dim);
            return SizedCall{kernels::StridedCopyParams{src, dst}, {blocks}};
          }};
}

CallSpec Cast(int64_t rows, int64_t columns) {
  return {absl::StrCat("cast fp32 to bf16 ", Sizes({rows, columns})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::StridedCopyParams p = {t.Normal(kW, {rows, 1, columns}),
                                                  t.Empty(kS, {rows, 1, columns})};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.dst}};
          }};
}

CallSpec RowDot(int64_t tokens, int64_t heads, int64_t head_dim) {
  return {absl::StrCat("delta ", Sizes({tokens, heads, head_dim})),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            const kernels::RowDotParams p = {t.Normal(kS, {tokens, heads, head_dim}),
                                             t.Normal(kS, {tokens, heads, head_dim}),
                                             t.Empty(kW, {tokens, heads})};
            UPIPE_RETURN_IF_ERROR(t.status());
            return SizedCall{p, {p.out}};
          }};
}

struct Product {
  const char* what;
  int64_t m, n, k;
  bool gradient = false;  // c, fp32, += a^T b
};

CallSpec Matmul(const Product& product) {
  const auto [what, m, n, k, gradient] = product;
  return {absl::StrCat(what, " ", m, " x ", n, " x ", k),
          [=](CheckDevice& device) -> absl::StatusOr<SizedCall> {
            Tensors t(device);
            kernels::MatmulParams p;
            p.a = gradient ? t.Normal(kS, {k, m}) : t.Normal(kS, {m, k});
            p.b = gradient ? t.Normal(kS, {k, n}) : t.Normal(kS, {n, k});
            p.c = gradient ? t.Filled(kW, {m, n}, 0) : t.Empty(kS, {m, n});
            p.transpose_a = gradient;
            p.transpose_b = !gradient;
            p.beta = gradient ? 1.0f : 0.0f;
            UPIPE_RETURN_IF_ERROR(t.status());
            if (!gradient) return SizedCall{p, {p.c}};
            return SizedCall{p, {p.c}, [&device, p] { return device.Fill(p.c, 0); }};
          }};
}

}  // namespace

std::vector<CallSpec> ElementwiseCalls(bool small, int64_t part) {
  const int64_t tokens = small ? 40 : 65536 / part, d = small ? 48 : 4096, f = small ? 96 : 14336;
  const int64_t heads = small ? 3 : 32, dim = small ? 16 : 128;
  return {RmsNormForward(tokens, d),
          RmsNormBackward(tokens, d),
          Rope(tokens, heads, dim),
          SwiGluForward(tokens, f),
          SwiGluBackward(tokens, f),
          AdamW(small ? 1000 : (int64_t{1} << 28) / part),
          CrossEntropy(small ? 20 : 8192 / part, small ? 300 : 128256),
          SumOfSquares(small ? 1000 : (int64_t{1} << 29) / part),
          Pack(tokens, heads, dim),
          Cast(tokens, d),
          RowDot(tokens, heads, dim)};
}

std::vector<CallSpec> MatmulCalls(bool small) {
  if (small) return {Matmul({"projection", 40, 24, 32}), Matmul({"gradient", 24, 32, 40, true})};
  return {Matmul({"projection", 32768, 4096, 4096}),
          Matmul({"stage projection", 131072, 1024, 4096}),
          Matmul({"MLP tile", 8192, 14336, 4096}),
          Matmul({"MLP tile down", 8192, 4096, 14336}),
          Matmul({"gradient", 14336, 4096, 8192, true}),
          Matmul({"head tile", 4096, 128256, 4096})};
}

std::vector<AttentionSize> AttentionSizes(bool small) {
  if (small) return {{64, 1}, {48, 2}};
  std::vector<AttentionSize> sizes;
  for (const int64_t heads : {1, 4}) {
    for (const int64_t kibi : {8, 32, 128, 512}) sizes.push_back({kibi * 1024, heads});
  }
  return sizes;
}

std::string ToString(const AttentionSize& size) {
  const std::string tokens =
      size.tokens % 1024 == 0 ? absl::StrCat(size.tokens / 1024, "K") : absl::StrCat(size.tokens);
  return absl::StrCat(tokens, " tokens, ", size.heads, size.heads == 1 ? " head" : " heads");
}

absl::StatusOr<AttentionCalls> MakeAttention(const AttentionShape& shape, CheckDevice& device) {
  const int64_t tq = shape.queries.end - shape.queries.begin;
  const int64_t tk = shape.keys.end - shape.keys.begin;
  const int64_t heads = shape.heads, dim = shape.head_dim;
  Tensors t(device);
  AttentionCalls calls;
  kernels::AttentionFwdParams& f = calls.forward;
  f.q = t.Normal(kS, {tq, heads, dim}, shape.q_stddev);
  f.k = t.Normal(kS, {tk, heads, dim});
  f.v = t.Normal(kS, {tk, heads, dim});
  f.o = t.Empty(kS, {tq, heads, dim});
  f.lse = t.Empty(kW, {heads, tq});
  for (int64_t head = 0; head < heads; ++head) f.kv_slot.push_back(static_cast<int32_t>(head));
  f.queries = shape.queries;
  f.keys = shape.keys;
  f.mask = {.causal = true,
            .window = shape.window,
            .document_starts = std::make_shared<const std::vector<int64_t>>(1, 0),
            .total = std::max(shape.queries.end, shape.keys.end)};
  f.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  kernels::AttentionBwdParams& b = calls.backward;
  b.q = f.q;
  b.k = f.k;
  b.v = f.v;
  b.o = f.o;
  b.dout = t.Normal(kS, {tq, heads, dim});
  b.lse = f.lse;
  b.delta = t.Empty(kW, {tq, heads});
  b.dq = t.Empty(kW, {tq, heads, dim});
  b.dk = t.Filled(kW, {tk, heads, dim}, 0);
  b.dv = t.Filled(kW, {tk, heads, dim}, 0);
  b.kv_slot = b.grad_slot = f.kv_slot;
  b.queries = f.queries;
  b.keys = f.keys;
  b.mask = f.mask;
  b.scale = f.scale;
  calls.delta = {b.dout, f.o, b.delta};
  UPIPE_RETURN_IF_ERROR(t.status());
  return calls;
}

}  // namespace upipe::gpu_check
