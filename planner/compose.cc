#include "planner/compose.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rounding.h"
#include "common/status.h"
#include "engine/model/position_ranges.h"
#include "engine/parallel/plan_hash.h"
#include "engine/train/step.h"
#include "kernels/api/attention_pairs.h"
#include "planner/in_threads.h"
#include "planner/recording.h"

namespace upipe::planner {
namespace {

using parallel::Coordinates;
using parallel::Mesh;

// ---- which ranks are alike

using Shape = std::vector<int64_t>;

// Of every call of an attention kernel in a stage: its queries, its keys, the pairs of them that
// see each other, whether it is the first of its queries. In what order they come otherwise changes
// neither bytes nor counts.
void AddAttention(const parallel::TokenMap& tokens, const kernels::AttentionMask& mask, int ring,
                  Shape& shape) {
  if (tokens.ring_ranks == 1) return;  // the same for all ranks
  std::vector<std::vector<int64_t>> calls;
  for (int64_t chunk = 0; chunk < tokens.query_chunks; ++chunk) {
    for (const auto& queries : tokens.ShardRuns(ring, chunk * tokens.chunk_tokens(),
                                                (chunk + 1) * tokens.chunk_tokens())) {
      bool first = true;
      for (int hop = 0; hop < tokens.ring_ranks; ++hop) {
        const int shard = (ring - hop + tokens.ring_ranks) % tokens.ring_ranks;
        for (const auto& keys : tokens.ShardRuns(shard, 0, tokens.shard_tokens())) {
          const int64_t pairs = kernels::VisiblePairs(mask, queries, keys);
          if (pairs == 0) continue;
          calls.push_back({queries.end - queries.begin, keys.end - keys.begin, pairs, first});
          first = false;
        }
      }
    }
  }
  std::sort(calls.begin(), calls.end());
  for (const auto& call : calls) shape.insert(shape.end(), call.begin(), call.end());
}

// Of every run of tokens whose loss is summed by itself.
void AddLoss(const parallel::TokenMap& tokens, int context_rank, Shape& shape) {
  for (const kernels::PositionRun& run : tokens.RunsOf(context_rank)) {
    for (int64_t begin = run.begin; begin < run.end;) {
      const int64_t range_end = model::PositionRangeEnd(model::PositionRangeOf(begin));
      const int64_t end = std::min(run.end, range_end);
      shape.push_back(end - begin);
      begin = end;
    }
  }
}

Shape HeadsOf(const v1::HeadChunkSchedule& schedule, int ulysses) {
  Shape shape;
  for (const auto& stage : schedule.stages()) {
    const auto& work = stage.ranks(ulysses);
    shape.push_back(work.query_heads_size());
    shape.push_back(work.kv_heads_size());
    shape.push_back(work.fetch_size());
    shape.push_back(work.release_size());
  }
  return shape;
}

// How much further round an axis of `size` ranks `to` is than `from`.
int Turn(int from, int to, int size) { return (to - from + size) % size; }

// Of every other rank of the rank's node where there are several: what of the rank's traffic stays
// in the node depends on it.
void AddNode(const v1::RunPlan& plan, const Mesh& mesh, int rank, Shape& shape) {
  const int node_ranks = plan.spec().parallel().ranks_per_node();
  if (node_ranks <= 0 || node_ranks >= mesh.num_ranks()) return;
  const Coordinates own = mesh.Of(rank);
  const int first = rank / node_ranks * node_ranks;
  std::vector<Shape> peers;
  for (int peer = first; peer < std::min(first + node_ranks, mesh.num_ranks()); ++peer) {
    const Coordinates at = mesh.Of(peer);
    Shape& to = peers.emplace_back();
    to = {Turn(own.dp, at.dp, mesh.dp_ranks), Turn(own.fsdp, at.fsdp, mesh.fsdp_ranks),
          Turn(own.ring, at.ring, mesh.ring_ranks), own.ulysses == at.ulysses};
    const Shape heads = HeadsOf(plan.schedule(), at.ulysses);
    to.insert(to.end(), heads.begin(), heads.end());
  }
  std::sort(peers.begin(), peers.end());
  for (const Shape& peer : peers) shape.insert(shape.end(), peer.begin(), peer.end());
}

// The peer of `like` that is to it what `peer` is to `rank`: axes but Ulysses are turned, on that
// one `rank` and `like` change places.
int PeerOf(const Mesh& mesh, int rank, int like, int peer) {
  const Coordinates to = mesh.Of(rank), from = mesh.Of(like);
  Coordinates at = mesh.Of(peer);
  at.dp = Turn(to.dp, at.dp + from.dp, mesh.dp_ranks);
  at.fsdp = Turn(to.fsdp, at.fsdp + from.fsdp, mesh.fsdp_ranks);
  at.ring = Turn(to.ring, at.ring + from.ring, mesh.ring_ranks);
  if (at.ulysses == to.ulysses) {
    at.ulysses = from.ulysses;
  } else if (at.ulysses == from.ulysses) {
    at.ulysses = to.ulysses;
  }
  return mesh.RankAt(at);
}

template <typename ShapeOf>
std::vector<std::vector<int>> GroupBy(int num_ranks, const ShapeOf& shape_of) {
  std::map<Shape, size_t> group_of;
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto [known, is_new] = group_of.emplace(shape_of(rank), groups.size());
    if (is_new) groups.emplace_back();
    groups[known->second].push_back(rank);
  }
  return groups;
}

// ---- shorter plans

// A segment at either end and one in the middle; a first micro-step and one that adds to it.
constexpr int64_t kSegmentsRun = 3;
constexpr int kMiddleSegment = 1;
constexpr int64_t kMicroStepsRun = 2;
constexpr int kLaterMicroStepRound = kFirstMicroStepRound + 1;
// Query chunks of a run over few tokens, at most.
constexpr int64_t kFewChunks = 2;

v1::RunPlan WithLayers(const v1::RunPlan& plan, int64_t layers) {
  v1::RunPlan shorter;
  if (plan.has_measured()) *shorter.mutable_measured() = plan.measured();
  *shorter.mutable_spec() = plan.spec();
  *shorter.mutable_schedule() = plan.schedule();
  shorter.set_schedule_hash(plan.schedule_hash());
  shorter.mutable_spec()->mutable_model()->set_num_layers(layers);
  v1::TrainSpec& train = *shorter.mutable_spec()->mutable_train();
  train.set_gradient_accumulation(std::min(train.gradient_accumulation(), kMicroStepsRun));
  return shorter;
}

// As few tokens as the plan's axes can share without padding.
v1::RunPlan WithFewTokens(v1::RunPlan plan) {
  v1::JobSpec& spec = *plan.mutable_spec();
  const int64_t chunks = std::min(spec.memory().query_chunks(), kFewChunks);
  spec.mutable_memory()->set_query_chunks(chunks);
  plan.mutable_schedule()->set_query_chunks(chunks);
  plan.set_schedule_hash(parallel::HashOf(plan.schedule()));
  spec.mutable_train()->set_context(1);
  spec.mutable_train()->set_context(train::TokensOf(spec).padded_context);
  return plan;
}

// ---- composing

// How often the middle is there again.
struct Repeats {
  int64_t segment_layers = 1;
  int64_t segments = 0;  // beyond those run
  int64_t micro_steps = 0;
};

// Runs over few tokens, for what layers add to the ends of a step.
struct Ends {
  const Recording& few_layers;
  const Recording& all_layers;
};

const Fragment* OptimizerOf(const Recording& recording) {
  const auto found = std::find_if(recording.fragments.begin(), recording.fragments.end(),
                                  [](const Fragment& f) { return f.pass == StepPass::kOptimizer; });
  return found == recording.fragments.end() ? nullptr : &*found;
}

// A fragment of the allocation round of all layers: `run` with what layers add to each block, which
// does not depend on the tokens.
absl::StatusOr<Fragment> Allocation(const Fragment& run, const Fragment& few, const Fragment& all) {
  if (run.events.size() != few.events.size() || run.events.size() != all.events.size()) {
    return absl::FailedPreconditionError(absl::StrCat("runs begin with ", run.events.size(), ", ",
                                                      few.events.size(), " and ", all.events.size(),
                                                      " requests for memory"));
  }
  Fragment result = run;
  for (size_t i = 0; i < run.events.size(); ++i) {
    result.events[i].bytes += all.events[i].bytes - few.events[i].bytes;
  }
  return result;
}

// The fragments of a run of all layers and micro-steps, in order. What is made anew is kept in
// `made`.
absl::StatusOr<std::vector<Played>> Arrange(const Recording& run, const Ends& ends,
                                            const Fragment& optimizer, const Repeats& repeats,
                                            std::deque<Fragment>& made) {
  std::vector<Played> played;
  for (size_t i = 0; i < run.fragments.size(); ++i) {
    const Fragment& fragment = run.fragments[i];
    if (fragment.round == kAllocationRound) {
      if (i >= ends.few_layers.fragments.size() || i >= ends.all_layers.fragments.size()) {
        return absl::FailedPreconditionError("runs begin with other passes");
      }
      UPIPE_ASSIGN_OR_RETURN(Fragment whole, Allocation(fragment, ends.few_layers.fragments[i],
                                                        ends.all_layers.fragments[i]));
      made.push_back(std::move(whole));
      played.push_back({.fragment = &made.back()});
      continue;
    }
    if (fragment.pass == StepPass::kOptimizer) {
      played.push_back({.fragment = &optimizer});
      continue;
    }
    const int64_t times = fragment.round == kLaterMicroStepRound ? 1 + repeats.micro_steps : 1;
    if (fragment.group != kMiddleSegment) {
      const int64_t later = fragment.group > kMiddleSegment ? repeats.segments : 0;
      played.push_back({&fragment, later * repeats.segment_layers, times});
      continue;
    }
    for (int64_t copy = 0; copy <= repeats.segments; ++copy) {
      const int64_t later = fragment.pass == StepPass::kBackward ? repeats.segments - copy : copy;
      played.push_back({&fragment, later * repeats.segment_layers, times});
    }
  }
  return played;
}

bool Same(const RankDryRun& a, const RankDryRun& b) {
  return a.counts == b.counts && a.rank.SerializeAsString() == b.rank.SerializeAsString();
}

// What the ranks of one group are composed from.
class Composer {
 public:
  // Runs `rank`, which stands for its group. `known`, of the same rank of a plan of another
  // context, lends what was run over few tokens. What is composed holds once Prove says so.
  static absl::StatusOr<Composer> Create(const v1::RunPlan& plan, int rank,
                                         const std::string& attention_kernel,
                                         const Composer* known = nullptr) {
    const int64_t layers = plan.spec().model().num_layers();
    Composer composer(plan, rank, attention_kernel);
    const Repeats& repeats = composer.repeats_;
    const int64_t few = layers - repeats.segments * repeats.segment_layers;
    composer.few_plan_ = WithLayers(plan, few);
    composer.few_tokens_plan_ = WithFewTokens(WithLayers(plan, layers));
    if (known != nullptr) {
      composer.streams_ = known->streams_;
      composer.all_layers_ = known->all_layers_;
      composer.few_layers_ = known->few_layers_;
    } else {
      UPIPE_ASSIGN_OR_RETURN(composer.all_layers_, composer.Run(composer.few_tokens_plan_, rank));
      UPIPE_ASSIGN_OR_RETURN(composer.few_layers_,
                             composer.Run(WithFewTokens(composer.few_plan_), rank));
    }
    UPIPE_ASSIGN_OR_RETURN(composer.few_, composer.Run(composer.few_plan_, rank));
    for (const Recording* run : {&composer.few_, &composer.few_layers_, &composer.all_layers_}) {
      if (OptimizerOf(*run) == nullptr) {
        return absl::FailedPreconditionError("a step without a pass of the optimizer");
      }
    }
    return composer;
  }

