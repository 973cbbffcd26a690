// Every message of a step, against the schedule's formula written down here from SCHEDULE: who
// sends how much to whom, in which collective. An all-gather of keys, or anything collected at rank
// 0, differs from it at once. The dry communicator records one rank at a time; the totals are then
// compared with the plan's and with a real run's.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
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

// The messages of rank `rank`, from (H, K, C, R, u, n), the axes and sizes alone.
class ExpectedMessages {
 public:
  ExpectedMessages(const SmallJob& job, int rank)
      : job_(job),
        world_(job.ranks),
        shard_ranks_(job.ranks / job.dp_ranks),
        context_ranks_(shard_ranks_ / job.fsdp_ranks),
        r_(job.method == v1::METHOD_RING ? context_ranks_ : job.ring_ranks),
        c_(context_ranks_ / r_),
        n_(job.query_chunks.value_or(job.method == v1::METHOD_FPDT ? 4 : 1)),
        stored_(job.bf16 ? 2 : kF32Bytes),
        rank_(rank),
        ring_(rank / c_ % r_),
        ulysses_(rank % c_) {
    const int64_t multiple = r_ > 1 ? r_ * std::lcm(c_ * n_, int64_t{2}) : c_ * n_;
    const int64_t padded = (job.context + multiple - 1) / multiple * multiple;
    shard_ = padded / r_ * job.head_dim;
    piece_ = padded / (r_ * c_ * n_) * job.head_dim;
  }

  // One vote, one training step, in order. A unit is asked for before the work that hides it.
  std::vector<RecordedCollective> Step() {
    AllReduce(4);
    for (int64_t micro = 0; micro < job_.accumulation; ++micro) ForwardAndBackward();
    if (job_.dp_ranks > 1) {
      SumOverReplicas(Embedding());
      for (int64_t layer = 0; layer < job_.num_layers; ++layer) SumOverReplicas(Block());
      if (!job_.tie_embeddings) SumOverReplicas(Head());
    }
    AllReduce(21);  // loss and count of ten ranges of positions, squares
    return std::move(messages_);
  }

 private:
  void ForwardAndBackward() {
    Gather(Embedding());
    Gather(Block());
    for (int64_t layer = 0; layer < job_.num_layers; ++layer) {
      Attention(/*backward=*/false);
      Gather(layer + 1 < job_.num_layers ? Block() : Head());
    }
    Gather(Block());
    Reduce(Head());
    for (int64_t layer = job_.num_layers - 1; layer >= 0; --layer) {
      Attention(/*backward=*/false);
      if (layer > 0) Gather(Block());
      Attention(/*backward=*/true);
      Reduce(Block());
    }
    Reduce(Embedding());
  }

  // ---- the schedule

  int64_t group() const { return job_.num_heads / job_.num_kv_heads; }
  int64_t HeadsPerRank() const {
    return job_.method == v1::METHOD_UPIPE ? job_.heads_per_rank : (job_.num_heads + c_ - 1) / c_;
  }
  int64_t Stages() const {
    const int64_t busiest = (job_.num_heads + c_ - 1) / c_;
    return (busiest + HeadsPerRank() - 1) / HeadsPerRank();
  }
  // Query heads [first, last) of a Ulysses rank at a stage.
  std::pair<int64_t, int64_t> Queries(int64_t stage, int64_t c) const {
    const int64_t begin = c * job_.num_heads / c_, end = (c + 1) * job_.num_heads / c_;
    const int64_t u = HeadsPerRank();
    return {std::min(begin + stage * u, end), std::min(begin + (stage + 1) * u, end)};
  }
  int64_t NumQueries(int64_t stage, int64_t c) const {
    const auto [first, last] = Queries(stage, c);
    return last - first;
  }
  std::set<int64_t> Kv(int64_t stage, int64_t c) const {
    std::set<int64_t> kv;
    if (stage < 0 || stage >= Stages()) return kv;
    const auto [first, last] = Queries(stage, c);
    for (int64_t head = first; head < last; ++head) kv.insert(head / group());
    return kv;
  }
  int64_t NotIn(int64_t stage, int64_t other, int64_t c) const {
    int64_t count = 0;
    const auto there = Kv(other, c);
    for (int64_t head : Kv(stage, c)) count += there.contains(head) ? 0 : 1;
    return count;
  }
  int64_t Resident(int64_t stage, int64_t c) const {
    return static_cast<int64_t>(Kv(stage, c).size());
  }
  int64_t Fetches(int64_t stage, int64_t c) const { return NotIn(stage, stage - 1, c); }
  int64_t Releases(int64_t stage, int64_t c) const { return NotIn(stage, stage + 1, c); }
  int64_t Stays(int64_t stage, int64_t c) const { return Resident(stage, c) - Releases(stage, c); }
  template <typename Count>
  bool Anybody(Count count, int64_t stage) const {
    for (int64_t c = 0; c < c_; ++c) {
      if ((this->*count)(stage, c) > 0) return true;
    }
    return false;
  }

