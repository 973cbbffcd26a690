#include "tests/invariance/engine/method_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "common/status.h"

namespace upipe::testing {
namespace {

constexpr uint64_t kWeightSeed = 11;

std::string LogitsName(size_t sequence) { return absl::StrCat("logits ", sequence); }

parallel::TokenMap TokenMapOf(const v1::JobSpec& spec) {
  const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
  return parallel::TokenMap::Make({.context = spec.train().context(),
                                   .ulysses_ranks = mesh.ulysses_ranks,
                                   .ring_ranks = mesh.ring_ranks,
                                   .query_chunks = spec.memory().query_chunks()});
}

std::vector<int64_t> DocumentStarts(const MethodCase& c, const v1::JobSpec& spec, int64_t index) {
  const int64_t context = c.job.context;
  std::set<int64_t> starts;
  if (c.bounds == DocumentBounds::kUneven) {
    const int64_t third = std::max<int64_t>(2, context / 3);
    // The first document, and one in the middle, are one token long.
    for (int64_t start : {int64_t{1}, third, third + 1, 2 * third - 1}) {
      starts.insert(index % 2 == 0 ? start : context - start);
    }
  } else {
    const parallel::TokenMap map = TokenMapOf(spec);
    std::set<int64_t> bounds;
    for (int rank = 0; rank < map.context_ranks(); ++rank) {
      for (const kernels::PositionRun& run : map.RunsOf(rank)) bounds.insert(run.begin);
    }
    bounds.erase(0);
    if (bounds.empty()) bounds.insert(context / 2);
    // One document of one token; all bounds but every third, so that some are reached over. A short
    // context keeps tokens that attend to others.
    if (index % 2 == 0) starts.insert(*bounds.begin() + 1);
    int64_t number = index;
    for (int64_t bound : bounds) {
      if (number++ % 3 != 2 && (context > 8 || bound == *bounds.begin())) starts.insert(bound);
    }
  }
  std::vector<int64_t> ascending = {0};
  for (int64_t start : starts) {
    if (start > 0 && start < context) ascending.push_back(start);
  }
  return ascending;
}

absl::Status CollectLogits(Rank rank, const Sequence& sequence, std::vector<float>& logits) {
  const parallel::TokenMap& map = rank.step.tokens();
  const int context_rank = rank.context.mesh().ContextRank(rank.rank);
  const int64_t vocab = static_cast<int64_t>(logits.size() / sequence.tokens.size());
  UPIPE_ASSIGN_OR_RETURN(
      const kernels::Buffer buffer,
      rank.context.AllocateFloats(kernels::MemoryTag::kLogits, map.tokens_per_rank * vocab));
  const RankTokens part = sequence.Slice(map, context_rank);
  UPIPE_RETURN_IF_ERROR(rank.step.model().Evaluate(
      rank.step.Upload(part.host()), 1,
      kernels::TensorView::Matrix(buffer.data(), kernels::DType::kFloat32, map.tokens_per_rank,
                                  vocab)));
  std::vector<float> own(map.tokens_per_rank * vocab);
  rank.context.device().CopyToHost(own.data(), buffer.data(),
                                   static_cast<int64_t>(own.size() * sizeof(float)),
                                   rank.context.stream());
  UPIPE_RETURN_IF_ERROR(rank.context.stream().Synchronize());
  auto from = own.begin();
  for (const kernels::PositionRun& run : map.RunsOf(context_rank)) {
    for (int64_t position = run.begin; position < run.end; ++position, from += vocab) {
      if (position >= map.context) continue;
      std::copy(from, from + vocab, logits.begin() + position * vocab);
    }
  }
  return absl::OkStatus();
}

// The first difference between what two ranks report of a step.
absl::Status SameReport(const train::StepResult& a, const train::StepResult& b, int rank) {
  if (a.loss == b.loss && a.valid_tokens == b.valid_tokens && a.grad_norm == b.grad_norm &&
      a.skipped == b.skipped) {
    return absl::OkStatus();
  }
  if (std::isnan(a.loss) && std::isnan(b.loss) && a.valid_tokens == b.valid_tokens) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "rank 0 reports loss ", a.loss, " of ", a.valid_tokens, " tokens, norm ", a.grad_norm,
      "; rank ", rank, " reports ", b.loss, " of ", b.valid_tokens, ", norm ", b.grad_norm));
}

// One rank, one stage, everything on the device.
SmallJob PlainJob(const SmallJob& job) {
  SmallJob plain = {.num_heads = job.num_heads,
                    .num_kv_heads = job.num_kv_heads,
                    .head_dim = job.head_dim,
                    .hidden_size = job.hidden_size,
                    .intermediate_size = job.intermediate_size,
                    .vocab_size = job.vocab_size,
                    .num_layers = job.num_layers,
                    .context = job.context,
                    .tie_embeddings = job.tie_embeddings,
                    .method = v1::METHOD_ULYSSES,
                    .qk_norm = job.qk_norm,
                    .qkv_bias = job.qkv_bias,
                    .bf16 = job.bf16};
  plain.causal = job.causal;
  plain.window = job.window;
  plain.documents = job.documents;
  return plain;
}

