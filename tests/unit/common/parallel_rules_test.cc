// The sections `parallel` and `memory` of a job: every rule with the number that breaks it, the
// defaults of each method, and what is warned of.
#include "common/spec/parallel_rules.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"

namespace upipe {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// Eight heads on 8,192 tokens; `text` has the rest in text format, over four ranks and upipe.
v1::JobSpec Spec(const std::string& text) {
  v1::JobSpec spec;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      "name: 'demo' model { vocab_size: 257 hidden_size: 128 num_layers: 2 num_heads: 8 "
      "num_kv_heads: 2 head_dim: 16 intermediate_size: 352 } data { path: 'data' } "
      "parallel { ranks: 4 method: METHOD_UPIPE } train { context: 8192 steps: 60 }",
      &spec));
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(text, &spec)) << text;
  return spec;
}

constexpr char kUpipe[] = "parallel { heads_per_stage: 4 } ";
constexpr char kUlysses[] = "parallel { method: METHOD_ULYSSES } ";
constexpr char kRing[] = "parallel { method: METHOD_RING } ";
constexpr char kUsp[] = "parallel { method: METHOD_USP ring_ranks: 2 } ";
constexpr char kFpdt[] = "parallel { method: METHOD_FPDT } ";

std::string Texts(const std::vector<Violation>& violations) {
  std::string text;
  for (const Violation& v : violations) absl::StrAppend(&text, v.field, ": ", v.message, "\n");
  return text;
}

TEST(ParallelRules, EachMethodIsLegalWithItsDefaults) {
  for (const char* method : {kUpipe, kUlysses, kRing, kUsp, kFpdt}) {
    const v1::JobSpec spec = Spec(method);
    EXPECT_EQ(Texts(ValidateJobSpec(spec)), "") << method;
    EXPECT_EQ(Texts(ValidateJobSpec(WithDefaults(spec))), "") << method;
    EXPECT_THAT(JobSpecWarnings(spec), IsEmpty()) << method;
  }
}

TEST(ParallelRules, DefaultsAreThoseOfTheMethod) {
  const auto ranks = [](const char* method) {
    const v1::ParallelSpec parallel = WithDefaults(Spec(method)).parallel();
    EXPECT_TRUE(parallel.has_ring_ranks() && parallel.has_fsdp_ranks() && parallel.has_dp_ranks());
    const ContextRanks split = *ContextRanksOf(parallel);
    return absl::StrCat(split.ulysses, " x ", split.ring);
  };
  EXPECT_EQ(ranks(kUpipe), "4 x 1");
  EXPECT_EQ(ranks(kUlysses), "4 x 1");
  EXPECT_EQ(ranks(kRing), "1 x 4");
  EXPECT_EQ(ranks("parallel { method: METHOD_RING dp_ranks: 2 }"), "1 x 2");
  EXPECT_EQ(ranks(kUsp), "2 x 2");
  EXPECT_EQ(ranks(kFpdt), "4 x 1");
  EXPECT_EQ(ranks("parallel { fsdp_ranks: 2 heads_per_stage: 2 }"), "2 x 1");
  const v1::MemorySpec plain = WithDefaults(Spec(kUpipe)).memory();
  EXPECT_EQ(plain.attention_output(), v1::ATTENTION_OUTPUT_RECOMPUTE);
  EXPECT_EQ(plain.layer_inputs(), v1::PLACE_DEVICE);
  EXPECT_EQ(plain.checkpoint_stride(), 1);
  EXPECT_EQ(plain.hidden_stream(), v1::PLACE_DEVICE);
  EXPECT_EQ(plain.stage_kv(), v1::PLACE_DEVICE);
  EXPECT_EQ(plain.query_chunks(), 1);
  EXPECT_TRUE(plain.has_overlap());
  EXPECT_FALSE(plain.overlap());
  EXPECT_EQ(plain.ring_kv(), v1::RING_KV_PASS);
  EXPECT_EQ(plain.optimizer(), v1::PLACE_DEVICE);
  const v1::MemorySpec fpdt = WithDefaults(Spec(kFpdt)).memory();
  EXPECT_EQ(fpdt.layer_inputs(), v1::PLACE_HOST);
  EXPECT_EQ(fpdt.hidden_stream(), v1::PLACE_HOST);
  EXPECT_EQ(fpdt.stage_kv(), v1::PLACE_HOST);
  EXPECT_EQ(fpdt.query_chunks(), 4);
  EXPECT_EQ(fpdt.optimizer(), v1::PLACE_DEVICE);
}

