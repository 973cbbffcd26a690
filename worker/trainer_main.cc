// upipe-trainer: one rank as a process. Says hello to the worker that forked it, meets its peers,
// trains to the last step and tells how it ended. Ends at once when its worker does.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/cpu_placement.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/position_page.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/checkpoint/job_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/comm/comm_factory.h"
#include "engine/parallel/mesh.h"
#include "engine/parallel/plan_hash.h"
#include "engine/train/check_communicator.h"
#include "engine/train/check_workspaces.h"
#include "engine/train/checkpointing.h"
#include "engine/train/rank_run.h"
#include "engine/train/selfcheck.h"
#include "kernels/api/device_fault.h"
#include "kernels/cpu/isa.h"
#include "worker/rpc/trainer_link.h"

namespace upipe::worker {
namespace {

constexpr auto kDeadlineLook = std::chrono::milliseconds(100);
constexpr absl::Duration kCommandPatience = absl::Minutes(10);  // the worker kills us long before
constexpr absl::Duration kFarewellPatience = absl::Seconds(5);
constexpr absl::Duration kRetainPatience = absl::Seconds(5);
constexpr absl::Duration kPatienceAtEnd = absl::Hours(1);     // for somebody to make room on a disk
constexpr absl::Duration kOwnerPatience = absl::Seconds(20);  // what a shared file system may hide

std::atomic<bool> stop_requested{false};

struct Environment {
  std::string socket;
  v1::RankRef ref;
  int position_fd = -1;
  bool place = true;  // on CPUs of its own
  comm::UcxOptions ucx;
};

absl::StatusOr<Environment> ReadEnvironment() {
  const auto read = [](const char* name) -> std::string {
    const char* value = getenv(name);
    return value == nullptr ? "" : value;
  };
  Environment environment;
  environment.socket = read("UPIPE_SOCKET");
  v1::Fence& fence = *environment.ref.mutable_fence();
  fence.set_job_id(read("UPIPE_JOB"));
  fence.set_nonce(read("UPIPE_NONCE"));
  int64_t generation = 0;
  int rank = 0;
  if (environment.socket.empty() || !absl::SimpleAtoi(read("UPIPE_GENERATION"), &generation) ||
      !absl::SimpleAtoi(read("UPIPE_RANK"), &rank) ||
      !absl::SimpleAtoi(read("UPIPE_POSITION_FD"), &environment.position_fd)) {
    return absl::FailedPreconditionError(
        "UPIPE_SOCKET, UPIPE_GENERATION, UPIPE_RANK and UPIPE_POSITION_FD must be set: only "
        "upipe-worker starts this");
  }
  environment.place = read("UPIPE_CPU_PLACEMENT") != "off";
  if (std::string devices = read("UPIPE_TRANSPORT_INTERFACE"); !devices.empty()) {
    environment.ucx.tcp_devices = std::move(devices);
  }
  if (const std::string text = read("UPIPE_PEER_SILENCE"); !text.empty()) {
    double seconds = 0;
    if (!absl::SimpleAtod(text, &seconds) || !(seconds > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("UPIPE_PEER_SILENCE is '", text, "', not a number of seconds above 0"));
    }
    environment.ucx.peer_silence = absl::Seconds(seconds);
  }
  fence.set_generation(generation);
  environment.ref.set_rank(rank);
  return environment;
}

// What the worker has said, awaited by the main thread.
class Orders {
 public:
  void Take(const v1::WorkerCommand& command) {
    std::lock_guard lock(mutex_);
    if (command.has_assignment()) assignment_ = command.assignment();
    if (command.has_peers()) peers_ = command.peers();
    if (command.has_stop()) stop_requested = true;
    if (command.has_retain()) {
      retain_ = command.retain();
      retained_step_ = command.retain().newest().step();
      PassRetain();
    }
    changed_.notify_all();
  }
  // Until the order comes that follows the commit of `step`: the last is worth a short wait.
  void AwaitRetain(int64_t step) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, absl::ToChronoSeconds(kRetainPatience),
                      [&] { return retained_step_ >= step; });
  }
  // Who carries out orders to delete checkpoints, the latest that has come among them; null from
  // the moment it goes.
  void SetWriter(checkpoint::Writer* writer) {
    std::lock_guard lock(mutex_);
    writer_ = writer;
    PassRetain();
  }
  absl::StatusOr<v1::Assignment> AwaitAssignment() { return Await(assignment_, "an assignment"); }
  absl::StatusOr<v1::Peers> AwaitPeers() { return Await(peers_, "its peers' addresses"); }

