// "No allocation over 64 KiB happens outside the Allocator once step 1 has begun": whole runs of
// the rank program on packed data, ranks as threads, under a watch of malloc and mmap that begins
// before step 1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/data/shard_writer.h"
#include "engine/train/rank_run.h"
#include "planner/plan.h"
#include "tests/memory/engine/malloc_guard.h"
#include "tests/support/engine/checkpointed_run.h"
#include "tests/support/engine/engine_harness.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kLimitBytes = size_t{64} << 10;

// Takes a block as a program would, in a way no compiler removes.
void Touch(void* block) { *static_cast<volatile char*>(block) = 1; }

TEST(MallocGuard, SeesEveryWayToTakeMemory) {
  const size_t bytes = kLimitBytes + 1;
  const auto seen = [&](const std::function<void()>& take) {
    ArmMallocGuard(kLimitBytes);
    take();
    const auto texts = DisarmMallocGuard();
    EXPECT_EQ(texts.size(), 1u);
    return texts.empty() ? "nothing" : texts[0].substr(0, texts[0].find(' '));
  };
  void* block = nullptr;
  const auto release = [&] { free(block); };
  EXPECT_EQ(seen([&] { Touch(block = malloc(bytes)); }), "malloc");
  EXPECT_EQ(seen([&] { Touch(block = realloc(block, bytes + 1)); }), "realloc");
  release();
  EXPECT_EQ(seen([&] { Touch(block = calloc(bytes, 1)); }), "calloc");
  release();
  EXPECT_EQ(seen([&] { Touch(block = aligned_alloc(64, (bytes + 63) / 64 * 64)); }),
            "aligned_alloc");
  release();
  EXPECT_EQ(seen([&] { ASSERT_EQ(posix_memalign(&block, 64, bytes), 0); }), "posix_memalign");
  release();
  EXPECT_EQ(seen([&] { Touch(std::vector<char>(bytes).data()); }), "malloc");
  EXPECT_EQ(
      seen([&] { std::thread([&] { Touch(std::make_unique<char[]>(bytes).get()); }).join(); }),
      "malloc");
  EXPECT_EQ(seen([&] {
              block =
                  mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            }),
            "mmap");
  munmap(block, bytes);
}

TEST(MallocGuard, SmallRequestsPass) {
  ArmMallocGuard(kLimitBytes);
  Touch(std::vector<char>(kLimitBytes).data());
  EXPECT_THAT(DisarmMallocGuard(), IsEmpty());
  EXPECT_GT(RequestsSeen(), 0u);
}

// A folder as upipe-data makes it, with more text than any job here reads.
void WritePackedText(const data::TempFolder& folder) {
  std::string text;
  for (int i = 0; text.size() < (100 << 10); ++i)
    text += absl::StrCat("the ", i, "th line of a long text\n");
  for (const char* name : {data::kTrainShardName, data::kHeldOutShardName}) {
    const auto header = data::WriteByteShard(folder.Path(name), {text});
    ASSERT_TRUE(header.ok()) << header.status();
  }
}