struct Case {
  std::string spec;
  const char* field;
  const char* message;
};

const std::string kU = kUpipe;

// Each breaks one rule and expects exactly one violation.
const Case kParallelCases[] = {
    {"parallel { ranks: 1025 }", "parallel.ranks", "1,025 is outside 1 to 1,024"},
    {"parallel { ranks: -1 }", "parallel.ranks", "-1 is outside"},
    {kU + "parallel { dp_ranks: 3 }", "parallel.ranks",
     "4 does not divide by dp_ranks 3 x fsdp_ranks 1 = 3; 3 or 6 would"},
    {kU + "parallel { dp_ranks: 2 fsdp_ranks: 4 }", "parallel.ranks",
     "4 does not divide by dp_ranks 2 x fsdp_ranks 4 = 8; 8 would"},
    {kU + "parallel { dp_ranks: 1024 fsdp_ranks: 1024 }", "parallel.ranks", "lower one of them"},
    {kU + "parallel { dp_ranks: 0 }", "parallel.dp_ranks", "0 is outside 1 to 1,024"},
    {kU + "parallel { fsdp_ranks: -2 }", "parallel.fsdp_ranks", "-2 is outside"},
    {kU + "parallel { ring_ranks: 3 }", "parallel.ring_ranks",
     "3 does not divide the 4 context ranks; legal values: 1, 2, 4"},
    {kU + "parallel { ring_ranks: 8 }", "parallel.ring_ranks", "8 does not divide the 4 context"},
    {kU + "parallel { ring_ranks: 4 dp_ranks: 2 }", "parallel.ring_ranks",
     "4 does not divide the 2 context ranks; legal values: 1, 2"},
    {kU + "parallel { ring_ranks: -1 }", "parallel.ring_ranks", "-1 is outside"},
    {"parallel { method: METHOD_AUTO ring_ranks: 2 }", "parallel.ring_ranks",
     "2 given, but with method auto the planner chooses it"},
    {"parallel { method: METHOD_AUTO heads_per_stage: 4 }", "parallel.heads_per_stage",
     "4 given, but method auto chooses it"},
    {kU + "parallel { ranks_per_node: 3 }", "parallel.ranks_per_node",
     "3 does not divide the 4 ranks; legal values: 1, 2, 4"},
    {kU + "parallel { device: '../h100' }", "parallel.device",
     "'../h100' is no name of a device description"},
    {std::string(kRing) + "parallel { ring_ranks: 2 }", "parallel.ring_ranks",
     "2 given, but with method ring the ring is all 4 context ranks: remove it or use usp"},
    {std::string(kUlysses) + "parallel { ring_ranks: 2 }", "parallel.ring_ranks",
     "2 given, but method ulysses has no ring"},
    {std::string(kFpdt) + "parallel { ring_ranks: 4 }", "parallel.ring_ranks",
     "4 given, but method fpdt has no ring"},
    {"parallel { method: METHOD_USP }", "parallel.ring_ranks",
     "is required for method usp; legal values for 4 context ranks: 2, 4"},
    {std::string(kUsp) + "parallel { ring_ranks: 1 }", "parallel.ring_ranks",
     "1 is no ring for method usp; legal values for 4 context ranks: 2, 4"},
    {std::string(kUsp) + "parallel { ring_ranks: 3 }", "parallel.ring_ranks", "3 does not divide"},
    {std::string(kUsp) + "parallel { fsdp_ranks: 4 }", "parallel.ring_ranks",
     "method usp needs two context ranks or more and has 1: use ulysses"},
    {"", "parallel.heads_per_stage",
     "is required for method upipe; legal values for 8 heads on 4 ranks: 4, 8, or auto"},
    {"parallel { heads_per_stage: 6 }", "parallel.heads_per_stage",
     "6 is not a multiple of the 4 ranks; legal values for 8 heads on 4 ranks: 4, 8"},
    {"parallel { heads_per_stage: 2 }", "parallel.heads_per_stage",
     "2 is below the 4 ranks and would idle some of them"},
    {"parallel { heads_per_stage: -4 }", "parallel.heads_per_stage", "-4 is below"},
    {"parallel { heads_per_stage: 12 }", "parallel.heads_per_stage",
     "12 is above what 8 heads can fill"},
    {"parallel { heads_per_stage: 3 ring_ranks: 2 }", "parallel.heads_per_stage",
     "3 is not a multiple of the 2 Ulysses ranks; legal values for 8 heads on 2 Ulysses ranks: 2, "
     "4, 6, 8"},
    {"model { num_heads: 64 } parallel { heads_per_stage: 5 }", "parallel.heads_per_stage",
     "multiples of 4 from 4 to 64"},
    {std::string(kUlysses) + kUpipe, "parallel.heads_per_stage",
     "4 given, but method ulysses runs all 8 heads in one stage: remove it or use method upipe"},
    {std::string(kRing) + "parallel { heads_per_stage: 8 }", "parallel.heads_per_stage",
     "8 given, but method ring runs all 8 heads in one stage: remove it or use method upipe"},
    {std::string(kUsp) + "parallel { heads_per_stage: 2 }", "parallel.heads_per_stage",
     "2 given, but method usp runs all 8 heads"},
    {std::string(kFpdt) + "parallel { heads_per_stage: 4 }", "parallel.heads_per_stage",
     "4 given, but method fpdt runs all 8 heads"},
};

