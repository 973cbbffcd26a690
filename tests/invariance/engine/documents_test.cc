// Packed documents in every method: what happens in one document reaches no other, to the bit, in
// the logits as in the gradients; bounds may fall anywhere.
#include <gtest/gtest.h>

#include <ostream>
#include <utility>

#include "tests/invariance/engine/method_space.h"

namespace upipe::testing {

namespace {

Outcome Must(absl::StatusOr<Outcome> outcome) {
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return outcome.ok() ? *std::move(outcome) : Outcome();
}

// Other tokens in document `index`; its labels stay.
Sequence WithOtherTokens(Sequence sequence, size_t index, int64_t vocab) {
  const int64_t begin = sequence.document_starts[index];
  const int64_t end = index + 1 < sequence.document_starts.size()
                          ? sequence.document_starts[index + 1]
                          : static_cast<int64_t>(sequence.tokens.size());
  for (int64_t t = begin; t < end; ++t) {
    sequence.tokens[t] = static_cast<int32_t>((sequence.tokens[t] + 1 + t % 5) % vocab);
  }
  return sequence;
}

class Documents : public ::testing::TestWithParam<NamedCase> {
 protected:
  // Every mask with documents, both kinds of bounds.
  template <typename Body>
  static void ForEachMask(Body body) {
    int turn = 0;
    for (const bool causal : {true, false}) {
      for (const auto bounds : {DocumentBounds::kUneven, DocumentBounds::kOnShards}) {
        MethodCase c = GetParam().test;
        c.job.causal = causal;
        c.bounds = bounds;
        c.job.documents = turn % 2 == 0 ? v1::DOCUMENTS_SEPARATE : v1::DOCUMENTS_RESTART;
        if (turn % 3 == 2) c.job.window = 9;
        c.job.bf16 = turn == 3;
        ++turn;
        body(c);
      }
    }
  }
};

TEST_P(Documents, Peers23_Peers24_OneDocumentsTokensReachNoOtherDocumentsLogits) {
  ForEachMask([](const MethodCase& c) {
    const Sequence sequence = SequencesOf(c)[0];
    const std::vector<int64_t>& starts = sequence.document_starts;
    ASSERT_GT(starts.size(), 2u);
    const Outcome before = Must(RunOnce(c.job, {&sequence, 1}));
    for (const size_t changed : {size_t{0}, starts.size() / 2, starts.size() - 1}) {
      const Sequence other = WithOtherTokens(sequence, changed, c.job.vocab_size);
      const Outcome after = Must(RunOnce(c.job, {&other, 1}));
      const auto& a = before.tensors.at("logits 0");
      const auto& b = after.tensors.at("logits 0");
      for (size_t document = 0; document < starts.size(); ++document) {
        const int64_t begin = starts[document] * c.job.vocab_size;
        const int64_t end =
            document + 1 < starts.size() ? starts[document + 1] * c.job.vocab_size : a.size();
        EXPECT_EQ(std::equal(a.begin() + begin, a.begin() + end, b.begin() + begin),
                  document != changed)
            << "document " << document << " of " << starts.size() << ", changed " << changed;
      }
    }
  });
}

// Without labels a document adds an exact 0: whatever its tokens are, loss and gradients are those
// of the other documents.
TEST_P(Documents, Peers23_Peers24_AnUnlabelledDocumentChangesNoGradient) {
  ForEachMask([](const MethodCase& c) {
    Sequence sequence = SequencesOf(c)[0];
    const std::vector<int64_t>& starts = sequence.document_starts;
    const size_t changed = starts.size() - 2;
    for (int64_t t = starts[changed]; t < starts[changed + 1]; ++t) sequence.labels[t] = -1;
    const Sequence other = WithOtherTokens(sequence, changed, c.job.vocab_size);
    Outcome before = Must(RunOnce(c.job, {&sequence, 1}));
    Outcome after = Must(RunOnce(c.job, {&other, 1}));
    EXPECT_NE(before.tensors.at("logits 0"), after.tensors.at("logits 0"));
    before.tensors.erase("logits 0");
    after.tensors.erase("logits 0");
    EXPECT_TRUE(SameBits(before, after));
  });
}

TEST_P(Documents, Peers18_Peers28_BoundsAnywhereGiveTheLossAndGradientsOfOneRank) {
  ForEachMask([](const MethodCase& c) { ExpectMatchesOneRank(c); });
}

// No label crosses a bound, and none is lost: as many valid tokens whatever the ranks.
TEST_P(Documents, Peers13_Peers14_TheNumberOfValidTokensIsThatOfTheSequence) {
  ForEachMask([](const MethodCase& c) {
    const Sequence sequence = SequencesOf(c)[0];
    const auto bounds = static_cast<double>(sequence.document_starts.size() - 1);
    EXPECT_EQ(Must(RunOnce(c)).valid_tokens, static_cast<double>(c.job.context) - bounds);
  });
}

INSTANTIATE_TEST_SUITE_P(OnePerMethod, Documents, ::testing::ValuesIn(OneCasePerMethod()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::testing
