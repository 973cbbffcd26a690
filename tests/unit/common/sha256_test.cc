#include "common/sha256.h"

#include <gtest/gtest.h>

namespace upipe {
namespace {

TEST(Sha256Test, AgreesWithTheStandardWholeAndInPieces) {
  EXPECT_EQ(Sha256Hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  const std::string abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  EXPECT_EQ(Sha256Hex("abc"), abc);
  Sha256 sum;
  sum.Update("a");
  const std::string first = sum.Hex();
  EXPECT_EQ(first, Sha256Hex("a"));
  sum.Update("bc");
  EXPECT_EQ(sum.Hex(), abc);
}

}  // namespace
}  // namespace upipe
