// The daemon and its store: backups while it is in use, `--restore`, a second coordinator beside
// the first, and a commit that fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/sha256.h"
#include "tests/e2e/coordinator/coordinator_daemon.h"

namespace upipe::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string text;  // stdout and stderr
};

struct Piece {
  std::string bytes;
  v1::BackupResponse last;
  grpc::Status status;
  int pieces = 0;
};

class BackupTest : public CoordinatorDaemon {
 protected:
  Outcome Coordinator(const std::string& arguments) {
    const std::string command =
        absl::StrCat(std::getenv("UPIPE_BIN_DIR"), "/upipe-coordinator --plan-binary ",
                     std::getenv("UPIPE_FAKE_PLAN"), " ", arguments, " 2>&1");
    Outcome outcome;
    FILE* pipe = popen(command.c_str(), "r");
    char piece[4096];
    for (size_t got; (got = fread(piece, 1, sizeof piece, pipe)) > 0;) {
      outcome.text.append(piece, got);
    }
    outcome.exit_code = WEXITSTATUS(pclose(pipe));
    return outcome;
  }
  Piece Backup() {
    const auto admin = v1::AdminService::NewStub(channel_);
    grpc::ClientContext context;
    const auto stream = admin->Backup(&context, {});
    Piece backup;
    v1::BackupResponse piece;
    for (; stream->Read(&piece); ++backup.pieces) {
      EXPECT_TRUE(backup.last.sha256().empty()) << "a piece after the last";
      backup.bytes += piece.data();
      backup.last = piece;
    }
    backup.status = stream->Finish();
    return backup;
  }
  std::string WriteFile(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
    return folder_ + "/" + name;
  }
};

TEST_F(BackupTest, RestoresJobsAtALaterEpoch) {
  v1::Job job;
  std::vector<std::string> ids;
  const auto worker = Worker("a");
  for (int i = 0; i < 200; ++i) {
    v1::JobSpec spec = Spec(absl::StrCat("job-", i), 2);
    spec.mutable_data()->set_path("/" + std::string(3000, 'x'));
    ASSERT_TRUE(Submit(spec, absl::StrCat("r", i), &job).ok());
    ids.push_back(job.id());
  }
  ASSERT_TRUE(Reaches(ids.front(), v1::JOB_STATE_SUCCEEDED));
  const Piece backup = Backup();
  ASSERT_TRUE(backup.status.ok()) << backup.status.error_message();
  EXPECT_GT(backup.pieces, 1);
  EXPECT_GT(backup.last.revision(), 200);
  EXPECT_EQ(backup.last.sha256(), Sha256Hex(backup.bytes));
  EXPECT_FALSE(fs::exists(folder_ + "/state/backup.sqlite"));
  ASSERT_TRUE(Submit(Spec("later", 1), "later", &job).ok());  // is not in it
  const std::string file = WriteFile("backup", backup.bytes);

  Outcome refused = Coordinator(absl::StrCat("--state-dir ", folder_, "/state --restore ", file));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.text, HasSubstr("there is a store already"));

  Stop(SIGKILL);
  fs::remove_all(folder_ + "/state");
  const Outcome restored =
      Coordinator(absl::StrCat("--state-dir ", folder_, "/state --restore ", file,
                               " --restore-sha256 ", backup.last.sha256()));
  EXPECT_EQ(restored.exit_code, 0) << restored.text;
  EXPECT_THAT(restored.text, AllOf(HasSubstr("200 jobs"),
                                   HasSubstr(absl::StrCat("revision ", backup.last.revision()))));
  Start();
  EXPECT_GT(Nodes().coordinator_epoch(), 1 << 20);
  EXPECT_EQ(Get(ids.front()).state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Get(ids.back()).id(), ids.back());
  EXPECT_TRUE(Get(job.id()).id().empty());
}

