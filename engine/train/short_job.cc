#include "engine/train/short_job.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/rounding.h"
#include "common/status.h"
#include "engine/data/sequence_source.h"
#include "engine/parallel/head_schedule.h"
#include "engine/parallel/mesh.h"

namespace upipe::train {
namespace {

// Long enough to cross the tiles of attention and loss, short enough to take seconds.
constexpr int64_t kUsualContext = 1024;
constexpr int64_t kLongestContext = 4096;
constexpr int64_t kUnitsWanted = 4;
// More sequences in a row tell no more than two.
constexpr int64_t kMostMicroSteps = 2;

int64_t PaddingUnit(const v1::JobSpec& spec) {
  const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
  return parallel::TokenMap::Make({.context = 1,
                                   .ulysses_ranks = mesh.ulysses_ranks,
                                   .ring_ranks = mesh.ring_ranks,
                                   .query_chunks = spec.memory().query_chunks()})
      .padded_context;
}

bool KeepsDocumentsApart(const v1::JobSpec& spec) {
  return spec.data().documents() != v1::DOCUMENTS_JOIN;
}

v1::JobSpec ShortSpec(const ShortJob& job) {
  v1::JobSpec spec = job.job.spec();
  spec.mutable_checkpoint()->clear_path();
  v1::TrainSpec& train = *spec.mutable_train();
  train.set_context(job.context);
  train.set_steps(std::max(train.steps(), job.steps));
  train.set_eval_sequences(0);
  train.set_gradient_accumulation(std::min(train.gradient_accumulation(), kMostMicroSteps));
  return spec;
}

// Everything on the device; nothing split. Parameters stay where the job has them.
void MakePlain(v1::MemorySpec& memory) {
  const v1::Place optimizer = memory.optimizer();
  memory.Clear();
  memory.set_attention_output(v1::ATTENTION_OUTPUT_RECOMPUTE);
  memory.set_layer_inputs(v1::PLACE_DEVICE);
  memory.set_checkpoint_stride(1);
  memory.set_hidden_stream(v1::PLACE_DEVICE);
  memory.set_stage_kv(v1::PLACE_DEVICE);
  memory.set_query_chunks(1);
  memory.set_overlap(false);
  memory.set_ring_kv(v1::RING_KV_PASS);
  memory.set_optimizer(optimizer);
}

// Context ranks become fsdp ranks: as many share all parameters.
void MakeContextRanksFsdpRanks(v1::ParallelSpec& parallel) {
  const parallel::Mesh mesh = parallel::Mesh::From(parallel);
  parallel.set_method(v1::METHOD_ULYSSES);
  parallel.clear_heads_per_stage();
  parallel.clear_ring_ranks();
  parallel.set_dp_ranks(mesh.dp_ranks);
  parallel.set_fsdp_ranks(mesh.shard_ranks());
}

bool HoldsSequence(const ShortJob& job, int rank) {
  return parallel::Mesh::From(job.job.spec().parallel()).ContextRank(rank) == 0;
}

std::vector<int64_t> DocumentStarts(int64_t context) {
  std::set<int64_t> starts;
  for (const int64_t start :
       {context / 5, context / 5 + 1, context / 2 + 1, context - context / 7}) {
    if (start > 0 && start < context) starts.insert(start);
  }
  std::vector<int64_t> ascending = {0};
  ascending.insert(ascending.end(), starts.begin(), starts.end());
  return ascending;
}

RankTokens Cut(const ShortSequence& sequence, const parallel::TokenMap& map, int context_rank) {
  RankTokens part;
  part.document_starts = sequence.document_starts;
  for (const kernels::PositionRun& run : map.RunsOf(context_rank)) {
    for (int64_t at = run.begin; at < run.end; ++at) {
      const bool padding = at >= map.context;
      part.tokens.push_back(padding ? 0 : sequence.tokens[at]);
      part.labels.push_back(padding ? -1 : sequence.labels[at]);
      part.positions.push_back(padding ? 0 : sequence.positions[at]);
    }
  }
  return part;
}

// Other tokens in [begin, end), which lose their labels on both sides.
LeakProbe ProbeOf(const ShortSequence& sequence, int64_t begin, int64_t end, int64_t vocab,
                  std::string what) {
  LeakProbe probe{.what = std::move(what), .before = sequence};
  std::fill(probe.before.labels.begin() + begin, probe.before.labels.begin() + end, -1);
  probe.changed = probe.before;
  for (int64_t at = begin; at < end; ++at) {
    int32_t& token = probe.changed.tokens[at];
    token = static_cast<int32_t>((token + 1 + at % 5) % vocab);
  }
  return probe;
}

}  // namespace

int64_t ContextOf(const v1::RunPlan& job, int64_t units) {
  const v1::JobSpec& spec = job.spec();
  const int64_t padded = units * PaddingUnit(spec);
  const bool pads = spec.train().context() % PaddingUnit(spec) != 0;
  return std::min(spec.train().context(), pads ? padded - 1 : padded);
}

int64_t MostUnits(const v1::RunPlan& job) {
  const int64_t unit = PaddingUnit(job.spec());
  const int64_t wanted = std::max(kUnitsWanted, CeilDiv(kUsualContext, unit));
  const int64_t most = std::max<int64_t>(1, kLongestContext / unit);
  return std::min({wanted, most, CeilDiv(job.spec().train().context(), unit)});
}

absl::StatusOr<v1::RunPlan> PlanOf(const ShortJob& job, Side side, int rank) {
  v1::RunPlan plan;
  v1::JobSpec& spec = *plan.mutable_spec();
  spec = ShortSpec(job);
  if (side == Side::kJob) {
    *plan.mutable_schedule() = job.job.schedule();
    plan.set_schedule_hash(job.job.schedule_hash());
    return plan;
  }
  MakePlain(*spec.mutable_memory());
  MakeContextRanksFsdpRanks(*spec.mutable_parallel());
  if (!HoldsSequence(job, rank)) spec.mutable_train()->set_context(1);
  if (side == Side::kScaled) {
    spec.mutable_model()->set_rms_norm_eps(spec.model().rms_norm_eps() * kScale * kScale);
    spec.mutable_train()->set_gradient_accumulation(spec.train().gradient_accumulation() *
                                                    kLossParts);
  }
  UPIPE_ASSIGN_OR_RETURN(
      *plan.mutable_schedule(),
      parallel::MakeHeadChunkSchedule({.num_heads = spec.model().num_heads(),
                                       .num_kv_heads = spec.model().num_kv_heads(),
                                       .heads_per_rank = spec.model().num_heads()}));
  plan.set_schedule_hash(parallel::HashOf(plan.schedule()));
  return plan;
}

double WeightScale(const std::string& tensor, bool tied_embeddings) {
  for (const char* adds : {"embed_tokens.weight", "o_proj.weight", "down_proj.weight"}) {
    if (absl::EndsWith(tensor, adds)) return kScale;
  }
  // The embedding is the head's too.
  return tied_embeddings && tensor == "model.norm.weight" ? 1 / kScale : 1;
}

ShortSequence MakeShortSequence(const ShortJob& job, int64_t number) {
  const v1::JobSpec& spec = job.job.spec();
  uint64_t state = spec.train().seed() + static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15u;
  const auto next = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(spec.model().vocab_size()));
  };
  std::vector<int32_t> stream(job.context + 1);
  std::generate(stream.begin(), stream.end(), next);
  ShortSequence sequence;
  sequence.tokens.assign(stream.begin(), stream.end() - 1);
  sequence.labels.assign(stream.begin() + 1, stream.end());
  if (KeepsDocumentsApart(spec)) sequence.document_starts = DocumentStarts(job.context);
  for (const int64_t start : sequence.document_starts) {
    if (start > 0) sequence.labels[start - 1] = -1;
  }
  const bool restart = spec.data().documents() == v1::DOCUMENTS_RESTART;
  sequence.positions.resize(job.context);
  data::RotaryPositions(restart ? sequence.document_starts : std::vector<int64_t>{0},
                        {0, job.context}, sequence.positions.data());
  return sequence;
}

