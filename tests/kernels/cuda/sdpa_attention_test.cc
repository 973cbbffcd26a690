// Attention through cuDNN's calls, with a fake of cuDNN and own kernels on the emulator, against
// the reference: cuts, masks, strides, tables of ragged batches, merging and adding up. And what
// the calls cost: plans, scratch, offsets.
#include "kernels/cuda/sdpa_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "kernels/cuda/workspace_bytes.h"
#include "kernels/host/host_op_table.h"
#include "kernels/reference/reference_backend.h"
#include "tests/kernels/cuda/fake_sdpa.h"
#include "tests/kernels/kernels/support/address_space.h"
#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

int calls_to_cudnn = 0;

struct FakeCudnnBackend : reference::Backend {
  using reference::Backend::Run;
  using reference::Backend::WorkspaceBytes;

  static int64_t WorkspaceBytes(const AttentionFwdParams& p) {
    return cuda::WorkspaceBytes(p, cuda::AttentionKernel::kCudnn);
  }
  static int64_t WorkspaceBytes(const AttentionBwdParams& p) {
    return cuda::WorkspaceBytes(p, cuda::AttentionKernel::kCudnn);
  }
  template <typename Params>
  static absl::Status Attend(const Params& p, Workspace workspace, ExecContext& context) {
    if (!SdpaTakes(p)) return reference::Backend::Run(p, workspace, context);
    ++calls_to_cudnn;
    SdpaAttention attention(std::make_unique<FakeSdpa>());
    CUstream_st stream;
    const cuda::LaunchContext launch = {.stream = &stream, .multiprocessors = 1, .fault = nullptr};
    const absl::StatusOr<int64_t> scratch = attention.ScratchBytes(p);
    if (!scratch.ok()) return scratch.status();
    EXPECT_LE(*scratch, workspace.size_bytes) << "the table says less than the plans take";
    const absl::Status status = attention.Run(p, workspace, launch);
    if (!stream.error.empty()) return absl::InternalError(stream.error);
    return status;
  }
  static absl::Status Run(const AttentionFwdParams& p, Workspace w, ExecContext& context) {
    return Attend(p, w, context);
  }
  static absl::Status Run(const AttentionBwdParams& p, Workspace w, ExecContext& context) {
    return Attend(p, w, context);
  }
};

OpTable& FakeCudnn() {
  static OpTable& table = *new HostOpTable<FakeCudnnBackend>();
  return table;
}

// cuDNN reads O beside delta.
AttentionBwdParams BackwardCallWithOutput(const AttentionCase& c, Memory& memory) {
  AttentionBwdParams p = BackwardCall(c, memory);
  p.o = memory.Input({{p.q.shape[0], p.q.shape[1], p.q.shape[2]}, c.gap});
  Memory forward(0, memory.storage());
  const TensorView lse = forward.Output("lse", {{p.q.shape[1], p.q.shape[0]}}, kW);
  const TensorView o = forward.Output("o", {{p.q.shape[0], p.q.shape[1], p.q.shape[2]}});
  EXPECT_TRUE(RunCall(Reference(),
                      AttentionFwdParams{p.q, p.k, p.v, o, lse, p.kv_slot, p.queries, p.keys,
                                         p.mask, p.scale},
                      forward)
                  .ok());
  for (int64_t t = 0; t < o.shape[0]; ++t) {
    for (int64_t h = 0; h < o.shape[1]; ++h) {
      for (int64_t d = 0; d < o.shape[2]; ++d) {
        SetElement(p.o, t, h, d, GetElement(o, t, h, d));
      }
    }
  }
  memory.Seal();
  return p;
}

void ExpectMatchesReference(const BuildCall& build) {
  Memory memory(3, DType::kBFloat16, Memory::Alignment::kSixteenBytes);
  const OpParams params = build(memory);
  memory.Seal();
  const auto results = [&](OpTable& ops) {
    memory.Restore();
    EXPECT_EQ(RunCall(ops, params, memory), absl::OkStatus());
    return memory.Results();
  };
  auto reference = results(Reference());
  // All that cuDNN writes is bf16 first, log-sum-exp apart.
  for (Memory::Result& result : reference) {
    if (result.name != "lse") result.dtype = DType::kBFloat16;
  }
  const auto naive = results(Naive());
  ExpectWithinTheBound(results(FakeCudnn()), naive, reference, "through cuDNN's calls");
}