 private:
  template <typename Message>
  absl::StatusOr<Message> Await(const std::optional<Message>& message, const char* what) {
    std::unique_lock lock(mutex_);
    const bool came = changed_.wait_for(lock, absl::ToChronoSeconds(kCommandPatience), [&] {
      return message.has_value() || stop_requested.load();
    });
    if (message.has_value()) return *message;
    if (came) return absl::CancelledError(absl::StrCat("asked to stop while waiting for ", what));
    return absl::DeadlineExceededError(absl::StrCat("the worker did not send ", what, " within ",
                                                    absl::FormatDuration(kCommandPatience)));
  }

  void PassRetain() {
    if (writer_ == nullptr || !retain_) return;
    writer_->Retain(retain_->newest(), retain_->keep());
    retain_.reset();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<v1::Assignment> assignment_;
  std::optional<v1::Peers> peers_;
  std::optional<v1::RetainCheckpoints> retain_;  // not yet passed on
  int64_t retained_step_ = 0;
  checkpoint::Writer* writer_ = nullptr;
};

// CPUs for one rank alone, with every thread of this process on them. An error, in words for the
// log, leaves it anywhere.
absl::StatusOr<CpuClaim> Place(const v1::Assignment& assignment, bool wanted) {
  if (!wanted) return absl::CancelledError("the worker was told --no-cpu-placement");
  const auto& nodes = assignment.node_ids();
  const int rank = assignment.ref().rank();
  const auto here = rank < nodes.size() ? std::count(nodes.begin(), nodes.end(), nodes[rank]) : 1;
  UPIPE_ASSIGN_OR_RETURN(CpuClaim claim,
                         CpuClaim::Take(static_cast<int>(here),
                                        assignment.plan().spec().parallel().threads_per_rank()));
  UPIPE_RETURN_IF_ERROR(PlaceProcess(claim.cpus()));
  return claim;
}

// What the bits of a rank's results depend on.
std::string ArithmeticOf(const kernels::Device& device) {
  const std::string hardware = device.hardware();
  return absl::StrCat(hardware, hardware.empty() ? "" : ", ", kernels::Arithmetic());
}

comm::CommOptions OptionsFor(const v1::RunPlan& plan, int rank, PositionPage& page) {
  comm::CommOptions options;
  const parallel::Mesh mesh = parallel::Mesh::From(plan.spec().parallel());
  // Every unit's weights are gathered in it, twice a step.
  if (mesh.dp_ranks > 1 && mesh.shard_ranks() > 1) options.parts = {mesh.ShardGroup(rank)};
  options.deadline = train::CollectiveDeadline(plan);
  options.reduce_room = comm::ReduceRoomOf(plan.spec().parallel().backend());
  options.observer.entered = [&page](int64_t number) {
    page.collective.store(number, std::memory_order_relaxed);
    page.in_collective.store(1, std::memory_order_relaxed);
    page.sequence.fetch_add(1, std::memory_order_release);
  };
  options.observer.left = [&page](int64_t) {
    page.in_collective.store(0, std::memory_order_relaxed);
    page.sequence.fetch_add(1, std::memory_order_release);
  };
  return options;
}

comm::PeerGroup GroupOf(const v1::Assignment& assignment, const v1::Peers& peers) {
  const v1::Fence& fence = assignment.ref().fence();
  comm::PeerGroup group;
  group.rank = assignment.ref().rank();
  group.addresses.assign(peers.addresses().begin(), peers.addresses().end());
  group.node_ids.assign(assignment.node_ids().begin(), assignment.node_ids().end());
  group.identity = {fence.job_id(), fence.generation(), parallel::HashOf(assignment.plan()),
                    fence.nonce()};
  return group;
}

// A peer or the transport: errors of those kinds reach us only through the communicator.
bool IsPeerFailure(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsAborted(status);
}

// Holds this rank to its worker's deadline for acting without a coordinator, also when the worker
// is stopped and cannot kill: looked at before each step and, by a thread of its own, while the
// rank waits inside one for a peer that has left.
class DeadlineWatch {
 public:
  DeadlineWatch(const PositionPage& page, comm::Communicator& comm) : page_(page), comm_(comm) {
    thread_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      while (!done_.wait_for(lock, kDeadlineLook, [this] { return ending_; })) {
        lock.unlock();
        LeaveIfPast();
        lock.lock();
      }
    });
  }
  ~DeadlineWatch() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    done_.notify_all();
    thread_.join();
  }
  // Past the deadline: ends the communicator, and with it the step. The peers hear of it by the
  // same deadline.
  void LeaveIfPast() {
    const absl::Duration deadline =
        absl::Nanoseconds(page_.deadline_boot_nanos.load(std::memory_order_relaxed));
    const BootTime now = SystemClock().Now();
    if (deadline == absl::ZeroDuration() || now.since_boot < deadline) return;
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ = absl::AbortedError(
        absl::StrCat("left: the worker's deadline for acting without its coordinator passed ",
                     FormatTimeSpan(now.since_boot - deadline), " ago"));
    comm_.Abort(status_);
  }
  // Not OK: why we left.
  absl::Status status() {
    std::lock_guard lock(mutex_);
    return status_;
  }

 private:
  const PositionPage& page_;
  comm::Communicator& comm_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool ending_ = false;
  absl::Status status_;
  std::thread thread_;
};

