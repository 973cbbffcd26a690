#include "common/spec/job_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/units.h"

namespace upipe {
namespace {

// RoPE angles are exact below it. With the limits of the sizes below, the largest product the
// engine forms (bytes of all layer inputs, 2^30 tokens x 2^16 columns x 2^10 layers x 4) is 2^58.
constexpr int64_t kMaxContext = int64_t{1} << 30;
constexpr int64_t kMaxSize = int64_t{1} << 62;  // of any product the engine forms

// Collects violations; each check returns whether it held.
class SpecChecker {
 public:
  bool Fail(absl::string_view field, std::string message) {
    violations_.push_back({std::string(field), std::move(message)});
    return false;
  }

  // For required integers, where 0 and absent look the same.
  bool Required(absl::string_view field, int64_t value, int64_t min, int64_t max) {
    if (value == 0) {
      return Fail(field, absl::StrCat("is required: a whole number from ", FormatCount(min), " to ",
                                      FormatCount(max), "; it is absent or 0"));
    }
    return InRange(field, value, min, max);
  }

  bool InRange(absl::string_view field, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return true;
    return Fail(field, absl::StrCat(FormatCount(value), " is outside ", FormatCount(min), " to ",
                                    FormatCount(max)));
  }

  bool Positive(absl::string_view field, double value) {
    if (std::isfinite(value) && value > 0) return true;
    return Fail(field, absl::StrCat(value, " is not a finite number above 0"));
  }

  // As Positive, for what the engine holds in fp32: there it must not become 0 or infinite.
  bool PositiveFloat(absl::string_view field, double value) {
    using Limits = std::numeric_limits<float>;
    if (value >= Limits::min() && value <= Limits::max()) return true;
    return Fail(field, absl::StrCat(value, " is not a number above 0 that fp32 holds (",
                                    Limits::min(), " to ", Limits::max(), ")"));
  }

  // [0, 1), in fp32 too.
  bool Fraction(absl::string_view field, double value) {
    if (value >= 0 && value < 1 && static_cast<float>(value) < 1) return true;
    return Fail(field, absl::StrCat(value, " is outside 0 (included) to 1 (excluded)"));
  }

  std::vector<Violation> Take() { return std::move(violations_); }

 private:
  std::vector<Violation> violations_;
};

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string DivisorsOf(int64_t n) {
  std::vector<int64_t> divisors;
  for (int64_t i = 1; i <= n; ++i) {
    if (n % i == 0) divisors.push_back(i);
  }
  return absl::StrJoin(divisors, ", ");
}

// Legal U (SCHEDULE "Legal U"): multiples of the ranks up to the first at or above the heads.
std::string LegalHeadsPerStage(int64_t num_heads, int64_t ranks) {
  const int64_t last = RoundUp(num_heads, ranks);
  std::vector<int64_t> legal;
  if (last / ranks > 8) {
    return absl::StrCat("multiples of ", ranks, " from ", ranks, " to ", FormatCount(last));
  }
  for (int64_t value = ranks; value <= last; value += ranks) legal.push_back(value);
  return absl::StrJoin(legal, ", ");
}

void CheckName(const std::string& name, SpecChecker& checker) {
  constexpr absl::string_view kRule =
      "1 to 63 lower-case letters, digits and '-', beginning with a letter or digit";
  if (name.empty()) {
    checker.Fail("name", absl::StrCat("is required: ", kRule));
    return;
  }
  const bool legal =
      name.size() <= 63 && name[0] != '-' && std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
      });
  if (!legal) {
    checker.Fail("name", absl::StrCat("must be ", kRule, "; it has ", name.size(), " characters: '",
                                      name.substr(0, 80), "'"));
  }
}

