#include "worker/launcher/posix_launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/clock.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/position_page.h"
#include "common/status.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/child_process.h"
#include "worker/launcher/oom_evidence.h"
#include "worker/launcher/proc_scan.h"
#include "worker/launcher/recovery.h"

namespace upipe::worker {
namespace {

constexpr int kProvePollMillis = 5;    // between looks at a dying tree
constexpr int kIdlePollMillis = 1000;  // between collections of adopted zombies
constexpr absl::Duration kStopPatience =
    absl::Seconds(10);  // for trees that will not die; the journal names them
constexpr absl::Duration kDrainPatience = absl::Milliseconds(200);

std::optional<std::set<std::string>> JobsWithLogs(const std::string& log_root) {
  if (log_root.empty()) return std::nullopt;
  std::set<std::string> jobs;
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator(log_root, error))
    jobs.insert(folder.path().filename().string());
  return jobs;
}

}  // namespace

// One rank's processes. Fields below `mutex_` are guarded by the launcher's; the rest is the
// launcher thread's.
struct PosixLauncher::Tree {
  RankKey key;
  std::optional<PositionMapping> position;  // set before the tree is shared, then constant
  // Guarded by mutex_:
  int pidfd = -1;
  std::string cgroup;
  bool kill_requested = false;
  bool died_before_kill = false;
  // Launcher thread:
  std::atomic<int> pid{0};
  bool reaped = false;
  std::set<ProcessId> seen;  // every process of it, whose shared memory it must not leave
  std::string name;          // of its program
  OomCounters oom_before;
  std::optional<KernelLog> kernel_log;  // from before the fork

  ~Tree() {
    if (pidfd >= 0) close(pidfd);
  }
};

absl::StatusOr<std::unique_ptr<PosixLauncher>> PosixLauncher::Create(
    const PosixLauncherOptions& options, RankRecorder& recorder, Sink sink) {
  UPIPE_ASSIGN_OR_RETURN(Journal journal, Journal::Open(options.state_dir));
  UPIPE_RETURN_IF_ERROR(KillLeftovers(journal.entries(), options.recovery_bound));
  UPIPE_RETURN_IF_ERROR(journal.Forget(JobsWithLogs(options.log_root)));
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
    return absl::ErrnoToStatus(errno, "cannot become a subreaper");
  std::optional<std::string> cgroup_root;
  if (options.allow_cgroup) cgroup_root = FindWritableCgroup2();
  return std::unique_ptr<PosixLauncher>(
      new PosixLauncher(std::move(journal), recorder, std::move(sink), std::move(cgroup_root)));
}

PosixLauncher::PosixLauncher(Journal journal, RankRecorder& recorder, Sink sink,
                             std::optional<std::string> cgroup_root)
    : journal_(std::move(journal)),
      recorder_(recorder),
      sink_(std::move(sink)),
      cgroup_root_(std::move(cgroup_root)),
      state_id_(journal_.state_id()),
      start_number_(journal_.start_number()),
      generations_(journal_.generations()) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  UPIPE_CHECK(wake_fd_ >= 0) << "eventfd: errno " << errno;
  thread_ = std::thread([this] { Run(); });
}

PosixLauncher::~PosixLauncher() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (const auto& tree : Trees()) Kill(tree->key);
  eventfd_write(wake_fd_, 1);
  thread_.join();
  close(wake_fd_);
}

std::string PosixLauncher::containment() const {
  return cgroup_root_.has_value() ? "cgroup2" : "subreaper";
}

std::shared_ptr<PosixLauncher::Tree> PosixLauncher::Find(const RankKey& key) const {
  std::lock_guard lock(mutex_);
  const auto found = trees_.find(key);
  return found == trees_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<PosixLauncher::Tree>> PosixLauncher::Trees() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Tree>> trees;
  for (const auto& [key, tree] : trees_) trees.push_back(tree);
  return trees;
}

void PosixLauncher::Post(Command command) {
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  eventfd_write(wake_fd_, 1);
}