TEST_F(BackupTest, AFileThatIsNoWholeBackupIsRefusedAndNothingIsLeft) {
  v1::Job job;
  const auto worker = Worker("a");
  ASSERT_TRUE(Submit(Spec("job", 1), "r", &job).ok());
  std::string bytes = Backup().bytes;
  const std::string whole = WriteFile("whole", bytes);
  std::fill_n(bytes.begin() + 4096, 4096, 'x');
  const std::string damaged = WriteFile("damaged", bytes);
  const std::string cut = WriteFile("cut", bytes.substr(0, 6000));
  const std::string empty = WriteFile("empty", "");
  const std::string state = folder_ + "/other";
  for (const auto& [file, says] : std::vector<std::pair<std::string, std::string>>{
           {damaged, "is damaged"}, {cut, "malformed"}, {empty, "no backup"}}) {
    const Outcome refused = Coordinator(absl::StrCat("--state-dir ", state, " --restore ", file));
    EXPECT_EQ(refused.exit_code, 1) << file;
    EXPECT_THAT(refused.text, HasSubstr(says)) << file;
    EXPECT_TRUE(fs::is_empty(state)) << file;
  }
  const Outcome refused = Coordinator(absl::StrCat("--state-dir ", state, " --restore ", whole,
                                                   " --restore-sha256 ", std::string(64, '0')));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.text, HasSubstr("has SHA-256"));
  EXPECT_TRUE(fs::is_empty(state));
}

TEST_F(BackupTest, OneAtATimeAndAReaderThatLeavesIsForgotten) {
  v1::Job job;
  const auto worker = Worker("a");
  // More than a stream's window, so that the first reader is waited for.
  v1::JobSpec spec = Spec("job", 1);
  spec.mutable_data()->set_path("/" + std::string(3000, 'x'));
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(Submit(spec, absl::StrCat("r", i), &job).ok());
  }
  // A reader whose window does not grow with what it measures of the connection.
  grpc::ChannelArguments narrow;
  narrow.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  narrow.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
  const auto admin = v1::AdminService::NewStub(
      grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), narrow));
  {
    grpc::ClientContext context;
    const auto stream = admin->Backup(&context, {});
    v1::BackupResponse piece;
    ASSERT_TRUE(stream->Read(&piece));
    const Piece second = Backup();
    EXPECT_EQ(second.status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_THAT(second.status.error_message(), HasSubstr("another backup"));
    context.TryCancel();
    stream->Finish();
  }
  EXPECT_TRUE(Eventually([&] { return Backup().status.ok(); }));
  EXPECT_EQ(WEXITSTATUS(Stop(SIGTERM)), 0);
}

TEST_F(BackupTest, AFailedCommitEndsTheDaemonAndTheRequestIsMadeAgain) {
  Stop(SIGTERM);
  setenv("UPIPE_FAILPOINT", "coordinator.before_commit:eio:2", 1);
  Start();
  unsetenv("UPIPE_FAILPOINT");
  auto worker = Worker("a");  // its record is the first commit
  v1::Job job;
  EXPECT_EQ(Submit(Spec("job", 1), "request", &job).error_code(), grpc::StatusCode::UNAVAILABLE);
  int status = 0;
  ASSERT_TRUE(Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }));
  pid_ = -1;
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 74);
  Start();  // as a supervisor does
  worker = Worker("a");
  ASSERT_TRUE(Submit(Spec("job", 1), "request", &job).ok());
  EXPECT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
}

TEST_F(BackupTest, ASecondCoordinatorOnTheStateOrThePortIsRefusedInASentence) {
  const Outcome same_state = Coordinator(absl::StrCat("--state-dir ", folder_, "/state"));
  EXPECT_EQ(same_state.exit_code, 1);
  EXPECT_THAT(same_state.text, AllOf(HasSubstr("another coordinator holds"),
                                     HasSubstr("/state/coordinator.sqlite")));
  const Outcome same_port =
      Coordinator(absl::StrCat("--state-dir ", folder_, "/other --listen ", address_));
  EXPECT_EQ(same_port.exit_code, 1);
  EXPECT_THAT(same_port.text,
              AllOf(HasSubstr("cannot listen on"), HasSubstr("is another process using")));
  EXPECT_EQ(Nodes().coordinator_epoch(), 1);  // the first one goes on
}

}  // namespace
}  // namespace upipe::coordinator
