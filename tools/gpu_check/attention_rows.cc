// Attention of lengths that no reference gets through, with tensors beyond 2^31 elements: our own
// kernels and cuDNN's against each other, every element, and against double precision in sampled
// rows.
#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tools/gpu_check/exact_rows.h"
#include "tools/gpu_check/parts.h"
#include "tools/gpu_check/sized_calls.h"

namespace upipe::gpu_check {
namespace {

using kernels::TensorView;

constexpr double kHalfEpsilonOfBf16 = 0x1p-8, kHalfEpsilonOfFp32 = 0x1p-24;

struct LongCase {
  std::string name;
  AttentionShape shape;
};

std::vector<LongCase> LongCases(bool small) {
  // 17 Mi rows of 128 elements are more than 2^31.
  const int64_t many = small ? 600 : int64_t{17} << 20, few = small ? 70 : 4096;
  const int64_t window = small ? 100 : 4096, dim = small ? 32 : 128;
  const auto shape = [&](kernels::PositionRun queries, kernels::PositionRun keys,
                         std::optional<int64_t> window) {
    // Scores of a few, so that single keys matter among millions.
    return AttentionShape{
        .queries = queries, .keys = keys, .head_dim = dim, .window = window, .q_stddev = 3};
  };
  return {{absl::StrCat(few, " queries over ", many, " keys"),
           shape({many - few, many}, {0, many}, {})},
          {absl::StrCat(many, " queries over ", few, " keys"), shape({0, many}, {0, few}, {})},
          {absl::StrCat(many, " tokens, window ", window), shape({0, many}, {0, many}, window)}};
}

// First and last, around 2^31 elements, and anywhere.
std::vector<int64_t> SampledRows(int64_t rows, int64_t dim, int count) {
  std::vector<int64_t> sampled = {0, rows - 1};
  for (const int64_t near : {(int64_t{1} << 31) / dim, (int64_t{1} << 30) / dim}) {
    for (int64_t row = near - 2; row <= near + 2; ++row) {
      if (row > 0 && row < rows) sampled.push_back(row);
    }
  }
  std::mt19937_64 random(1);
  while (static_cast<int>(sampled.size()) < count) {
    sampled.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(rows)));
  }
  return sampled;
}

double ErrorOf(const ExactRows& rows, const ExactRows& exact) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    for (size_t e = 0; e < exact[i].size(); ++e) {
      error += (rows[i][e] - exact[i][e]) * (rows[i][e] - exact[i][e]);
      norm += exact[i][e] * exact[i][e];
    }
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

// One result of an attention call: what it should be in sampled rows, and how near.
struct Truth {
  std::string name;
  std::vector<int64_t> rows;
  ExactRows exact;
  double plain_error = 0;

  double Bound(double half_epsilon) const { return 3 * plain_error + half_epsilon; }
};

Truth MakeTruth(std::string name, const std::vector<int64_t>& rows, ExactRows exact,
                const ExactRows& plain) {
  const double error = ErrorOf(plain, exact);
  return {std::move(name), rows, std::move(exact), error};
}

ExactRows Column(const std::vector<double>& values) {
  ExactRows rows;
  for (const double value : values) rows.push_back({value});
  return rows;
}

class LongAttention {
 public:
  LongAttention(const LongCase& c, int samples, CheckDevice& device, Findings& findings)
      : case_(c), samples_(samples), device_(device), findings_(findings) {}

  absl::Status Run() {
    UPIPE_ASSIGN_OR_RETURN(calls_, MakeAttention(case_.shape, device_));
    UPIPE_RETURN_IF_ERROR(Forward());
    return Backward();
  }

 private:
  using Results = std::vector<TensorView>;

  std::vector<int64_t> Rows(const TensorView& view) const {
    return SampledRows(view.shape[0], case_.shape.head_dim, samples_);
  }

  absl::Status Forward() {
    const kernels::AttentionFwdParams& p = calls_.forward;
    const std::vector<int64_t> rows = Rows(p.q);
    UPIPE_ASSIGN_OR_RETURN(
        const ExactForward exact,
        ExactForwardRows(p, rows, Precision::kDouble, device_.device(), device_.stream()));
    UPIPE_ASSIGN_OR_RETURN(
        const ExactForward plain,
        ExactForwardRows(p, rows, Precision::kPlain, device_.device(), device_.stream()));
    const std::vector<Truth> truths = {
        MakeTruth("o", rows, exact.o, plain.o),
        MakeTruth("lse", rows, Column(exact.lse), Column(plain.lse))};
    const auto run = [&](const NamedOps& ops, const Results& results) {
      kernels::AttentionFwdParams call = p;
      call.o = results[0];
      call.lse = results[1];
      return device_.RunToEnd(ops, call);
    };
    return Compare(truths, {p.o, p.lse}, run);
  }