void PosixLauncher::Launch(LaunchSpec spec) {
  auto tree = std::make_shared<Tree>();
  tree->key = spec.key;
  if (absl::StatusOr<PositionMapping> position = PositionMapping::Create(); position.ok()) {
    tree->position = *std::move(position);
  }
  {
    std::lock_guard lock(mutex_);
    trees_[spec.key] = tree;
    WriteDeadline(*tree);
  }
  Post(LaunchCommand{std::move(tree), std::move(spec)});
}

void PosixLauncher::Kill(const RankKey& key) {
  const std::shared_ptr<Tree> tree = Find(key);
  if (tree == nullptr) return;
  const int pid = tree->pid;
  const bool dying = pid != 0 && IsDying(pid);
  {
    std::lock_guard lock(mutex_);
    tree->died_before_kill |= dying && !tree->kill_requested;
    tree->kill_requested = true;
  }
  SendKill(*tree);
}

// From any thread. Nothing happens before the fork: the launcher thread looks at the request after
// it.
void PosixLauncher::SendKill(Tree& tree) {
  int pidfd = -1;
  std::string cgroup;
  {
    std::lock_guard lock(mutex_);
    pidfd = tree.pidfd;
    cgroup = tree.cgroup;
  }
  if (!cgroup.empty()) KillCgroup(cgroup);
  if (pidfd >= 0) syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0);
}

void PosixLauncher::KillSuperseded(const RankKey& key, const std::string& job, int64_t generation) {
  Post(FenceCommand{key, job, generation});
}

void PosixLauncher::SetDeadline(BootTime deadline) {
  std::lock_guard lock(mutex_);
  deadline_ = deadline;
  for (const auto& [key, tree] : trees_) WriteDeadline(*tree);
}

// Under mutex_, so that a launch meanwhile gets it too.
void PosixLauncher::WriteDeadline(Tree& tree) const {
  if (!deadline_.has_value() || !tree.position.has_value()) return;
  tree.position->page().deadline_boot_nanos.store(absl::ToInt64Nanoseconds(deadline_->since_boot),
                                                  std::memory_order_relaxed);
}

std::vector<v1::RankPosition> PosixLauncher::ReadPositions(const std::string& nonce) {
  std::vector<v1::RankPosition> positions;
  for (const auto& tree : Trees()) {
    if (tree->key.nonce != nonce || !tree->position.has_value()) continue;
    const PositionPage& page = tree->position->page();
    v1::RankPosition& position = positions.emplace_back();
    position.set_rank(tree->key.rank);
    position.set_changes(page.sequence.load(std::memory_order_acquire));
    position.set_step(page.step.load());
    position.set_pass(NameOf(static_cast<StepPass>(page.pass.load())));
    position.set_layer(page.layer.load());
    position.set_stage(page.stage.load());
    position.set_collective(page.collective.load());
    position.set_in_collective(page.in_collective.load() != 0);
  }
  return positions;
}

// --- the launcher thread ---

void PosixLauncher::Run() {
  std::vector<pollfd> polled;
  std::optional<BootTime> stop_until;
  for (;;) {
    const std::vector<std::shared_ptr<Tree>> trees = Trees();
    polled.assign(1, {wake_fd_, POLLIN, 0});
    bool proving = false;
    for (const auto& tree : trees) {
      polled.push_back({tree->reaped ? -1 : tree->pidfd, POLLIN, 0});
      proving |= tree->reaped;
    }
    poll(polled.data(), polled.size(), proving ? kProvePollMillis : kIdlePollMillis);
    eventfd_t ignored;
    eventfd_read(wake_fd_, &ignored);
    RunCommands();
    for (size_t i = 0; i < trees.size(); ++i) {
      Tree& tree = *trees[i];
      NotePids(tree);
      if (!tree.reaped && (polled[i + 1].revents & POLLIN) != 0) Reap(tree);
    }
    ReapAdopted();
    for (const auto& tree : trees) {
      if (!tree->reaped || !TryProve(*tree)) continue;
      {
        std::lock_guard lock(mutex_);
        trees_.erase(tree->key);
      }
      Emit(TreeGone{tree->key});
    }
    std::lock_guard lock(mutex_);
    if (!stopping_) continue;
    if (!stop_until.has_value()) stop_until = SystemClock().Now() + kStopPatience;
    if ((trees_.empty() && commands_.empty()) || SystemClock().Now() >= *stop_until) return;
  }
}

