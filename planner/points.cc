#include "planner/points.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"
#include "common/spec/job_spec.h"
#include "common/spec/scalar_field.h"

namespace upipe::planner {
namespace {

using google::protobuf::FieldDescriptor;

// Tokens of a rank in one query chunk below which a pass over all keys is mostly overhead.
constexpr int64_t kMinChunkTokens = 2048;
constexpr int64_t kMaxQueryChunks = 16;
constexpr int64_t kMaxStride = 4;

v1::Method MethodOf(const ContextRanks& ranks, bool all_heads) {
  if (!all_heads) return v1::METHOD_UPIPE;
  if (ranks.ring == 1) return v1::METHOD_ULYSSES;
  return ranks.ulysses == 1 ? v1::METHOD_RING : v1::METHOD_USP;
}

int64_t ContextRanksOfSplit(const v1::ParallelSpec& parallel) {
  return parallel.ranks() / parallel.fsdp_ranks() / parallel.dp_ranks();
}

// The ring ranks that the job leaves open, or its own.
std::vector<int64_t> RingsOf(const v1::ParallelSpec& parallel) {
  const bool open = parallel.method() == v1::METHOD_AUTO || parallel.ring_ranks() == 0;
  if (!open) return {parallel.ring_ranks()};
  const int64_t context = ContextRanksOfSplit(parallel);
  std::vector<int64_t> rings;
  for (int64_t ring = parallel.method() == v1::METHOD_USP ? 2 : 1; ring <= context; ++ring) {
    if (context % ring == 0) rings.push_back(ring);
  }
  return rings;
}

// u of the stages, query heads per rank; 0 stands for what the job says.
std::vector<int64_t> WidthsOf(const v1::JobSpec& spec, const ContextRanks& ranks) {
  const v1::ParallelSpec& parallel = spec.parallel();
  const bool any = parallel.method() == v1::METHOD_AUTO;
  const bool upipe = parallel.method() == v1::METHOD_UPIPE && parallel.heads_per_stage() == 0;
  if (!any && !upipe) return {0};
  const int64_t all = CeilDiv(spec.model().num_heads(), ranks.ulysses);
  std::vector<int64_t> widths;
  for (int64_t u = 1; u < all; u *= 2) widths.push_back(u);
  widths.push_back(all);
  return widths;
}

v1::JobSpec Split(const v1::JobSpec& spec, const ContextRanks& ranks, int64_t width) {
  v1::JobSpec split = spec;
  v1::ParallelSpec& parallel = *split.mutable_parallel();
  parallel.set_ring_ranks(static_cast<int32_t>(ranks.ring));
  if (width == 0) return split;
  const int64_t all = CeilDiv(spec.model().num_heads(), ranks.ulysses);
  if (parallel.method() == v1::METHOD_AUTO) parallel.set_method(MethodOf(ranks, width == all));
  if (parallel.method() == v1::METHOD_UPIPE) parallel.set_heads_per_stage(width * ranks.ulysses);
  return split;
}

const FieldDescriptor* MemoryField(const char* name) {
  const FieldDescriptor* field = v1::MemorySpec::descriptor()->FindFieldByName(name);
  UPIPE_CHECK(field != nullptr) << "no memory." << name;
  return field;
}

void SetValue(const FieldDescriptor* field, int64_t value, v1::MemorySpec& memory) {
  const auto& reflection = *memory.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.SetEnumValue(&memory, field, static_cast<int>(value));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(&memory, field, value != 0);
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(&memory, field, static_cast<int32_t>(value));
    default:
      return reflection.SetInt64(&memory, field, value);
  }
}

// Nothing auto any more; fields that are no knob have the defaults of the method.
v1::JobSpec Written(v1::JobSpec spec) {
  spec.mutable_memory()->set_policy(v1::POLICY_CHOICE_WRITTEN);
  *spec.mutable_memory() = WithMemoryDefaults(spec.memory(), spec.parallel().method());
  return spec;
}

bool IsLegal(const v1::JobSpec& spec) { return ValidateJobSpec(spec).empty(); }

// From `spec`, each knob in turn at the first value of `order` that is legal.
v1::JobSpec AtEnds(const v1::JobSpec& split, const std::vector<Knob>& knobs, bool fastest) {
  v1::JobSpec spec = Written(split);
  // Places need each other: a second round sets what the first could not yet.
  for (int round = 0; round < 2; ++round) {
    for (const Knob& knob : knobs) {
      std::vector<int64_t> order = knob.values;
      if (fastest) std::reverse(order.begin(), order.end());
      for (const int64_t value : order) {
        v1::JobSpec tried = spec;
        SetValue(knob.field, value, *tried.mutable_memory());
        if (!IsLegal(tried)) continue;
        spec = std::move(tried);
        break;
      }
    }
  }
  return spec;
}

}  // namespace

