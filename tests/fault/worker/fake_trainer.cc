// A trainer without an engine: speaks the worker's protocol and misbehaves on order. The order
// comes from FAKE_TRAINER_MODE (then nothing is dialled), or from the name of the assigned job.
#include <fcntl.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/position_page.h"
#include "worker/rpc/trainer_link.h"

namespace {

using upipe::v1::TrainerMessage;
using upipe::v1::WorkerCommand;

int usr1_exit_code = 0;

void Say(const std::string& line) {
  printf("%s\n", line.c_str());
  fflush(stdout);
}

[[noreturn]] void Hang() {
  Say("ready");
  for (;;) pause();
}

// A grandchild that left the session, whose parent is dead: nothing ties it to the trainer but its
// environment.
void LeaveGrandchild() {
  const pid_t child = fork();
  if (child == 0) {
    setsid();
    if (fork() != 0) _exit(0);
    signal(SIGTERM, SIG_IGN);
    Say(absl::StrCat("grandchild ", getpid()));
    for (;;) pause();
  }
}

void LeaveSharedMemory(const std::string& nonce) {
  const int segment = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
  Say(absl::StrCat("segment ", segment));
  std::ofstream("/dev/shm/upipe-test-" + nonce) << "left behind";
}

void Misbehave(absl::string_view mode, const std::string& nonce) {
  if (absl::ConsumePrefix(&mode, "exit:")) {
    int code = 0;
    if (absl::SimpleAtoi(mode, &code)) _exit(code);
  }
  if (mode == "grandchild") LeaveGrandchild();
  if (mode == "shared-memory") LeaveSharedMemory(nonce);
  if (mode == "eat-memory") {
    for (std::vector<std::string> eaten;;) eaten.emplace_back(1 << 20, 'x');
  }
  if (absl::ConsumePrefix(&mode, "exit-on-usr1:") && absl::SimpleAtoi(mode, &usr1_exit_code)) {
    signal(SIGUSR1, [](int) { _exit(usr1_exit_code); });
  }
  if (mode == "descriptors") {
    for (int fd = 0; fd < 1024; ++fd) {
      if (fcntl(fd, F_GETFD) >= 0) Say(absl::StrCat("descriptor ", fd));
    }
  }
  Hang();
}

// What the stream has brought so far.
struct Inbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<upipe::v1::Assignment> assignment;
  std::optional<upipe::v1::Peers> peers;
  std::optional<upipe::v1::RetainCheckpoints> retain;
  bool stop = false;
};

void Take(Inbox& inbox, const WorkerCommand& command) {
  std::lock_guard lock(inbox.mutex);
  if (command.has_assignment()) inbox.assignment = command.assignment();
  if (command.has_peers()) inbox.peers = command.peers();
  if (command.has_retain()) inbox.retain = command.retain();
  inbox.stop |= command.has_stop();
  inbox.changed.notify_all();
}

TrainerMessage Ready(const upipe::v1::RunPlan& plan, int rank) {
  TrainerMessage message;
  message.mutable_ready()->set_address(absl::StrCat("address of ", rank));
  message.mutable_ready()->set_plan_hash(plan.plan_hash());
  if (plan.spec().name() == "checkpoint" && rank == 0) {
    message.mutable_ready()->mutable_resume()->set_step(40);
    message.mutable_ready()->add_passed_over()->set_step(50);
  }
  return message;
}

TrainerMessage Report(int64_t step, int64_t total) {
  TrainerMessage message;
  upipe::v1::StepReport& report = *message.mutable_report();
  report.set_step(step);
  report.set_total_steps(total);
  report.set_loss(5.0 / static_cast<double>(step));
  report.set_step_seconds(1);
  report.set_comm_seconds(0.25);
  upipe::v1::CommUse& use = *report.add_comm();
  use.set_operation("all_to_all");
  use.set_seconds(0.25);
  report.mutable_memory()->set_peak_bytes(4096);
  upipe::v1::TagBytes& tag = *report.mutable_memory()->add_tags();
  tag.set_tag("weights");
  tag.set_bytes(1024);
  tag.set_peak_bytes(1024);
  upipe::v1::TagBytes& query = *report.mutable_memory()->add_tags();  // lives inside a step only
  query.set_tag("attn_q");
  query.set_peak_bytes(512);
  report.mutable_memory()->set_attention_peak_bytes(768);
  report.mutable_host_memory()->set_peak_bytes(4096);
  return message;
}

TrainerMessage Committed(int64_t step) {
  TrainerMessage message;
  message.mutable_committed()->set_step(step);
  message.mutable_committed()->set_bytes(1 << 20);
  message.mutable_committed()->set_write_seconds(1.5);
  return message;
}

