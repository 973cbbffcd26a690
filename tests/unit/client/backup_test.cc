// The file of a backup appears whole and checked, or not at all.
#include "client/backup.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "common/sha256.h"
#include "tests/unit/client/console_test.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class BackupTest : public ConsoleTest {
 protected:
  // `pieces`, the last one with a checksum over `sum_of`.
  void Send(const std::vector<std::string>& pieces, const std::string& sum_of) {
    for (const std::string& piece : pieces) {
      coordinator_.backup.emplace_back().set_data(piece);
    }
    coordinator_.backup.back().set_revision(77);
    coordinator_.backup.back().set_sha256(Sha256Hex(sum_of));
  }
  std::string Path() const { return folder_ + "/store.backup"; }
};

TEST_F(BackupTest, IsWrittenWhole) {
  Send({"one", "two"}, "onetwo");
  EXPECT_EQ(Backup(console_, Path()), kExitDone);
  EXPECT_EQ(ReadText(Path()), "onetwo");
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("6 B, revision 77"), HasSubstr(Sha256Hex("onetwo"))));
  EXPECT_THAT(Files(), ElementsAre("store.backup"));
  const auto mode = std::filesystem::status(Path()).permissions();
  EXPECT_EQ(mode & std::filesystem::perms::group_read, std::filesystem::perms::none);
}

TEST_F(BackupTest, JsonNamesRevisionAndChecksum) {
  Send({"one"}, "one");
  console_.json = true;
  EXPECT_EQ(Backup(console_, Path()), kExitDone);
  const auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json.at("bytes"), 3);
  EXPECT_EQ(json.at("revision"), 77);
}

TEST_F(BackupTest, ADamagedCopyReplacesNothing) {
  WriteText(Path(), "the last good one");
  Send({"one", "tw0"}, "onetwo");
  EXPECT_EQ(Backup(console_, Path()), kExitFailed);
  EXPECT_EQ(ReadText(Path()), "the last good one");
  EXPECT_THAT(Files(), ElementsAre("store.backup"));
  EXPECT_THAT(err_.str(), HasSubstr("is not the one the coordinator sent"));
}

TEST_F(BackupTest, NothingButAFileIsReplaced) {
  Send({"one"}, "one");
  WriteText(folder_ + "/elsewhere", "of somebody else");
  std::filesystem::create_symlink("elsewhere", Path());  // as /dev/stdout is one
  EXPECT_EQ(Backup(console_, Path()), kExitFailed);
  EXPECT_THAT(err_.str(), HasSubstr("it is no regular file"));
  EXPECT_TRUE(std::filesystem::is_symlink(Path()));
  const std::string pipe = folder_ + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(Backup(console_, pipe), kExitFailed);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_EQ(ReadText(folder_ + "/elsewhere"), "of somebody else");
}

TEST_F(BackupTest, ACopyThatBreaksOffLeavesNothing) {
  Send({"one", "two"}, "onetwo");
  coordinator_.backup.pop_back();
  EXPECT_EQ(Backup(console_, Path()), kExitFailed);  // ended well, yet without a checksum
  coordinator_.backup_end = absl::UnavailableError("gone");
  EXPECT_EQ(Backup(console_, Path()), kExitFailed);
  EXPECT_THAT(Files(), IsEmpty());
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("ended without a checksum"), HasSubstr("gone")));
}

TEST_F(BackupTest, AnUnwritablePlaceIsNamed) {
  Send({"one"}, "one");
  EXPECT_EQ(Backup(console_, folder_ + "/missing/store.backup"), kExitFailed);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("/missing/store.backup"), HasSubstr("No such file")));
  std::filesystem::create_directory(Path());
  EXPECT_EQ(Backup(console_, Path()), kExitFailed);
  EXPECT_THAT(Files(), ElementsAre("store.backup"));
}

}  // namespace
}  // namespace upipe::client