v1::RunPlan PlanFor(const data::TempFolder& folder, const SmallJob& job, int threads) {
  v1::JobSpec spec = MakeSpec(job);
  spec.mutable_data()->set_path(folder.Path(""));
  spec.mutable_parallel()->set_threads_per_rank(threads);
  spec.mutable_train()->set_steps(3);
  spec.mutable_train()->set_eval_every(1);
  auto plan = planner::MakeRunPlan(spec, {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

// Trains as upipe-run does; the guard is armed when the first rank is about to begin step 1. The
// requests it saw.
std::vector<std::string> TrainWatched(const v1::RunPlan& plan,
                                      const std::function<void(int64_t step)>& on_step) {
  const int ranks = plan.spec().parallel().ranks();
  std::vector<std::unique_ptr<kernels::Device>> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    auto device = train::CreateRankDevice(plan, rank);
    EXPECT_TRUE(device.ok()) << device.status();
    devices.push_back(*std::move(device));
  }
  const auto comms =
      comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  std::atomic<bool> armed{false};
  std::atomic<int> steps{0};
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = train::TrainRank({.plan = plan,
                                         .rank = rank,
                                         .comm = *comms[rank],
                                         .device = *devices[rank],
                                         .on_step =
                                             [&, rank](const v1::StepReport& report) {
                                               EXPECT_TRUE(report.has_held_out_loss());
                                               EXPECT_FALSE(report.skipped());
                                               if (rank == 0) on_step(report.step());
                                               ++steps;
                                             },
                                         .on_timeline = [](const v1::StepTimeline&) {},
                                         .timeline_every = absl::ZeroDuration(),
                                         .on_running =
                                             [&] {
                                               if (!armed.exchange(true))
                                                 ArmMallocGuard(kLimitBytes);
                                             }});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto texts = DisarmMallocGuard();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(steps, ranks * plan.spec().train().steps());
  EXPECT_GT(RequestsSeen(), 100u);
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(train::ToMessage(devices[rank]->allocator().stats()).arena_bytes(),
              plan.ranks(rank).memory().arena_bytes());
    EXPECT_EQ(train::ToMessage(devices[rank]->host_allocator().stats()).arena_bytes(),
              plan.ranks(rank).host_memory().arena_bytes());
  }
  return texts;
}

struct Shape {
  const char* name;
  SmallJob job;
  int threads = 1;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

// Each shape in fp32 and in bf16.
class NoLargeAllocation : public ::testing::TestWithParam<std::tuple<Shape, bool>> {};

std::string CaseName(const ::testing::TestParamInfo<std::tuple<Shape, bool>>& info) {
  const auto& [shape, bf16] = info.param;
  return absl::StrCat(shape.name, bf16 ? "_bf16" : "_fp32");
}

TEST_P(NoLargeAllocation, OutsideTheAllocatorOnceStepOneHasBegun) {
  auto [shape, bf16] = GetParam();
  shape.job.bf16 = bf16;
  const data::TempFolder folder;
  WritePackedText(folder);
  const v1::RunPlan plan = PlanFor(folder, shape.job, shape.threads);
  const auto texts = TrainWatched(plan, [](int64_t) {});
  for (const std::string& text : texts) ADD_FAILURE() << text;
}

// In each something the step handles, if it were a host block, would be over the limit: a column of
// all tokens, a block of an all-to-all, a unit of weights, a tile of logits.
INSTANTIATE_TEST_SUITE_P(Shapes, NoLargeAllocation,
                         ::testing::Combine(::testing::Values(Shape{"many_tokens",
                                                                    {.ranks = 1,
                                                                     .num_heads = 1,
                                                                     .num_kv_heads = 1,
                                                                     .head_dim = 2,
                                                                     .hidden_size = 4,
                                                                     .intermediate_size = 8,
                                                                     .vocab_size = 257,
                                                                     .num_layers = 1,
                                                                     .context = 17000}},
                                                              Shape{"wide_heads",
                                                                    {.ranks = 4,
                                                                     .num_heads = 8,
                                                                     .num_kv_heads = 2,
                                                                     .head_dim = 64,
                                                                     .hidden_size = 96,
                                                                     .intermediate_size = 200,
                                                                     .vocab_size = 2000,
                                                                     .context = 1100}},
                                                              Shape{"two_threads",
                                                                    {.ranks = 2,
                                                                     .heads_per_rank = 2,
                                                                     .num_heads = 4,
                                                                     .num_kv_heads = 4,
                                                                     .head_dim = 64,
                                                                     .hidden_size = 128,
                                                                     .vocab_size = 300,
                                                                     .context = 1024},
                                                                    2}),
                                            ::testing::Bool()),
                         CaseName);

// Tensors of tokens, heads and parameters above the limit, on whichever side they live.
SmallJob Wide(v1::Method method) {
  return {.ranks = 4,
          .num_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 64,
          .hidden_size = 96,
          .intermediate_size = 200,
          .vocab_size = 1000,
          .context = 1100,
          .method = method};
}
template <typename Change>
SmallJob With(SmallJob job, Change change) {
  change(job);
  return job;
}
void HiddenOnHost(SmallJob& job) { job.layer_inputs = job.hidden_stream = v1::PLACE_HOST; }

INSTANTIATE_TEST_SUITE_P(
    Methods, NoLargeAllocation,
    ::testing::Combine(::testing::Values(Shape{"upipe", With(Wide(v1::METHOD_UPIPE),
                                                             [](SmallJob& job) {
                                                               HiddenOnHost(job);
                                                               job.optimizer = v1::PLACE_HOST;
                                                               job.attention_output =
                                                                   v1::ATTENTION_OUTPUT_HOST;
                                                               job.overlap = true;
                                                             })},
                                         Shape{"upipe_chunks", With(Wide(v1::METHOD_UPIPE),
                                                                    [](SmallJob& job) {
                                                                      HiddenOnHost(job);
                                                                      job.stage_kv = v1::PLACE_HOST;
                                                                      job.query_chunks = 2;
                                                                    })},
                                         Shape{"ulysses", With(Wide(v1::METHOD_ULYSSES),
                                                               [](SmallJob& job) {
                                                                 HiddenOnHost(job);
                                                                 job.optimizer = v1::PLACE_HOST;
                                                               })},
                                         Shape{"ring", With(Wide(v1::METHOD_RING),
                                                            [](SmallJob& job) {
                                                              job.ring_ranks = 4;
                                                              job.layer_inputs = v1::PLACE_HOST;
                                                              job.stride = 2;
                                                              job.optimizer = v1::PLACE_HOST;
                                                            })},
                                         Shape{"usp_keep", With(Wide(v1::METHOD_USP),
                                                                [](SmallJob& job) {
                                                                  job.ring_ranks = 2;
                                                                  HiddenOnHost(job);
                                                                  job.ring_keep = true;
                                                                })},
                                         Shape{"hybrid", With(Wide(v1::METHOD_UPIPE),
                                                              [](SmallJob& job) {
                                                                job.ring_ranks = 2;
                                                                HiddenOnHost(job);
                                                                job.overlap = true;
                                                              })},
                                         Shape{"fpdt", With(Wide(v1::METHOD_FPDT),
                                                            [](SmallJob& job) {
                                                              job.optimizer = v1::PLACE_HOST;
                                                            })}),
                       ::testing::Bool()),
    CaseName);

// The watch covers the run itself: a block taken between its steps is found.
TEST(NoLargeAllocationTest, ABlockTakenDuringTheRunIsFound) {
  const data::TempFolder folder;
  WritePackedText(folder);
  const v1::RunPlan plan = PlanFor(folder, {.ranks = 2, .vocab_size = 257}, 1);
  const auto texts = TrainWatched(plan, [](int64_t step) {
    if (step == 2) Touch(std::vector<char>(kLimitBytes + 1).data());
  });
  EXPECT_THAT(texts, Contains(HasSubstr(absl::StrCat("malloc of ", kLimitBytes + 1, " bytes"))));
}

// The writer's thread too: what it hashes and writes lies in the host pool.
TEST(NoLargeAllocationOfCheckpoints, WhileTheyAreWritten) {
  const data::TempFolder folder;
  WritePackedText(folder);
  v1::JobSpec spec = PlanFor(folder, {.ranks = 2, .vocab_size = 257, .num_layers = 2}, 1).spec();
  spec.mutable_checkpoint()->set_path(folder.Path("checkpoints"));
  spec.mutable_checkpoint()->set_every_steps(1);
  const auto plan = MakePlan(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::atomic<bool> armed{false};
  const CheckpointedResult result = RunCheckpointed({.plan = *plan, .on_running = [&armed](int) {
                                                       if (!armed.exchange(true))
                                                         ArmMallocGuard(kLimitBytes);
                                                     }});
  const auto texts = DisarmMallocGuard();
  ASSERT_TRUE(result.ok()) << result.DebugString();
  EXPECT_FALSE(result.commits.empty());
  for (const std::string& text : texts) ADD_FAILURE() << text;
}

}  // namespace
}  // namespace upipe::testing
