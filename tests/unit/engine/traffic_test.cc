// Every message of a step, against the schedule's formula written down here from SCHEDULE: who
// sends how much to whom, in which collective. An all-gather of keys, or anything collected at rank
// 0, differs from it at once. The dry communicator records one rank at a time; the totals are then
// compared with the plan's and with a real run's.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/comm/dry/dry_communicator.h"
#include "tests/support/engine/engine_harness.h"
#include "tests/support/engine/recording_communicator.h"

namespace upipe::testing {
namespace {

using Bytes = std::vector<int64_t>;

constexpr int64_t kF32Bytes = 4;

// The messages of rank `rank`, from (H, K, C, u) and sizes alone.
class ExpectedMessages {
 public:
  ExpectedMessages(const SmallJob& job, int rank)
      : job_(job),
        rank_(rank),
        n_((job.context + job.ranks - 1) / job.ranks),
        stored_(job.bf16 ? 2 : kF32Bytes) {}

  // One vote, one training step, in order. A unit is asked for before the work that hides it.
  std::vector<RecordedCollective> Step() {
    AllReduce(1);
    Gather(Embedding());
    Gather(Block());
    for (int64_t layer = 0; layer < job_.num_layers; ++layer) {
      AttentionForward();
      Gather(layer + 1 < job_.num_layers ? Block() : Head());
    }
    Gather(Block());
    Reduce(Head());
    for (int64_t layer = job_.num_layers - 1; layer >= 0; --layer) {
      AttentionForward();
      if (layer > 0) Gather(Block());
      AttentionBackward();
      Reduce(Block());
    }
    Reduce(Embedding());
    AllReduce(21);  // loss and count of ten ranges of positions, squares
    return std::move(messages_);
  }

 private:
  int64_t group() const { return job_.num_heads / job_.num_kv_heads; }
  int64_t HeadsPerRank() const {
    return job_.ulysses ? (job_.num_heads + job_.ranks - 1) / job_.ranks : job_.heads_per_rank;
  }
  int64_t Stages() const {
    const int64_t busiest = (job_.num_heads + job_.ranks - 1) / job_.ranks;
    return (busiest + HeadsPerRank() - 1) / HeadsPerRank();
  }
  // Query heads [first, last) of a rank at a stage.
  std::pair<int64_t, int64_t> Queries(int64_t stage, int64_t rank) const {
    const int64_t begin = rank * job_.num_heads / job_.ranks,
                  end = (rank + 1) * job_.num_heads / job_.ranks;
    const int64_t u = HeadsPerRank();
    return {std::min(begin + stage * u, end), std::min(begin + (stage + 1) * u, end)};
  }
  int64_t NumQueries(int64_t stage, int64_t rank) const {
    const auto [first, last] = Queries(stage, rank);
    return last - first;
  }
  std::set<int64_t> Kv(int64_t stage, int64_t rank) const {
    std::set<int64_t> kv;
    if (stage < 0 || stage >= Stages()) return kv;
    const auto [first, last] = Queries(stage, rank);
    for (int64_t head = first; head < last; ++head) kv.insert(head / group());
    return kv;
  }
  int64_t NotIn(int64_t stage, int64_t other, int64_t rank) const {
    int64_t count = 0;
    const auto there = Kv(other, rank);
    for (int64_t head : Kv(stage, rank)) count += there.contains(head) ? 0 : 1;
    return count;
  }
  int64_t Fetches(int64_t stage, int64_t rank) const { return NotIn(stage, stage - 1, rank); }
  int64_t Releases(int64_t stage, int64_t rank) const { return NotIn(stage, stage + 1, rank); }