HostTokens RankTokens::host() const {
  return {.tokens = tokens.data(),
          .labels = labels.data(),
          .positions = positions.data(),
          .document_starts = document_starts};
}

RankTokens PartOf(const ShortJob& job, const ShortSequence& sequence, Side side, int rank) {
  const v1::JobSpec& spec = job.job.spec();
  const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
  if (side == Side::kJob) {
    const auto map = parallel::TokenMap::Make({.context = job.context,
                                               .ulysses_ranks = mesh.ulysses_ranks,
                                               .ring_ranks = mesh.ring_ranks,
                                               .query_chunks = spec.memory().query_chunks()});
    return Cut(sequence, map, mesh.ContextRank(rank));
  }
  if (!HoldsSequence(job, rank)) {
    return {.tokens = {0}, .labels = {-1}, .positions = {0}, .document_starts = {0}};
  }
  return Cut(sequence, parallel::TokenMap::Make({.context = job.context}), 0);
}

RankTokens WithLabelsOf(int part, const RankTokens& tokens) {
  RankTokens some = tokens;
  const auto count = static_cast<int64_t>(tokens.labels.size());
  for (int64_t at = 0; at < count; ++at) {
    if (at * kLossParts / count != part) some.labels[at] = -1;
  }
  return some;
}

std::vector<RankTokens> PartsOfStep(const ShortJob& job, int64_t step, Side side, int rank) {
  const v1::JobSpec spec = ShortSpec(job);
  const int64_t group = parallel::Mesh::From(spec.parallel()).SequenceGroup(rank);
  std::vector<RankTokens> parts;
  for (int64_t micro = 0; micro < spec.train().gradient_accumulation(); ++micro) {
    const int64_t number = SequenceOf(spec, step, micro, group);
    const RankTokens whole = PartOf(job, MakeShortSequence(job, number), side, rank);
    if (side != Side::kScaled) {
      parts.push_back(whole);
      continue;
    }
    for (int part = 0; part < kLossParts; ++part) parts.push_back(WithLabelsOf(part, whole));
  }
  return parts;
}