  // ---- the turns of a layer

  // With overlap a turn's inputs are asked for before the turn before attends.
  void Attention(bool backward) {
    const int64_t turns = Stages() * n_;
    if (job_.overlap) Inputs(0, backward);
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (!job_.overlap) Inputs(turn, backward);
      if (job_.overlap && turn + 1 < turns) Inputs(turn + 1, backward);
      if (r_ > 1 && !job_.ring_keep) GoRound(turn, backward);
      HeadsBack(turn / n_);  // o, dq
      if (backward && turn % n_ == n_ - 1) KvGradientsBack(turn / n_);
    }
  }
  void Inputs(int64_t turn, bool backward) {
    const int64_t stage = turn / n_;
    if (backward)
      HeadsOut(stage, stored_ * piece_ + kF32Bytes * piece_ / job_.head_dim);  // dO, delta
    HeadsOut(stage, stored_ * piece_);                                         // q
    if (turn % n_ == 0) KvOut(stage);
  }

  // Among the Ulysses ranks of the own ring rank: `to(c)` bytes go to each, `from(c)` come from it.
  template <typename To, typename From>
  void Exchange(To to, From from) {
    if (c_ == 1) return;
    RecordedCollective all{CollectiveKind::kAllToAllV, Bytes(world_), Bytes(world_)};
    for (int64_t c = 0; c < c_; ++c) {
      if (c == ulysses_) continue;
      all.sent[rank_ - ulysses_ + c] = to(c);
      all.received[rank_ - ulysses_ + c] = from(c);
    }
    messages_.push_back(all);
  }
  int RingPeer(int64_t ring) const { return static_cast<int>(rank_ + (ring - ring_) * c_); }
  // `bytes` to ring rank ring + 1 and as many from ring - 1.
  void Pass(int64_t bytes) {
    RecordedCollective all{CollectiveKind::kAllToAllV, Bytes(world_), Bytes(world_)};
    all.sent[RingPeer((ring_ + 1) % r_)] = bytes;
    all.received[RingPeer((ring_ + r_ - 1) % r_)] = bytes;
    messages_.push_back(all);
  }
  // `bytes` to and from every ring rank.
  void Share(int64_t bytes) {
    RecordedCollective all{CollectiveKind::kAllToAllV, Bytes(world_), Bytes(world_)};
    for (int64_t ring = 0; ring < r_; ++ring) {
      if (ring != ring_) all.sent[RingPeer(ring)] = all.received[RingPeer(ring)] = bytes;
    }
    messages_.push_back(all);
  }

  // Own tokens of each rank's heads travel to it; `head` bytes per head.
  void HeadsOut(int64_t stage, int64_t head) {
    Exchange([&](int64_t c) { return head * NumQueries(stage, c); },
             [&](int64_t) { return head * NumQueries(stage, ulysses_); });
  }
  void HeadsBack(int64_t stage) {
    Exchange([&](int64_t) { return stored_ * piece_ * NumQueries(stage, ulysses_); },
             [&](int64_t c) { return stored_ * piece_ * NumQueries(stage, c); });
  }
  void KvOut(int64_t stage) {
    if (!Anybody(&ExpectedMessages::Fetches, stage)) return;
    for (int64_t i = 0; i < 2 * n_; ++i) {  // k, v of each chunk
      Exchange([&](int64_t c) { return stored_ * piece_ * Fetches(stage, c); },
               [&](int64_t) { return stored_ * piece_ * Fetches(stage, ulysses_); });
    }
    if (r_ > 1 && job_.ring_keep) Share(2 * stored_ * shard_ * Fetches(stage, ulysses_));
  }
  // K and V of the stage visit every ring rank, and come home if a later turn attends with them; in
  // the backward pass dK and dV go with them and all the way.
  void GoRound(int64_t turn, bool backward) {
    const int64_t stage = turn / n_;
    const bool last_chunk = turn % n_ == n_ - 1;
    const auto stay = last_chunk ? &ExpectedMessages::Stays : &ExpectedMessages::Resident;
    for (int64_t hop = 0; hop < r_; ++hop) {
      const bool last_hop = hop == r_ - 1;
      if (!last_hop) Pass(2 * stored_ * shard_ * Resident(stage, ulysses_));
      if (last_hop && Anybody(stay, stage))
        Pass(2 * stored_ * shard_ * (this->*stay)(stage, ulysses_));
      if (backward) Pass(2 * kF32Bytes * shard_ * Resident(stage, ulysses_));
    }
  }
  void KvGradientsBack(int64_t stage) {
    if (!Anybody(&ExpectedMessages::Releases, stage)) return;
    for (int tensor = 0; tensor < 2; ++tensor) {  // dk, dv
      if (r_ > 1 && job_.ring_keep) Share(kF32Bytes * shard_ * Releases(stage, ulysses_));
      for (int64_t chunk = 0; chunk < n_; ++chunk) {
        Exchange([&](int64_t) { return stored_ * piece_ * Releases(stage, ulysses_); },
                 [&](int64_t c) { return stored_ * piece_ * Releases(stage, c); });
      }
    }
  }

  // ---- parameters

  // Elements of one rank's part of a unit: tensors aligned to 16, then cut into equal parts that
  // the replicas can cut once more.
  int64_t Shard(const std::vector<int64_t>& tensors) const {
    int64_t elements = 0;
    for (int64_t tensor : tensors) elements += (tensor + 15) / 16 * 16;
    const int64_t aligned = 16 * job_.dp_ranks;
    return ((elements + shard_ranks_ - 1) / shard_ranks_ + aligned - 1) / aligned * aligned;
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
  // To every rank of the whole, of those that share the parameters, or of the replicas.
  void ToEach(CollectiveKind kind, int64_t bytes, int first, int stride, int count) {
    Bytes by_peer(world_);
    for (int i = 0; i < count; ++i) by_peer[first + i * stride] = bytes;
    by_peer[rank_] = 0;
    const bool receives = kind == CollectiveKind::kAllGather;
    messages_.push_back({kind, by_peer, receives ? by_peer : Bytes()});
  }
  void ToSharers(CollectiveKind kind, int64_t bytes) {
    ToEach(kind, bytes, rank_ / shard_ranks_ * shard_ranks_, 1, shard_ranks_);
  }
  void ToReplicas(CollectiveKind kind, int64_t bytes) {
    ToEach(kind, bytes, rank_ % shard_ranks_, shard_ranks_, job_.dp_ranks);
  }
  // One rank's fp32 shard on the device is the unit, and its gradient the sum.
  void Gather(int64_t shard) {
    if (shard_ranks_ == 1 && !job_.bf16 && job_.optimizer != v1::PLACE_HOST) return;
    ToSharers(CollectiveKind::kAllGather, shard * stored_);
  }
  void Reduce(int64_t shard) {
    if (shard_ranks_ == 1) return;
    ToSharers(CollectiveKind::kReduceScatter, shard * kF32Bytes);
  }
  void SumOverReplicas(int64_t shard) {
    ToReplicas(CollectiveKind::kReduceScatter, shard / job_.dp_ranks * kF32Bytes);
    ToReplicas(CollectiveKind::kAllGather, shard / job_.dp_ranks * kF32Bytes);
  }
  void AllReduce(int64_t count) { ToEach(CollectiveKind::kAllReduce, count * 8, 0, 1, world_); }

  const SmallJob job_;
  const int world_, shard_ranks_;
  const int64_t context_ranks_, r_, c_, n_;
  const int64_t stored_;  // bytes of an element in the storage type
  const int rank_;
  const int64_t ring_, ulysses_;
  int64_t shard_ = 0;  // elements of one head of a ring shard
  int64_t piece_ = 0;  // and of one rank's tokens of a chunk
  std::vector<RecordedCollective> messages_;
};