// Token losses of a sequence, in fp64 from its logits.
void AppendTokenLosses(const std::vector<float>& logits, const Sequence& sequence,
                       std::vector<float>& losses) {
  const size_t vocab = logits.size() / sequence.tokens.size();
  for (size_t t = 0; t < sequence.labels.size(); ++t) {
    if (sequence.labels[t] < 0) continue;
    const float* row = logits.data() + t * vocab;
    double sum = 0;
    for (size_t i = 0; i < vocab; ++i) sum += std::exp(double{row[i]});
    losses.push_back(static_cast<float>(std::log(sum) - row[sequence.labels[t]]));
  }
}

std::vector<float> AllTokenLosses(const Outcome& outcome, absl::Span<const Sequence> sequences) {
  std::vector<float> losses;
  for (size_t i = 0; i < sequences.size(); ++i) {
    AppendTokenLosses(outcome.tensors.at(LogitsName(i)), sequences[i], losses);
  }
  return losses;
}

bool IsGradient(const std::string& name) { return name.rfind("logits ", 0) != 0; }

std::vector<float> AllGradients(const Outcome& outcome) {
  std::vector<float> all;
  for (const auto& [name, values] : outcome.tensors) {
    if (IsGradient(name)) all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Every sequence by itself; sums, mean and norm taken here.
absl::StatusOr<Outcome> RunEachAlone(const SmallJob& job, absl::Span<const Sequence> sequences) {
  Outcome total;
  std::map<std::string, std::vector<double>> sums;
  for (size_t i = 0; i < sequences.size(); ++i) {
    UPIPE_ASSIGN_OR_RETURN(Outcome one, RunOnce(job, sequences.subspan(i, 1)));
    if (one.valid_tokens > 0) total.loss += one.loss * one.valid_tokens;
    total.valid_tokens += one.valid_tokens;
    for (size_t range = 0; range < one.by_position.size(); ++range) {
      total.by_position[range].loss += one.by_position[range].loss;
      total.by_position[range].count += one.by_position[range].count;
    }
    for (auto& [name, values] : one.tensors) {
      if (!IsGradient(name)) {
        total.tensors[LogitsName(i)] = std::move(values);
        continue;
      }
      std::vector<double>& sum = sums[name];
      sum.resize(values.size());
      for (size_t k = 0; k < values.size(); ++k) sum[k] += values[k];
    }
  }
  total.loss /= total.valid_tokens;
  double squares = 0;
  for (const auto& [name, sum] : sums) {
    total.tensors[name].assign(sum.begin(), sum.end());
    for (double value : sum) squares += value * value;
  }
  total.grad_norm = std::sqrt(squares) / total.valid_tokens;
  return total;
}

// What a reference depends on.
std::string KeyOf(const SmallJob& job, absl::Span<const Sequence> sequences) {
  const v1::JobSpec spec = MakeSpec(PlainJob(job));
  std::string key = spec.SerializeAsString();
  for (const Sequence& sequence : sequences) {
    for (const auto* list : {&sequence.tokens, &sequence.labels}) {
      absl::StrAppend(&key, "|");
      for (int32_t value : *list) absl::StrAppend(&key, value, ",");
    }
    for (int64_t start : sequence.document_starts) absl::StrAppend(&key, start, ";");
  }
  return key;
}

absl::StatusOr<Reference> MakeReference(const SmallJob& job, absl::Span<const Sequence> sequences) {
  SmallJob exact = PlainJob(job);
  exact.backend = "reference";
  exact.bf16 = false;
  SmallJob plain = PlainJob(job);
  plain.accumulation = static_cast<int64_t>(sequences.size());
  Reference reference;
  UPIPE_ASSIGN_OR_RETURN(reference.exact, RunEachAlone(exact, sequences));
  UPIPE_ASSIGN_OR_RETURN(const Outcome once, RunOnce(plain, sequences));
  for (const auto& [name, values] : reference.exact.tensors) {
    reference.plain_errors[name] = RelativeError(once.tensors.at(name), values);
  }
  reference.plain_loss_error =
      RelativeError(AllTokenLosses(once, sequences), AllTokenLosses(reference.exact, sequences));
  reference.plain_norm_error = RelativeError(AllGradients(once), AllGradients(reference.exact));
  reference.half_epsilon =
      job.bf16 ? kHalfEpsilonOfBf16 : std::numeric_limits<float>::epsilon() / 2;
  reference.largest_plain_error = job.bf16 ? 0.25 : 1e-4;
  return reference;
}

}  // namespace

std::vector<Sequence> SequencesOf(const MethodCase& c) {
  const v1::JobSpec spec = MakeSpec(c.job);
  const v1::JobSpec full = WithDefaults(spec);
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < train::SequencesPerStep(full); ++i) {
    std::vector<int64_t> starts = {0};
    if (c.job.documents != v1::DOCUMENTS_JOIN) starts = DocumentStarts(c, full, i);
    sequences.push_back(MakeSequence(spec, static_cast<uint64_t>(7 + i), std::move(starts)));
  }
  return sequences;
}

