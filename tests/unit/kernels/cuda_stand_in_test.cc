// Scratch of the ops a CUDA device would run: cuDNN's as its finalised plans report it, cuBLAS's,
// and what kernels of our own need. Counts of a dry device that stands in for one.
#include "kernels/dry/cuda_stand_in.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/api/scratch_table.h"
#include "kernels/backends.h"

namespace upipe::kernels {
namespace {

using testing::HasSubstr;

constexpr int64_t kKi = 1024, kMi = kKi * kKi;

std::unique_ptr<OpTable> Table(const char* attention) {
  auto table = CreateCudaStandIn(attention);
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

struct Shape {
  int64_t queries = 0, keys = 0;
  int64_t heads = 1, kv_heads = 1;
  DType dtype = DType::kBFloat16;
  bool merge = false;
};

TensorView Heads(int64_t tokens, int64_t heads, DType dtype) {
  return TensorView::Tensor3(nullptr, dtype, {tokens, heads, 128}, heads * 128, 128);
}

std::vector<int32_t> Slots(const Shape& s) {
  std::vector<int32_t> slots(s.heads);
  for (int64_t h = 0; h < s.heads; ++h) slots[h] = static_cast<int32_t>(h * s.kv_heads / s.heads);
  return slots;
}

AttentionBwdParams Backward(const Shape& s) {
  return {.q = Heads(s.queries, s.heads, s.dtype),
          .k = Heads(s.keys, s.kv_heads, s.dtype),
          .kv_slot = Slots(s)};
}

AttentionFwdParams Forward(const Shape& s) {
  return {.q = Heads(s.queries, s.heads, s.dtype),
          .k = Heads(s.keys, s.kv_heads, s.dtype),
          .o = Heads(s.queries, s.heads, s.merge ? DType::kFloat32 : s.dtype),
          .kv_slot = Slots(s),
          .merge = s.merge};
}

// The bf16 dq, dk and dv that cuDNN writes are ours to hold beside its own workspace.
int64_t GradientBytes(const Shape& s) {
  return 2 * 128 * (s.heads * s.queries + 2 * s.kv_heads * s.keys);
}

TEST(CudaStandIn, CudnnsBackwardWorkspaceIsWhatItsPlansReport) {
  const auto table = Table(kCudnnAttention);
  const std::pair<Shape, int64_t> reported[] = {
      {{.queries = 128 * kKi, .keys = 128 * kKi}, 67'633'408},
      {{.queries = kMi, .keys = kMi}, 541'065'472},
      {{.queries = 5 * kMi, .keys = 5 * kMi}, 2'705'326'336},
      {{.queries = 64 * kKi, .keys = kMi}, 33'816'832},  // the keys cost nothing
      {{.queries = kMi, .keys = kMi, .heads = 4, .kv_heads = 1}, 4'311'744'768},
  };
  for (const auto& [shape, bytes] : reported) {
    // Of the reported bytes 256 do not grow with the call; for packed documents more are counted.
    EXPECT_EQ(table->WorkspaceBytes(Backward(shape)),
              bytes - 256 + cuda::kCudnnFixedBytes + GradientBytes(shape))
        << shape.queries << " x " << shape.keys << ", " << shape.heads << " heads";
  }
}

TEST(CudaStandIn, CudnnsForwardHoldsWhatIsMergedLater) {
  const auto table = Table(kCudnnAttention);
  EXPECT_EQ(table->WorkspaceBytes(Forward({.queries = kMi, .keys = kMi, .heads = 2})),
            cuda::kCudnnFixedBytes);
  const Shape merged = {.queries = kMi, .keys = kMi, .heads = 2, .merge = true};
  EXPECT_EQ(table->WorkspaceBytes(Forward(merged)),
            cuda::kCudnnFixedBytes + 2 * kMi * (2 * 128 + 4));
}

TEST(CudaStandIn, OwnAttentionAndFp32TakeNoScratch) {
  const Shape shape = {.queries = kMi, .keys = kMi, .heads = 4, .kv_heads = 1, .merge = true};
  const auto own = Table(kOwnAttention);
  EXPECT_FALSE(own->AttentionBwdReadsOutput());
  EXPECT_EQ(own->WorkspaceBytes(Backward(shape)), 0);
  EXPECT_EQ(own->WorkspaceBytes(Forward(shape)), 0);
  const auto cudnn = Table(kCudnnAttention);
  EXPECT_TRUE(cudnn->AttentionBwdReadsOutput());
  Shape fp32 = shape;
  fp32.dtype = DType::kFloat32;
  EXPECT_EQ(cudnn->WorkspaceBytes(Backward(fp32)), 0);
}

// A deterministic job's: cuDNN forward, our own backward.
TEST(CudaStandIn, TheOwnBackwardTakesNoScratchBehindCudnnsForward) {
  const Shape shape = {.queries = kMi, .keys = kMi, .heads = 4, .kv_heads = 1, .merge = true};
  EXPECT_EQ(DeterministicAttention(kOwnAttention), kOwnAttention);
  const std::string name = DeterministicAttention(kCudnnAttention);
  EXPECT_EQ(DeterministicAttention(name), name);
  const auto mixed = Table(name.c_str()), cudnn = Table(kCudnnAttention);
  EXPECT_FALSE(mixed->AttentionBwdReadsOutput());
  EXPECT_EQ(mixed->WorkspaceBytes(Backward(shape)), 0);
  EXPECT_EQ(mixed->WorkspaceBytes(Forward(shape)), cudnn->WorkspaceBytes(Forward(shape)));
}

TEST(CudaStandIn, OtherVersionsAreCountedAsTheKnownOne) {
  const Shape shape = {.queries = kMi, .keys = kMi};
  EXPECT_EQ(Table("cudnn 9.25")->WorkspaceBytes(Backward(shape)),
            Table(kCudnnAttention)->WorkspaceBytes(Backward(shape)));
  for (const char* name : {"cudnn 9.", "cudnn 10.1", "cudnn 9.19 own", "own, own backward"}) {
    EXPECT_FALSE(CreateCudaStandIn(name).ok()) << name;
  }
}

TEST(MeasuredScratch, IsWhatTheShapeTookOrTheWorstOfItsOp) {
  const Shape measured = {.queries = kMi, .keys = kMi}, other = {.queries = 2 * kMi, .keys = kMi};
  const auto formula = Table(kCudnnAttention);
  const auto counted = [&](const Shape& shape) { return formula->WorkspaceBytes(Backward(shape)); };
  ScratchTable table;
  table.Add(*ScratchShapeOf(Backward(measured)),
            {.counted = counted(measured), .measured = 3 * counted(measured)});
  const Shape less = {.queries = kMi, .keys = kKi};
  table.Add(*ScratchShapeOf(Backward(less)), {.counted = counted(less), .measured = 5});
  const auto dry = *CreateDryDevice("cuda", kCudnnAttention, table);
  OpTable& ops = dry->ops();
  EXPECT_EQ(ops.WorkspaceBytes(Backward(measured)), 3 * counted(measured));
  EXPECT_EQ(ops.WorkspaceBytes(Backward(less)), counted(less)) << "never below the formula";
  EXPECT_EQ(ops.WorkspaceBytes(Backward(other)), 3 * counted(other)) << "nobody measured it";
  EXPECT_EQ(ops.CountedBytes(Backward(measured)), counted(measured));
  EXPECT_EQ(ops.WorkspaceBytes(Forward(measured)), formula->WorkspaceBytes(Forward(measured)));
  EXPECT_TRUE(ops.AttentionBwdReadsOutput());
  EXPECT_FALSE(ScratchShapeOf(FillParams{}).has_value()) << "ours";
}

TEST(CudaStandIn, ProductsTakeCublasesAndReductionsTheirPartials) {
  const auto table = Table(kOwnAttention);
  const auto matrix = [](int64_t rows, int64_t columns) {
    return TensorView::Matrix(nullptr, DType::kBFloat16, rows, columns);
  };
  EXPECT_EQ(
      table->WorkspaceBytes(MatmulParams{.a = matrix(8, 4), .b = matrix(4, 2), .c = matrix(8, 2)}),
      32 * kMi);
  const auto weight = TensorView::Vector(nullptr, DType::kBFloat16, 4096);
  EXPECT_EQ(table->WorkspaceBytes(RmsNormBwdParams{.x = matrix(512, 4096), .weight = weight}),
            512 * 4096 * 4);
  EXPECT_EQ(table->WorkspaceBytes(RmsNormFwdParams{.x = matrix(512, 4096), .weight = weight}), 0);
  EXPECT_EQ(table->WorkspaceBytes(ColumnSumParams{.x = matrix(100'000, 4096)}), 528 * 4096 * 4);
  EXPECT_EQ(table->WorkspaceBytes(CrossEntropyParams{.logits = matrix(512, 100)}), 512 * 8);
}

TEST(CudaStandIn, UnknownKernelsAreRefusedByName) {
  const absl::Status status = CreateDryDevice("cuda", "cudnn 8").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("\"cudnn 8\""), HasSubstr("own"), HasSubstr("cudnn 9.19")));
  EXPECT_EQ(CreateDryDevice("cpu", kCudnnAttention).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Ops on host memory are the CPU's whatever the device is.
TEST(CudaStandIn, HostOpsAreTheCpus) {
  const auto cuda = *CreateDryDevice("cuda", kCudnnAttention);
  const auto cpu = *CreateDryDevice("cpu");
  const OpParams squares =
      SumOfSquaresParams{.x = TensorView::Vector(nullptr, DType::kFloat32, 10 * kMi)};
  EXPECT_EQ(cuda->host_ops().WorkspaceBytes(squares), cpu->host_ops().WorkspaceBytes(squares));
  const OpParams product = MatmulParams{.a = TensorView::Matrix(nullptr, DType::kFloat32, 4, 4)};
  EXPECT_EQ(cuda->ops().WorkspaceBytes(product), 32 * kMi);
  EXPECT_EQ(cuda->host_ops().WorkspaceBytes(product), cpu->ops().WorkspaceBytes(product));
}

TEST(DryCounts, AddUpByKindOfCall) {
  const DryCalls large = {.op = kOpIndex<MatmulParams>, .cost = {8, 4, 2}, .extent = 2, .calls = 1};
  DryCalls small = large;
  small.cost.flops = 1;
  DryCounts step;
  for (int i = 0; i < 3; ++i) {
    step.Add(large);
    step.Add(small);
  }
  ASSERT_EQ(step.by_kind()[kOpIndex<MatmulParams>].size(), 2u);
  EXPECT_EQ(step.by_op().at("matmul").calls, 6);
  EXPECT_EQ(step.total().cost.flops, 27);
  step.bytes_to_host = 5;
  DryCounts sum = step;
  sum.AddTimes(step, 3);
  EXPECT_EQ(sum.total().calls, 24);
  EXPECT_EQ(sum.bytes_to_host, 20);
  EXPECT_FALSE(sum == step);
  sum.AddTimes(step, -3);
  EXPECT_TRUE(sum == step);
  sum.AddTimes(step, -1);
  EXPECT_TRUE(sum == DryCounts());
  EXPECT_TRUE(sum.by_op().empty());
}

TEST(DryCounts, TellWhatTimeDependsOn) {
  const auto device = *CreateDryDevice("cuda");
  const auto stream = device->CreateStream("compute");
  const auto buffer = *device->allocator().Allocate(MemoryTag::kMlp, kMi, *stream);
  const auto matrix = [&](int64_t first, int64_t rows, int64_t columns) {
    return TensorView::Matrix(static_cast<char*>(buffer.data()) + first, DType::kBFloat16, rows,
                              columns);
  };
  const OpParams product = MatmulParams{.a = matrix(0, 16, 32),
                                        .b = matrix(4096, 16, 8),
                                        .c = matrix(8192, 32, 8),
                                        .transpose_a = true};
  const Workspace scratch = {buffer.data(), 32 * kMi};
  ASSERT_TRUE(device->ops().Enqueue(product, scratch, *stream).ok());
  DryCounts elsewhere;
  device->CountInto(&elsewhere);
  const OpParams fill = FillParams{.dst = matrix(0, 1, 8)};
  ASSERT_TRUE(device->host_ops().Enqueue(fill, {}, *stream).ok());
  device->CountInto(nullptr);
  const DryCalls& calls = device->counts().by_kind()[kOpIndex<MatmulParams>].at(0);
  EXPECT_EQ(calls.dtype, DType::kBFloat16);
  EXPECT_EQ(calls.extent, 32);
  EXPECT_FALSE(calls.on_host);
  EXPECT_EQ(device->counts().total().calls, 1);
  EXPECT_TRUE(elsewhere.by_kind()[kOpIndex<FillParams>].at(0).on_host);
}

}  // namespace
}  // namespace upipe::kernels
