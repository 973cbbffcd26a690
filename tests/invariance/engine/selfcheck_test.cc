// A self check passes at every kind of method and policy, and one defect of each kind that it is
// there for, put between the engine and its device or its peers, fails it in the right words.
#include "engine/train/selfcheck.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "tests/invariance/engine/method_case.h"

namespace upipe::testing {
namespace {

using kernels::OpParams;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// ---- A device whose ops and memory are not quite right

class TamperingOps final : public kernels::OpTable {
 public:
  using Tamper = std::function<void(OpParams&)>;
  TamperingOps(kernels::OpTable& wrapped, Tamper tamper)
      : wrapped_(wrapped), tamper_(std::move(tamper)) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return wrapped_.WorkspaceBytes(params);
  }
  bool AttentionBwdReadsOutput() const override { return wrapped_.AttentionBwdReadsOutput(); }
  absl::Status Enqueue(const OpParams& params, kernels::Workspace workspace,
                       kernels::Stream& stream) override {
    OpParams other = params;
    tamper_(other);
    return wrapped_.Enqueue(other, workspace, stream);
  }

 private:
  kernels::OpTable& wrapped_;
  Tamper tamper_;
};

class TamperingDevice final : public kernels::Device {
 public:
  // Takes `more_bytes` of device memory for itself.
  TamperingDevice(std::unique_ptr<kernels::Device> wrapped, TamperingOps::Tamper tamper,
                  int64_t more_bytes)
      : wrapped_(std::move(wrapped)),
        ops_(wrapped_->ops(), std::move(tamper)),
        stream_(wrapped_->CreateStream("tampering")) {
    if (more_bytes == 0) return;
    taken_ = *allocator().Allocate(kernels::MemoryTag::kComm, more_bytes, *stream_);
  }

  std::string name() const override { return wrapped_->name(); }
  kernels::Allocator& allocator() override { return wrapped_->allocator(); }
  kernels::OpTable& ops() override { return ops_; }
  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override {
    return wrapped_->CreateStream(std::move(name));
  }
  kernels::Allocator& host_allocator() override { return wrapped_->host_allocator(); }
  kernels::OpTable& host_ops() override { return wrapped_->host_ops(); }
  std::unique_ptr<kernels::Stream> CreateHostStream(std::string name) override {
    return wrapped_->CreateHostStream(std::move(name));
  }
  void CopyRowsToHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    wrapped_->CopyRowsToHost(copy, stream);
  }
  void CopyRowsFromHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    wrapped_->CopyRowsFromHost(copy, stream);
  }

 private:
  std::unique_ptr<kernels::Device> wrapped_;
  TamperingOps ops_;
  std::unique_ptr<kernels::Stream> stream_;
  kernels::Buffer taken_;
};

// ---- A communicator that delivers something else

class TamperingCommunicator final : public comm::Communicator {
 public:
  explicit TamperingCommunicator(comm::Communicator& wrapped)
      : Communicator(wrapped.size()), wrapped_(wrapped) {}

  std::function<void(comm::AllToAllVParams&)> on_all_to_all;
  std::function<bool(int64_t reduction)> drops;  // what this rank adds to its n-th reduce-scatter
  std::function<void(double* values, int64_t count)> on_all_reduce;  // before it

  int rank() const override { return wrapped_.rank(); }
  int size() const override { return wrapped_.size(); }
  absl::Status AllToAllV(const comm::AllToAllVParams& params, kernels::Stream& stream) override {
    comm::AllToAllVParams other = params;
    if (on_all_to_all) on_all_to_all(other);
    return wrapped_.AllToAllV(other, stream);
  }
  absl::Status AllGather(const comm::RankGroup& group, const void* send, void* receive,
                         int64_t bytes, kernels::Stream& stream) override {
    return wrapped_.AllGather(group, send, receive, bytes, stream);
  }
  absl::Status ReduceScatter(const comm::RankGroup& group, const float* send, float* receive,
                             int64_t count, void* scratch, kernels::Stream& stream) override {
    if (drops && drops(reductions_++)) {
      nothing_.resize(std::max(nothing_.size(), group.size() * count));
      send = nothing_.data();
    }
    return wrapped_.ReduceScatter(group, send, receive, count, scratch, stream);
  }
  int64_t ReduceScatterScratchBytes(int group_size, int64_t count) const override {
    return wrapped_.ReduceScatterScratchBytes(group_size, count);
  }
  absl::Status AllReduce(double* values, int64_t count, comm::ReduceOp op, void* scratch,
                         kernels::Stream& stream) override {
    if (on_all_reduce) {
      stream.Submit([this, values, count](kernels::ExecContext&) {
        on_all_reduce(values, count);
        return absl::OkStatus();
      });
    }
    return wrapped_.AllReduce(values, count, op, scratch, stream);
  }
  int64_t AllReduceScratchBytes(int64_t count) const override {
    return wrapped_.AllReduceScratchBytes(count);
  }
  absl::Status Barrier(kernels::Stream& stream) override { return wrapped_.Barrier(stream); }
  void Abort(absl::Status cause) override { wrapped_.Abort(std::move(cause)); }
  absl::Status status() const override { return wrapped_.status(); }
  comm::CommStats stats() const override { return wrapped_.stats(); }