const Case kMemoryCases[] = {
    {kU + "memory { attention_output: ATTENTION_OUTPUT_UNSPECIFIED }", "memory.attention_output",
     "0 is none of recompute, device, host"},
    {kU + "memory { layer_inputs: PLACE_UNSPECIFIED }", "memory.layer_inputs",
     "0 is neither device nor host"},
    {kU + "memory { stage_kv: PLACE_UNSPECIFIED }", "memory.stage_kv", "0 is neither"},
    {kU + "memory { optimizer: PLACE_UNSPECIFIED }", "memory.optimizer", "0 is neither"},
    {kU + "memory { ring_kv: RING_KV_UNSPECIFIED }", "memory.ring_kv", "0 is neither pass nor"},
    {kU + "memory { checkpoint_stride: 0 }", "memory.checkpoint_stride", "0 is outside 1 to 2"},
    {kU + "memory { checkpoint_stride: 3 }", "memory.checkpoint_stride", "3 is outside 1 to 2"},
    {kU + "memory { query_chunks: 0 }", "memory.query_chunks", "0 is outside 1 to 1,024"},
    {kU + "memory { query_chunks: 1025 }", "memory.query_chunks", "1,025 is outside"},
    {kU + "memory { hidden_stream: PLACE_HOST }", "memory.hidden_stream",
     "host needs layer_inputs: host"},
    {kU + "memory { hidden_stream: PLACE_HOST layer_inputs: PLACE_HOST "
          "attention_output: ATTENTION_OUTPUT_DEVICE }",
     "memory.attention_output", "put back on the device what hidden_stream: host takes away"},
    {kU + "parallel { ring_ranks: 2 } memory { stage_kv: PLACE_HOST }", "memory.stage_kv",
     "host needs ring_ranks 1 and there are 2"},
    {std::string(kRing) + "memory { stage_kv: PLACE_HOST }", "memory.stage_kv", "there are 4"},
    {std::string(kUsp) + "memory { stage_kv: PLACE_HOST }", "memory.stage_kv", "there are 2"},
    {kU + "memory { ring_kv: RING_KV_KEEP }", "memory.ring_kv",
     "keep given, but without a ring (ring_ranks 1) nothing is gathered"},
    {std::string(kFpdt) + "memory { ring_kv: RING_KV_KEEP }", "memory.ring_kv", "without a ring"},
    {std::string(kFpdt) + "memory { query_chunks: 1 }", "memory.query_chunks",
     "1 given, but two chunks or more are what makes it fpdt"},
    {std::string(kFpdt) + "memory { layer_inputs: PLACE_DEVICE }", "memory.layer_inputs",
     "device given, but waiting in host memory is what makes it fpdt"},
    {std::string(kFpdt) + "memory { hidden_stream: PLACE_DEVICE }", "memory.hidden_stream",
     "what makes it fpdt"},
    {std::string(kFpdt) + "memory { stage_kv: PLACE_DEVICE }", "memory.stage_kv",
     "what makes it fpdt"},
    {std::string(kFpdt) + "memory { attention_output: ATTENTION_OUTPUT_DEVICE }",
     "memory.attention_output", "use host or recompute"},
};

void ExpectOneViolation(const Case& c) {
  const std::vector<Violation> violations = ValidateJobSpec(Spec(c.spec));
  ASSERT_EQ(violations.size(), 1u) << c.spec << "\n" << Texts(violations);
  EXPECT_EQ(violations[0].field, c.field) << c.spec;
  EXPECT_THAT(violations[0].message, HasSubstr(c.message)) << c.spec;
}

