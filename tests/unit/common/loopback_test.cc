#include "common/loopback.h"

#include <gtest/gtest.h>

namespace upipe {
namespace {

TEST(Loopback, OnlyThisMachine) {
  for (const char* yes : {"127.0.0.1:0", "127.8.9.10:80", "localhost:1", "[::1]:5"}) {
    EXPECT_TRUE(IsLoopback(yes)) << yes;
  }
  for (const char* no : {"0.0.0.0:0", "127.evil.example:1", "127.0.0.1.example:1", "10.0.0.1:1",
                         "[::]:5", "", ":80", "localhost.example:1"}) {
    EXPECT_FALSE(IsLoopback(no)) << no;
  }
}

}  // namespace
}  // namespace upipe
