// Errors of the API: what survives the way over a call, its bounds, and that docs/errors.md lists
// the reasons there are.
#include "common/errors/rpc_error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>

namespace upipe {
namespace {

using testing::HasSubstr;

TEST(RpcError, SurvivesTheWay) {
  const absl::Status sent = InvalidFields(
      Reason::kRequestInvalid, {{"page_size", "is -1"}, {"rank", "is 9"}}, {{"ranks", 4}});
  const WireError wire = EncodeError(sent);
  const absl::Status got = DecodeError(sent.code(), wire.message, wire.details);
  EXPECT_EQ(got.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(got.message(), "page_size: is -1; rank: is 9");
  EXPECT_TRUE(HasReason(got, Reason::kRequestInvalid));
  EXPECT_EQ(ErrorInfoOf(got).domain(), "upipe");
  EXPECT_EQ(ErrorInfoOf(got).metadata().at("ranks"), "4");
  ASSERT_EQ(FieldViolationsOf(got).size(), 2u);
  EXPECT_EQ(FieldViolationsOf(got)[1].field, "rank");
}

TEST(RpcError, AnErrorWithoutAReasonSaysSo) {
  const WireError wire = EncodeError(absl::DataLossError("bits"));
  const absl::Status got = DecodeError(absl::StatusCode::kDataLoss, wire.message, wire.details);
  EXPECT_TRUE(HasReason(got, Reason::kInternal));
}

TEST(RpcError, GarbageInsteadOfDetailsIsNoError) {
  for (const std::string& details :
       {std::string(), std::string("\xff\xff\x01"), std::string(1000, '\x0a')}) {
    const absl::Status got = DecodeError(absl::StatusCode::kNotFound, "gone", details);
    EXPECT_EQ(got, absl::NotFoundError("gone"));
    EXPECT_EQ(ErrorInfoOf(got).reason(), "");
    EXPECT_TRUE(FieldViolationsOf(got).empty());
  }
}

// A call's trailing metadata holds 8 KiB: the message, every byte beyond ASCII as %XX, and details
// in base64.
TEST(RpcError, TheLargestErrorFitsIntoACall) {
  std::vector<FieldViolation> violations;
  for (int i = 0; i < 500; ++i) {
    std::string letters;
    for (int k = 0; k < 1500; ++k) letters += "\u00e9";
    violations.push_back({absl::StrCat("spec.field", i), letters + "\xff"});
  }
  const std::string huge(100'000, 'y');
  const WireError wire = EncodeError(
      InvalidFields(Reason::kSpecInvalid, violations, {{"a", huge}, {"b", huge}, {"c", huge}}));
  EXPECT_LE(wire.message.size() * 3 + wire.details.size() * 4 / 3, 6000u);
  const absl::Status got = DecodeError(absl::StatusCode::kInvalidArgument, "", wire.details);
  const std::vector<FieldViolation> kept = FieldViolationsOf(got);
  ASSERT_GT(kept.size(), 2u);
  EXPECT_THAT(kept.back().description, HasSubstr(absl::StrCat(500 - kept.size(), " more")));
}

// docs/errors.md: | REASON | CODE | ..
TEST(RpcError, TheTableInTheDocumentsIsThisOne) {
  std::ifstream file(absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/docs/errors.md"));
  const std::regex row(R"(^\| ([A-Z_]+) \| ([A-Z_]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$)");
  std::map<std::string, std::string> documented;
  for (std::string line; std::getline(file, line);) {
    std::smatch match;
    if (std::regex_match(line, match, row)) {
      EXPECT_TRUE(documented.emplace(match[1].str(), match[2].str()).second) << line;
    }
  }
  std::map<std::string, std::string> real;
  for (const ReasonEntry& entry : Reasons()) {
    EXPECT_TRUE(real.emplace(std::string(entry.name), absl::StatusCodeToString(entry.code)).second);
  }
  EXPECT_EQ(documented, real);
}

}  // namespace
}  // namespace upipe