  absl::Status Backward() {
    const kernels::AttentionBwdParams& p = calls_.backward;
    // What the forward that was checked last left there came from `own`.
    UPIPE_RETURN_IF_ERROR(device_.RunToEnd(device_.own(), calls_.delta));
    const std::vector<int64_t> queries = Rows(p.q), keys = Rows(p.k);
    UPIPE_ASSIGN_OR_RETURN(auto dq, ExactQueryGradient(p, queries, Precision::kDouble,
                                                       device_.device(), device_.stream()));
    UPIPE_ASSIGN_OR_RETURN(
        const auto plain_dq,
        ExactQueryGradient(p, queries, Precision::kPlain, device_.device(), device_.stream()));
    UPIPE_ASSIGN_OR_RETURN(auto dkv, ExactKeyGradientRows(p, keys, Precision::kDouble,
                                                          device_.device(), device_.stream()));
    UPIPE_ASSIGN_OR_RETURN(
        const auto plain_dkv,
        ExactKeyGradientRows(p, keys, Precision::kPlain, device_.device(), device_.stream()));
    const std::vector<Truth> truths = {MakeTruth("dq", queries, std::move(dq), plain_dq),
                                       MakeTruth("dk", keys, std::move(dkv.dk), plain_dkv.dk),
                                       MakeTruth("dv", keys, std::move(dkv.dv), plain_dkv.dv)};
    const auto run = [&](const NamedOps& ops, const Results& results) -> absl::Status {
      kernels::AttentionBwdParams call = p;
      call.dq = results[0];
      call.dk = results[1];
      call.dv = results[2];
      UPIPE_RETURN_IF_ERROR(device_.Fill(call.dk, 0));
      UPIPE_RETURN_IF_ERROR(device_.Fill(call.dv, 0));
      return device_.RunToEnd(ops, call);
    };
    return Compare(truths, {p.dq, p.dk, p.dv}, run);
  }

  // Each op table against the truth, then the two against each other.
  template <typename RunCall>
  absl::Status Compare(const std::vector<Truth>& truths, const Results& own, const RunCall& run) {
    UPIPE_RETURN_IF_ERROR(run(device_.own(), own));
    UPIPE_RETURN_IF_ERROR(CompareWithTruth(device_.own(), truths, own));
    if (!device_.library()) return absl::OkStatus();
    Results theirs;
    for (const TensorView& view : own) {
      UPIPE_ASSIGN_OR_RETURN(
          TensorView copy,
          view.rank == 3 ? device_.Tensor(view.dtype, {view.shape[0], view.shape[1], view.shape[2]})
                         : device_.Tensor(view.dtype, {view.shape[0], view.shape[1]}));
      theirs.push_back(copy);
    }
    UPIPE_RETURN_IF_ERROR(run(*device_.library(), theirs));
    UPIPE_RETURN_IF_ERROR(CompareWithTruth(*device_.library(), truths, theirs));
    for (size_t i = 0; i < truths.size(); ++i) {
      UPIPE_ASSIGN_OR_RETURN(const double difference, device_.Difference(theirs[i], own[i]));
      const double bound = BoundOf(truths[i], device_.own(), own[i]) +
                           BoundOf(truths[i], *device_.library(), own[i]);
      const std::string name =
          absl::StrCat(case_.name, ": ", truths[i].name, " of ", device_.library()->name, " and ",
                       device_.own().name, ", every element");
      findings_.Add({name, difference, "apart", bound, /*at_most=*/true});
      findings_.Expect(difference <= bound, name, absl::StrCat(difference, " apart"));
    }
    return absl::OkStatus();
  }

  // What cuDNN writes is bf16 first, log-sum-exp apart.
  static double BoundOf(const Truth& truth, const NamedOps& ops, const TensorView& view) {
    const bool bf16 =
        view.dtype == kernels::DType::kBFloat16 || (ops.name == "cuDNN" && truth.name != "lse");
    return truth.Bound(bf16 ? kHalfEpsilonOfBf16 : kHalfEpsilonOfFp32);
  }

  absl::Status CompareWithTruth(const NamedOps& ops, const std::vector<Truth>& truths,
                                const Results& results) {
    for (size_t i = 0; i < truths.size(); ++i) {
      UPIPE_ASSIGN_OR_RETURN(const ExactRows rows, device_.Rows(results[i], truths[i].rows));
      const double error = ErrorOf(rows, truths[i].exact);
      const double bound = BoundOf(truths[i], ops, results[i]);
      const std::string name = absl::StrCat(case_.name, ": ", truths[i].name, " of ", ops.name);
      findings_.Add({name, error, "off double precision", bound, /*at_most=*/true});
      findings_.Expect(error <= bound, name,
                       absl::StrCat("sampled rows are off by ", error, ", bound ", bound));
    }
    return absl::OkStatus();
  }

  const LongCase& case_;
  const int samples_;
  CheckDevice& device_;
  Findings& findings_;
  AttentionCalls calls_;
};

absl::Status CheckRows(const Settings& settings, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(
      const auto device,
      CheckDevice::Create(settings, settings.small ? int64_t{256} << 20 : int64_t{124} << 30));
  if (!device->library()) {
    findings.Skipped(absl::StrCat("long attention by cuDNN: ", device->no_library()));
  }
  for (const LongCase& c : LongCases(settings.small)) {
    const absl::Status status =
        LongAttention(c, settings.small ? 12 : 256, *device, findings).Run();
    if (!status.ok()) findings.Failed(absl::StrCat(c.name, ": ", status.message()));
    UPIPE_RETURN_IF_ERROR(device->Clear());
  }
  return absl::OkStatus();
}

}  // namespace

Part AttentionRowsPart(const Settings& settings) {
  Part part = {.name = "attention_rows",
               .what = "long attention against double precision in sampled rows",
               .budget = absl::Seconds(55),
               .cases = {},
               .run = [settings](Findings& f) { return CheckRows(settings, f); }};
  for (const LongCase& c : LongCases(settings.small)) part.cases.push_back(c.name);
  return part;
}

}  // namespace upipe::gpu_check