class Trainer {
 public:
  Trainer(TrainerLink& link, Orders& orders, PositionPage& page, const Environment& environment)
      : link_(link), orders_(orders), page_(page), environment_(environment) {}

  absl::Status Run() {
    UPIPE_ASSIGN_OR_RETURN(const v1::Assignment assignment, orders_.AwaitAssignment());
    // From here on a stop comes as a command, at a step boundary; the signal alone must not end us
    // in mid-step.
    signal(SIGTERM, [](int) { stop_requested = true; });
    const v1::RunPlan& plan = assignment.plan();
    const int rank = assignment.ref().rank();
    if (const std::string& cap = plan.spec().parallel().isa_cap(); !cap.empty()) {
      UPIPE_RETURN_IF_ERROR(kernels::CapIsa(cap));
    }
    UPIPE_RETURN_IF_ERROR(OpenCheckpoints(assignment));
    const absl::StatusOr<CpuClaim> placed = Place(assignment, environment_.place);
    const std::vector<int> cpus = placed.ok() ? placed->cpus() : std::vector<int>();
    UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Device> device,
                           train::CreateRankDevice(plan, rank, cpus));
    train::WorkspaceCheck workspaces = train::CheckWorkspaces(plan, rank, *device);
    measured_ = std::move(workspaces.measured);
    UPIPE_RETURN_IF_ERROR(workspaces.status);
    UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<comm::PeerContext> rendezvous,
                           comm::CreatePeerContext({.backend = plan.spec().parallel().backend(),
                                                    .rank = rank,
                                                    .ucx = environment_.ucx,
                                                    .nccl = {}}));
    UPIPE_LOG(INFO) << "rank " << rank << " of " << plan.spec().parallel().ranks() << " on "
                    << device->name() << " " << ArithmeticOf(*device) << ", process " << getpid()
                    << ", cpus "
                    << (placed.ok() ? FormatCpuList(cpus)
                                    : absl::StrCat("any: ", placed.status().message()));
    SendReady(rendezvous->address(), parallel::HashOf(plan));
    UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kTrainerReady));
    UPIPE_ASSIGN_OR_RETURN(const v1::Peers peers, orders_.AwaitPeers());
    if (folder_) UPIPE_RETURN_IF_ERROR(folder_->AwaitOwner(owner_, kOwnerPatience));
    absl::StatusOr<std::unique_ptr<comm::Communicator>> comm =
        rendezvous->Connect(GroupOf(assignment, peers), OptionsFor(plan, rank, page_));
    if (!comm.ok()) {
      peer_failure_ = IsPeerFailure(comm.status());
      return comm.status();
    }
    if (const int64_t bytes = rendezvous->device_bytes(); bytes > 0) {
      UPIPE_LOG(INFO) << "the communicator took " << FormatBytes(bytes) << " of device memory";
      UPIPE_RETURN_IF_ERROR(train::CheckCommunicatorMemory(plan, rank, bytes));
    }
    UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kTrainerConnected));
    DeadlineWatch watch(page_, **comm);
    if (plan.spec().train().selfcheck() && !peers.has_resume()) {
      device.reset();  // the check has devices of its own
      const absl::Status passed = CheckSelf(plan, rank, **comm, cpus);
      UPIPE_RETURN_IF_ERROR(watch.status());
      peer_failure_ = IsPeerFailure(passed);
      UPIPE_RETURN_IF_ERROR(passed);
      UPIPE_ASSIGN_OR_RETURN(device, train::CreateRankDevice(plan, rank, cpus));
    }
    const std::unique_ptr<checkpoint::Writer> writer =
        MakeWriter(assignment, ArithmeticOf(*device), watch);
    orders_.SetWriter(writer.get());
    const absl::Status status = Train(assignment, peers, **comm, *device, writer.get(), watch);
    const int64_t newest = std::max(committed_step_.load(), peers.resume().step());
    if (status.ok() && folder_ && rank == 0 && newest > 0) orders_.AwaitRetain(newest);
    orders_.SetWriter(nullptr);
    UPIPE_RETURN_IF_ERROR(watch.status());
    peer_failure_ = IsPeerFailure(status);
    return status;
  }

  bool peer_failure() const { return peer_failure_; }
  bool selfcheck_failed() const { return selfcheck_failed_; }
  const v1::MeasuredWorkspaces& measured() const { return measured_; }

 private:
  // Opens the job's folder where it has one. Rank 0 claims it, whereby the others know that they
  // see the same file system, and looks for what to go on from.
  absl::Status OpenCheckpoints(const v1::Assignment& assignment) {
    const v1::RunPlan& plan = assignment.plan();
    const v1::Fence& fence = assignment.ref().fence();
    if (plan.spec().checkpoint().path().empty()) return absl::OkStatus();
    page_.pass = static_cast<uint32_t>(StepPass::kRestoring);
    page_.sequence.fetch_add(1, std::memory_order_release);
    UPIPE_ASSIGN_OR_RETURN(
        folder_, checkpoint::JobFolder::Open(plan.spec().checkpoint().path(), fence.job_id()));
    owner_.set_job_id(fence.job_id());
    owner_.set_generation(fence.generation());
    owner_.set_nonce(fence.nonce());
    if (assignment.ref().rank() != 0) return absl::OkStatus();
    UPIPE_RETURN_IF_ERROR(folder_->Claim(owner_));
    UPIPE_ASSIGN_OR_RETURN(resume_, folder_->FindNewest(train::CheckpointFacts(plan)));
    for (const v1::CheckpointProblem& problem : resume_.passed_over) {
      UPIPE_LOG(WARNING) << "checkpoint of step " << problem.step() << " of generation "
                         << problem.generation() << " " << problem.message();
    }
    return absl::OkStatus();
  }

  // Null where the job has no checkpoint path.
  std::unique_ptr<checkpoint::Writer> MakeWriter(const v1::Assignment& assignment,
                                                 const std::string& arithmetic,
                                                 DeadlineWatch& watch) {
    if (!folder_) return nullptr;
    const v1::RunPlan& plan = assignment.plan();
    return std::make_unique<checkpoint::Writer>(checkpoint::WriterOptions{
        .folder = *folder_,
        .owner = owner_,
        .rank = assignment.ref().rank(),
        .num_ranks = plan.spec().parallel().ranks(),
        .facts = train::CheckpointFacts(plan),
        .arithmetic = absl::StrCat(arithmetic, ", upipe ", UPIPE_VERSION),
        .patience = train::CheckpointPatience(plan),
        .may_commit =
            [&watch] {
              watch.LeaveIfPast();
              return watch.status();
            },
        .on_committed =
            [this](const v1::CheckpointRef& ref) {
              UPIPE_LOG(INFO) << "checkpoint of step " << ref.step() << ", " << ref.bytes()
                              << " bytes in " << ref.write_seconds() << " s, content_sha256 "
                              << ref.content_sha256();
              committed_step_ = ref.step();
              v1::TrainerMessage message;
              *message.mutable_committed() = ref;
              link_.Send(std::move(message));
            },
        .on_problem =
            [this](const v1::CheckpointProblem& problem) {
              UPIPE_LOG(WARNING) << "checkpoint of step " << problem.step() << ": "
                                 << problem.message();
              v1::TrainerMessage message;
              *message.mutable_problem() = problem;
              link_.Send(std::move(message));
            }});
  }

  // FailedPrecondition with the verdict, which is every rank's, when it is FAIL.
  absl::Status CheckSelf(const v1::RunPlan& plan, int rank, comm::Communicator& comm,
                         const std::vector<int>& cpus) {
    SendRunning();  // all ranks have met; how long they may take to is another matter
    const v1::TrainSpec& spec = plan.spec().train();
    train::SelfCheckOptions options;
    if (spec.has_memory_per_rank()) options.memory_bytes = spec.memory_per_rank();
    const absl::StatusOr<train::SelfCheckReport> report = train::RunSelfCheck(
        {.plan = plan, .rank = rank, .comm = comm, .cpus = cpus, .options = options});
    if (!report.ok()) {
      comm.Abort(report.status());
      return report.status();
    }
    const std::string verdict = absl::StrCat("self check: ", VerdictOf(*report));
    UPIPE_LOG(INFO) << verdict;
    selfcheck_failed_ = !report->passed();
    return selfcheck_failed_ ? absl::FailedPreconditionError(verdict) : absl::OkStatus();
  }

  absl::Status Train(const v1::Assignment& assignment, const v1::Peers& peers,
                     comm::Communicator& comm, kernels::Device& device, checkpoint::Writer* writer,
                     DeadlineWatch& watch) {
    return train::TrainRank(
        {.plan = assignment.plan(),
         .rank = assignment.ref().rank(),
         .comm = comm,
         .device = device,
         .position = &page_,
         .on_step =
             [this, &watch](const v1::StepReport& report) {
               SendReport(report);
               watch.LeaveIfPast();
             },
         .on_timeline =
             [this](const v1::StepTimeline& timeline) {
               v1::TrainerMessage message;
               *message.mutable_timeline() = timeline;
               link_.Send(std::move(message));
             },
         .on_running =
             [this, &watch] {
               SendRunning();
               watch.LeaveIfPast();
             },
         .stop_requested = &stop_requested,
         .writer = writer,
         .resume = writer != nullptr && peers.has_resume() ? &peers.resume() : nullptr,
         .patience_at_end = kPatienceAtEnd});
  }

  void SendReady(const std::string& address, uint64_t plan_hash) {
    v1::TrainerMessage message;
    v1::TrainerReady& ready = *message.mutable_ready();
    ready.set_address(address);
    ready.set_plan_hash(plan_hash);
    if (resume_.newest) *ready.mutable_resume() = *resume_.newest;
    for (const v1::CheckpointProblem& problem : resume_.passed_over) {
      *ready.add_passed_over() = problem;
    }
    link_.Send(std::move(message));
  }
  void SendRunning() {
    v1::TrainerMessage message;
    message.mutable_running();
    link_.Send(std::move(message));
  }
  void SendReport(const v1::StepReport& report) {
    v1::TrainerMessage message;
    *message.mutable_report() = report;
    link_.Send(std::move(message));
  }

  TrainerLink& link_;
  Orders& orders_;
  PositionPage& page_;
  const Environment& environment_;
  std::optional<checkpoint::JobFolder> folder_;  // where the job has a checkpoint path
  v1::CheckpointOwner owner_;
  checkpoint::ResumeChoice resume_;         // what rank 0 found
  std::atomic<int64_t> committed_step_{0};  // by this process
  bool peer_failure_ = false;
  bool selfcheck_failed_ = false;
  v1::MeasuredWorkspaces measured_;  // what a better plan needs to know
};