void CheckRope(const v1::RopeSpec& rope, SpecChecker& checker) {
  if (!(std::isfinite(rope.theta()) && rope.theta() > 1)) {
    checker.Fail("model.rope.theta", absl::StrCat(rope.theta(), " is not a finite number above 1"));
  }
  if (!rope.has_llama3()) return;
  const v1::Llama3RopeScaling& llama3 = rope.llama3();
  if (!(std::isfinite(llama3.factor()) && llama3.factor() >= 1)) {
    checker.Fail("model.rope.llama3.factor",
                 absl::StrCat("is required: a finite number from 1; it is ", llama3.factor()));
  }
  const bool low = checker.Positive("model.rope.llama3.low_freq_factor", llama3.low_freq_factor());
  const bool high =
      checker.Positive("model.rope.llama3.high_freq_factor", llama3.high_freq_factor());
  if (low && high && llama3.high_freq_factor() <= llama3.low_freq_factor()) {
    checker.Fail("model.rope.llama3.high_freq_factor",
                 absl::StrCat(llama3.high_freq_factor(), " is not above low_freq_factor ",
                              llama3.low_freq_factor()));
  }
  checker.Required("model.rope.llama3.original_context", llama3.original_context(), 1, kMaxContext);
}

void CheckModel(const v1::ModelSpec& model, SpecChecker& checker) {
  checker.Required("model.vocab_size", model.vocab_size(), 2, 1 << 20);
  checker.Required("model.hidden_size", model.hidden_size(), 1, 1 << 16);
  checker.Required("model.num_layers", model.num_layers(), 1, 1024);
  const bool heads = checker.Required("model.num_heads", model.num_heads(), 1, 1024);
  const bool kv_heads = checker.Required("model.num_kv_heads", model.num_kv_heads(), 1, 1024);
  if (heads && kv_heads && model.num_heads() % model.num_kv_heads() != 0) {
    checker.Fail(
        "model.num_kv_heads",
        absl::StrCat(model.num_kv_heads(), " does not divide num_heads ", model.num_heads(),
                     "; legal values: ", DivisorsOf(model.num_heads())));
  }
  if (checker.Required("model.head_dim", model.head_dim(), 2, 256) && model.head_dim() % 2 != 0) {
    checker.Fail("model.head_dim",
                 absl::StrCat(model.head_dim(), " is odd; rotary positions turn pairs of ",
                              "columns, so it must be even"));
  }
  checker.Required("model.intermediate_size", model.intermediate_size(), 1, 1 << 20);
  checker.PositiveFloat("model.rms_norm_eps", model.rms_norm_eps());
  CheckRope(model.rope(), checker);
  checker.PositiveFloat("model.init_stddev", model.init_stddev());
}

void CheckHeadsPerStage(const v1::ParallelSpec& parallel, int64_t num_heads, SpecChecker& checker) {
  constexpr absl::string_view kField = "parallel.heads_per_stage";
  const std::string legal =
      absl::StrCat("legal values for ", num_heads, " heads on ", parallel.ranks(),
                   " ranks: ", LegalHeadsPerStage(num_heads, parallel.ranks()));
  if (parallel.method() == v1::METHOD_ULYSSES) {
    if (parallel.has_heads_per_stage()) {
      checker.Fail(kField,
                   absl::StrCat(parallel.heads_per_stage(), " given, but method ulysses runs all ",
                                num_heads, " heads in one stage: remove it or use method upipe"));
    }
    return;
  }
  if (!parallel.has_heads_per_stage()) {
    checker.Fail(kField, absl::StrCat("is required for method upipe; ", legal));
    return;
  }
  const int64_t value = parallel.heads_per_stage();
  if (value < parallel.ranks()) {
    checker.Fail(kField, absl::StrCat(value, " is below the ", parallel.ranks(),
                                      " ranks and would idle some of them; ", legal));
  } else if (value % parallel.ranks() != 0) {
    checker.Fail(kField, absl::StrCat(value, " is not a multiple of the ", parallel.ranks(),
                                      " ranks; ", legal));
  } else if (value > RoundUp(num_heads, parallel.ranks())) {
    checker.Fail(kField,
                 absl::StrCat(value, " is above what ", num_heads, " heads can fill; ", legal));
  }
}

