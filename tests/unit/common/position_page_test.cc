#include "common/position_page.h"

#include <unistd.h>

#include <cerrno>

#include "gtest/gtest.h"

namespace upipe {
namespace {

TEST(PositionPage, BothMappingsShowTheSamePage) {
  const absl::StatusOr<PositionMapping> worker = PositionMapping::Create();
  ASSERT_TRUE(worker.ok()) << worker.status();
  const absl::StatusOr<PositionMapping> trainer = PositionMapping::Open(dup(worker->fd()));
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  EXPECT_EQ(trainer->page().deadline_boot_nanos, 0);
  worker->page().deadline_boot_nanos = 7;
  EXPECT_EQ(trainer->page().deadline_boot_nanos, 7);
  trainer->page().collective = 11;
  EXPECT_EQ(worker->page().collective, 11);
}

// A page cut short would end the worker that reads it by SIGBUS.
TEST(PositionPage, ItsSizeIsSealed) {
  const absl::StatusOr<PositionMapping> page = PositionMapping::Create();
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(ftruncate(page->fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(page->fd(), 1 << 20), -1);
  EXPECT_EQ(errno, EPERM);
}

}  // namespace
}  // namespace upipe