int Main() {
  SetLogComponent("trainer");
  signal(SIGPIPE, SIG_IGN);
  if (const absl::Status armed =
          ArmFailpoints(getenv("UPIPE_FAILPOINT"), getenv("UPIPE_FAILPOINT_FILE"));
      !armed.ok()) {
    UPIPE_LOG(ERROR) << armed.message();
    return 2;
  }
  absl::StatusOr<Environment> environment = ReadEnvironment();
  if (!environment.ok()) {
    UPIPE_LOG(ERROR) << environment.status().message();
    return 2;
  }
  absl::StatusOr<PositionMapping> position = PositionMapping::Open(environment->position_fd);
  if (!position.ok()) {
    UPIPE_LOG(ERROR) << position.status().message();
    return 2;
  }
  position->page().pass = static_cast<uint32_t>(StepPass::kStarting);
  Orders orders;
  v1::TrainerHello hello;
  *hello.mutable_ref() = environment->ref;
  hello.set_pid(getpid());
  const std::unique_ptr<TrainerLink> link =
      TrainerLink::Dial(environment->socket, hello,
                        {[&orders](const v1::WorkerCommand& command) { orders.Take(command); },
                         [] {
                           UPIPE_LOG(ERROR) << "the worker closed the stream: leaving";
                           _exit(3);
                         }});
  Trainer trainer(*link, orders, position->page(), *environment);
  const absl::Status status = trainer.Run();
  v1::TrainerFinished finished;
  finished.set_code(static_cast<int>(status.code()));
  finished.set_message(std::string(status.message()));
  if (kernels::IsDeviceFault(status)) {
    finished.set_device_fault(true);
    finished.set_message(absl::StrCat("at step ", position->page().step.load(), ": ",
                                      std::string(status.message())));
  }
  finished.set_peer_failure(trainer.peer_failure());
  finished.set_selfcheck_failed(trainer.selfcheck_failed());
  if (trainer.measured().ops_size() > 0) *finished.mutable_measured() = trainer.measured();
  if (!status.ok()) {
    UPIPE_LOG(ERROR) << status.ToString();
  }
  if (const absl::Status hit = Failpoint(failpoints::kTrainerFinishing); !hit.ok()) return 1;
  link->Finish(finished, kFarewellPatience);
  // Not by return: a stream whose socket a stopped worker no longer drains cannot be taken down,
  // and everything else is.
  std::fflush(nullptr);
  _exit(status.ok() ? 0 : 1);
}

}  // namespace
}  // namespace upipe::worker

int main() { return upipe::worker::Main(); }