// A checkpoint, one that failed, and the order to delete what is older.
void Checkpoint(upipe::worker::TrainerLink& link, Inbox& inbox,
                std::unique_lock<std::mutex>& lock) {
  link.Send(Committed(45));
  TrainerMessage problem;
  problem.mutable_problem()->set_step(60);
  problem.mutable_problem()->set_message("no room on the checkpoints' disk");
  link.Send(problem);
  inbox.changed.wait(lock, [&] { return inbox.retain.has_value(); });
  Say(absl::StrCat("keeps ", inbox.retain->keep()));
}

// Leaves at the boundary after a notice, as a whole gang does.
int Obey(upipe::worker::TrainerLink& link, Inbox& inbox, std::unique_lock<std::mutex>& lock,
         int rank) {
  Say("ready");
  inbox.changed.wait(lock, [&] { return inbox.stop; });
  Say("leaves on notice");
  if (rank == 0) link.Send(Committed(10));
  lock.unlock();
  upipe::v1::TrainerFinished finished;
  finished.set_code(static_cast<int>(absl::StatusCode::kCancelled));
  link.Finish(finished, absl::Seconds(5));
  return 1;
}

int Train(const std::string& socket, const upipe::v1::TrainerHello& hello,
          upipe::PositionPage& page) {
  Inbox inbox;
  const auto link = upipe::worker::TrainerLink::Dial(
      socket, hello,
      {[&](const WorkerCommand& command) { Take(inbox, command); }, [] { _exit(3); }});
  std::unique_lock lock(inbox.mutex);
  inbox.changed.wait(lock, [&] { return inbox.assignment.has_value(); });
  const upipe::v1::RunPlan plan = inbox.assignment->plan();
  const int rank = hello.ref().rank();
  link->Send(Ready(plan, rank));
  inbox.changed.wait(lock, [&] { return inbox.peers.has_value(); });
  if (inbox.peers->has_resume()) Say(absl::StrCat("resumes step ", inbox.peers->resume().step()));
  TrainerMessage running;
  running.mutable_running();
  link->Send(running);
  page.collective = 100 + rank;
  page.in_collective = 1;
  page.sequence.fetch_add(1);
  // "exit:7@1" misbehaves in rank 1 only, the others hang as ranks do whose peer is stuck.
  absl::string_view mode = plan.spec().name();
  std::string target;
  if (const size_t at = mode.find('@'); at != absl::string_view::npos) {
    target = std::string(mode.substr(at + 1));
    mode = mode.substr(0, at);
  }
  if (mode == "obey" && (target.empty() || target == absl::StrCat(rank)))
    return Obey(*link, inbox, lock, rank);
  if (mode == "checkpoint" && rank == 0) Checkpoint(*link, inbox, lock);
  if (mode != "train" && mode != "report") {
    lock.unlock();
    Say(absl::StrCat("rank ", rank, " does ", mode));
    if (!target.empty() && target != absl::StrCat(rank)) Hang();
    Misbehave(mode, hello.ref().fence().nonce());
  }
  const int64_t steps = plan.spec().train().steps();
  for (int64_t step = 1; step <= steps; ++step) {
    Say(absl::StrCat("step ", step));
    link->Send(Report(step, steps));
  }
  lock.unlock();
  if (mode == "report") Hang();
  link->Finish({}, absl::Seconds(5));
  return 0;
}

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

int main() {
  const std::string nonce = Variable("UPIPE_NONCE");
  absl::StatusOr<upipe::PositionMapping> position =
      upipe::PositionMapping::Open(std::atoi(Variable("UPIPE_POSITION_FD").c_str()));
  if (!position.ok()) {
    Say(position.status().ToString());
    return 4;
  }
  if (const std::string mode = Variable("FAKE_TRAINER_MODE"); !mode.empty()) {
    position->page().collective = 42;
    position->page().sequence = 1;
    Misbehave(mode, nonce);
  }
  upipe::v1::TrainerHello hello;
  hello.set_pid(getpid());
  hello.mutable_ref()->set_rank(std::atoi(Variable("UPIPE_RANK").c_str()));
  hello.mutable_ref()->mutable_fence()->set_job_id(Variable("UPIPE_JOB"));
  hello.mutable_ref()->mutable_fence()->set_generation(
      std::atoll(Variable("UPIPE_GENERATION").c_str()));
  hello.mutable_ref()->mutable_fence()->set_nonce(nonce);
  return Train(Variable("UPIPE_SOCKET"), hello, position->page());
}
