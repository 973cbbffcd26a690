// What users of other systems ran into, A to G of the numbered list in docs/peer-cases.md, as far
// as a training step can show it. The number is in the name of the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/invariance/engine/method_space.h"

namespace upipe::testing {
namespace {

Outcome Must(absl::StatusOr<Outcome> outcome) {
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return outcome.ok() ? *std::move(outcome) : Outcome();
}

// Labels at the positions for which `keep` says so only.
template <typename Keep>
Sequence WithLabelsWhere(Sequence sequence, Keep keep) {
  for (size_t t = 0; t < sequence.labels.size(); ++t) {
    if (!keep(static_cast<int64_t>(t))) sequence.labels[t] = -1;
  }
  return sequence;
}

std::vector<Sequence> PlainSequences(const SmallJob& job, int64_t count) {
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    sequences.push_back(MakeSequence(MakeSpec(job), static_cast<uint64_t>(20 + i)));
  }
  return sequences;
}

// Methods on 1, 2, 4 and 8 ranks.
std::vector<SmallJob> Topologies(const SmallJob& base) {
  std::vector<SmallJob> jobs;
  for (const int ranks : {1, 2, 4, 8}) {
    SmallJob job = base;
    job.ranks = ranks;
    jobs.push_back(job);
    if (ranks == 1) continue;
    job.method = v1::METHOD_RING;
    jobs.push_back(job);
    job.method = v1::METHOD_UPIPE;
    job.ring_ranks = 2;
    jobs.push_back(job);
  }
  return jobs;
}

std::string NameOf(const SmallJob& job) {
  return absl::StrCat(job.method == v1::METHOD_RING ? "ring" : "upipe", " on ", job.ranks,
                      " ranks, ring ", job.ring_ranks, ", fsdp ", job.fsdp_ranks, ", dp ",
                      job.dp_ranks, ", accumulation ", job.accumulation);
}

const SmallJob kJob{.num_heads = 8, .num_kv_heads = 2, .context = 45};

// ---- A. Loss and gradient normalisation

TEST(Normalisation, Peers1_Peers12_NeitherLossNorGradientsKnowTheNumberOfRanks) {
  for (const SmallJob& job : Topologies(kJob)) {
    SCOPED_TRACE(NameOf(job));
    ExpectMatchesOneRank(job, PlainSequences(job, 1));
  }
}

TEST(Normalisation, Peers2_EvaluationFindsTheLossOfTraining) {
  for (const SmallJob& job : Topologies(kJob)) {
    const auto plan = MakePlan(MakeSpec(job));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::vector<Sequence> sequences = PlainSequences(job, 1);
    const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
      UPIPE_ASSIGN_OR_RETURN(const auto evaluated, Evaluate(rank, 1, sequences));
      UPIPE_ASSIGN_OR_RETURN(const auto trained, RunStep(rank, 1, sequences));
      const auto total = optim::TotalOf(evaluated);
      EXPECT_EQ(total.loss / total.count, trained.loss) << NameOf(job);
      EXPECT_EQ(total.count, trained.valid_tokens) << NameOf(job);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Ranks, groups and micro-steps with unlike numbers of labels: one sum over all of them, divided
// once by their number.
TEST(Normalisation, Peers3_Peers4_Peers5_OneNumeratorOneDenominatorPerStep) {
  for (const int ranks : {1, 2, 8}) {
    for (const auto& [fsdp, dp, accumulation] :
         {std::tuple{1, 1, 4}, {2, 1, 2}, {1, 2, 2}, {2, 2, 1}}) {
      if (ranks == 8 && fsdp * dp > 1) continue;
      SmallJob job = kJob;
      job.ranks = ranks * fsdp * dp;
      job.fsdp_ranks = fsdp;
      job.dp_ranks = dp;
      job.accumulation = accumulation;
      SCOPED_TRACE(NameOf(job));
      std::vector<Sequence> sequences = PlainSequences(job, 4);
      for (int64_t i = 0; i < 4; ++i) {
        sequences[i] = WithLabelsWhere(sequences[i], [&](int64_t t) { return t < 3 + 11 * i; });
      }
      ExpectMatchesOneRank(job, sequences);
    }
  }
}

TEST(Normalisation, Peers6_TheNormIsThatOfOneRankUnderEverySharding) {
  const std::vector<Sequence> sequences = PlainSequences(kJob, 4);
  for (const auto& [fsdp, dp, accumulation] :
       {std::tuple{4, 1, 1}, {1, 4, 1}, {2, 2, 1}, {1, 1, 4}, {1, 2, 2}}) {
    SmallJob job = kJob;
    job.ranks = fsdp * dp;
    job.fsdp_ranks = fsdp;
    job.dp_ranks = dp;
    job.accumulation = accumulation;
    const auto reference = ReferenceOf(job, sequences);
    ASSERT_TRUE(reference.ok()) << reference.status();
    const double expected = (*reference)->exact.grad_norm;
    EXPECT_NEAR(Must(RunOnce(job, sequences)).grad_norm, expected,
                (*reference)->Bound((*reference)->plain_norm_error) * expected)
        << NameOf(job);
  }
}

// Labels within the first tokens only: most ranks have none.
TEST(Normalisation, Peers7_Peers8_Peers10_AShardWithoutLabelsAddsAnExactZero) {
  for (const SmallJob& job : Topologies(kJob)) {
    SCOPED_TRACE(NameOf(job));
    const Sequence sequence =
        WithLabelsWhere(PlainSequences(job, 1)[0], [](int64_t t) { return t >= 1 && t < 4; });
    ExpectMatchesOneRank(job, {&sequence, 1});
  }
}

// A whole group, and a whole micro-step, without a label; and then nothing at all.
TEST(Normalisation, Peers9_NoDenominatorIsZeroUnlessTheStepsIs) {
  SmallJob job = kJob;
  job.ranks = 4;
  job.fsdp_ranks = 2;
  job.accumulation = 2;
  std::vector<Sequence> sequences = PlainSequences(job, 4);
  const auto none = [](int64_t) { return false; };
  for (const size_t empty : {1, 2, 3}) sequences[empty] = WithLabelsWhere(sequences[empty], none);
  ExpectMatchesOneRank(job, sequences);
  sequences[0] = WithLabelsWhere(sequences[0], none);
  const Outcome nothing = Must(RunOnce(job, sequences));
  EXPECT_EQ(nothing.valid_tokens, 0);
  for (const auto& [name, values] : nothing.tensors) {
    if (name.rfind("logits", 0) == 0) continue;
    EXPECT_EQ(values, std::vector<float>(values.size(), 0)) << name;
  }
}

// Every method learns the same: the loss of a structured text falls as on one rank.
TEST(Normalisation, Peers11_EveryMethodsLossFalls) {
  constexpr int kSteps = 12;
  const auto curve = [](const SmallJob& job) {
    v1::JobSpec spec = MakeSpec(job);
    spec.mutable_optimizer()->set_learning_rate(1e-2);
    const auto plan = MakePlan(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    Sequence text = MakeSequence(spec, 1);
    for (size_t t = 0; t < text.tokens.size(); ++t) {
      text.tokens[t] = static_cast<int32_t>(3 * t % job.vocab_size);
      text.labels[t] = static_cast<int32_t>(3 * (t + 1) % job.vocab_size);
    }
    std::vector<double> losses;
    const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
      for (int step = 1; step <= kSteps; ++step) {
        UPIPE_ASSIGN_OR_RETURN(const auto result, RunStep(rank, step, text));
        if (rank.rank == 0) losses.push_back(result.loss);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return losses;
  };
  for (NamedCase& named : OneCasePerMethod()) {
    const std::vector<double> losses = curve(named.test.job);
    ASSERT_EQ(losses.size(), size_t{kSteps}) << named.name;
    EXPECT_LT(losses.back(), 0.7 * losses.front()) << named.name;
  }
}

// ---- B. Label shift

// Only the last token of every shard has a label: the first token of the next one.
TEST(Labels, Peers13_TheLastTokenOfEveryShardKeepsItsLabel) {
  for (const SmallJob& job : Topologies(kJob)) {
    SCOPED_TRACE(NameOf(job));
    const int64_t half_block = std::max<int64_t>(1, 48 / (2 * job.ranks));
    const Sequence sequence = WithLabelsWhere(
        PlainSequences(job, 1)[0], [&](int64_t t) { return t % half_block == half_block - 1; });
    ExpectMatchesOneRank(job, {&sequence, 1});
  }
}

// Losses by range of positions are of the labels trained on, wherever they lie.
TEST(Labels, Peers15_LossesByPositionAreThoseOfOneRank) {
  SmallJob job = kJob;
  job.num_layers = 1;
  job.num_heads = job.num_kv_heads = 2;
  job.context = 4500;  // reaches into the second range
  const std::vector<Sequence> sequences = PlainSequences(job, 1);
  job.method = v1::METHOD_ULYSSES;
  const Outcome one = Must(RunOnce(job, sequences));
  job.ranks = 4;
  job.method = v1::METHOD_RING;
  const Outcome ring = Must(RunOnce(job, sequences));
  for (const int range : {0, 1}) {
    EXPECT_GT(one.by_position[range].count, 0);
    EXPECT_EQ(ring.by_position[range].count, one.by_position[range].count);
    // Sums of fp32 token losses; a label at the wrong place is off by some nats.
    EXPECT_NEAR(ring.by_position[range].loss, one.by_position[range].loss,
                1e-5 * one.by_position[range].loss);
  }
}

// ---- C. Positions

TEST(Positions, Peers16_ZigzagRanksRotateByGlobalPositions) {
  for (const int ranks : {2, 3, 4}) {
    MethodCase c{.job = kJob};
    c.job.ranks = ranks;
    c.job.method = v1::METHOD_RING;
    for (const auto documents : {v1::DOCUMENTS_JOIN, v1::DOCUMENTS_RESTART}) {
      c.job.documents = documents;
      SCOPED_TRACE(NameOf(c.job));
      ExpectMatchesOneRank(c);
    }
  }
}

// ---- D. Masks, packing, ordering

TEST(Tokens, Peers25_Peers31_LengthsThatNothingDivides) {
  for (const int64_t context : {3, 4, 7, 13, 31, 47}) {
    for (SmallJob job : Topologies(kJob)) {
      job.context = context;
      SCOPED_TRACE(absl::StrCat(context, " tokens, ", NameOf(job)));
      ExpectMatchesOneRank(job, PlainSequences(job, 1));
    }
  }
}

// Three tokens on eight ranks in chunks: shards, half-blocks and chunks that are all padding.
TEST(Tokens, Peers26_ShardsAndChunksOfPaddingAlone) {
  for (SmallJob job : Topologies(kJob)) {
    for (const int64_t chunks : {1, 3}) {
      for (const bool causal : {true, false}) {
        job.context = 3;
        job.query_chunks = chunks;
        job.causal = causal;
        SCOPED_TRACE(absl::StrCat(NameOf(job), ", ", chunks, " chunks"));
        ExpectMatchesOneRank(job, PlainSequences(job, 1));
      }
    }
  }
}

TEST(Ring, Peers27_GradientsAreThoseOfOneRank) {
  for (const int ring : {2, 3, 5}) {
    for (const bool keep : {false, true}) {
      SmallJob job = kJob;
      job.context = 61;
      job.ranks = ring;
      job.method = v1::METHOD_RING;
      job.ring_keep = keep;
      SCOPED_TRACE(NameOf(job));
      ExpectMatchesOneRank(job, PlainSequences(job, 1));
    }
  }
}

// A mask that were dropped would give another mask's loss.
TEST(Masks, Peers29_EveryMaskIsTheOneAskedFor) {
  for (const NamedCase& named : OneCasePerMethod()) {
    std::vector<double> losses;
    for (const bool causal : {true, false}) {
      for (const auto& window : {std::optional<int64_t>(), std::optional<int64_t>(9)}) {
        MethodCase c = named.test;
        c.job.causal = causal;
        c.job.window = window;
        ExpectMatchesOneRank(c);
        losses.push_back(Must(RunOnce(c)).loss);
      }
    }
    std::sort(losses.begin(), losses.end());
    for (size_t i = 1; i < losses.size(); ++i) {
      EXPECT_GT(losses[i] - losses[i - 1], 1e-3) << named.name;
    }
  }
}

// ---- E. Heads

// K below C, K that C does not divide, one K/V head: the gradient of a K/V head is the sum over
// every rank that attends with it.
TEST(Heads, Peers32_Peers33_Peers36_FewerKvHeadsThanRanks) {
  for (const auto& [heads, kv_heads] : {std::pair{8, 2}, {7, 1}, {6, 3}, {9, 3}}) {
    for (const int ranks : {2, 4, 8}) {
      SmallJob job = kJob;
      job.num_heads = heads;
      job.num_kv_heads = kv_heads;
      job.ranks = ranks;
      SCOPED_TRACE(absl::StrCat(heads, " / ", kv_heads, " heads, ", NameOf(job)));
      ExpectMatchesOneRank(job, PlainSequences(job, 1));
    }
  }
}

// 28 query heads over 4 K/V heads on 8 ranks: 3 or 4 query heads a rank, groups of 7.
TEST(Heads, Peers35_HeadsThatDoNotDivideKeepTheirGroups) {
  for (const int64_t heads_per_rank : {1, 2, 3, 4}) {
    for (const int ring : {1, 2}) {
      SmallJob job = kJob;
      job.num_heads = 28;
      job.num_kv_heads = 4;
      job.head_dim = 4;
      job.ranks = 8;
      job.ring_ranks = ring;
      job.heads_per_rank = heads_per_rank;
      SCOPED_TRACE(absl::StrCat("u ", heads_per_rank, ", ", NameOf(job)));
      ExpectMatchesOneRank(job, PlainSequences(job, 1));
    }
  }
}

// Two jobs of unlike shape at once in one process: neither sees the other.
TEST(Heads, Peers34_JobsInOneProcessShareNothing) {
  SmallJob one = kJob, other = kJob;
  one.ranks = other.ranks = 3;
  other.num_heads = 5;
  other.num_kv_heads = 5;
  other.head_dim = 4;
  other.context = 29;
  const auto one_text = PlainSequences(one, 1), other_text = PlainSequences(other, 1);
  const Outcome one_alone = Must(RunOnce(one, one_text));
  const Outcome other_alone = Must(RunOnce(other, other_text));
  Outcome one_beside;
  std::thread beside([&] { one_beside = Must(RunOnce(one, one_text, Hostile(1))); });
  const Outcome other_beside = Must(RunOnce(other, other_text, Hostile(2)));
  beside.join();
  EXPECT_TRUE(SameBits(one_beside, one_alone));
  EXPECT_TRUE(SameBits(other_beside, other_alone));
}

// ---- F. Numerics

// Weights that make large scores, a context that every shard of the ring adds to.
TEST(Ring, Peers38_TheErrorDoesNotGrowWithTheRing) {
  SmallJob job = kJob;
  job.context = 192;
  job.head_dim = 16;
  job.method = v1::METHOD_RING;
  for (const bool bf16 : {false, true}) {
    for (const int ring : {1, 2, 4, 8}) {
      job.bf16 = bf16;
      job.ranks = ring;
      SCOPED_TRACE(NameOf(job));
      ExpectMatchesOneRank(job, PlainSequences(job, 1));
    }
  }
}

// ---- G. Tiling

// More tokens per rank than a tile, other numbers of tiles on other numbers of ranks: gradients are
// summed over tiles in fp32 and reduced once.
TEST(Tiles, Peers42_Peers43_Peers44_GradientsDoNotKnowTheTiles) {
  SmallJob job = kJob;
  job.num_layers = 2;
  job.num_heads = 2;
  job.num_kv_heads = 1;
  job.context = 1200;
  job.window = 32;
  const std::vector<Sequence> sequences = PlainSequences(job, 1);
  for (const int ranks : {1, 2, 3}) {
    for (const bool host : {false, true}) {
      job.ranks = ranks;
      job.layer_inputs = job.hidden_stream = host ? v1::PLACE_HOST : v1::PLACE_DEVICE;
      SCOPED_TRACE(absl::StrCat(NameOf(job), host ? ", on the host" : ""));
      ExpectMatchesOneRank(job, sequences);
    }
  }
}

}  // namespace
}  // namespace upipe::testing
