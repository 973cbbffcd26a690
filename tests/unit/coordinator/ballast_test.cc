#include "coordinator/store/ballast.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace upipe::coordinator {
namespace {

TEST(BallastTest, TakesItsSpaceAndRefusesWhenThereIsLess) {
  std::string folder = (std::filesystem::temp_directory_path() / "upipe-ballast-XXXXXX");
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  Ballast small(folder, 1 << 20);
  EXPECT_TRUE(small.Check().ok());
  EXPECT_EQ(std::filesystem::file_size(folder + "/ballast"), 1 << 20);
  // The next coordinator takes it over: what is kept already need not be free once more.
  Ballast next(folder, 1 << 20);
  EXPECT_TRUE(next.Check().ok());
  EXPECT_EQ(std::filesystem::file_size(folder + "/ballast"), 1 << 20);
  Ballast huge(folder, int64_t{1} << 60);
  const absl::Status status = huge.Check();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  // Under a quarter of it is free: what was kept has been given back to the transitions of live
  // jobs.
  EXPECT_FALSE(std::filesystem::exists(folder + "/ballast"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace upipe::coordinator
