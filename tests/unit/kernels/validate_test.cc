// For every op: good params pass, and each broken field is refused in a sentence naming op and
// field.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/api/op_table.h"
#include "kernels/api/workspace_check.h"

namespace upipe::kernels {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr int64_t kT = 6, kD = 8, kVocab = 10, kHeads = 4, kSlots = 2;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A fresh address per tensor; never dereferenced.
void* Address() {
  static uintptr_t next = uintptr_t{1} << 40;
  return reinterpret_cast<void*>(next += 4096);
}
TensorView Vec(int64_t n, DType dtype = DType::kFloat32) {
  return TensorView::Vector(Address(), dtype, n);
}
TensorView Mat(int64_t rows, int64_t cols) {
  return TensorView::Matrix(Address(), DType::kFloat32, rows, cols);
}
// The same view of bf16 numbers.
TensorView Bf16(TensorView view) {
  view.dtype = DType::kBFloat16;
  return view;
}
TensorView Cube(int64_t tokens, int64_t heads) {
  return TensorView::Tensor3(Address(), DType::kFloat32, {tokens, heads, kD}, heads * kD, kD);
}

// The op's name, good params, and breakages with a part of the sentence each must give.
template <typename P>
struct Breakage {
  const char* sentence;
  std::function<void(P&)> apply;
};

template <typename P>
void ExpectRefusals(const char* op, const P& good, const std::vector<Breakage<P>>& breakages) {
  EXPECT_STREQ(NameOf(good), op);
  EXPECT_TRUE(Validate(good).ok()) << Validate(good);
  for (const Breakage<P>& breakage : breakages) {
    P bad = good;
    breakage.apply(bad);
    const absl::Status status = Validate(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << breakage.sentence;
    EXPECT_THAT(std::string(status.message()), StartsWith(std::string(op) + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(breakage.sentence));
  }
}

TEST(Validate, Views) {
  using P = FillParams;
  ExpectRefusals<P>(
      "fill", {.dst = Mat(3, 4)},
      {{"dst has rank 0", [](P& p) { p.dst = {}; }},
       {"dst has rank 4", [](P& p) { p.dst.rank = 4; }},
       {"dst.shape[0] = -1", [](P& p) { p.dst.shape[0] = -1; }},
       {"dst.shape[2] = 7, must be 1", [](P& p) { p.dst.shape[2] = 7; }},
       {"dst.stride[0] = -4", [](P& p) { p.dst.stride[0] = -4; }},
       {"last stride 2", [](P& p) { p.dst.stride[1] = 2; }},
       {"dst has no address", [](P& p) { p.dst.data = nullptr; }},
       {"not aligned to 4", [](P& p) { p.dst.data = static_cast<char*>(p.dst.data) + 2; }},
       {"dst overlaps itself: shape [3, 4], strides [3, 1]", [](P& p) { p.dst.stride[0] = 3; }}});
  // No elements, no address; a single row has no stride; slot-major order is legal.
  EXPECT_TRUE(Validate(P{.dst = TensorView::Matrix(nullptr, DType::kInt32, 0, 4)}).ok());
  EXPECT_TRUE(Validate(P{.dst = TensorView::Tensor3(Address(), DType::kFloat32, {kT, kSlots, kD},
                                                    kD, kT * kD)})
                  .ok());
}

TEST(Validate, Embedding) {
  using F = EmbeddingFwdParams;
  ExpectRefusals<F>(
      "embedding_fwd",
      {.tokens = Vec(kT, DType::kInt32), .table = Mat(kVocab, kD), .out = Mat(kT, kD)},
      {{"tokens is int64, must be int32", [](F& p) { p.tokens.dtype = DType::kInt64; }},
       {"table is int32, must be fp32 or bf16", [](F& p) { p.table.dtype = DType::kInt32; }},
       {"out is fp32, must be bf16 as table", [](F& p) { p.table = Bf16(p.table); }},
       {"out is bf16, must be fp32 as table", [](F& p) { p.out = Bf16(p.out); }},
       {"table is absent", [](F& p) { p.table = {}; }},
       {"table is [0, 8]", [](F& p) { p.table = Mat(0, kD); }},
       {"out is [5, 8], dim 0 must be 6 (tokens)", [](F& p) { p.out = Mat(5, kD); }},
       {"out is [6, 7], dim 1", [](F& p) { p.out = Mat(kT, 7); }},
       {"out aliases table", [](F& p) { p.out.data = p.table.data; }}});
  using B = EmbeddingBwdParams;
  ExpectRefusals<B>(
      "embedding_bwd",
      {.tokens = Vec(kT, DType::kInt32), .dout = Mat(kT, kD), .dtable = Mat(kVocab, kD)},
      {{"tokens has rank 2", [](B& p) { p.tokens = Mat(kT, 1); }},
       {"dout is [7, 8], dim 0", [](B& p) { p.dout = Mat(7, kD); }},
       {"dout is [6, 9], dim 1", [](B& p) { p.dout = Mat(kT, 9); }},
       {"dtable is bf16, must be fp32", [](B& p) { p.dtable = Bf16(p.dtable); }},
       {"dtable overlaps itself", [](B& p) { p.dtable.stride[0] = 0; }}});
}

TEST(Validate, RmsNormFwd) {
  using F = RmsNormFwdParams;
  const F plain{.x = Mat(kT, kD), .weight = Vec(kD), .y = Mat(kT, kD)};
  ExpectRefusals<F>(
      "rms_norm_fwd", plain,
      {{"x has rank 1, must be 2", [](F& p) { p.x = Vec(kD); }},
       {"weight is [7]", [](F& p) { p.weight = Vec(7); }},
       {"weight is bf16, must be fp32 as x", [](F& p) { p.weight = Bf16(p.weight); }},
       {"y is [5, 8], must be [6, 8] as x", [](F& p) { p.y = Mat(5, kD); }},
       {"y is fp32, must be bf16 as x", [](F& p) { p.x = Bf16(p.x), p.weight = Bf16(p.weight); }},
       {"y aliases x", [](F& p) { p.y.data = p.x.data, p.y.stride[0] = 9; }},
       {"sum is present, residual is absent", [](F& p) { p.sum = Mat(kT, kD); }},
       {"eps = -1", [](F& p) { p.eps = -1; }},
       {"eps = nan", [](F& p) { p.eps = kNaN; }}});
  F in_place = plain;
  in_place.y = in_place.x;
  EXPECT_TRUE(Validate(in_place).ok());
  const F heads{.x = Bf16(Cube(kT, 3)), .weight = Bf16(Vec(kD)), .y = Bf16(Cube(kT, 3))};
  ExpectRefusals<F>(
      "rms_norm_fwd", heads,
      {{"weight is [3], dim 0 must be 8 (last dim of x)", [](F& p) { p.weight = Bf16(Vec(3)); }},
       {"y has rank 2, must be 3", [](F& p) { p.y = Bf16(Mat(kT, kD)); }}});
  F added{.x = Bf16(Mat(kT, kD)),
          .weight = Bf16(Vec(kD)),
          .y = Bf16(Mat(kT, kD)),
          .residual = Bf16(Mat(kT, kD)),
          .sum = Bf16(Mat(kT, kD))};
  ExpectRefusals<F>("rms_norm_fwd", added,
                    {{"sum is absent", [](F& p) { p.sum = {}; }},
                     {"residual is [5, 8]", [](F& p) { p.residual = Mat(5, kD); }},
                     {"residual is int32, must be bf16 as x, or fp32",
                      [](F& p) { p.residual.dtype = DType::kInt32; }},
                     {"sum is fp32, must be bf16 as x", [](F& p) { p.sum = Mat(kT, kD); }},
                     {"sum aliases x", [](F& p) { p.sum.data = p.x.data, p.sum.stride[0] = 10; }},
                     {"sum aliases residual", [](F& p) { p.sum = p.residual; }},
                     {"y aliases x", [](F& p) { p.y = p.x; }},
                     {"y aliases residual", [](F& p) { p.y = p.residual; }},
                     {"y aliases sum", [](F& p) { p.y = p.sum; }}});
  added.residual = Mat(kT, kD);
  added.sum = added.x;
  EXPECT_TRUE(Validate(added).ok()) << Validate(added);
}

TEST(Validate, RmsNormBwd) {
  using B = RmsNormBwdParams;
  const B good{.x = Bf16(Mat(kT, kD)),
               .weight = Bf16(Vec(kD)),
               .dy = Bf16(Mat(kT, kD)),
               .dx = Bf16(Mat(kT, kD)),
               .dweight = Vec(kD)};
  ExpectRefusals<B>("rms_norm_bwd", good,
                    {{"dy is", [](B& p) { p.dy = Bf16(Mat(kT, 7)); }},
                     {"dx is", [](B& p) { p.dx = Bf16(Mat(kT, 7)); }},
                     {"dx is fp32, must be bf16 as x", [](B& p) { p.dx = Mat(kT, kD); }},
                     {"dx aliases x", [](B& p) { p.dx = p.x; }},
                     {"dx aliases dy", [](B& p) { p.dx = p.dy; }},
                     {"dx aliases dy",
                      [](B& p) {
                        p.dy = Mat(kT, kD), p.accumulate = false;
                        p.dx.data = p.dy.data;
                      }},
                     {"dweight is bf16, must be fp32", [](B& p) { p.dweight = Bf16(Vec(kD)); }},
                     {"dweight is [3]", [](B& p) { p.dweight = Vec(3); }}});
  B in_place = good;
  in_place.accumulate = false;
  in_place.dx = in_place.dy;
  EXPECT_TRUE(Validate(in_place).ok());
  in_place.dx = in_place.x;
  EXPECT_TRUE(Validate(in_place).ok());
  in_place.dy = Mat(kT, kD);
  EXPECT_TRUE(Validate(in_place).ok());
}

TEST(Validate, Matmul) {
  using P = MatmulParams;
  ExpectRefusals<P>("matmul", {.a = Mat(3, 5), .b = Mat(5, 4), .c = Mat(3, 4)},
                    {{"a is [2, 5], dim 0 must be 3", [](P& p) { p.a = Mat(2, 5); }},
                     {"b is [6, 4], dim 0 must be 5", [](P& p) { p.b = Mat(6, 4); }},
                     {"b is [5, 3], dim 1 must be 4", [](P& p) { p.b = Mat(5, 3); }},
                     {"a is [3, 5], dim 1 must be 3", [](P& p) { p.transpose_a = true; }},
                     {"b is [5, 4], dim 1 must be 5", [](P& p) { p.transpose_b = true; }},
                     {"c aliases b", [](P& p) { p.c.data = p.b.data; }},
                     {"b is bf16, must be fp32 as a", [](P& p) { p.b = Bf16(p.b); }},
                     {"c is bf16, must be fp32 as a", [](P& p) { p.c = Bf16(p.c); }},
                     {"c is int32, must be bf16 as a, or fp32",
                      [](P& p) {
                        p.a = Bf16(p.a), p.b = Bf16(p.b);
                        p.c.dtype = DType::kInt32;
                      }},
                     {"bias is [3], dim 0 must be 4", [](P& p) { p.bias = Vec(3); }},
                     {"bias is bf16, must be fp32 as a", [](P& p) { p.bias = Bf16(Vec(4)); }},
                     {"c aliases bias", [](P& p) { p.bias = Vec(4), p.bias.data = p.c.data; }},
                     {"alpha = inf", [](P& p) { p.alpha = INFINITY; }},
                     {"beta = nan", [](P& p) { p.beta = kNaN; }}});
  EXPECT_TRUE(Validate(P{.a = Mat(5, 3),
                         .b = Mat(4, 5),
                         .c = Mat(3, 4),
                         .transpose_a = true,
                         .transpose_b = true})
                  .ok());
  EXPECT_TRUE(Validate(P{.a = Mat(3, 0), .b = Mat(0, 4), .c = Mat(3, 4)}).ok());
  P bf16{.a = Bf16(Mat(3, 5)), .b = Bf16(Mat(5, 4)), .c = Mat(3, 4), .bias = Bf16(Vec(4))};
  EXPECT_TRUE(Validate(bf16).ok()) << Validate(bf16);
  bf16.c = Bf16(bf16.c);
  EXPECT_TRUE(Validate(bf16).ok()) << Validate(bf16);
}

TEST(Validate, ColumnSum) {
  using P = ColumnSumParams;
  ExpectRefusals<P>("column_sum", {.x = Bf16(Mat(kT, kD)), .out = Vec(kD)},
                    {{"x has rank 3", [](P& p) { p.x = Cube(kT, 2); }},
                     {"x is int64, must be fp32 or bf16", [](P& p) { p.x.dtype = DType::kInt64; }},
                     {"out is [6], dim 0 must be 8 (columns of x)", [](P& p) { p.out = Vec(kT); }},
                     {"out is bf16, must be fp32", [](P& p) { p.out = Bf16(p.out); }},
                     {"out aliases x", [](P& p) { p.out.data = p.x.data; }}});
}

template <typename Scaling>
Breakage<RopeParams> BreakScaling(const char* sentence,
                                  const std::function<void(Scaling&)>& apply) {
  return {sentence, [apply](RopeParams& p) {
            Scaling scaling;
            apply(scaling);
            p.config.scaling = scaling;
          }};
}

TEST(Validate, Rope) {
  using R = RopeParams;
  const R rope{.src = Cube(kT, 2), .dst = Cube(kT, 2), .positions = Vec(kT, DType::kInt64)};
  ExpectRefusals<R>(
      "rope", rope,
      {{"dst is", [](R& p) { p.dst = Cube(kT, 3); }},
       {"dst is bf16, must be fp32 as src", [](R& p) { p.dst = Bf16(p.dst); }},
       {"positions is int32", [](R& p) { p.positions.dtype = DType::kInt32; }},
       {"positions is [5]", [](R& p) { p.positions = Vec(5, DType::kInt64); }},
       {"head_dim = 7, must be even", [](R& p) { p.src.shape[2] = p.dst.shape[2] = 7; }},
       {"dst aliases src", [](R& p) { p.dst = p.src, p.accumulate = true; }},
       {"dst aliases src", [](R& p) { p.dst = p.src, p.src = Bf16(p.src); }},
       {"theta = 0", [](R& p) { p.config.theta = 0; }}});
  R in_place = rope;
  in_place.dst = in_place.src;
  EXPECT_TRUE(Validate(in_place).ok());
  R wide = rope;
  wide.src = Bf16(wide.src);
  EXPECT_TRUE(Validate(wide).ok());
}

TEST(Validate, RopeScaling) {
  using R = RopeParams;
  using L = RopeConfig::Llama3Scaling;
  using N = RopeConfig::DynamicNtkScaling;
  using Y = RopeConfig::YarnScaling;
  const R rope{.src = Cube(kT, 2), .dst = Cube(kT, 2), .positions = Vec(kT, DType::kInt64)};
  for (const RopeConfig::Scaling& scaling : std::vector<RopeConfig::Scaling>{
           std::monostate(), L(), RopeConfig::LinearScaling(), N(), Y()}) {
    R good = rope;
    good.config.scaling = scaling;
    EXPECT_TRUE(Validate(good).ok()) << Validate(good);
  }
  ExpectRefusals<R>(
      "rope", rope,
      {BreakScaling<L>("llama3.factor = 0.5", [](L& s) { s.factor = 0.5; }),
       BreakScaling<L>("llama3.low_freq_factor = 0", [](L& s) { s.low_freq_factor = 0; }),
       BreakScaling<L>("llama3.high_freq_factor = 1", [](L& s) { s.high_freq_factor = 1; }),
       BreakScaling<L>("llama3.original_context = 0", [](L& s) { s.original_context = 0; }),
       BreakScaling<RopeConfig::LinearScaling>("linear.factor = nan",
                                               [](auto& s) { s.factor = kNaN; }),
       BreakScaling<N>("dynamic.factor = inf", [](N& s) { s.factor = INFINITY; }),
       BreakScaling<N>("dynamic.original_context = 0", [](N& s) { s.original_context = 0; }),
       BreakScaling<N>("dynamic.context = -1", [](N& s) { s.context = -1; }),
       BreakScaling<Y>("yarn.factor = 0", [](Y& s) { s.factor = 0; }),
       BreakScaling<Y>("yarn.original_context = 0", [](Y& s) { s.original_context = 0; }),
       BreakScaling<Y>("yarn.beta_slow = 0", [](Y& s) { s.beta_slow = 0; }),
       BreakScaling<Y>("yarn.beta_fast = 1, must be finite and > beta_slow = 1",
                       [](Y& s) { s.beta_fast = 1; }),
       BreakScaling<Y>("yarn.attention_factor = 0", [](Y& s) { s.attention_factor = 0; }),
       {"theta = 1, must be > 1 with yarn", [](R& p) { p.config = {.theta = 1, .scaling = Y()}; }},
       {"head_dim = 2, must be > 2 with dynamic", [](R& p) {
          p.src.shape[2] = p.dst.shape[2] = 2;
          p.config.scaling = N();
        }}});
}

TEST(Validate, CopyAndRowDot) {
  using C = StridedCopyParams;
  ExpectRefusals<C>(
      "strided_copy", {.src = Cube(kT, 2), .dst = Cube(kT, 2)},
      {{"src has rank 2", [](C& p) { p.src = Mat(kT, kD); }},
       {"dst is", [](C& p) { p.dst = Cube(5, 2); }},
       {"src is fp64, must be fp32 or bf16", [](C& p) { p.src.dtype = DType::kFloat64; }},
       {"dst is int32, must be fp32 or bf16", [](C& p) { p.dst.dtype = DType::kInt32; }},
       {"dst aliases src", [](C& p) { p.dst = p.src; }}});
  for (const bool narrow : {false, true}) {
    C cast{.src = Cube(kT, 2), .dst = Cube(kT, 2)};
    (narrow ? cast.dst : cast.src).dtype = DType::kBFloat16;
    EXPECT_TRUE(Validate(cast).ok());
  }
  using D = RowDotParams;
  ExpectRefusals<D>(
      "row_dot", {.a = Cube(kT, 3), .b = Cube(kT, 3), .out = Mat(kT, 3)},
      {{"b is", [](D& p) { p.b = Cube(kT, 2); }},
       {"b is fp32, must be bf16 as a", [](D& p) { p.a = Bf16(p.a); }},
       {"out is bf16, must be fp32", [](D& p) { p.out = Bf16(p.out); }},
       {"out is [6, 2], dim 1 must be 3 (heads of a)", [](D& p) { p.out = Mat(kT, 2); }}});
}

AttentionMask Mask(std::vector<int64_t> starts, int64_t total) {
  AttentionMask mask{.total = total};
  mask.document_starts = std::make_shared<const std::vector<int64_t>>(std::move(starts));
  return mask;
}

// What both directions refuse.
template <typename P>
std::vector<Breakage<P>> AttentionBreakages() {
  return {{"k is", [](P& p) { p.k.shape[2] = 4, p.v.shape[2] = 4; }},
          {"v is", [](P& p) { p.v = Cube(kT, kSlots + 1); }},
          {"k is fp32, must be bf16 as q", [](P& p) { p.q = Bf16(p.q); }},
          {"v is bf16, must be fp32 as q", [](P& p) { p.v = Bf16(p.v); }},
          {"lse is bf16, must be fp32", [](P& p) { p.lse = Bf16(p.lse); }},
          {"lse is [3, 6], dim 0 must be 4 (heads of q)", [](P& p) { p.lse = Mat(3, kT); }},
          {"kv_slot.size = 3, must be the heads of q, 4", [](P& p) { p.kv_slot.pop_back(); }},
          {"kv_slot[1] = 2, must be in [0, 2)", [](P& p) { p.kv_slot[1] = kSlots; }},
          {"kv_slot[0] = -1", [](P& p) { p.kv_slot[0] = -1; }},
          {"queries = [14, 21), must be a run within [0, mask.total = 20)",
           [](P& p) {
             p.queries = {14, 21};
           }},
          {"queries = [0, 5) is 5 positions, its tensor has 6 tokens",
           [](P& p) {
             p.queries = {0, 5};
           }},
          {"keys = [9, 8)",
           [](P& p) {
             p.keys = {9, 8};
           }},
          {"mask.window = 0", [](P& p) { p.mask.window = 0; }},
          {"mask.document_starts is empty", [](P& p) { p.mask.document_starts = nullptr; }},
          {"mask.document_starts is empty", [](P& p) { p.mask = Mask({}, 20); }},
          {"mask.document_starts[0] = 1, must be 0", [](P& p) { p.mask = Mask({1}, 20); }},
          {"mask.document_starts[2] = 7 after 7",
           [](P& p) {
             p.mask = Mask({0, 7, 7}, 20);
           }},
          {"last of mask.document_starts = 20",
           [](P& p) {
             p.mask = Mask({0, 20}, 20);
           }},
          {"scale = nan", [](P& p) { p.scale = kNaN; }}};
}

AttentionFwdParams LegalAttention() {
  return {.q = Cube(kT, kHeads),
          .k = Cube(kT, kSlots),
          .v = Cube(kT, kSlots),
          .o = Cube(kT, kHeads),
          .lse = Mat(kHeads, kT),
          .kv_slot = {0, 0, 1, 1},
          .queries = {10, 16},
          .keys = {4, 10},
          .mask = Mask({0, 7}, 20)};
}

TEST(Validate, AttentionForward) {
  using F = AttentionFwdParams;
  const F fwd = LegalAttention();
  std::vector<Breakage<F>> breakages = AttentionBreakages<F>();
  breakages.push_back({"o is", [](F& p) { p.o = Cube(kT, 3); }});
  breakages.push_back({"o is bf16, must be fp32 as q", [](F& p) { p.o = Bf16(p.o); }});
  breakages.push_back({"o is bf16, must be fp32 with merge", [](F& p) {
                         p.q = Bf16(p.q), p.k = Bf16(p.k), p.v = Bf16(p.v), p.o = Bf16(p.o);
                         p.merge = true;
                       }});
  breakages.push_back({"o is int32, must be bf16 as q, or fp32", [](F& p) {
                         p.q = Bf16(p.q), p.k = Bf16(p.k), p.v = Bf16(p.v);
                         p.o.dtype = DType::kInt32;
                       }});
  breakages.push_back({"lse overlaps itself", [](F& p) { p.lse.stride[0] = kT - 1; }});
  breakages.push_back({"lse has last stride 2", [](F& p) { p.lse.stride[1] = 2; }});
  breakages.push_back({"lse aliases o", [](F& p) { p.lse.data = p.o.data; }});
  breakages.push_back({"o aliases q", [](F& p) { p.o = p.q; }});
  ExpectRefusals<F>("attention_fwd", fwd, breakages);
  F wide = fwd;
  wide.q = Bf16(wide.q), wide.k = Bf16(wide.k), wide.v = Bf16(wide.v);
  EXPECT_TRUE(Validate(wide).ok()) << Validate(wide);
  wide.merge = true;
  EXPECT_TRUE(Validate(wide).ok()) << Validate(wide);
  // Columns of a wider matrix of all tokens.
  F columns = fwd;
  columns.lse.stride[0] = 100;
  EXPECT_TRUE(Validate(columns).ok()) << Validate(columns);
}

TEST(Validate, AttentionBackward) {
  const AttentionFwdParams fwd = LegalAttention();
  using B = AttentionBwdParams;
  const B bwd{.q = fwd.q,
              .k = fwd.k,
              .v = fwd.v,
              .dout = Cube(kT, kHeads),
              .lse = fwd.lse,
              .delta = Mat(kT, kHeads),
              .dq = Cube(kT, kHeads),
              .dk = Cube(kT, kSlots + 1),
              .dv = Cube(kT, kSlots + 1),
              .kv_slot = fwd.kv_slot,
              .grad_slot = {2, 2, 0, 0},
              .queries = fwd.queries,
              .keys = fwd.keys,
              .mask = fwd.mask};
  std::vector<Breakage<B>> back = AttentionBreakages<B>();
  back.push_back({"delta is [5, 4]", [](B& p) { p.delta = Mat(5, kHeads); }});
  back.push_back({"dout is", [](B& p) { p.dout = Cube(kT, 3); }});
  back.push_back({"dout is bf16, must be fp32 as q", [](B& p) { p.dout = Bf16(p.dout); }});
  back.push_back({"o is", [](B& p) { p.o = Cube(kT, 3); }});
  back.push_back({"o is bf16, must be fp32 as q", [](B& p) { p.o = Bf16(p.dout); }});
  back.push_back({"delta is bf16, must be fp32", [](B& p) { p.delta = Bf16(p.delta); }});
  back.push_back({"dq is bf16, must be fp32", [](B& p) { p.dq = Bf16(p.dq); }});
  back.push_back({"dk is bf16, must be fp32", [](B& p) { p.dk = Bf16(p.dk); }});
  back.push_back({"dv is bf16, must be fp32", [](B& p) { p.dv = Bf16(p.dv); }});
  back.push_back({"dq is", [](B& p) { p.dq = Cube(5, kHeads); }});
  back.push_back({"dk is [5, 3, 8], dim 0 must be 6 (tokens of k)",
                  [](B& p) { p.dk = p.dv = Cube(5, kSlots + 1); }});
  back.push_back({"dk is", [](B& p) { p.dk.shape[2] = p.dv.shape[2] = 4; }});
  back.push_back({"dv is", [](B& p) { p.dv = Cube(kT, 1); }});
  back.push_back(
      {"grad_slot.size = 3, must be the heads of q, 4", [](B& p) { p.grad_slot.pop_back(); }});
  back.push_back(
      {"grad_slot[3] = 3, must be in [0, 3), the slots of dk", [](B& p) { p.grad_slot[3] = 3; }});
  back.push_back({"kv_slot and grad_slot of heads 0 and 1 are 0, 0 and 2, 1",
                  [](B& p) { p.grad_slot[1] = 1; }});
  back.push_back({"kv_slot and grad_slot of heads 0 and 2 are 0, 1 and 2, 2", [](B& p) {
                    p.grad_slot = {2, 2, 2, 0};
                  }});
  back.push_back({"dk aliases dv", [](B& p) { p.dk = p.dv; }});
  ExpectRefusals<B>("attention_bwd", bwd, back);
  B columns = bwd;
  columns.lse.stride[0] = 100;
  EXPECT_TRUE(Validate(columns).ok()) << Validate(columns);
}

TEST(Validate, SwiGluAndCrossEntropy) {
  using F = SwiGluFwdParams;
  ExpectRefusals<F>(
      "swiglu_fwd", {.gate = Mat(kT, 9), .up = Mat(kT, 9), .out = Mat(kT, 9)},
      {{"up is", [](F& p) { p.up = Mat(kT, 8); }},
       {"out is", [](F& p) { p.out = Mat(kT, 8); }},
       {"up is fp32, must be bf16 as gate", [](F& p) { p.gate = Bf16(p.gate); }},
       {"out aliases up", [](F& p) { p.out.data = p.up.data, p.out.stride[0] = 12; }}});
  using B = SwiGluBwdParams;
  ExpectRefusals<B>("swiglu_bwd", {.dout = Mat(kT, 9), .gate = Mat(kT, 9), .up = Mat(kT, 9)},
                    {{"gate is", [](B& p) { p.gate = Mat(5, 9); }},
                     {"dout overlaps itself", [](B& p) { p.dout.stride[0] = 0; }},
                     {"up is bf16, must be fp32 as dout", [](B& p) { p.up = Bf16(p.up); }},
                     {"up aliases gate", [](B& p) { p.up = p.gate; }}});
}

TEST(Validate, CrossEntropy) {
  using C = CrossEntropyParams;
  C good{.logits = Mat(kT, kVocab),
         .labels = Vec(kT, DType::kInt32),
         .loss_and_count = Vec(2, DType::kFloat64)};
  ExpectRefusals<C>(
      "cross_entropy", good,
      {{"labels is fp32, must be int32", [](C& p) { p.labels = Vec(kT); }},
       {"labels is [5]", [](C& p) { p.labels = Vec(5, DType::kInt32); }},
       {"logits is [6, 0]", [](C& p) { p.logits = Mat(kT, 0); }},
       {"logits is bf16, must be fp32", [](C& p) { p.logits = Bf16(p.logits); }},
       {"dlogits is [6, 9]", [](C& p) { p.dlogits = Mat(kT, 9); }},
       {"dlogits is fp64, must be fp32 or bf16",
        [](C& p) { p.dlogits = p.logits, p.dlogits.dtype = DType::kFloat64; }},
       {"loss_and_count is fp32, must be fp64", [](C& p) { p.loss_and_count = Vec(2); }},
       {"loss_and_count is [3]", [](C& p) { p.loss_and_count = Vec(3, DType::kFloat64); }}});
  good.dlogits = Bf16(good.logits);
  good.dlogits.stride[0] = 2 * kVocab;
  ExpectRefusals<C>(
      "cross_entropy", good,
      {{"dlogits begins where logits does, its rows are 20 bytes apart, must be 40",
        [](C& p) { p.dlogits.stride[0] = kVocab; }},
       {"its rows are 80 bytes apart", [](C& p) { p.dlogits.dtype = DType::kFloat32; }}});
  good.dlogits = good.logits;
  EXPECT_TRUE(Validate(good).ok());
}

TEST(Validate, Optimizer) {
  using S = SumOfSquaresParams;
  ExpectRefusals<S>("sum_of_squares", {.x = Vec(kT), .out = Vec(1, DType::kFloat64)},
                    {{"x has rank 2", [](S& p) { p.x = Mat(kT, kD); }},
                     {"out is [2]", [](S& p) { p.out = Vec(2, DType::kFloat64); }},
                     {"out is fp32", [](S& p) { p.out = Vec(1); }}});
  using C = ClipScaleParams;
  TensorView loss_and_count = Mat(3, 2);
  loss_and_count.dtype = DType::kFloat64;
  ExpectRefusals<C>("clip_scale",
                    {.sum_of_squares = Vec(1, DType::kFloat64),
                     .loss_and_count = loss_and_count,
                     .grad_norm = Vec(1),
                     .scale = Vec(1),
                     .skip = Vec(1, DType::kInt32),
                     .max_norm = INFINITY},
                    {{"skip is fp32", [](C& p) { p.skip = Vec(1); }},
                     {"loss_and_count has rank 1, must be 2",
                      [](C& p) { p.loss_and_count = Vec(2, DType::kFloat64); }},
                     {"loss_and_count is fp32", [](C& p) { p.loss_and_count = Mat(3, 2); }},
                     {"loss_and_count is [0, 2]", [](C& p) { p.loss_and_count.shape[0] = 0; }},
                     {"loss_and_count is [3, 1]", [](C& p) { p.loss_and_count.shape[1] = 1; }},
                     {"scale aliases grad_norm", [](C& p) { p.scale = p.grad_norm; }},
                     {"max_norm = 0", [](C& p) { p.max_norm = 0; }},
                     {"max_norm = nan", [](C& p) { p.max_norm = kNaN; }}});
  using A = AdamWParams;
  ExpectRefusals<A>("adamw",
                    {.param = Vec(kT),
                     .grad = Vec(kT),
                     .m = Vec(kT),
                     .v = Vec(kT),
                     .scale = Vec(1),
                     .skip = Vec(1, DType::kInt32)},
                    {{"grad is [5]", [](A& p) { p.grad = Vec(5); }},
                     {"m is", [](A& p) { p.m = Vec(5); }},
                     {"v is", [](A& p) { p.v = Vec(5); }},
                     {"param is bf16, must be fp32", [](A& p) { p.param = Bf16(p.param); }},
                     {"grad aliases param", [](A& p) { p.grad = p.param; }},
                     {"lr = -1", [](A& p) { p.lr = -1; }},
                     {"beta1 = 1", [](A& p) { p.beta1 = 1; }},
                     {"beta2 = nan", [](A& p) { p.beta2 = kNaN; }},
                     {"eps = -1", [](A& p) { p.eps = -1; }},
                     {"weight_decay = inf", [](A& p) { p.weight_decay = INFINITY; }},
                     {"step = 0", [](A& p) { p.step = 0; }}});
  using R = RandomNormalParams;
  ExpectRefusals<R>("random_normal", {.dst = Vec(kT)},
                    {{"dst is fp64", [](R& p) { p.dst = Vec(kT, DType::kFloat64); }},
                     {"first_index = -1", [](R& p) { p.first_index = -1; }},
                     {"stddev = nan", [](R& p) { p.stddev = kNaN; }}});
}

TEST(CheckWorkspace, NamesOpAndSizes) {
  const FillParams fill{.dst = Vec(kT)};
  char scratch[8];
  EXPECT_TRUE(CheckWorkspace(fill, {}, 0).ok());
  EXPECT_TRUE(CheckWorkspace(fill, {scratch, 8}, 8).ok());
  EXPECT_THAT(std::string(CheckWorkspace(fill, {scratch, 8}, 9).message()),
              HasSubstr("fill: workspace has 8 bytes, needs 9"));
  EXPECT_THAT(std::string(CheckWorkspace(fill, {nullptr, 8}, 8).message()),
              HasSubstr("has no address"));
}

}  // namespace
}  // namespace upipe::kernels
