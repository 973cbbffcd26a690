// What workers, clients and planners send, in any order and with any content: the coordinator's
// core must neither fail, nor write what its store refuses or what it cannot load again, nor grow
// with what it hears. One byte of an event says what happens, one whom it concerns; the payload is
// the message as it lies on the wire.
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/utf8.h"
#include "tests/support/coordinator/core_driver.h"
#include "tests/support/fuzz/events.h"
#include "tests/support/fuzz/swell.h"

namespace upipe::coordinator {
namespace {

constexpr int kWorkers = 3;
constexpr size_t kActionsMax = 2000;  // of one step
constexpr int kEventsOfJobMax = 64;
constexpr size_t kSendMax = size_t{4} << 20;
constexpr size_t kSwollen = kMaxBatchBytes + 1;

std::string WorkerName(uint8_t argument) { return absl::StrCat("w", argument % kWorkers + 1); }

class Coordinator {
 public:
  Coordinator() : driver_(store_) {}

  void Happen(const fuzz::Event& event) {
    switch (event.kind) {
      case 'w':
      case 'W':
        return Hear(event);
      case 'S':
      case 's':
        return Submit(event);
      case 'P':
        return Plan(event);
      case 'c':
        return Client(CancelReceived{++call_, JobId(event), Grace(event)});
      case 'h':
        return Client(HoldReceived{++call_, JobId(event)});
      case 'r':
        return Client(ReleaseReceived{++call_, JobId(event)});
      case 'C':
        return Client(CordonReceived{++call_, WorkerName(event.argument), Text(event)});
      case 'U':
        return Client(UncordonReceived{++call_, WorkerName(event.argument)});
      case 'D':
        return Client(
            DrainReceived{++call_, WorkerName(event.argument), Text(event), Grace(event)});
      case 'F':
        return Client(FenceNodeReceived{++call_, WorkerName(event.argument)});
      case 'G':
        return Client(ForgetNodeReceived{++call_, WorkerName(event.argument)});
      case 'x':
        return Take(SessionClosed{SessionOf(event.argument)});
      case 'd':
        driver_.Advance(absl::Milliseconds(event.argument * event.argument * 20));
        return Take(Tick{});
      case 'R':
        driver_.Restart();
        return ++epoch_, void();
      case 'v':
        return View(event);
      default:
        return;
    }
  }

 private:
  // Sessions are never used again: those before a restart are others.
  SessionId SessionOf(uint8_t argument) const { return epoch_ * 8 + argument % 8; }
  std::string JobId(const fuzz::Event& event) const {
    return absl::StrCat("job", event.argument % 8);
  }
  static std::string Text(const fuzz::Event& event) { return ToUtf8(event.payload, 500); }
  static std::optional<absl::Duration> Grace(const fuzz::Event& event) {
    if (event.argument < 128) return std::nullopt;
    return absl::Seconds(event.argument - 128);
  }

  // Bits 0 to 2: the session. Bit 3: what is said concerns a rank of a placed job, and comes from
  // where that is. Of kind W one of its strings, as bits 4 to 7 say, is long.
  void Hear(const fuzz::Event& event) {
    v1::WorkerMessage message;
    if (!fuzz::Parse(event, message)) return;
    if (event.kind == 'W') fuzz::Swell(message, event.argument >> 4, kSwollen);
    const SessionId session = SessionOf(event.argument);
    const bool ours = (event.argument & 8) != 0;
    switch (message.kind_case()) {
      case v1::WorkerMessage::kHello:
        if (ours) message.mutable_hello()->set_worker(WorkerName(event.argument));
        return Take(HelloReceived{session, message.hello()});
      case v1::WorkerMessage::kHeartbeat:
        if (ours && message.heartbeat().attempts_size() > 0) {
          const v1::RankRef ref = Placed(event.argument).ref();
          *message.mutable_heartbeat()->mutable_attempts(0)->mutable_fence() = ref.fence();
        }
        return Take(HeartbeatReceived{session, message.sequence(), message.heartbeat()});
      case v1::WorkerMessage::kRank: {
        if (ours) {
          const v1::RankReport placed = Placed(event.argument);
          *message.mutable_rank()->mutable_ref() = placed.ref();
          message.mutable_rank()->set_slot(placed.slot());
        }
        return Take(RankReported{session, message.sequence(), message.rank()});
      }
      case v1::WorkerMessage::kProgress:
        if (ours) *message.mutable_progress()->mutable_ref() = Placed(event.argument).ref();
        return Take(ProgressReceived{session, message.progress()});
      case v1::WorkerMessage::KIND_NOT_SET:
        return;
    }
  }

