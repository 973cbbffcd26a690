// Attention kernels that read the attention output in backward, as cuDNN's do, are given it: O of
// the stage's heads travels once more. A device that checks that what arrives is the O whose delta
// travelled beside it, in real runs.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <ostream>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/host/host_device.h"
#include "tests/memory/engine/schedule_point.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

using engine::Place;
using kernels::AttentionBwdParams;

std::atomic<int64_t> rows_checked{0};

// That delta = rowsum(dO * O), fp32.
absl::Status CheckDelta(const AttentionBwdParams& p) {
  for (int64_t t = 0; t < p.q.shape[0]; ++t) {
    for (int64_t h = 0; h < p.q.shape[1]; ++h) {
      const auto* out = static_cast<const float*>(p.o.At(t, h));
      const auto* dout = static_cast<const float*>(p.dout.At(t, h));
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < p.q.shape[2]; ++i) {
        sum += double{out[i]} * dout[i];
        magnitude += std::abs(double{out[i]} * dout[i]);
      }
      const double delta = *static_cast<const float*>(p.delta.At(t, h));
      if (std::abs(sum - delta) > 1e-5 * magnitude) {
        return absl::InternalError(absl::StrCat("token ", t, " of ", p.queries.begin, ", head ", h,
                                                ": rowsum ", sum, ", delta ", delta));
      }
      ++rows_checked;
    }
  }
  return absl::OkStatus();
}

class ReadingOutput final : public kernels::OpTable {
 public:
  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    return cpu_->WorkspaceBytes(params);
  }
  bool AttentionBwdReadsOutput() const override { return true; }
  absl::Status Enqueue(const kernels::OpParams& params, kernels::Workspace workspace,
                       kernels::Stream& stream) override {
    if (const auto* backward = std::get_if<AttentionBwdParams>(&params)) {
      if (!backward->o.present()) return absl::InternalError("no attention output");
      stream.Submit([p = *backward](kernels::ExecContext&) { return CheckDelta(p); });
    }
    return cpu_->Enqueue(params, workspace, stream);
  }

 private:
  std::unique_ptr<kernels::OpTable> cpu_ = kernels::CreateCpuOpTable(2);
};

absl::Status RunRank(const v1::RunPlan& plan, const Sequence& sequence, comm::Communicator& comm) {
  const int rank = comm.rank();
  UPIPE_ASSIGN_OR_RETURN(
      const auto device,
      kernels::HostDevice::Create({.arena_bytes = 2 * plan.ranks(rank).memory().arena_bytes(),
                                   .host_bytes = plan.ranks(rank).host_memory().arena_bytes()},
                                  std::make_unique<ReadingOutput>()));
  const auto streams = engine::RankStreams::Create(*device, rank);
  const engine::RankContext context = MakeContext(plan, *device, streams, comm);
  UPIPE_ASSIGN_OR_RETURN(const auto step, train::TrainStep::Create(context, plan));
  const absl::Status status = RunStep({rank, context, *step}, 1, sequence).status();
  if (!status.ok()) comm.Abort(status);
  return status;
}

struct Case {
  const char* name;
  Point point;
};
void PrintTo(const Case& c, std::ostream* out) { *out << Describe(c.point); }

class ResentOutput : public ::testing::TestWithParam<Case> {};

TEST_P(ResentOutput, IsTheOneDeltaIsOf) {
  const Point& point = GetParam().point;
  const auto plan = MakePlan(point.Spec());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Sequence sequence = MakeSequence(point.Spec(), 1);
  const auto comms =
      comm::InprocGroup::Create(point.ranks(), {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<absl::Status> statuses(point.ranks());
  std::vector<std::thread> threads;
  rows_checked = 0;
  for (int rank = 0; rank < point.ranks(); ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = RunRank(*plan, sequence, *comms[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(rows_checked, point.num_layers * point.num_heads * point.padded_context());
}

Point Small(int ulysses, int ring, int64_t chunks, const engine::MemoryPolicy& policy) {
  return {.ulysses_ranks = ulysses,
          .ring_ranks = ring,
          .query_chunks = chunks,
          .num_heads = 6,
          .num_kv_heads = 3,
          .context = 75,
          .policy = policy};
}

INSTANTIATE_TEST_SUITE_P(
    Points, ResentOutput,
    ::testing::Values(Case{"plain", Small(4, 1, 1, {})}, Case{"hybrid", Small(2, 2, 1, {})},
                      Case{"chunks_overlap", Small(3, 1, 2, {.overlap = true})},
                      Case{"hidden_on_host", Small(2, 1, 2,
                                                   {.layer_inputs = Place::kHost,
                                                    .hidden_stream = Place::kHost,
                                                    .overlap = true})}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::testing