 private:
  comm::Communicator& wrapped_;
  int64_t reductions_ = 0;
  std::vector<float> nothing_ = std::vector<float>(1 << 16);
};

// ---- A check on threads

struct Defect {
  TamperingOps::Tamper tamper = [](OpParams&) {};
  int64_t more_bytes = 0;  // that the device of rank 1 takes for itself
  std::function<void(TamperingCommunicator&)> arm = {};  // of rank 1
  bool hostile = false;  // delays between streams, freed memory poisoned
};

constexpr int64_t kRoom = int64_t{1} << 28;

absl::StatusOr<train::SelfCheckReport> Check(const v1::JobSpec& spec, const Defect& defect = {},
                                             const train::SelfCheckOptions& options = {
                                                 .steps = 2, .memory_bytes = kRoom}) {
  const absl::StatusOr<v1::RunPlan> plan = MakePlan(spec);
  if (!plan.ok()) return plan.status();
  const int ranks = spec.parallel().ranks();
  const auto comms =
      comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<absl::StatusOr<train::SelfCheckReport>> reports(ranks, absl::UnknownError("none"));
  const auto run = [&](int rank) {
    TamperingCommunicator tampering(*comms[rank]);
    if (rank == 1 && defect.arm) defect.arm(tampering);
    const int64_t more_bytes = rank == 1 ? defect.more_bytes : 0;
    reports[rank] = train::RunSelfCheck(
        {.plan = *plan,
         .rank = rank,
         .comm = tampering,
         .options = options,
         .create_device =
             [&](kernels::DeviceOptions asked) -> absl::StatusOr<std::unique_ptr<kernels::Device>> {
           asked.arena_bytes += more_bytes;
           if (defect.hostile) Hostile(3)(rank, asked);
           auto device = kernels::CreateDevice(asked);
           if (!device.ok()) return device.status();
           return std::make_unique<TamperingDevice>(*std::move(device), defect.tamper, more_bytes);
         }});
    if (!reports[rank].ok()) comms[rank]->Abort(reports[rank].status());
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < ranks; ++rank) {
    if (!reports[rank].ok()) return reports[rank].status();
    EXPECT_EQ(VerdictOf(*reports[rank]), VerdictOf(*reports[0])) << "rank " << rank;
  }
  return std::move(reports[0]);
}

std::string VerdictWith(const SmallJob& job, const Defect& defect) {
  const auto report = Check(MakeSpec(job), defect);
  return report.ok() ? VerdictOf(*report) : report.status().ToString();
}

// ---- What passes

struct Point {
  const char* name;
  SmallJob job;
};

class SelfCheck : public ::testing::TestWithParam<Point> {};

TEST_P(SelfCheck, Passes) {
  const SmallJob& job = GetParam().job;
  const auto report = Check(MakeSpec(job), {.hostile = true});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(VerdictOf(*report), StartsWith("PASS: 2 steps of "));
  EXPECT_EQ(report->numbers.size(), 6u);
  EXPECT_EQ(report->probes.size(), (job.documents == v1::DOCUMENTS_JOIN ? 0u : 3u) + job.causal);
  // Bounds that say something: what a defect changes is of the order of one.
  for (const train::Compared& gradient : report->gradients) {
    EXPECT_LT(gradient.bound, job.bf16 ? 0.3 : 1e-4) << gradient.what;
    EXPECT_GT(gradient.alone, 0) << gradient.what;
  }
  for (const train::PlannedAndMeasured& each : report->memory) {
    EXPECT_EQ(each.measured, each.planned) << each.what;
  }
}