  // A rank on the worker of that session, or of any: bits 4 to 7 say which.
  v1::RankReport Placed(uint8_t argument) {
    std::vector<v1::RankReport> ranks;
    const auto& sessions = driver_.state().worker_of_session;
    const auto session = sessions.find(SessionOf(argument));
    for (const auto& [id, job] : driver_.state().jobs) {
      if (!job.attempt) continue;
      const v1::AttemptRecord& attempt = job.attempt->record;
      for (int r = 0; r < attempt.ranks_size(); ++r) {
        if (session != sessions.end() && attempt.ranks(r).worker() != session->second) continue;
        v1::RankReport& report = ranks.emplace_back();
        report.mutable_ref()->set_rank(r);
        report.mutable_ref()->mutable_fence()->set_job_id(id);
        report.mutable_ref()->mutable_fence()->set_generation(attempt.generation());
        report.mutable_ref()->mutable_fence()->set_nonce(attempt.nonce());
        report.set_slot(attempt.ranks(r).slot());
      }
    }
    return ranks.empty() ? v1::RankReport() : ranks[(argument >> 4) % ranks.size()];
  }

  // Bits 0 to 2: the job. Bit 3: the payload is the spec. Bits 4 and 5: its ranks. Bit 6: held.
  // Of kind s one of the spec's strings is long.
  void Submit(const fuzz::Event& event) {
    v1::JobSpec spec = SpecOf(1 + (event.argument >> 4) % 4);
    spec.mutable_train()->set_steps(3);
    spec.mutable_restarts()->set_infrastructure(2);
    spec.mutable_restarts()->set_no_progress(2);
    if ((event.argument & 8) != 0) {
      v1::JobSpec wanted;
      if (!fuzz::Parse(event, wanted)) return;
      if (event.kind == 's') fuzz::Swell(wanted, event.argument >> 4, kSwollen);
      const std::vector<Violation> violations = ValidateJobSpec(wanted);
      for (const Violation& violation : violations) {
        UPIPE_CHECK(ToUtf8(violation.message, kSwollen) == violation.message) << violation.field;
      }
      if (!violations.empty()) return;
      spec = WithDefaults(wanted);
    }
    if (spec.parallel().ranks() > 1024) return;  // as a planner would refuse for its size
    Client(SubmitReceived{++call_, JobId(event), absl::StrCat("request", event.argument % 8), spec,
                          (event.argument & 64) != 0});
  }

  // Bits 0 to 2: the job. Bit 3: the payload is the result.
  void Plan(const fuzz::Event& event) {
    const auto job = driver_.state().jobs.find(JobId(event));
    if (job == driver_.state().jobs.end() || !job->second.planner_running) return;
    v1::PlanResult result = PlanOf(job->second.record.spec().parallel().ranks());
    if ((event.argument & 8) != 0 && !fuzz::Parse(event, result)) {
      return Take(PlanFinished{job->first, absl::InternalError(Text(event))});
    }
    Take(PlanFinished{job->first, result});
  }

  void View(const fuzz::Event& event) {
    const std::string id = JobId(event);
    GetJob(driver_.state(), id).IgnoreError();
    Why(driver_.state(), id, driver_.now()).IgnoreError();
    ListNodes(driver_.state(), driver_.now().boot);
    v1::ListJobsRequest request;
    if (fuzz::Parse(event, request)) ListJobs(driver_.state(), request).IgnoreError();
  }

  // Every call is answered once.
  void Client(const Event& event) {
    Take(event);
    UPIPE_CHECK(driver_.Last<ReplyJob>().size() + driver_.Last<ReplyNode>().size() == 1);
  }

  void Take(const Event& event) {
    const std::vector<Action>& actions = driver_.Do(event);
    UPIPE_CHECK(actions.size() <= kActionsMax) << actions.size();
    for (const Action& action : actions) {
      const auto* send = std::get_if<SendToWorker>(&action);
      if (send != nullptr) UPIPE_CHECK(send->message.ByteSizeLong() <= kSendMax);
    }
    for (const auto& [id, job] : driver_.state().jobs) CheckJob(id, job);
    for (const auto& [worker, node] : driver_.state().nodes) {
      UPIPE_CHECK(static_cast<int>(node.slots.size()) == node.record.num_slots());
    }
  }

  void CheckJob(const std::string& id, const Job& job) {
    UPIPE_CHECK(job.record.events_size() <= kEventsOfJobMax);
    const auto [ended, fresh] = ended_.try_emplace(id, job.record.state());
    if (!fresh && IsTerminal(ended->second)) {
      UPIPE_CHECK(ended->second == job.record.state()) << id << " ended twice";
    }
    ended->second = job.record.state();
    if (!job.attempt) return;
    UPIPE_CHECK(job.attempt->record.generation() == job.record.generation());
    UPIPE_CHECK(static_cast<int>(job.attempt->soft.size()) == job.attempt->record.ranks_size());
  }

  MemoryStore store_;
  CoreDriver driver_;
  std::map<std::string, v1::JobState> ended_;
  SessionId epoch_ = 1;
  CallId call_ = 0;
};

}  // namespace
}  // namespace upipe::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::coordinator::Coordinator coordinator;
  for (const upipe::fuzz::Event& event : upipe::fuzz::ReadEvents(data, size)) {
    coordinator.Happen(event);
  }
  return 0;
}