std::vector<AttentionCase> Cases() {
  std::vector<AttentionCase> cases = AttentionCases();
  cases.push_back({.name = "GroupedEvenly",
                   .queries = {0, 96},
                   .keys = {0, 96},
                   .kv_slot = {1, 1, 3, 3, 5, 5},
                   .slots = 6});
  cases.push_back({.name = "GroupedUnevenly",
                   .queries = {32, 96},
                   .keys = {0, 96},
                   .kv_slot = {0, 0, 0, 1},
                   .slots = 2});
  cases.push_back({.name = "GroupedDocuments",
                   .queries = {0, 96},
                   .keys = {0, 96},
                   .kv_slot = {0, 0, 1, 1},
                   .slots = 2,
                   .document_starts = {0, 10, 70}});
  std::vector<int64_t> many;
  for (int64_t i = 0; i < 520; ++i) many.push_back(2 * i);
  cases.push_back({.name = "MoreDocumentsThanOneCallTakes",
                   .queries = {0, 1040},
                   .keys = {0, 1040},
                   .document_starts = many});
  cases.push_back({.name = "WindowInDocumentsOfAllLengths",
                   .queries = {0, 300},
                   .keys = {0, 300},
                   .window = 20,
                   .document_starts = {0, 5, 100, 119, 140, 141}});
  for (AttentionCase& c : cases) {
    // Where o is wide, the bound needs scores of a few hundred.
    c.score_scale = std::min(c.score_scale, 300.0);
  }
  return cases;
}

class SdpaAttentionTest : public ::testing::TestWithParam<AttentionCase> {
 protected:
  static void TearDownTestSuite() { EXPECT_GE(calls_to_cudnn, 100) << "most cases go to cuDNN"; }
};

TEST_P(SdpaAttentionTest, ForwardWithinTheBound) {
  ExpectMatchesReference([](Memory& memory) { return ForwardCall(GetParam(), memory); });
}

TEST_P(SdpaAttentionTest, WideOutputWithinTheBound) {
  AttentionCase c = GetParam();
  c.wide_output = true;
  ExpectMatchesReference([&](Memory& memory) { return ForwardCall(c, memory); });
}

TEST_P(SdpaAttentionTest, MergeWithinTheBound) {
  AttentionCase c = GetParam();
  c.merge = true;
  ExpectMatchesReference([&](Memory& memory) { return ForwardCall(c, memory); });
}

TEST_P(SdpaAttentionTest, BackwardWithinTheBound) {
  ExpectMatchesReference([](Memory& memory) { return BackwardCallWithOutput(GetParam(), memory); });
}

// The same where more documents are to come than the call has: always ragged, always the same plan.
template <typename Params>
Params Bounded(Params p) {
  p.mask.documents_max = 700;
  p.mask.document_length_max = p.mask.total;
  return p;
}

TEST_P(SdpaAttentionTest, BoundedDocumentsWithinTheBound) {
  ExpectMatchesReference([](Memory& memory) { return Bounded(ForwardCall(GetParam(), memory)); });
  ExpectMatchesReference(
      [](Memory& memory) { return Bounded(BackwardCallWithOutput(GetParam(), memory)); });
}