  // That what is said of layers, tokens and the optimizer is so: composing few layers over few
  // tokens gives what all layers over few tokens gave, and the optimizer does not see tokens.
  absl::Status Prove() const {
    const Fragment* few = OptimizerOf(few_);
    const Fragment* few_layers = OptimizerOf(few_layers_);
    if (few->events != few_layers->events || few->counts != few_layers->counts) {
      return absl::FailedPreconditionError("the optimizer's work depends on the tokens");
    }
    Repeats repeats = repeats_;
    repeats.micro_steps = 0;
    std::deque<Fragment> made;
    UPIPE_ASSIGN_OR_RETURN(
        const std::vector<Played> played,
        Arrange(few_layers_, {few_layers_, all_layers_}, *OptimizerOf(all_layers_), repeats, made));
    UPIPE_ASSIGN_OR_RETURN(const RankDryRun composed,
                           Play(played, few_tokens_plan_, rank_, streams_));
    if (Same(composed, all_layers_.result)) return absl::OkStatus();
    return absl::FailedPreconditionError("layers in the middle differ");
  }

  absl::StatusOr<Outline> Outlined() const {
    std::deque<Fragment> made;
    UPIPE_ASSIGN_OR_RETURN(
        const std::vector<Played> played,
        Arrange(few_, {few_layers_, all_layers_}, *OptimizerOf(all_layers_), repeats_, made));
    UPIPE_ASSIGN_OR_RETURN(Outline outline, OutlineOf(played, few_plan_));
    const v1::MemoryUsage& memory = few_.result.rank.memory();
    outline.unused_bytes = memory.arena_bytes() - memory.peak_bytes();
    return outline;
  }

