// What every picture is made of: axes that people can read, text that cannot break the page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/chart/scale.h"
#include "common/chart/svg.h"

namespace upipe::chart {
namespace {

using ::testing::ElementsAre;

TEST(Scale, MapsBothWays) {
  const Scale down = {.from = {0, 10}, .to = {100, 0}};
  EXPECT_DOUBLE_EQ(down(0), 100);
  EXPECT_DOUBLE_EQ(down(2.5), 75);
}

TEST(Scale, TicksAreRoundNumbersInside) {
  EXPECT_THAT(RoundTicks({2.7, 5.7}, 6), ElementsAre(3, 3.5, 4, 4.5, 5, 5.5));
  EXPECT_THAT(WholeTicks({1, 3}, 8), ElementsAre(1, 2, 3));
  const double mib = 1 << 20;
  EXPECT_THAT(ByteTicks({0, 13 * mib}, 8),
              ElementsAre(0, 2 * mib, 4 * mib, 6 * mib, 8 * mib, 10 * mib, 12 * mib));
}

TEST(Scale, Numbers) {
  EXPECT_EQ(PlainNumber(2.50), "2.5");
  EXPECT_EQ(PlainNumber(-0.00001), "0");
  EXPECT_EQ(ShortNumber(6845), "6.8K");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
}

TEST(Svg, TextIsEscapedAndWhatXmlForbidsLeftOut) {
  EXPECT_EQ(Escape("a <b> & \"c\"\x01\n"), "a &lt;b&gt; &amp; &quot;c&quot;\n");
  EXPECT_EQ(Text(1, 2.5, "end", "1 < 2"),
            "<text x=\"1.00\" y=\"2.50\" text-anchor=\"end\" >1 &lt; 2</text>\n");
}

TEST(Svg, NoNegativeZero) { EXPECT_EQ(Number(-0.001), "0.00"); }

}  // namespace
}  // namespace upipe::chart