// Points of the schedule space beyond one axis of Ulysses ranks, and data axes.
std::vector<SmallJob> JobsOfSeveralAxes() {
  std::vector<SmallJob> jobs;
  for (bool overlap : {false, true}) {
    jobs.push_back({.ranks = 2, .num_heads = 8, .num_kv_heads = 2, .overlap = overlap});
    jobs.push_back({.ranks = 8, .num_heads = 28, .num_kv_heads = 4, .overlap = overlap});
    jobs.push_back(
        {.ranks = 2, .num_heads = 8, .num_kv_heads = 2, .query_chunks = 3, .overlap = overlap});
    for (bool keep : {false, true}) {
      jobs.push_back(
          {.ranks = 3, .method = v1::METHOD_RING, .overlap = overlap, .ring_keep = keep});
      jobs.push_back({.ranks = 4,
                      .num_heads = 6,
                      .num_kv_heads = 3,
                      .method = v1::METHOD_USP,
                      .ring_ranks = 2,
                      .overlap = overlap,
                      .ring_keep = keep});
      for (int64_t u = 1; u <= 3; ++u) {
        jobs.push_back({.ranks = 6,
                        .heads_per_rank = u,
                        .num_heads = 9,
                        .num_kv_heads = 3,
                        .ring_ranks = 2,
                        .query_chunks = 2,
                        .overlap = overlap,
                        .ring_keep = keep});
      }
    }
    jobs.push_back({.ranks = 2, .context = 25, .method = v1::METHOD_FPDT, .overlap = overlap});
  }
  jobs.push_back({.ranks = 4, .fsdp_ranks = 2});
  jobs.push_back({.ranks = 4, .dp_ranks = 2});
  jobs.push_back({.ranks = 2, .dp_ranks = 2, .accumulation = 2});
  jobs.push_back({.ranks = 8, .tie_embeddings = true, .fsdp_ranks = 2, .dp_ranks = 2});
  jobs.push_back({.ranks = 8, .ring_ranks = 2, .fsdp_ranks = 2, .dp_ranks = 2, .accumulation = 3});
  jobs.push_back({.ranks = 1, .optimizer = v1::PLACE_HOST});
  jobs.push_back({.ranks = 4, .dp_ranks = 2, .optimizer = v1::PLACE_HOST});
  return jobs;
}

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
  jobs.push_back({.ranks = 4, .num_heads = 8, .num_kv_heads = 4, .method = v1::METHOD_ULYSSES});
  jobs.push_back({.ranks = 1, .heads_per_rank = 2, .num_heads = 4, .num_kv_heads = 2});
  for (const SmallJob& job : JobsOfSeveralAxes()) jobs.push_back(job);
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
  return absl::StrCat(
      "H", job.num_heads, " K", job.num_kv_heads, " ranks ", job.ranks, " u", job.heads_per_rank,
      " method ", job.method, " R", job.ring_ranks, " n", job.query_chunks.value_or(0),
      job.overlap ? " overlap" : "", job.ring_keep ? " keep" : "", " fsdp ", job.fsdp_ranks, " dp ",
      job.dp_ranks, " accumulation ", job.accumulation, " context ", job.context,
      job.bf16 ? " bf16" : "", job.qk_norm ? " q/k-norm" : "", job.qkv_bias ? " q/k/v bias" : "");
}