int64_t SequencesOfStep(const ShortJob& job) { return SequencesPerStep(ShortSpec(job)); }

int64_t NumLabels(const ShortJob& job, int64_t step) {
  const int64_t sequences = SequencesOfStep(job);
  int64_t labels = 0;
  for (int64_t number = (step - 1) * sequences; number < step * sequences; ++number) {
    const ShortSequence sequence = MakeShortSequence(job, number);
    labels += std::count_if(sequence.labels.begin(), sequence.labels.end(),
                            [](int32_t label) { return label >= 0; });
  }
  return labels;
}

std::vector<LeakProbe> LeakProbesOf(const ShortJob& job) {
  const v1::JobSpec& spec = job.job.spec();
  const int64_t vocab = spec.model().vocab_size();
  const ShortSequence sequence = MakeShortSequence(job, 0);
  std::vector<int64_t> bounds = sequence.document_starts;
  bounds.push_back(job.context);
  const int64_t documents = static_cast<int64_t>(bounds.size()) - 1;
  std::vector<LeakProbe> probes;
  if (documents > 1) {
    for (const int64_t index : std::set<int64_t>{0, documents / 2, documents - 1}) {
      probes.push_back(ProbeOf(sequence, bounds[index], bounds[index + 1], vocab,
                               absl::StrCat("in document ", index + 1, " of ", documents)));
    }
  }
  if (spec.model().causal() && job.context > 1) {
    const int64_t half = job.context / 2;
    probes.push_back(ProbeOf(sequence, half, job.context, vocab,
                             absl::StrCat("at positions from ", half, " on")));
  }
  return probes;
}

}  // namespace upipe::train