  // A rank of the group.
  absl::StatusOr<RankDryRun> Compose(int rank) {
    Recording own;
    if (rank != rank_) {
      UPIPE_ASSIGN_OR_RETURN(own, Run(few_tokens_plan_, rank));
    }
    const Recording& all_layers = rank == rank_ ? all_layers_ : own;
    Fragment optimizer = *OptimizerOf(all_layers);
    const Mesh mesh = Mesh::From(plan_.spec().parallel());
    const std::vector<int64_t> sent = optimizer.bytes_sent_to_peer;
    for (int peer = 0; peer < mesh.num_ranks(); ++peer) {
      optimizer.bytes_sent_to_peer[PeerOf(mesh, rank, rank_, peer)] = sent[peer];
    }
    std::deque<Fragment> made;
    UPIPE_ASSIGN_OR_RETURN(const std::vector<Played> played,
                           Arrange(few_, {few_layers_, all_layers}, optimizer, repeats_, made));
    UPIPE_ASSIGN_OR_RETURN(RankDryRun result, Play(played, few_plan_, rank, streams_));
    const v1::RankPlan as_first = result.rank;
    for (int peer = 0; peer < mesh.num_ranks(); ++peer) {
      result.rank.set_bytes_sent_to_peer(
          peer, as_first.bytes_sent_to_peer(PeerOf(mesh, rank, rank_, peer)));
    }
    return result;
  }