// What the engine asks of its communicator in one dry step of a rank.
std::vector<RecordedCollective> RecordDryStep(const v1::RunPlan& plan, int rank) {
  auto device = *kernels::CreateDryDevice(plan.spec().parallel().backend());
  comm::DryCommunicator dry(rank, plan.spec().parallel().ranks());
  RecordingCommunicator comm(dry);
  const auto streams = engine::RankStreams::Create(*device, rank);
  const engine::RankContext context = MakeContext(plan, *device, streams, comm);
  auto step = train::TrainStep::Create(context, plan);
  EXPECT_TRUE(step.ok()) << step.status();
  comm.Clear();
  EXPECT_TRUE((*step)->Vote({}).ok());
  const std::vector<train::HostTokens> micro_steps(plan.spec().train().gradient_accumulation());
  EXPECT_TRUE((*step)->Run(1, micro_steps).ok());
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
  job.method = v1::METHOD_ULYSSES;
  const auto ulysses = *MakePlan(MakeSpec(job));
  job.method = v1::METHOD_UPIPE;
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
    if (job.ranks > 4) continue;  // threads enough
    SCOPED_TRACE(Name(job));
    const auto plan = MakePlan(MakeSpec(job));
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<Sequence> sequences;
    for (int64_t i = 0; i < train::SequencesPerStep(plan->spec()); ++i) {
      sequences.push_back(MakeSequence(plan->spec(), 1 + i));
    }
    const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
      for (int64_t step = 1; step <= 2; ++step) {
        const comm::CommStats before = rank.context.comm().stats();
        UPIPE_RETURN_IF_ERROR(rank.step.Vote({}).status());
        UPIPE_RETURN_IF_ERROR(RunStep(rank, step, sequences).status());
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