const SmallJob kUneven = {.ranks = 4, .num_heads = 6, .num_kv_heads = 3, .context = 301};

SmallJob With(SmallJob job, const std::function<void(SmallJob&)>& change) {
  change(job);
  return job;
}

INSTANTIATE_TEST_SUITE_P(
    Points, SelfCheck,
    ::testing::Values(Point{"upipe", kUneven},
                      Point{"hybrid_bf16_restart", With(kUneven,
                                                        [](SmallJob& j) {
                                                          j.ring_ranks = 2;
                                                          j.bf16 = true;
                                                          j.documents = v1::DOCUMENTS_RESTART;
                                                          j.overlap = true;
                                                        })},
                      Point{"ring_keep_tied", With(kUneven,
                                                   [](SmallJob& j) {
                                                     j.ranks = 3;
                                                     j.method = v1::METHOD_RING;
                                                     j.ring_keep = true;
                                                     j.tie_embeddings = true;
                                                   })},
                      Point{"usp_host", With(kUneven,
                                             [](SmallJob& j) {
                                               j.method = v1::METHOD_USP;
                                               j.ring_ranks = 2;
                                               j.documents = v1::DOCUMENTS_SEPARATE;
                                               j.layer_inputs = v1::PLACE_HOST;
                                               j.hidden_stream = v1::PLACE_HOST;
                                               j.optimizer = v1::PLACE_HOST;
                                             })},
                      Point{"fpdt_bf16_window", With(kUneven,
                                                     [](SmallJob& j) {
                                                       j.ranks = 2;
                                                       j.method = v1::METHOD_FPDT;
                                                       j.bf16 = true;
                                                       j.window = 50;
                                                       j.qk_norm = true;
                                                     })},
                      Point{"ulysses_axes", With(kUneven,
                                                 [](SmallJob& j) {
                                                   j.ranks = 8;
                                                   j.method = v1::METHOD_ULYSSES;
                                                   j.fsdp_ranks = 2;
                                                   j.dp_ranks = 2;
                                                   j.accumulation = 3;
                                                   j.qkv_bias = true;
                                                 })},
                      Point{"bidirectional", With(kUneven,
                                                  [](SmallJob& j) {
                                                    j.causal = false;
                                                    j.stride = 2;
                                                    j.attention_output = v1::ATTENTION_OUTPUT_HOST;
                                                  })}),
    [](const auto& info) { return info.param.name; });

// ---- What fails

const SmallJob kJob = {.ranks = 4, .context = 256};

const SmallJob kSeparate = With(kJob, [](SmallJob& j) { j.documents = v1::DOCUMENTS_SEPARATE; });

TEST(SelfCheckFinds, BlocksThatChangedPlaces) {
  const auto swap = [](comm::AllToAllVParams& params) {
    auto& receives = params.receives;
    for (size_t i = 1; i < receives.size(); ++i) {
      if (receives[0].bytes != receives[i].bytes || receives[0].peer == receives[i].peer) continue;
      return std::swap(receives[0].data, receives[i].data);
    }
  };
  EXPECT_THAT(VerdictWith(kJob, {.arm = [&](auto& comm) { comm.on_all_to_all = swap; }}),
              AllOf(StartsWith("FAIL: loss of step 1 differs between CP = 1 and CP = 4 by"),
                    HasSubstr("rounding explains")));
}

// Of one layer, on one rank: embedding, layer 0 and layer 1 have losses and norms about right.
TEST(SelfCheckFinds, AGradientThatWasDropped) {
  constexpr int kReductionsOfAStep = 4;  // head, layer 1, layer 0, embedding
  const auto second = [](int64_t reduction) { return reduction % kReductionsOfAStep == 1; };
  EXPECT_THAT(VerdictWith(kJob, {.arm = [&](auto& comm) { comm.drops = second; }}),
              StartsWith("FAIL: the gradient of model.layers.1.mlp.down_proj.weight differs"));
}

