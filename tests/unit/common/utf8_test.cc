#include "common/utf8.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace upipe {
namespace {

TEST(Utf8, KeepsWhatIsTextAndReplacesTheRest) {
  EXPECT_EQ(ToUtf8("", 10), "");
  EXPECT_EQ(ToUtf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 100),
            "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(ToUtf8("a\xff\xfe"
                   "b\xc3",
                   100),
            "a??b?");
  EXPECT_EQ(ToUtf8("\xc0\x80\xed\xa0\x80", 100), "?????");  // overlong, surrogate
}

TEST(Utf8, CutsBetweenCharacters) {
  const std::string euros = absl::StrCat("\xe2\x82\xac", "\xe2\x82\xac");
  EXPECT_EQ(ToUtf8(euros, 5), "\xe2\x82\xac");
  EXPECT_EQ(ToUtf8(euros, 6), euros);
  EXPECT_EQ(ToUtf8(euros, 2), "");
}

}  // namespace
}  // namespace upipe