INSTANTIATE_TEST_SUITE_P(Cases, SdpaAttentionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// A call of long runs at an address nobody reads.
AttentionFwdParams Long(PositionRun queries, PositionRun keys, std::vector<int64_t> documents = {0},
                        std::optional<int64_t> window = {}, int heads = 1) {
  auto* const anywhere = reinterpret_cast<void*>(uintptr_t{1} << 44);
  constexpr int64_t kDim = 128;
  const auto tensor = [&](PositionRun run, DType dtype) {
    return TensorView::Tensor3(anywhere, dtype, {run.end - run.begin, heads, kDim}, heads * kDim,
                               kDim);
  };
  AttentionFwdParams p = {.q = tensor(queries, DType::kBFloat16),
                          .k = tensor(keys, DType::kBFloat16),
                          .v = tensor(keys, DType::kBFloat16),
                          .o = tensor(queries, DType::kBFloat16)};
  p.lse = TensorView::Matrix(anywhere, DType::kFloat32, heads, queries.end - queries.begin);
  for (int head = 0; head < heads; ++head) p.kv_slot.push_back(head);
  p.queries = queries;
  p.keys = keys;
  p.mask = {.causal = true,
            .window = window,
            .document_starts = std::make_shared<const std::vector<int64_t>>(documents),
            .total = std::max(queries.end, keys.end)};
  return p;
}

constexpr int64_t kMi = 1 << 20;

TEST(SdpaCalls, OneSquareIsOneDenseCall) {
  const SdpaCalls calls = SdpaCallsOf(Long({0, 5 * kMi}, {0, 5 * kMi}, {0}, {}, 4));
  ASSERT_EQ(calls.calls.size(), 1u);
  const SdpaCall& call = calls.calls[0];
  EXPECT_FALSE(call.ragged);
  EXPECT_EQ(call.mask, (SdpaMask{.causal = true}));
  EXPECT_EQ(call.heads.heads, 4);
  EXPECT_EQ(call.pieces, (std::vector<SdpaPiece>{{0, 5 * kMi, 0, 5 * kMi}}));
  EXPECT_TRUE(calls.blind.empty());
}

TEST(SdpaCalls, UnequalRunsHaveTheirDiagonalAtTheEnd) {
  const SdpaCalls calls = SdpaCallsOf(Long({3 * kMi, 4 * kMi}, {0, 5 * kMi}));
  ASSERT_EQ(calls.calls.size(), 1u);
  EXPECT_EQ(calls.calls[0].mask, (SdpaMask{.causal = true, .bottom_right = true}));
  EXPECT_EQ(calls.calls[0].pieces, (std::vector<SdpaPiece>{{0, kMi, 0, 4 * kMi}}));
}

TEST(SdpaCalls, QueriesPastTheLastKeyAreARectangle) {
  const SdpaCalls calls = SdpaCallsOf(Long({kMi, 4 * kMi}, {0, 2 * kMi}));
  ASSERT_EQ(calls.calls.size(), 2u);
  EXPECT_EQ(calls.calls[0].mask, SdpaMask());
  EXPECT_EQ(calls.calls[0].pieces, (std::vector<SdpaPiece>{{kMi, 3 * kMi, 0, 2 * kMi}}));
  EXPECT_EQ(calls.calls[1].pieces, (std::vector<SdpaPiece>{{0, kMi, 0, 2 * kMi}}));
  EXPECT_EQ(calls.seeing, (std::vector<SdpaCalls::Rows>{{0, 3 * kMi}}));
}

TEST(SdpaCalls, QueriesBeforeTheFirstKeyAreBlind) {
  const SdpaCalls calls = SdpaCallsOf(Long({0, 2 * kMi}, {kMi, 3 * kMi}));
  EXPECT_EQ(calls.blind, (std::vector<SdpaCalls::Rows>{{0, kMi}}));
  ASSERT_EQ(calls.calls.size(), 1u);
  EXPECT_EQ(calls.calls[0].pieces, (std::vector<SdpaPiece>{{kMi, 2 * kMi, 0, kMi}}));
}

TEST(SdpaCalls, AWindowOfAnEarlierRunIsLookedAtFromItsCorner) {
  const SdpaCalls calls = SdpaCallsOf(Long({kMi, 2 * kMi}, {0, kMi}, {0}, 4096));
  ASSERT_EQ(calls.calls.size(), 1u);
  EXPECT_EQ(calls.calls[0].mask, (SdpaMask{.left = 1}));
  EXPECT_EQ(calls.calls[0].pieces, (std::vector<SdpaPiece>{{0, 4095, kMi - 4095, kMi}}));
  EXPECT_FALSE(calls.calls[0].ragged);
  EXPECT_EQ(calls.blind, (std::vector<SdpaCalls::Rows>{{4095, kMi}}));
}

TEST(SdpaCalls, DocumentsAreOneBatchPerHead) {
  const SdpaCalls calls =
      SdpaCallsOf(Long({0, 4 * kMi}, {0, 4 * kMi}, {0, 10, 3 * kMi, 3 * kMi + 1}, {}, 2));
  ASSERT_EQ(calls.calls.size(), 4u);  // single tokens need no diagonal
  for (const SdpaCall& call : calls.calls) {
    EXPECT_EQ(call.heads.heads, 1);
    EXPECT_FALSE(call.mask.bottom_right);
  }
  EXPECT_EQ(calls.calls[0].pieces.size(), 1u);
  EXPECT_TRUE(calls.calls[0].ragged) << "one query and one key";
  EXPECT_EQ(calls.calls[3].pieces.size(), 3u);
}

TEST(SdpaAttention, PackedDocumentsShareAPlanAndItsScratch) {
  FakeSdpa* library = new FakeSdpa();
  SdpaAttention attention{std::unique_ptr<SdpaLibrary>(library)};
  const auto scratch = [&](const std::vector<int64_t>& documents) {
    const AttentionFwdParams f = Long({0, kMi}, {0, kMi}, documents);
    AttentionBwdParams b = {.q = f.q, .k = f.k, .v = f.v, .o = f.o, .dout = f.q, .lse = f.lse};
    b.dq = b.dk = b.dv = f.q;
    b.kv_slot = b.grad_slot = f.kv_slot;
    b.queries = f.queries;
    b.keys = f.keys;
    b.mask = f.mask;
    EXPECT_TRUE(SdpaTakes(b));
    const int64_t bytes = *attention.ScratchBytes(b);
    EXPECT_LE(bytes, cuda::WorkspaceBytes(b, cuda::AttentionKernel::kCudnn));
    return bytes;
  };
  const int64_t bytes = scratch({0, 100, 9000});
  EXPECT_EQ(scratch({0, 5000, 70'000, 300'000}), bytes) << "no size follows their lengths";
  EXPECT_EQ(library->made().size(), 1u) << "documents of 1 Mi tokens and a few make one plan";
  scratch({0, 2, 4, 6, 8, 10, 12, 14, 16, 18});
  EXPECT_EQ(library->made().size(), 2u) << "more documents take a larger batch";
  EXPECT_EQ(library->made()[1].batch, 64);
  EXPECT_EQ(library->made()[1].total_queries, kMi);
}

// What is readied at the start serves every step: no plan is made when documents are met.
TEST(SdpaAttention, BoundedDocumentsNeedNoOtherPlanThanTheStartMade) {
  struct Runs {
    PositionRun queries, keys;
    size_t plans;  // a diagonal, rectangles, or both
  };
  for (const Runs& runs : {Runs{{0, 8192}, {0, 8192}, 1}, Runs{{4096, 8192}, {0, 8192}, 1},
                           Runs{{4096, 8192}, {0, 4096}, 1}, Runs{{0, 8192}, {0, 6000}, 2}}) {
    FakeSdpa* library = new FakeSdpa();
    SdpaAttention attention{std::unique_ptr<SdpaLibrary>(library)};
    const auto ask = [&](const std::vector<int64_t>& documents, int64_t longest) {
      AttentionFwdParams p = Long(runs.queries, runs.keys, documents);
      p.mask.documents_max = 300;
      p.mask.document_length_max = longest;
      EXPECT_TRUE(attention.ScratchBytes(p).ok());
    };
    constexpr int64_t kLongest = 3000;
    for (const int64_t first : {kLongest, kLongest / 2 + 1}) {  // as CheckWorkspaces does
      std::vector<int64_t> documents = {0};
      for (int64_t at = first; at < 8192; at += kLongest) documents.push_back(at);
      ask(documents, kLongest);
    }
    EXPECT_EQ(library->made().size(), runs.plans);
    for (const auto& key : library->made()) {
      EXPECT_TRUE(key.ragged);
      EXPECT_EQ(key.batch, kSdpaDocumentsMax) << "of up to 300 documents";
    }
    std::mt19937_64 random(5);
    for (int step = 0; step < 200; ++step) {
      std::vector<int64_t> documents = {0};
      while (documents.back() < 8192) {
        documents.push_back(documents.back() + 1 + static_cast<int64_t>(random() % kLongest));
        if (step % 3 == 0) documents.push_back(documents.back() + 1);  // of one token
      }
      while (documents.back() >= 8192) documents.pop_back();
      ask(documents, kLongest);
    }
    EXPECT_EQ(library->made().size(), runs.plans) << "made in a step";
  }
}

TEST(SdpaAttention, TakesWhatCudnnCan) {
  AttentionFwdParams p = Long({0, 64}, {0, 64});
  EXPECT_TRUE(SdpaTakes(p));
  p.q.stride[1] = 132;
  EXPECT_FALSE(SdpaTakes(p)) << "heads 264 bytes apart";
  p = Long({0, 64}, {0, 64}, {0}, 8);
  EXPECT_TRUE(SdpaTakes(p));
  p.mask.causal = false;
  EXPECT_FALSE(SdpaTakes(p)) << "a window both ways";
  p = Long({0, 1}, {0, 1});
  EXPECT_FALSE(SdpaTakes(p)) << "one query and one key";
  p = Long({0, 64}, {0, 64});
  p.q.dtype = p.k.dtype = p.v.dtype = DType::kFloat32;
  EXPECT_FALSE(SdpaTakes(p));
}

TEST(SdpaLength, HasFewValues) {
  EXPECT_EQ(SdpaLength(1, kMi), 1024);
  EXPECT_EQ(SdpaLength(1025, kMi), 2048);
  EXPECT_EQ(SdpaLength(kMi - 1, 700'000), 700'000);
  EXPECT_EQ(SdpaBatch(1), 1);
  EXPECT_EQ(SdpaBatch(9), 64);
  EXPECT_EQ(SdpaBatch(512), kSdpaDocumentsMax);
}

}  // namespace
}  // namespace upipe::kernels::testing