void PosixLauncher::Emit(LaunchEvent event) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
  }
  sink_(std::move(event));
}

void PosixLauncher::RunCommands() {
  std::vector<Command> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) std::visit([this](auto& kind) { Do(kind); }, command);
}

void PosixLauncher::Do(FenceCommand& command) {
  if (absl::Status status = journal_.AppendFence(command.job, command.generation); !status.ok()) {
    UPIPE_LOG(ERROR) << "fence not recorded: " << status.ToString();
  }
  Kill(command.key);
}

void PosixLauncher::Do(LaunchCommand& command) {
  Tree& tree = *command.tree;
  const absl::Status status = Fork(tree, command.spec);
  if (status.ok()) {
    Emit(TreeStarted{tree.key, tree.pid});
    bool kill_requested = false;
    {
      std::lock_guard lock(mutex_);
      kill_requested = tree.kill_requested;
    }
    if (kill_requested) SendKill(tree);
    return;
  }
  recorder_.FinishLog(tree.key, kDrainPatience);
  if (const std::string cgroup = CgroupOf(tree.key); !cgroup.empty()) RemoveEmptyCgroup(cgroup);
  {
    std::lock_guard lock(mutex_);
    trees_.erase(tree.key);
  }
  if (absl::Status gone = journal_.AppendGone(tree.key); !gone.ok()) {
    UPIPE_LOG(ERROR) << "failed launch not recorded: " << gone.ToString();
  }
  Emit(TreeLaunchFailed{tree.key, status});
}

// Empty: trees are held without one.
std::string PosixLauncher::CgroupOf(const RankKey& key) const {
  if (!cgroup_root_.has_value()) return "";
  return absl::StrCat(*cgroup_root_, "/upipe-", key.nonce, "-", key.rank);
}

absl::Status PosixLauncher::Fork(Tree& tree, const LaunchSpec& spec) {
  if (!tree.position.has_value())
    return absl::ResourceExhaustedError("cannot create the rank's position page");
  {
    std::lock_guard lock(mutex_);
    if (tree.kill_requested) return absl::CancelledError("killed before it was started");
  }
  JournalEntry entry{spec.key, spec.job, spec.generation};
  entry.cgroup = CgroupOf(spec.key);
  UPIPE_RETURN_IF_ERROR(journal_.AppendStart(entry));
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kWorkerJournaled));
  if (!entry.cgroup.empty()) UPIPE_RETURN_IF_ERROR(MakeCgroup(entry.cgroup));
  std::error_code error;
  for (int attempt = 0; attempt < 2; ++attempt) {  // its job's folder may just be deleted as empty
    std::filesystem::create_directories(spec.log_dir, error);
    if (error != std::errc::no_such_file_or_directory) break;
  }
  if (error)
    return absl::UnavailableError(
        absl::StrCat("cannot create ", spec.log_dir, ": ", error.message()));
  UPIPE_ASSIGN_OR_RETURN(const int output_fd, recorder_.OpenLog(spec.key, spec.log_dir));
  tree.name = std::filesystem::path(spec.binary).filename();
  tree.oom_before = ReadOomCounters(entry.cgroup);
  tree.kernel_log.emplace();
  ChildSetup setup{spec.binary, spec.environment, tree.position->fd(), output_fd, entry.cgroup};
  setup.environment.push_back(absl::StrCat("UPIPE_POSITION_FD=", kPositionFd));
  const absl::StatusOr<Child> child = StartChild(setup);
  close(output_fd);
  {
    std::lock_guard lock(mutex_);
    tree.cgroup = entry.cgroup;
    if (child.ok()) tree.pidfd = child->pidfd;
  }
  UPIPE_RETURN_IF_ERROR(child.status());
  Failpoint(failpoints::kWorkerForked).IgnoreError();
  tree.pid = child->pid;
  const ProcessId first = IdOf(child->pid);
  tree.seen.insert(first);
  if (absl::Status noted = journal_.AppendPid(spec.key, first); !noted.ok()) {
    UPIPE_LOG(ERROR) << "process id not recorded: " << noted.ToString();
  }
  return absl::OkStatus();
}