  // `to(peer)` bytes go to each peer, `from(peer)` come from it.
  template <typename To, typename From>
  void Exchange(To to, From from) {
    RecordedCollective all{CollectiveKind::kAllToAllV, Bytes(job_.ranks), Bytes(job_.ranks)};
    for (int64_t peer = 0; peer < job_.ranks; ++peer) {
      if (peer == rank_) continue;
      all.sent[peer] = to(peer);
      all.received[peer] = from(peer);
    }
    messages_.push_back(all);
  }
  bool Anybody(int64_t (ExpectedMessages::*count)(int64_t, int64_t) const, int64_t stage) const {
    for (int64_t rank = 0; rank < job_.ranks; ++rank) {
      if ((this->*count)(stage, rank) > 0) return true;
    }
    return false;
  }
  // Own tokens of each rank's heads travel to it; `row` bytes per token and head.
  void HeadsOut(int64_t stage, int64_t row) {
    Exchange([&](int64_t peer) { return n_ * row * NumQueries(stage, peer); },
             [&](int64_t) { return n_ * row * NumQueries(stage, rank_); });
  }
  void HeadsBack(int64_t stage) {
    Exchange([&](int64_t) { return stored_ * n_ * job_.head_dim * NumQueries(stage, rank_); },
             [&](int64_t peer) { return stored_ * n_ * job_.head_dim * NumQueries(stage, peer); });
  }
  void KvOut(int64_t stage) {
    if (!Anybody(&ExpectedMessages::Fetches, stage)) return;
    for (int tensor = 0; tensor < 2; ++tensor) {  // k, v
      Exchange([&](int64_t peer) { return stored_ * n_ * job_.head_dim * Fetches(stage, peer); },
               [&](int64_t) { return stored_ * n_ * job_.head_dim * Fetches(stage, rank_); });
    }
  }
  void KvGradientsBack(int64_t stage) {
    if (!Anybody(&ExpectedMessages::Releases, stage)) return;
    for (int tensor = 0; tensor < 2; ++tensor) {  // dk, dv
      Exchange([&](int64_t) { return stored_ * n_ * job_.head_dim * Releases(stage, rank_); },
               [&](int64_t peer) { return stored_ * n_ * job_.head_dim * Releases(stage, peer); });
    }
  }
  void AttentionForward() {
    for (int64_t s = 0; s < Stages(); ++s) {
      HeadsOut(s, stored_ * job_.head_dim);  // q
      KvOut(s);
      HeadsBack(s);  // o
    }
  }
  void AttentionBackward() {
    for (int64_t s = 0; s < Stages(); ++s) {
      HeadsOut(s, stored_ * job_.head_dim + kF32Bytes);  // dO and delta
      HeadsOut(s, stored_ * job_.head_dim);              // q
      KvOut(s);
      HeadsBack(s);  // dq
      KvGradientsBack(s);
    }
  }

  // Elements of one rank's part of a unit: tensors aligned to 16, then cut into equal aligned
  // parts.
  int64_t Shard(const std::vector<int64_t>& tensors) const {
    int64_t elements = 0;
    for (int64_t tensor : tensors) elements += (tensor + 15) / 16 * 16;
    return ((elements + job_.ranks - 1) / job_.ranks + 15) / 16 * 16;
  }
  int64_t Embedding() const {
    const int64_t table = job_.vocab_size * job_.hidden_size;
    return job_.tie_embeddings ? Shard({table, job_.hidden_size}) : Shard({table});
  }
  int64_t Head() const {
    return job_.tie_embeddings ? Embedding()
                               : Shard({job_.hidden_size, job_.vocab_size * job_.hidden_size});
  }
  int64_t Block() const {
    const int64_t d = job_.hidden_size, query = job_.num_heads * job_.head_dim * d;
    const int64_t kv = job_.num_kv_heads * job_.head_dim * d, mlp = job_.intermediate_size * d;
    std::vector<int64_t> tensors = {d, query, kv, kv, query, d, mlp, mlp, mlp};
    if (job_.qk_norm) tensors.insert(tensors.end(), {job_.head_dim, job_.head_dim});
    if (job_.qkv_bias) tensors.insert(tensors.end(), {query / d, kv / d, kv / d});
    return Shard(tensors);
  }
  void ToEveryPeer(CollectiveKind kind, int64_t bytes, bool receives) {
    Bytes by_peer(job_.ranks, bytes);
    by_peer[rank_] = 0;
    messages_.push_back({kind, by_peer, receives ? by_peer : Bytes()});
  }
  // One rank's fp32 shard is the unit, and its gradient the sum.
  void Gather(int64_t shard) {
    if (job_.ranks == 1 && !job_.bf16) return;
    ToEveryPeer(CollectiveKind::kAllGather, shard * stored_, true);
  }
  void Reduce(int64_t shard) {
    if (job_.ranks == 1) return;
    ToEveryPeer(CollectiveKind::kReduceScatter, shard * kF32Bytes, false);
  }
  void AllReduce(int64_t count) { ToEveryPeer(CollectiveKind::kAllReduce, count * 8, false); }