void CheckParallel(const v1::ParallelSpec& parallel, int64_t num_heads, SpecChecker& checker) {
  const bool ranks = checker.Required("parallel.ranks", parallel.ranks(), 1, 1024);
  bool method = parallel.method() == v1::METHOD_UPIPE || parallel.method() == v1::METHOD_ULYSSES;
  if (!method) checker.Fail("parallel.method", "is required: upipe or ulysses");
  if (ranks && method && num_heads >= 1 && num_heads <= 1024) {
    CheckHeadsPerStage(parallel, num_heads, checker);
  }
  checker.InRange("parallel.threads_per_rank", parallel.threads_per_rank(), 1, 64);
  if (!std::all_of(parallel.isa_cap().begin(), parallel.isa_cap().end(),
                   [](char c) { return absl::ascii_isalnum(c) || c == '_'; })) {
    checker.Fail("parallel.isa_cap",
                 absl::StrCat("'", parallel.isa_cap().substr(0, 80),
                              "' is no instruction set name such as AVX2 or AVX3"));
  }
  if (parallel.backend() != "cpu" && parallel.backend() != "reference") {
    checker.Fail("parallel.backend", absl::StrCat("'", parallel.backend().substr(0, 80),
                                                  "' is unknown; backends: cpu, reference"));
  }
}

void CheckOptimizer(const v1::OptimizerSpec& optimizer, SpecChecker& checker) {
  const bool peak = checker.PositiveFloat("optimizer.learning_rate", optimizer.learning_rate());
  const double floor = optimizer.min_learning_rate();
  if (!(std::isfinite(floor) && floor >= 0)) {
    checker.Fail("optimizer.min_learning_rate",
                 absl::StrCat(floor, " is not a finite number from 0"));
  } else if (peak && floor > optimizer.learning_rate()) {
    checker.Fail(
        "optimizer.min_learning_rate",
        absl::StrCat(floor, " is above the peak learning_rate ", optimizer.learning_rate()));
  }
  checker.InRange("optimizer.warmup_steps", optimizer.warmup_steps(), 0, int64_t{1} << 31);
  checker.Fraction("optimizer.beta1", optimizer.beta1());
  checker.Fraction("optimizer.beta2", optimizer.beta2());
  checker.PositiveFloat("optimizer.eps", optimizer.eps());
  if (!(std::isfinite(optimizer.weight_decay()) && optimizer.weight_decay() >= 0)) {
    checker.Fail("optimizer.weight_decay",
                 absl::StrCat(optimizer.weight_decay(), " is not a finite number from 0"));
  }
  if (!(optimizer.clip_norm() > 0)) {
    checker.Fail("optimizer.clip_norm", absl::StrCat(optimizer.clip_norm(),
                                                     " is not above 0; .inf "
                                                     "means no clipping"));
  }
  checker.InRange("optimizer.max_skipped_steps", optimizer.max_skipped_steps(), 1,
                  std::numeric_limits<int32_t>::max());
}

void CheckTrain(const v1::TrainSpec& train, SpecChecker& checker) {
  checker.Required("train.context", train.context(), 1, kMaxContext);
  checker.Required("train.steps", train.steps(), 1, int64_t{1} << 31);
  checker.InRange("train.eval_every", train.eval_every(), 0, int64_t{1} << 31);
  checker.InRange("train.eval_sequences", train.eval_sequences(), 0, int64_t{1} << 31);
  if (train.has_memory_per_rank()) {
    checker.InRange("train.memory_per_rank", train.memory_per_rank(), 1, kMaxSize);
  }
}

}  // namespace

std::string MethodName(v1::Method method) {
  switch (method) {
    case v1::METHOD_UPIPE:
      return "upipe";
    case v1::METHOD_ULYSSES:
      return "ulysses";
    default:
      return "unspecified";
  }
}

int64_t PaddedContext(const v1::JobSpec& spec) {
  return RoundUp(spec.train().context(), spec.parallel().ranks());
}