// On every rank and at CP = 1 too: only the probe can tell.
TEST(SelfCheckFinds, AMaskThatLeaksADocument) {
  const auto join = [](OpParams& params) {
    const auto one = [](kernels::AttentionMask& mask) {
      mask.document_starts = std::make_shared<const std::vector<int64_t>>(1, 0);
    };
    if (auto* forward = std::get_if<kernels::AttentionFwdParams>(&params)) one(forward->mask);
    if (auto* backward = std::get_if<kernels::AttentionBwdParams>(&params)) one(backward->mask);
  };
  EXPECT_THAT(VerdictWith(kSeparate, {.tamper = join}),
              StartsWith("FAIL: other tokens in document 1 of 5 change losses that must not see "
                         "them: the mean of "));
}

TEST(SelfCheckFinds, AMaskThatLeaksADocumentOnTheWayBack) {
  const auto join = [](OpParams& params) {
    if (auto* backward = std::get_if<kernels::AttentionBwdParams>(&params)) {
      backward->mask.document_starts = std::make_shared<const std::vector<int64_t>>(1, 0);
    }
  };
  EXPECT_THAT(VerdictWith(kSeparate, {.tamper = join}),
              AllOf(StartsWith("FAIL: other tokens in document 1 of 5, which have no label, "),
                    HasSubstr("elements of the gradient of model.layers.1.")));
}

TEST(SelfCheckFinds, AttentionThatSeesLaterTokens) {
  const auto see = [](OpParams& params) {
    if (auto* forward = std::get_if<kernels::AttentionFwdParams>(&params)) {
      forward->mask.causal = false;
    }
  };
  EXPECT_THAT(VerdictWith(kJob, {.tamper = see}),
              StartsWith("FAIL: other tokens at positions from 128 on change losses"));
}

TEST(SelfCheckFinds, ATokenThatCountsTwice) {
  const auto count = [](double* values, int64_t number) {
    if (number == optim::StepScalarsView::kNumReduced) values[1] += 1;
  };
  EXPECT_THAT(VerdictWith(kJob, {.arm = [&](auto& comm) { comm.on_all_reduce = count; }}),
              StartsWith("FAIL: valid tokens of step 1 are not the labels of the data: 257 at CP = "
                         "1, 257 at CP = 4"));
}

TEST(SelfCheckFinds, MemoryThatNobodyPlanned) {
  EXPECT_THAT(VerdictWith(kJob, {.more_bytes = 4096}),
              AllOf(StartsWith("FAIL: rank 1 measured "), HasSubstr(" bytes of CP = 1, device: "),
                    HasSubstr("were planned")));
}

// ---- What is refused, and how long the sequence is

TEST(SelfCheckOptions, AreHeldToTheirRanges) {
  const v1::JobSpec spec = MakeSpec(kJob);
  const auto status = [&](const train::SelfCheckOptions& options) {
    return Check(spec, {}, options).status();
  };
  EXPECT_EQ(status({.steps = 0}).message(), "a self check of 0 steps; 1 to 1000");
  EXPECT_EQ(status({.context = 257}).message(),
            "a self check of 257 tokens; 1 to the job's context of 256");
}

// Nothing but the job's own arenas: as many tokens as one rank has room for there.
TEST(SelfCheckOptions, TheSequenceIsShortenedUntilItFitsTheJobsMemory) {
  SmallJob job = kJob;
  job.context = 1024;
  const auto roomy = Check(MakeSpec(job), {}, {.steps = 1, .memory_bytes = kRoom});
  const auto tight = Check(MakeSpec(job), {}, {.steps = 1});
  ASSERT_TRUE(roomy.ok() && tight.ok()) << roomy.status() << tight.status();
  EXPECT_EQ(roomy->context, 1024);
  EXPECT_EQ(tight->context, 256);
  const auto plan = MakePlan(MakeSpec(job));
  EXPECT_LE(tight->bytes, plan->ranks(0).memory().arena_bytes());
  EXPECT_GT(roomy->bytes, plan->ranks(0).memory().arena_bytes());
  const auto refused = Check(MakeSpec(job), {}, {.steps = 1, .context = 1000});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("the self check of 1000 tokens takes"),
                    HasSubstr("raise train.memory_per_rank")));
}

}  // namespace
}  // namespace upipe::testing