std::vector<v1::JobSpec> SplitsOf(const v1::JobSpec& spec) {
  const int64_t context = ContextRanksOfSplit(spec.parallel());
  std::vector<v1::JobSpec> splits, idle;
  for (const int64_t ring : RingsOf(spec.parallel())) {
    const ContextRanks ranks = {.ulysses = context / ring, .ring = ring};
    for (const int64_t width : WidthsOf(spec, ranks)) {
      v1::JobSpec split = Split(spec, ranks, width);
      if (!IsLegal(split)) continue;
      (ranks.ulysses > spec.model().num_heads() ? idle : splits).push_back(std::move(split));
    }
  }
  return splits.empty() ? idle : splits;
}

std::vector<Knob> KnobsOf(const v1::JobSpec& split) {
  const v1::MemorySpec& memory = split.memory();
  if (memory.policy() != v1::POLICY_CHOICE_AUTO) return {};
  const ContextRanks ranks = *ContextRanksOf(split.parallel());
  const int64_t tokens = CeilDiv(split.train().context(), ranks.total());
  std::vector<int64_t> chunks, strides;
  for (int64_t n = kMaxQueryChunks; n > 1; n /= 2) {
    if (tokens / n >= kMinChunkTokens) chunks.push_back(n);
  }
  const bool fpdt = split.parallel().method() == v1::METHOD_FPDT;
  chunks.push_back(fpdt ? 2 : 1);
  for (int64_t k = std::min(kMaxStride, split.model().num_layers()); k >= 1; --k) {
    strides.push_back(k);
  }
  // With one Ulysses rank, or all heads in one stage, there is nothing to overlap.
  const int64_t all_heads = RoundUp(split.model().num_heads(), ranks.ulysses);
  const bool stages = split.parallel().method() == v1::METHOD_UPIPE &&
                      split.parallel().heads_per_stage() < all_heads;
  const std::vector<int64_t> overlap =
      ranks.ulysses > 1 && stages ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0};
  const std::vector<int64_t> places = {v1::PLACE_HOST, v1::PLACE_DEVICE};
  std::vector<Knob> knobs = {
      {MemoryField("attention_output"),
       {v1::ATTENTION_OUTPUT_RECOMPUTE, v1::ATTENTION_OUTPUT_HOST, v1::ATTENTION_OUTPUT_DEVICE}},
      {MemoryField("layer_inputs"), places},
      {MemoryField("checkpoint_stride"), strides},
      {MemoryField("hidden_stream"), places},
      {MemoryField("stage_kv"), places},
      {MemoryField("query_chunks"), chunks},
      {MemoryField("overlap"), overlap},
      {MemoryField("ring_kv"), {v1::RING_KV_PASS, v1::RING_KV_KEEP}},
      {MemoryField("optimizer"), places},
  };
  const auto is_fixed = [&](const Knob& knob) {
    return memory.GetReflection()->HasField(memory, knob.field) || knob.values.size() == 1;
  };
  knobs.erase(std::remove_if(knobs.begin(), knobs.end(), is_fixed), knobs.end());
  return knobs;
}

v1::JobSpec Leanest(const v1::JobSpec& split, const std::vector<Knob>& knobs) {
  return AtEnds(split, knobs, /*fastest=*/false);
}

v1::JobSpec Fastest(const v1::JobSpec& split, const std::vector<Knob>& knobs) {
  return AtEnds(split, knobs, /*fastest=*/true);
}

std::vector<Move> MovesOf(const v1::JobSpec& point, const std::vector<Knob>& knobs) {
  std::vector<Move> moves;
  const std::string here = point.memory().SerializeAsString();
  for (const Knob& knob : knobs) {
    for (const int64_t value : knob.values) {
      Move move{point, ""};
      SetValue(knob.field, value, *move.spec.mutable_memory());
      if (move.spec.memory().SerializeAsString() == here || !IsLegal(move.spec)) continue;
      move.what = absl::StrCat("memory.", knob.field->name(), ": ",
                               ScalarFieldText(move.spec.memory(), *knob.field));
      moves.push_back(std::move(move));
    }
  }
  return moves;
}

}  // namespace upipe::planner