TEST(ParallelRules, EachViolationOfRanksAndHeadsIsNamedOnce) {
  for (const Case& c : kParallelCases) ExpectOneViolation(c);
}

TEST(ParallelRules, EachViolationOfThePolicyIsNamedOnce) {
  for (const Case& c : kMemoryCases) ExpectOneViolation(c);
}

TEST(ParallelRules, MethodsOfOtherVersionsAreRefused) {
  for (const int method : {0, 7, 99}) {
    v1::JobSpec spec = Spec("");
    spec.mutable_parallel()->set_method(static_cast<v1::Method>(method));
    const std::vector<Violation> violations = ValidateJobSpec(spec);
    ASSERT_EQ(violations.size(), 1u) << method;
    EXPECT_EQ(violations[0].field, "parallel.method");
    EXPECT_EQ(violations[0].message, "is required: upipe, ulysses, ring, usp, fpdt or auto");
    EXPECT_EQ(MethodName(spec.parallel().method()), "unspecified");
  }
}

TEST(ParallelRules, ViolationsOfBothSectionsComeAtOnce) {
  const std::vector<Violation> violations = ValidateJobSpec(
      Spec("parallel { method: METHOD_FPDT heads_per_stage: 4 ring_ranks: 2 dp_ranks: 1 } "
           "memory { layer_inputs: PLACE_DEVICE checkpoint_stride: 9 query_chunks: 1 } "
           "train { gradient_accumulation: -1 } data { documents: DOCUMENTS_UNSPECIFIED }"));
  std::vector<std::string> fields;
  for (const Violation& violation : violations) fields.push_back(violation.field);
  EXPECT_THAT(fields, testing::UnorderedElementsAre(
                          "data.documents", "parallel.heads_per_stage", "parallel.ring_ranks",
                          "train.gradient_accumulation", "memory.checkpoint_stride",
                          "memory.layer_inputs", "memory.query_chunks"));
}

TEST(ParallelRules, LegalPointsOfTheSpace) {
  for (const std::string& text : std::vector<std::string>{
           "parallel { ring_ranks: 4 heads_per_stage: 1 }",
           "parallel { ring_ranks: 2 heads_per_stage: 6 } memory { ring_kv: RING_KV_KEEP }",
           "parallel { method: METHOD_RING ring_ranks: 4 }",
           "parallel { method: METHOD_ULYSSES ring_ranks: 1 } memory { overlap: true }",
           "parallel { method: METHOD_USP ring_ranks: 4 } memory { query_chunks: 1024 }",
           "parallel { ranks: 24 dp_ranks: 2 fsdp_ranks: 3 ring_ranks: 2 heads_per_stage: 2 }",
           "parallel { ranks: 1024 dp_ranks: 1024 heads_per_stage: 3 }",
           "parallel { method: METHOD_FPDT } memory { attention_output: ATTENTION_OUTPUT_HOST "
           "query_chunks: 2 optimizer: PLACE_HOST checkpoint_stride: 2 }",
           kU + "memory { layer_inputs: PLACE_HOST hidden_stream: PLACE_HOST stage_kv: PLACE_HOST "
                "attention_output: ATTENTION_OUTPUT_HOST query_chunks: 4 }",
           kU + "memory { attention_output: ATTENTION_OUTPUT_DEVICE layer_inputs: PLACE_HOST }",
           "parallel { method: METHOD_AUTO } memory { policy: POLICY_CHOICE_AUTO }",
           "parallel { heads_per_stage: 0 ring_ranks: 0 ranks_per_node: 2 device: 'h200' }",
           kUsp + std::string("parallel { ring_ranks: 0 } memory { hidden_stream: PLACE_HOST "
                              "policy: POLICY_CHOICE_AUTO }"),
           kU + "data { documents: DOCUMENTS_RESTART } model { window: 1 causal: false }"}) {
    EXPECT_EQ(Texts(ValidateJobSpec(Spec(text))), "") << text;
    EXPECT_EQ(Texts(ValidateJobSpec(WithDefaults(Spec(text)))), "") << text;
  }
}

