// The same gradients over UCX processes as over threads, bit for bit: this binary starts itself
// once per rank. Shared memory inside a node, tcp between two nodes, several head shapes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "engine/comm/ucx/ucx_communicator.h"
#include "engine/train/rank_run.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe {
namespace {

namespace fs = std::filesystem;
using testing::SmallJob;

struct Case {
  SmallJob job;
  int num_nodes = 1;
};

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {{.ranks = 2, .heads_per_rank = 1, .num_heads = 4, .num_kv_heads = 2, .context = 45}},
      {{.ranks = 4, .heads_per_rank = 2, .num_heads = 7, .num_kv_heads = 1, .context = 45}},
      {{.ranks = 4, .heads_per_rank = 1, .num_heads = 8, .num_kv_heads = 2, .context = 45}, 2},
      {{.ranks = 3, .heads_per_rank = 2, .num_heads = 6, .num_kv_heads = 3, .context = 45}, 3},
      {{.ranks = 4,
        .heads_per_rank = 1,
        .num_heads = 6,
        .num_kv_heads = 3,
        .context = 45,
        .qk_norm = true,
        .qkv_bias = true,
        .bf16 = true},
       2},
      // The other methods and axes, several groups of ranks at once.
      {{.ranks = 3, .num_heads = 4, .num_kv_heads = 2, .context = 45, .method = v1::METHOD_RING},
       3},
      {{.ranks = 4,
        .num_heads = 6,
        .num_kv_heads = 3,
        .context = 45,
        .ring_ranks = 2,
        .overlap = true,
        .ring_keep = true},
       2},
      {{.ranks = 2, .num_heads = 4, .num_kv_heads = 2, .context = 45, .method = v1::METHOD_FPDT}},
      {{.ranks = 8,
        .num_heads = 4,
        .num_kv_heads = 2,
        .context = 45,
        .fsdp_ranks = 2,
        .dp_ranks = 2,
        .accumulation = 2,
        .optimizer = v1::PLACE_HOST,
        .overlap = true},
       2},
  };
  return cases;
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path + ".part", std::ios::binary) << bytes;
  fs::rename(path + ".part", path);
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream bytes;
  bytes << in.rdbuf();
  return bytes.str();
}

// The raw bytes of this rank's gradient shard after one step, then its loss.
absl::StatusOr<std::string> OneStep(const v1::RunPlan& plan, testing::Rank rank) {
  std::vector<testing::Sequence> sequences;
  for (int64_t i = 0; i < train::SequencesPerStep(plan.spec()); ++i) {
    sequences.push_back(testing::MakeSequence(plan.spec(), static_cast<uint64_t>(7 + i)));
  }
  UPIPE_ASSIGN_OR_RETURN(auto result, testing::RunStep(rank, 1, sequences));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<float> shard,
                         testing::ReadShard(rank, rank.step.parameters().gradients()));
  const size_t shard_bytes = shard.size() * sizeof(float);
  std::string bytes(shard_bytes + sizeof(double), '\0');
  std::memcpy(bytes.data(), shard.data(), shard_bytes);
  std::memcpy(bytes.data() + shard_bytes, &result.loss, sizeof(double));
  return bytes;
}

// Rendezvous through files: each rank writes its address and waits for the others'.
absl::Status RunRankProcess(const std::string& folder, const Case& test, int rank) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, testing::MakePlan(testing::MakeSpec(test.job)));
  UPIPE_ASSIGN_OR_RETURN(auto device, train::CreateRankDevice(plan, rank));
  UPIPE_ASSIGN_OR_RETURN(auto ucx, comm::UcxContext::Create({}));
  WriteFile(absl::StrCat(folder, "/address", rank), ucx->address());
  comm::PeerGroup group{.rank = rank,
                       .addresses = {},
                       .node_ids = {},
                       .identity = {"job", 1, plan.plan_hash(), "nonce"}};
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  for (int peer = 0; peer < test.job.ranks; ++peer) {
    const std::string path = absl::StrCat(folder, "/address", peer);
    while (!fs::exists(path)) {
      if (absl::Now() > deadline) return absl::DeadlineExceededError(path);
      absl::SleepFor(absl::Milliseconds(5));
    }
    group.addresses.push_back(ReadFile(path));
    group.node_ids.push_back(absl::StrCat("node", peer % test.num_nodes));
  }
  UPIPE_ASSIGN_OR_RETURN(auto comm,
                         ucx->Connect(group, {.deadline = absl::Minutes(1), .observer = {}}));
  const auto streams = engine::RankStreams::Create(*device, rank);
  const engine::RankContext context = testing::MakeContext(plan, *device, streams, *comm);
  UPIPE_ASSIGN_OR_RETURN(auto step, train::TrainStep::Create(context, plan));
  UPIPE_ASSIGN_OR_RETURN(const std::string bytes, OneStep(plan, {rank, context, *step}));
  WriteFile(absl::StrCat(folder, "/gradient", rank), bytes);
  return absl::OkStatus();
}

class UcxInvariance : public ::testing::TestWithParam<int> {};

TEST_P(UcxInvariance, ProcessesGiveTheBitsOfThreads) {
  const Case& test = Cases()[GetParam()];
  const std::string folder = absl::StrCat(::testing::TempDir(), "ucx-", getpid(), "-", GetParam());
  fs::create_directories(folder);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < test.job.ranks; ++rank) {
    const std::string index = absl::StrCat(GetParam()), number = absl::StrCat(rank);
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("UCX_HANDLE_ERRORS", "none", 1);
      execl("/proc/self/exe", "rank", "--rank-process", folder.c_str(), index.c_str(),
            number.c_str(), nullptr);
      _exit(127);
    }
    pids.push_back(pid);
  }
  for (pid_t pid : pids) {
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }
  const auto plan = testing::MakePlan(testing::MakeSpec(test.job));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const absl::Status threads =
      testing::RunRanks({.plan = *plan}, [&](testing::Rank rank) -> absl::Status {
        UPIPE_ASSIGN_OR_RETURN(const std::string bytes, OneStep(*plan, rank));
        EXPECT_TRUE(bytes == ReadFile(absl::StrCat(folder, "/gradient", rank.rank)))
            << "rank " << rank.rank;
        return absl::OkStatus();
      });
  EXPECT_TRUE(threads.ok()) << threads;
  fs::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(HeadShapes, UcxInvariance,
                         ::testing::Range(0, static_cast<int>(Cases().size())));

int Main(int argc, char** argv) {
  int index = 0, rank = 0;
  if (argc == 5 && std::string(argv[1]) == "--rank-process" && absl::SimpleAtoi(argv[3], &index) &&
      absl::SimpleAtoi(argv[4], &rank)) {
    const absl::Status status = RunRankProcess(argv[2], Cases()[index], rank);
    if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace
}  // namespace upipe

int main(int argc, char** argv) { return upipe::Main(argc, argv); }