void PosixLauncher::NotePids(Tree& tree) {
  if (tree.pid == 0 || tree.cgroup.empty()) return;
  for (const int pid : CgroupProcesses(tree.cgroup)) tree.seen.insert(IdOf(pid));
}

void PosixLauncher::Reap(Tree& tree) {
  siginfo_t info{};
  if (waitid(P_PIDFD, static_cast<id_t>(tree.pidfd), &info, WEXITED | WNOHANG) != 0 ||
      info.si_pid == 0)
    return;
  tree.reaped = true;
  std::vector<v1::RankPosition> positions = ReadPositions(tree.key.nonce);
  SendKill(tree);
  ProcessExit exit;
  if (info.si_code == CLD_EXITED) {
    exit.exit_code = info.si_status;
  } else {
    exit.signal = info.si_status;
  }
  const OomCounters after = ReadOomCounters(tree.cgroup);
  {
    std::lock_guard lock(mutex_);
    exit.died_before_kill = !tree.kill_requested || tree.died_before_kill;
  }
  if (exit.signal == SIGKILL)
    exit.oom_evidence =
        OomEvidence(tree.oom_before, after, tree.kernel_log->ReadOomKills(tree.pid, tree.name));
  exit.oom_counters_known = after.memory_events >= 0 || after.v1_control >= 0 || after.machine >= 0;
  exit.log_tail = recorder_.FinishLog(tree.key, kDrainPatience);
  Failpoint(failpoints::kWorkerReaped).IgnoreError();
  Emit(TreeExited{tree.key, std::move(exit), std::move(positions)});
}

std::set<int> PosixLauncher::FirstProcesses() const {
  std::set<int> pids;
  for (const auto& tree : Trees()) pids.insert(tree->pid);
  return pids;
}

// Zombies the subreaper was given. Children other than the trees' first processes are all adopted.
void PosixLauncher::ReapAdopted() {
  const std::set<int> first = FirstProcesses();
  for (const int pid : OwnChildren()) {
    if (!first.contains(pid) && IsZombie(pid)) waitpid(pid, nullptr, WNOHANG);
  }
}

// Without a cgroup: everything whose environment names the tree, and adopted children that name no
// live tree at all.
bool PosixLauncher::KillStrays(Tree& tree) {
  std::vector<int> strays = ProcessesOf(tree.key);
  const std::set<int> first = FirstProcesses();
  for (const int pid : OwnChildren()) {
    if (first.contains(pid) || IsZombie(pid)) continue;
    const RankKey owner = IdentityOf(pid);
    if (owner != tree.key && Find(owner) == nullptr) strays.push_back(pid);
  }
  for (const int pid : strays) {
    tree.seen.insert(IdOf(pid));
    kill(pid, SIGKILL);
  }
  return strays.empty();
}

bool PosixLauncher::TryProve(Tree& tree) {
  if (!tree.cgroup.empty()) {
    if (!RemoveEmptyCgroup(tree.cgroup)) {
      SendKill(tree);
      return false;
    }
  } else if (!KillStrays(tree)) {
    return false;
  }
  if (!RemoveSystemVSegments(tree.seen, /*also_attached=*/true)) return false;
  const std::vector<std::shared_ptr<Tree>> trees = Trees();
  const bool last = std::none_of(trees.begin(), trees.end(), [&](const auto& other) {
    return other->key.nonce == tree.key.nonce && other->key.rank != tree.key.rank;
  });
  if (last && !RemoveSharedMemoryFiles(tree.key.nonce)) return false;
  Failpoint(failpoints::kWorkerProven).IgnoreError();
  // The proof holds without its record: a next worker looks for the rank again and finds nothing.
  if (absl::Status status = journal_.AppendGone(tree.key); !status.ok()) {
    UPIPE_LOG(ERROR) << "proof not recorded: " << status.ToString();
  }
  return true;
}

}  // namespace upipe::worker