// What the planner chooses stays absent, and can be told from what is written.
TEST(ParallelRules, AutoStaysAbsent) {
  const v1::JobSpec written = WithDefaults(Spec(kUpipe));
  EXPECT_FALSE(HasAuto(written));
  EXPECT_EQ(written.memory().policy(), v1::POLICY_CHOICE_WRITTEN);
  const v1::JobSpec policy =
      WithDefaults(Spec(kU + "memory { policy: POLICY_CHOICE_AUTO overlap: true }"));
  EXPECT_TRUE(HasAuto(policy));
  EXPECT_TRUE(policy.memory().overlap());
  EXPECT_FALSE(policy.memory().has_layer_inputs());
  const v1::JobSpec method = WithDefaults(Spec("parallel { method: METHOD_AUTO }"));
  EXPECT_TRUE(HasAuto(method));
  EXPECT_FALSE(method.parallel().has_ring_ranks());
  EXPECT_FALSE(method.memory().has_query_chunks());
  EXPECT_FALSE(ContextRanksOf(method.parallel()).has_value());
  EXPECT_TRUE(HasAuto(Spec("parallel { heads_per_stage: 0 }")));
  EXPECT_TRUE(HasAuto(Spec(kU + "parallel { ring_ranks: 0 }")));
}

// What is written beside auto is checked all the same.
TEST(ParallelRules, WrittenValuesBesideAutoAreChecked) {
  ExpectOneViolation({"parallel { method: METHOD_AUTO } memory { query_chunks: 1025 }",
                      "memory.query_chunks", "1,025 is outside"});
  ExpectOneViolation({kU + "memory { policy: POLICY_CHOICE_AUTO checkpoint_stride: 3 }",
                      "memory.checkpoint_stride", "3 is outside 1 to 2"});
  ExpectOneViolation({kU + "memory { policy: POLICY_CHOICE_UNSPECIFIED }", "memory.policy",
                      "0 is neither written nor auto"});
}

// SCHEDULE "Legal U", for every U of several (H, C, R): u = U / C whole, 1 <= u <= ceil(H / C).
TEST(ParallelRules, LegalHeadsPerStageIsExactlyTheSchedules) {
  for (const int64_t heads : {1, 3, 7, 8, 28}) {
    for (const int64_t ulysses : {1, 2, 3, 4, 8}) {
      for (const int64_t ring : {1, 3}) {
        for (int64_t value = -1; value <= 40; ++value) {
          if (value == 0) continue;  // auto
          const v1::JobSpec spec = Spec(absl::StrCat(
              "model { num_heads: ", heads, " num_kv_heads: 1 } parallel { ranks: ", ulysses * ring,
              " ring_ranks: ", ring, " heads_per_stage: ", value, " }"));
          const int64_t u = value / ulysses;
          const bool legal = value % ulysses == 0 && u >= 1 && u <= (heads + ulysses - 1) / ulysses;
          EXPECT_EQ(ValidateJobSpec(spec).empty(), legal)
              << heads << " heads, C " << ulysses << ", R " << ring << ", U " << value;
        }
      }
    }
  }
}

TEST(ParallelRules, ContextsArePaddedToWholePiecesAndHalfBlocks) {
  const auto padded = [](const std::string& text, int64_t context) {
    return PaddedContext(Spec(absl::StrCat(text, "train { context: ", context, " }")));
  };
  EXPECT_EQ(padded(kU, 1), 4);
  EXPECT_EQ(padded(kU, 8192), 8192);
  EXPECT_EQ(padded(kU + "memory { query_chunks: 3 }", 8192), 8196);
  EXPECT_EQ(padded(kU + "parallel { dp_ranks: 4 heads_per_stage: 1 }", 8191), 8191);
  EXPECT_EQ(padded(kRing, 8), 8);
  EXPECT_EQ(padded(kRing, 9), 16);                                                      // 2R = 8
  EXPECT_EQ(padded("parallel { ranks: 6 method: METHOD_USP ring_ranks: 2 }", 13), 24);  // 6 and 4
  EXPECT_EQ(padded("parallel { ranks: 9 method: METHOD_USP ring_ranks: 3 }", 10), 18);  // 9 and 6
  EXPECT_EQ(padded(kFpdt, 8190), 8192);
  EXPECT_EQ(padded("parallel { method: METHOD_RING ranks: 1 }", 7), 7);  // a ring of one is none
}