  const SmallJob job_;
  const int rank_;
  const int64_t n_;       // tokens of each rank
  const int64_t stored_;  // bytes of an element in the storage type
  std::vector<RecordedCollective> messages_;
};

std::vector<SmallJob> Jobs() {
  std::vector<SmallJob> jobs;
  for (int64_t u = 1; u <= 4; ++u) {
    jobs.push_back({.ranks = 8,
                    .heads_per_rank = u,
                    .num_heads = 28,
                    .num_kv_heads = 4});  // H not divisible by C
    jobs.push_back({.ranks = 2, .heads_per_rank = u, .num_heads = 8, .num_kv_heads = 2});
  }
  for (int64_t u = 1; u <= 2; ++u) {
    jobs.push_back({.ranks = 4,
                    .heads_per_rank = u,
                    .num_heads = 8,
                    .num_kv_heads = 1,
                    .tie_embeddings = true});
    jobs.push_back({.ranks = 4, .heads_per_rank = u, .num_heads = 8, .num_kv_heads = 2});  // K < C
  }
  for (int64_t u = 1; u <= 3; ++u) {
    jobs.push_back({.ranks = 4,
                    .heads_per_rank = u,
                    .num_heads = 12,
                    .num_kv_heads = 6});  // C does not divide K
  }
  jobs.push_back(
      {.ranks = 4, .num_heads = 8, .num_kv_heads = 8, .context = 3});  // ranks without tokens
  jobs.push_back(
      {.ranks = 5, .num_heads = 3, .num_kv_heads = 3, .context = 26});  // ranks without heads
  jobs.push_back({.ranks = 4, .num_heads = 8, .num_kv_heads = 4, .ulysses = true});
  jobs.push_back({.ranks = 1, .heads_per_rank = 2, .num_heads = 4, .num_kv_heads = 2});
  const std::vector<SmallJob> fp32 = jobs;
  for (SmallJob job : fp32) {
    job.bf16 = true;
    job.qk_norm = job.heads_per_rank % 2 == 1;
    job.qkv_bias = job.heads_per_rank % 2 == 0;
    jobs.push_back(job);
  }
  return jobs;
}

std::string Name(const SmallJob& job) {
  return absl::StrCat("H", job.num_heads, " K", job.num_kv_heads, " C", job.ranks, " u",
                      job.heads_per_rank, job.ulysses ? " ulysses" : "", " context ", job.context,
                      job.bf16 ? " bf16" : "", job.qk_norm ? " q/k-norm" : "",
                      job.qkv_bias ? " q/k/v bias" : "");
}

// What the engine asks of its communicator in one dry step of a rank.
std::vector<RecordedCollective> RecordDryStep(const v1::RunPlan& plan, int rank) {
  auto device = *kernels::CreateDryDevice(plan.spec().parallel().backend());
  comm::DryCommunicator dry(rank, plan.spec().parallel().ranks());
  RecordingCommunicator comm(dry);
  const auto stream = device->CreateStream("compute");
  const engine::RankContext context(*device, *stream, comm, nullptr,
                                    model::StorageTypeOf(plan.spec().train()));
  auto step = train::TrainStep::Create(context, plan);
  EXPECT_TRUE(step.ok()) << step.status();
  comm.Clear();
  EXPECT_TRUE((*step)->AnyRank(false).ok());
  EXPECT_TRUE((*step)->Run(1, {}).ok());
  return comm.recorded();
}

TEST(Traffic, EveryMessageOfAStepIsTheSchedules) {
  for (const SmallJob& job : Jobs()) {
    SCOPED_TRACE(Name(job));
    const auto plan = MakePlan(MakeSpec(job));
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (int rank = 0; rank < job.ranks; ++rank) {
      const auto expected = ExpectedMessages(job, rank).Step();
      const auto recorded = RecordDryStep(*plan, rank);
      ASSERT_EQ(recorded.size(), expected.size()) << "rank " << rank;
      Bytes total(job.ranks, 0);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(recorded[i], expected[i])
            << "rank " << rank << ", collective " << i << ":\n  " << ToString(recorded[i])
            << "\n  should be\n  " << ToString(expected[i]);
        for (int peer = 0; peer < job.ranks; ++peer) total[peer] += expected[i].sent[peer];
      }
      const auto& planned = plan->ranks(rank).bytes_sent_to_peer();
      EXPECT_EQ(Bytes(planned.begin(), planned.end()), total) << "rank " << rank;
    }
  }
}

// What a rank sends another is what that one expects, collective by collective.
TEST(Traffic, SendsAndReceivesOfTheRanksMeet) {
  for (const SmallJob& job : Jobs()) {
    SCOPED_TRACE(Name(job));
    const auto plan = MakePlan(MakeSpec(job));
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<std::vector<RecordedCollective>> ranks;
    for (int rank = 0; rank < job.ranks; ++rank) ranks.push_back(RecordDryStep(*plan, rank));
    for (const auto& recorded : ranks) ASSERT_EQ(recorded.size(), ranks[0].size());
    for (size_t i = 0; i < ranks[0].size(); ++i) {
      for (int a = 0; a < job.ranks; ++a) {
        ASSERT_EQ(ranks[a][i].kind, ranks[0][i].kind) << "collective " << i;
        if (ranks[a][i].received.empty()) continue;
        for (int b = 0; b < job.ranks; ++b) {
          ASSERT_EQ(ranks[a][i].sent[b], ranks[b][i].received[a])
              << "collective " << i << ", " << a << " to " << b;
        }
      }
    }
  }
}

// Whatever u is, K and V reach a rank once per pass: fewer heads at a time cost no more bytes.
TEST(Traffic, AttentionBytesDoNotDependOnHeadsPerStage) {
  SmallJob job{.ranks = 4, .num_heads = 16, .num_kv_heads = 4};
  job.ulysses = true;
  const auto ulysses = *MakePlan(MakeSpec(job));
  job.ulysses = false;
  for (int64_t u = 1; u <= 4; ++u) {
    job.heads_per_rank = u;
    const auto upipe = *MakePlan(MakeSpec(job));
    for (int rank = 0; rank < job.ranks; ++rank) {
      const auto& a = upipe.ranks(rank).bytes_sent_to_peer();
      const auto& b = ulysses.ranks(rank).bytes_sent_to_peer();
      EXPECT_EQ(Bytes(a.begin(), a.end()), Bytes(b.begin(), b.end()))
          << "u " << u << " rank " << rank;
    }
  }
}

TEST(Traffic, ARealStepSendsWhatThePlanSays) {
  for (const SmallJob& job : Jobs()) {
    SCOPED_TRACE(Name(job));
    const auto plan = MakePlan(MakeSpec(job));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Sequence sequence = MakeSequence(job.context, plan->padded_context(), job.vocab_size, 1);
    const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
      const auto host = sequence.Slice(rank.step.tokens(), rank.rank);
      for (int64_t step = 1; step <= 2; ++step) {
        const comm::CommStats before = rank.context.comm().stats();
        UPIPE_RETURN_IF_ERROR(rank.step.AnyRank(false).status());
        UPIPE_RETURN_IF_ERROR(rank.step.Run(step, host).status());
        Bytes sent = rank.context.comm().stats().bytes_sent_to_peer;
        for (int peer = 0; peer < job.ranks; ++peer) sent[peer] -= before.bytes_sent_to_peer[peer];
        const auto& planned = plan->ranks(rank.rank).bytes_sent_to_peer();
        EXPECT_EQ(sent, Bytes(planned.begin(), planned.end())) << "rank " << rank.rank;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace upipe::testing