bool SameBits(const Outcome& a, const Outcome& b) {
  return a.loss == b.loss && a.valid_tokens == b.valid_tokens && a.grad_norm == b.grad_norm &&
         a.tensors == b.tensors;
}

Adjust Hostile(uint64_t seed) {
  return [seed](int rank, kernels::DeviceOptions& options) {
    options.test_delay =
        kernels::StreamDelay{.seed = seed * 100 + rank, .longest = absl::Microseconds(20)};
    options.test_poison_freed = true;
  };
}

absl::StatusOr<Outcome> RunOnce(const SmallJob& job, absl::Span<const Sequence> sequences,
                                const Adjust& adjust) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, MakePlan(MakeSpec(job)));
  const Tensors weights = RandomWeights(plan, kWeightSeed);
  Outcome outcome;
  std::vector<std::vector<float>> logits(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    logits[i].resize(sequences[i].tokens.size() * job.vocab_size);
  }
  std::vector<train::StepResult> results(job.ranks);
  Collector gradients;
  const int64_t logits_bytes = plan.tokens_per_rank() * job.vocab_size * 4;
  UPIPE_RETURN_IF_ERROR(
      RunRanks({.plan = plan,
                .adjust =
                    [&](int rank, kernels::DeviceOptions& options) {
                      options.arena_bytes = 2 * options.arena_bytes + logits_bytes;
                      if (adjust) adjust(rank, options);
                    }},
               [&](Rank rank) -> absl::Status {
                 UPIPE_RETURN_IF_ERROR(SetWeights(rank, weights));
                 const parallel::Mesh& mesh = rank.context.mesh();
                 for (size_t i = mesh.SequenceGroup(rank.rank); i < sequences.size();
                      i += mesh.sequence_groups()) {
                   UPIPE_RETURN_IF_ERROR(CollectLogits(rank, sequences[i], logits[i]));
                 }
                 UPIPE_ASSIGN_OR_RETURN(results[rank.rank], RunStep(rank, 1, sequences));
                 return gradients.Add(rank, rank.step.parameters().gradients());
               }));
  for (int rank = 1; rank < job.ranks; ++rank) {
    UPIPE_RETURN_IF_ERROR(SameReport(results[0], results[rank], rank));
  }
  outcome.loss = results[0].loss;
  outcome.valid_tokens = results[0].valid_tokens;
  outcome.grad_norm = results[0].grad_norm;
  outcome.by_position = results[0].by_position;
  outcome.tensors = gradients.tensors();
  for (size_t i = 0; i < sequences.size(); ++i) {
    outcome.tensors[LogitsName(i)] = std::move(logits[i]);
  }
  return outcome;
}

absl::StatusOr<const Reference*> ReferenceOf(const SmallJob& job,
                                             absl::Span<const Sequence> sequences) {
  static std::map<std::string, std::unique_ptr<Reference>> made;
  std::unique_ptr<Reference>& reference = made[KeyOf(job, sequences)];
  if (reference == nullptr) {
    UPIPE_ASSIGN_OR_RETURN(Reference fresh, MakeReference(job, sequences));
    reference = std::make_unique<Reference>(std::move(fresh));
  }
  return reference.get();
}

void ExpectWithinBound(const Outcome& outcome, const Reference& reference) {
  const Outcome& exact = reference.exact;
  const auto expect_near = [&](double value, double expected, double plain_error,
                               const char* what) {
    EXPECT_NEAR(value, expected, reference.Bound(plain_error) * std::abs(expected))
        << what << ", plain error " << plain_error;
  };
  EXPECT_EQ(outcome.valid_tokens, exact.valid_tokens);
  expect_near(outcome.loss, exact.loss, reference.plain_loss_error, "loss");
  expect_near(outcome.grad_norm, exact.grad_norm, reference.plain_norm_error, "norm");
  ASSERT_EQ(outcome.tensors.size(), exact.tensors.size());
  for (const auto& [name, expected] : exact.tensors) {
    const double plain = reference.plain_errors.at(name);
    EXPECT_LE(plain, reference.largest_plain_error) << name << " of the plain run";
    EXPECT_LE(RelativeError(outcome.tensors.at(name), expected), reference.Bound(plain))
        << name << ", plain error " << plain;
  }
}

void ExpectMatchesOneRank(const SmallJob& job, absl::Span<const Sequence> sequences) {
  const auto reference = ReferenceOf(job, sequences);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const auto outcome = RunOnce(job, sequences);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ExpectWithinBound(*outcome, **reference);
}

}  // namespace upipe::testing