 private:
  Composer(const v1::RunPlan& plan, int rank, std::string attention_kernel)
      : plan_(plan), rank_(rank), attention_kernel_(std::move(attention_kernel)) {
    const int64_t stride = plan.spec().memory().checkpoint_stride();
    const int64_t segments = CeilDiv(plan.spec().model().num_layers(), stride);
    const int64_t micro_steps = plan.spec().train().gradient_accumulation();
    repeats_ = {.segment_layers = stride,
                .segments = std::max<int64_t>(segments - kSegmentsRun, 0),
                .micro_steps = std::max<int64_t>(micro_steps - kMicroStepsRun, 0)};
  }

  absl::StatusOr<Recording> Run(const v1::RunPlan& plan, int rank) {
    return Record(plan, rank, attention_kernel_, repeats_.segment_layers, streams_);
  }

  const v1::RunPlan& plan_;
  int rank_;
  std::string attention_kernel_;
  Repeats repeats_;
  StreamNames streams_;
  v1::RunPlan few_plan_, few_tokens_plan_;
  Recording few_;                      // few layers, all tokens
  Recording few_layers_, all_layers_;  // over few tokens
};

// Where composing is refused, whole runs.
absl::StatusOr<std::vector<RankDryRun>> ComposeOrRun(const v1::RunPlan& plan,
                                                     const std::vector<int>& ranks,
                                                     const std::string& attention_kernel) {
  auto composed = ComposeAlike(plan, ranks, attention_kernel);
  if (composed.status().code() != absl::StatusCode::kFailedPrecondition) return composed;
  std::vector<RankDryRun> runs;
  for (int rank : ranks) {
    UPIPE_ASSIGN_OR_RETURN(RankDryRun run, DryRunRank(plan, rank, attention_kernel));
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace

std::vector<std::vector<int>> RanksOfSameHeads(const v1::RunPlan& plan) {
  const Mesh mesh = Mesh::From(plan.spec().parallel());
  return GroupBy(mesh.num_ranks(),
                 [&](int rank) { return HeadsOf(plan.schedule(), mesh.Of(rank).ulysses); });
}

std::vector<std::vector<int>> AlikeRanks(const v1::RunPlan& plan) {
  const v1::ModelSpec& model = plan.spec().model();
  const Mesh mesh = Mesh::From(plan.spec().parallel());
  const parallel::TokenMap tokens = train::TokensOf(plan.spec());
  const auto window = model.has_window() ? std::optional<int64_t>(model.window()) : std::nullopt;
  const kernels::AttentionMask mask = tokens.Mask(model.causal(), window, {0});
  return GroupBy(mesh.num_ranks(), [&](int rank) {
    Shape shape = HeadsOf(plan.schedule(), mesh.Of(rank).ulysses);
    AddLoss(tokens, mesh.ContextRank(rank), shape);
    shape.push_back(0);  // no run of tokens is that long
    AddAttention(tokens, mask, mesh.Of(rank).ring, shape);
    shape.push_back(0);
    AddNode(plan, mesh, rank, shape);
    return shape;
  });
}

absl::StatusOr<std::vector<RankDryRun>> ComposeAlike(const v1::RunPlan& plan,
                                                     const std::vector<int>& ranks,
                                                     const std::string& attention_kernel) {
  UPIPE_ASSIGN_OR_RETURN(Composer composer, Composer::Create(plan, ranks[0], attention_kernel));
  UPIPE_RETURN_IF_ERROR(composer.Prove());
  std::vector<RankDryRun> runs;
  for (int rank : ranks) {
    UPIPE_ASSIGN_OR_RETURN(RankDryRun run, composer.Compose(rank));
    runs.push_back(std::move(run));
  }
  return runs;
}

absl::StatusOr<RankDryRun> ComposeRank(const v1::RunPlan& plan, int rank,
                                       const std::string& attention_kernel) {
  UPIPE_ASSIGN_OR_RETURN(std::vector<RankDryRun> runs,
                         ComposeOrRun(plan, {rank}, attention_kernel));
  return std::move(runs[0]);
}

absl::StatusOr<std::vector<RankDryRun>> ComposeRanks(const v1::RunPlan& plan,
                                                     const std::string& attention_kernel,
                                                     int num_threads) {
  std::vector<RankDryRun> runs(plan.spec().parallel().ranks());
  const std::vector<std::vector<int>> groups = AlikeRanks(plan);
  UPIPE_RETURN_IF_ERROR(InThreads(num_threads, groups.size(), [&](size_t index) -> absl::Status {
    const std::vector<int>& group = groups[index];
    UPIPE_ASSIGN_OR_RETURN(std::vector<RankDryRun> of_group,
                           ComposeOrRun(plan, group, attention_kernel));
    for (size_t i = 0; i < group.size(); ++i) runs[group[i]] = std::move(of_group[i]);
    return absl::OkStatus();
  }));
  return runs;
}

absl::StatusOr<std::vector<Outline>> OutlinesOf(const std::vector<v1::RunPlan>& plans, int rank,
                                                const std::string& attention_kernel) {
  std::vector<Outline> outlines;
  std::optional<Composer> last;
  for (const v1::RunPlan& plan : plans) {
    UPIPE_ASSIGN_OR_RETURN(
        Composer composer,
        Composer::Create(plan, rank, attention_kernel, last.has_value() ? &*last : nullptr));
    UPIPE_ASSIGN_OR_RETURN(outlines.emplace_back(), composer.Outlined());
    last.emplace(std::move(composer));
  }
  return outlines;
}

}  // namespace upipe::planner
