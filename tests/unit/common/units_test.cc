#include "common/units.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace upipe {
namespace {

TEST(Units, FormatsBytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(1024 * 1024 - 1), "1.0 MiB");  // never "1024.0 KiB"
  EXPECT_EQ(FormatBytes(int64_t{80} << 30), "80.0 GiB");
  EXPECT_EQ(FormatBytes(int64_t{1} << 52), "4096.0 TiB");
  EXPECT_EQ(FormatBytes(-2048), "-2.0 KiB");
}

TEST(Units, ParsesBytes) {
  EXPECT_EQ(*ParseBytes("80GiB"), int64_t{80} << 30);
  EXPECT_EQ(*ParseBytes(" 1.5 MiB "), 3 << 19);
  EXPECT_EQ(*ParseBytes("4096"), 4096);
  EXPECT_EQ(*ParseBytes("4096 B"), 4096);
  for (const char* bad : {"", "GiB", "80GB", "80G", "-1", "1.5", "1e9", "0x10", "9999999999TiB",
                          "1..5MiB", "5 Ki B"}) {
    const auto result = ParseBytes(bad);
    EXPECT_FALSE(result.ok()) << bad << " -> " << result.value_or(-1);
  }
}

TEST(Units, TokenCountsAreBinaryAndRoundTrip) {
  EXPECT_EQ(*ParseTokenCount("8K"), 8192);
  EXPECT_EQ(*ParseTokenCount("5M"), 5242880);
  EXPECT_EQ(*ParseTokenCount("1.5M"), 1572864);
  EXPECT_EQ(*ParseTokenCount("8192"), 8192);
  for (const char* bad : {"", "K", "8k", "8 KiB", "0.3K", "1.5", "-8K", "99999999999999M"}) {
    EXPECT_FALSE(ParseTokenCount(bad).ok()) << bad;
  }
  for (const int64_t tokens :
       {int64_t{0}, int64_t{1}, int64_t{8191}, int64_t{8192}, int64_t{1} << 20, int64_t{1} << 40}) {
    EXPECT_EQ(*ParseTokenCount(FormatTokenCount(tokens)), tokens);
  }
  EXPECT_EQ(FormatTokenCount(8192), "8K");
  EXPECT_EQ(FormatTokenCount(5242880), "5M");
  EXPECT_EQ(FormatTokenCount(8191), "8191");
}

TEST(Units, FormatsDurations) {
  EXPECT_EQ(FormatTimeSpan(absl::Milliseconds(12)), "12 ms");
  EXPECT_EQ(FormatTimeSpan(absl::Milliseconds(3200)), "3.2 s");
  EXPECT_EQ(FormatTimeSpan(absl::Milliseconds(59990)), "1 min 0 s");
  EXPECT_EQ(FormatTimeSpan(absl::Seconds(250)), "4 min 10 s");
  EXPECT_EQ(FormatTimeSpan(absl::Minutes(125)), "2 h 5 min");
  EXPECT_EQ(FormatTimeSpan(absl::Hours(76)), "3 d 4 h");
  EXPECT_EQ(FormatTimeSpan(-absl::Seconds(5)), "0 s");
  EXPECT_EQ(FormatTimeSpan(absl::InfiniteDuration()), "unknown");
}

TEST(Units, FormatsCounts) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1048576), "1,048,576");
  EXPECT_EQ(FormatCount(-1000), "-1,000");
  EXPECT_EQ(FormatCount(std::numeric_limits<int64_t>::min()), "-9,223,372,036,854,775,808");
}

}  // namespace
}  // namespace upipe