TEST(ParallelRules, WarnsOfUnevenHeadsAndNamesTheExactSplit) {
  const std::string heads = "model { num_heads: 28 num_kv_heads: 4 } parallel { ranks: 8 ";
  EXPECT_THAT(
      JobSpecWarnings(Spec(heads + "heads_per_stage: 8 }")),
      ElementsAre("model.num_heads 28 does not divide by the 8 Ulysses ranks: the busiest "
                  "rank does 4 heads against 3.5 in balance; parallel.ring_ranks 2 (C = 4 x "
                  "R = 2) is exact"));
  EXPECT_THAT(JobSpecWarnings(Spec(heads + "heads_per_stage: 4 ring_ranks: 2 }")), IsEmpty());
  EXPECT_THAT(JobSpecWarnings(Spec(heads + "method: METHOD_ULYSSES }")),
              ElementsAre(HasSubstr("; method usp with ring_ranks 2 (C = 4 x R = 2) is exact")));
  EXPECT_THAT(JobSpecWarnings(Spec("model { num_heads: 7 num_kv_heads: 1 } " + kU)),
              ElementsAre(HasSubstr("2 heads against 1.75 in balance; parallel.ring_ranks 4 (C = 1 "
                                    "x R = 4) is exact")));
  EXPECT_THAT(JobSpecWarnings(Spec("model { num_heads: 7 num_kv_heads: 1 } " + std::string(kFpdt))),
              ElementsAre(HasSubstr("; method ring (C = 1 x R = 4) is exact")));
  EXPECT_THAT(
      JobSpecWarnings(Spec(absl::StrCat("parallel { ranks: 16 } ", kUlysses))),
      ElementsAre(HasSubstr("8 is below the 16 Ulysses ranks: 8 ranks idle during attention; "
                            "method usp with ring_ranks 2 (C = 8 x R = 2)")));
  // Two replicas of eight context ranks are split as eight are.
  EXPECT_THAT(JobSpecWarnings(Spec("model { num_heads: 28 num_kv_heads: 4 } parallel { ranks: 16 "
                                   "dp_ranks: 2 heads_per_stage: 8 }")),
              ElementsAre(HasSubstr("(C = 4 x R = 2)")));
}

TEST(ParallelRules, WarnsOfPadding) {
  EXPECT_THAT(JobSpecWarnings(Spec(kU + "train { context: 8190 }")),
              ElementsAre("train.context 8,190 is padded by 2 tokens to a multiple of 4 (4 context "
                          "ranks)"));
  EXPECT_THAT(JobSpecWarnings(Spec(kU + "memory { query_chunks: 3 }")),
              ElementsAre(HasSubstr("padded by 4 tokens to a multiple of 12 (4 context ranks x 3 "
                                    "query chunks)")));
  EXPECT_THAT(JobSpecWarnings(Spec(absl::StrCat(kRing, "train { context: 8188 }"))),
              ElementsAre(HasSubstr("padded by 4 tokens to a multiple of 8 (4 context ranks, "
                                    "half-blocks of the ring)")));
}

TEST(ParallelRules, WarnsOfRingsOutOfBalance) {
  for (const char* mask : {"model { window: 4096 }", "data { documents: DOCUMENTS_SEPARATE }",
                           "data { documents: DOCUMENTS_RESTART }"}) {
    EXPECT_THAT(JobSpecWarnings(Spec(absl::StrCat(kUsp, mask))),
                ElementsAre(HasSubstr("zigzag order balances only a full causal mask")))
        << mask;
    EXPECT_THAT(JobSpecWarnings(Spec(kU + mask)), IsEmpty()) << mask;
  }
  EXPECT_THAT(
      JobSpecWarnings(Spec(absl::StrCat(kRing, "model { causal: false }"))),
      ElementsAre(HasSubstr("the loss says nothing"), HasSubstr("with model.causal false")));
  EXPECT_THAT(JobSpecWarnings(Spec(absl::StrCat(kRing, "model { window: 8192 }"))),
              ElementsAre(AllOf(HasSubstr("hides nothing"), Not(HasSubstr("zigzag")))));
}

TEST(ParallelRules, WarnsOfOverlapOfNothing) {
  const std::string on = "memory { overlap: true } ";
  EXPECT_THAT(JobSpecWarnings(Spec(on + kUpipe)), IsEmpty());
  EXPECT_THAT(JobSpecWarnings(Spec(on + kRing)), ElementsAre(HasSubstr("with one Ulysses rank")));
  EXPECT_THAT(JobSpecWarnings(Spec(on + kUlysses)), ElementsAre(HasSubstr("no next one")));
  EXPECT_THAT(JobSpecWarnings(Spec(on + "parallel { heads_per_stage: 8 }")),
              ElementsAre(HasSubstr("with all heads in one stage there is no next one")));
  EXPECT_THAT(JobSpecWarnings(Spec(on + "parallel { ranks: 1 heads_per_stage: 1 }")),
              ElementsAre(HasSubstr("memory.overlap has nothing to overlap: with one Ulysses")));
}

}  // namespace
}  // namespace upipe