v1::JobSpec WithDefaults(const v1::JobSpec& spec) {
  v1::JobSpec full = spec;
  v1::ModelSpec& model = *full.mutable_model();
  if (!model.has_rms_norm_eps()) model.set_rms_norm_eps(1e-5);
  if (!model.has_tie_embeddings()) model.set_tie_embeddings(false);
  if (!model.has_init_stddev()) model.set_init_stddev(0.02);
  v1::RopeSpec& rope = *model.mutable_rope();
  if (!rope.has_theta()) rope.set_theta(500000);
  if (!rope.has_hf_parity()) rope.set_hf_parity(false);
  v1::ParallelSpec& parallel = *full.mutable_parallel();
  if (!parallel.has_threads_per_rank()) parallel.set_threads_per_rank(1);
  if (!parallel.has_isa_cap()) parallel.set_isa_cap("");
  if (!parallel.has_backend()) parallel.set_backend("cpu");
  v1::OptimizerSpec& optimizer = *full.mutable_optimizer();
  if (!optimizer.has_learning_rate()) optimizer.set_learning_rate(3e-4);
  if (!optimizer.has_min_learning_rate()) {
    optimizer.set_min_learning_rate(optimizer.learning_rate() / 10);
  }
  if (!optimizer.has_warmup_steps()) optimizer.set_warmup_steps(0);
  if (!optimizer.has_beta1()) optimizer.set_beta1(0.9);
  if (!optimizer.has_beta2()) optimizer.set_beta2(0.95);
  if (!optimizer.has_eps()) optimizer.set_eps(1e-8);
  if (!optimizer.has_weight_decay()) optimizer.set_weight_decay(0.1);
  if (!optimizer.has_clip_norm()) optimizer.set_clip_norm(1.0);
  if (!optimizer.has_max_skipped_steps()) optimizer.set_max_skipped_steps(10);
  v1::TrainSpec& train = *full.mutable_train();
  if (!train.has_seed()) train.set_seed(1);
  if (!train.has_eval_every()) train.set_eval_every(0);
  if (!train.has_eval_sequences()) train.set_eval_sequences(1);
  return full;
}

std::vector<Violation> ValidateJobSpec(const v1::JobSpec& spec) {
  const v1::JobSpec full = WithDefaults(spec);
  SpecChecker checker;
  CheckName(full.name(), checker);
  const auto present = [&](absl::string_view section, bool has) {
    return has || checker.Fail(section, "this section is required");
  };
  if (present("model", spec.has_model())) CheckModel(full.model(), checker);
  if (present("data", spec.has_data())) {
    if (full.data().path().empty()) {
      checker.Fail("data.path", "is required: a folder written by `upipe data pack`");
    } else if (full.data().path().find('\0') != std::string::npos) {
      checker.Fail("data.path", "contains a NUL character");
    }
  }
  if (present("parallel", spec.has_parallel())) {
    CheckParallel(full.parallel(), full.model().num_heads(), checker);
  }
  CheckOptimizer(full.optimizer(), checker);
  if (present("train", spec.has_train())) CheckTrain(full.train(), checker);
  return checker.Take();
}

std::vector<std::string> JobSpecWarnings(const v1::JobSpec& spec) {
  std::vector<std::string> warnings;
  const int64_t heads = spec.model().num_heads();
  const int64_t ranks = spec.parallel().ranks();
  if (heads < ranks) {
    warnings.push_back(absl::StrCat("model.num_heads ", heads, " is below parallel.ranks ", ranks,
                                    ": ", ranks - heads, " ranks idle during attention"));
  } else if (heads % ranks != 0) {
    warnings.push_back(absl::StrCat(
        "model.num_heads ", heads, " does not divide by parallel.ranks ", ranks,
        ": the busiest rank does ", (heads + ranks - 1) / ranks, " heads against ",
        absl::SixDigits(static_cast<double>(heads) / static_cast<double>(ranks)), " in balance"));
  }
  const int64_t padding = PaddedContext(spec) - spec.train().context();
  if (padding > 0) {
    warnings.push_back(absl::StrCat("train.context ", FormatCount(spec.train().context()),
                                    " is padded by ", padding, " tokens to a multiple of ", ranks,
                                    " ranks"));
  }
  if (spec.optimizer().warmup_steps() >= spec.train().steps()) {
    warnings.push_back(absl::StrCat("optimizer.warmup_steps ", spec.optimizer().warmup_steps(),
                                    " is not below train.steps ", spec.train().steps(),
                                    ": the peak learning rate is never left"));
  }
  return warnings;
}

}  // namespace upipe
