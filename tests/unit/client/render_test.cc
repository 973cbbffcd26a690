#include "client/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

void SetTag(v1::MemoryUsage& usage, const std::string& tag, int64_t peak) {
  v1::TagBytes& bytes = *usage.add_tags();
  bytes.set_tag(tag);
  bytes.set_peak_bytes(peak);
}

v1::Job FailedJob() {
  v1::Job job;
  job.set_id("demo-abcdef");
  job.set_state(v1::JOB_STATE_FAILED);
  job.set_generation(1);
  job.set_submitted_unix_millis(1769847330000);
  job.set_started_unix_millis(1769847331000);
  job.set_ended_unix_millis(1769847581000);
  v1::JobSpec& spec = *job.mutable_spec();
  spec.set_name("demo");
  spec.mutable_model()->set_num_heads(8);
  spec.mutable_parallel()->set_ranks(2);
  spec.mutable_parallel()->set_method(v1::METHOD_UPIPE);
  spec.mutable_parallel()->set_heads_per_stage(2);
  v1::Cause& cause = *job.mutable_cause();
  cause.set_kind(v1::CAUSE_KIND_SIGNAL);
  cause.set_message("rank 1 was killed in step 12");
  cause.set_rank(1);
  cause.set_node("host-a");
  cause.set_signal(9);
  cause.set_evidence("SIGKILL we did not send (probable)");
  cause.add_log_tail("step 11 done");
  cause.add_log_tail("step 12\x1b[2J");
  *job.mutable_plan()->mutable_spec() = spec;
  job.mutable_plan()->set_padded_context(8192);
  job.mutable_plan()->add_notes("bit-identical on any nodes");
  for (int rank = 0; rank < 2; ++rank) {
    v1::RankPlan& plan = *job.mutable_plan()->add_ranks();
    plan.set_rank(rank);
    plan.mutable_memory()->set_peak_bytes(4096 + rank);
    SetTag(*plan.mutable_memory(), "weights", 1024);
    SetTag(*plan.mutable_memory(), "attn_q", 2048 + rank * 1024);
    v1::RankStatus& status = *job.add_ranks();
    status.set_rank(rank);
    status.set_node("host-a");
    status.set_slot(rank);
    status.set_state(v1::RANK_STATE_GONE);
    if (rank == 1) status.set_signal(9);
    if (rank == 0) status.set_exit_code(1);
    v1::MemoryUsage& memory = *status.mutable_last_report()->mutable_memory();
    memory.set_peak_bytes(4096 + rank);
    SetTag(memory, "weights", 1024);
    SetTag(memory, "attn_q", 2048 + rank * 512);
  }
  v1::JobEvent& event = *job.add_events();
  event.set_kind("STARTING");
  event.set_message("two\nlines");
  return job;
}

TEST(Render, TablesAlignAndDoNotTrail) {
  EXPECT_EQ(RenderTable({{"A", "LONG", "C"}, {"xxx", "y", ""}, {"", "z", "w"}}),
            "A    LONG  C\nxxx  y\n     z     w\n");
}

TEST(Render, ParallelSummaryNamesTheAxesInUse) {
  v1::JobSpec spec;
  spec.mutable_model()->set_num_heads(8);
  spec.mutable_parallel()->set_ranks(16);
  spec.mutable_parallel()->set_method(v1::METHOD_ULYSSES);
  EXPECT_EQ(ParallelSummary(spec), "8 heads on 16 ranks, ulysses");
  spec.mutable_parallel()->set_method(v1::METHOD_RING);
  EXPECT_EQ(ParallelSummary(spec), "8 heads on 16 ranks, ring, 1 Ulysses x 16 ring");
  spec.mutable_parallel()->set_method(v1::METHOD_UPIPE);
  spec.mutable_parallel()->set_heads_per_stage(2);
  spec.mutable_parallel()->set_ring_ranks(2);
  spec.mutable_parallel()->set_fsdp_ranks(2);
  spec.mutable_parallel()->set_dp_ranks(2);
  EXPECT_EQ(ParallelSummary(spec),
            "8 heads on 16 ranks, upipe, U = 2, 2 Ulysses x 2 ring x 2 fsdp x 2 dp");
}

TEST(Render, NothingUntrustedReachesTheTerminalRaw) {
  EXPECT_EQ(Printable("a\x1b[2J\nb"), "a [2J b");
  EXPECT_THAT(RenderJob(FailedJob(), absl::UnixEpoch()), Not(HasSubstr("\x1b")));
}

TEST(Render, DescribeTellsTheWholeCause) {
  const std::string text = RenderJob(FailedJob(), absl::UnixEpoch());
  EXPECT_THAT(text, AllOf(HasSubstr("Job demo-abcdef: FAILED"), HasSubstr("ran for: 4 min 10 s"),
                          HasSubstr("  rank 1 was killed in step 12\n  first failing rank: 1 on "
                                    "host-a, signal 9 (SIGKILL)\n"
                                    "  kind: SIGNAL\n  evidence: SIGKILL we did not send "
                                    "(probable)\n  last log lines:\n    step 11 done\n")));
  EXPECT_THAT(text,
              AllOf(HasSubstr("exit code 1"), HasSubstr("STARTING"), HasSubstr("two lines"),
                    HasSubstr("note: bit-identical"), HasSubstr("8 heads on 2 ranks, upipe, U = 2"),
                    HasSubstr("  name: demo\n")));
}

// A job that was killed once, crashed once, and waits to start again.
v1::Job RestartedJob() {
  v1::Job job;
  job.set_id("demo-abcdef");
  job.set_state(v1::JOB_STATE_QUEUED);
  job.set_generation(2);
  job.set_reason("starts again in 8.0 s");
  job.mutable_spec()->set_priority(7);
  job.mutable_restarts()->set_infrastructure(1);
  job.mutable_restarts()->set_application(1);
  job.set_retry_at_unix_millis(9000);
  job.mutable_last_commit()->set_step(400);
  job.mutable_last_commit()->set_generation(2);
  job.mutable_last_commit()->set_bytes(1 << 20);
  job.mutable_resume()->set_step(300);
  job.mutable_resume()->set_generation(1);
  for (int generation = 1; generation <= 2; ++generation) {
    v1::AttemptSummary& attempt = *job.add_attempts();
    attempt.set_generation(generation);
    attempt.set_placed_unix_millis(1769847330000);
    attempt.set_ended_unix_millis(1769847335000);
    attempt.set_intent(v1::STOP_INTENT_RESTART);
    attempt.set_last_step(300 + generation);
    attempt.set_ranks_proven_gone(1);
    attempt.set_ranks_presumed_gone(generation - 1);
    attempt.mutable_cause()->set_message("rank 1 was killed\n");
  }
  v1::Cause& crash = *job.mutable_attempts(1)->mutable_cause();
  crash.set_kind(v1::CAUSE_KIND_STALL);
  crash.set_rank(3);
  crash.set_node("w1");
  crash.set_evidence("rank 3: step 41\x1b");
  return job;
}

TEST(Render, DescribeTellsTheCourseOfARestartedJob) {
  const std::string text = RenderJob(RestartedJob(), absl::FromUnixMillis(1000));
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("Restarts: generation 2, restarted twice; infrastructure 1 of 100, "
                    "application 1 of 3, without progress 0 of 3 in a row\n"),
          HasSubstr(", in 8.0 s\n"),
          HasSubstr("Last checkpoint: step 400 of generation 2, 1.0 MiB"),
          HasSubstr("Went on from: step 300 of generation 1"),
          testing::ContainsRegex("1 +2026[^\n]+5\\.0 s +RESTART +301 +1 proven +rank 1 was killed"),
          testing::ContainsRegex("2 +2026[^\n]+RESTART +302 +1 proven, 1 presumed +"
                                 "STALL, rank 3 on w1: rank 1 was killed"),
          HasSubstr("Evidence of generation 2: rank 3: step 41 \n"), Not(HasSubstr("Held"))));
  EXPECT_THAT(RenderJob(RestartedJob(), absl::FromUnixMillis(9000)),
              Not(HasSubstr("Starts again: ")));  // the pause is over
  v1::Job waiting = RestartedJob();
  waiting.mutable_spec()->mutable_train()->set_steps(1000);
  EXPECT_THAT(RenderJobs({waiting}, absl::UnixEpoch()), HasSubstr(" 400/1000 "));
  v1::Job held = RestartedJob();
  held.set_held(true);
  EXPECT_THAT(RenderJob(held, absl::UnixEpoch()), HasSubstr("`upipe release demo-abcdef`"));
  EXPECT_THAT(RenderJob(FailedJob(), absl::UnixEpoch()), Not(HasSubstr("Restarts")));
}

TEST(Render, WhyIsOneReasonAndThePosition) {
  v1::WhyResponse why;
  why.mutable_job()->set_id("demo-abcdef");
  why.mutable_job()->set_state(v1::JOB_STATE_QUEUED);
  why.set_position(3);
  why.set_message("big-bbbbbb\x1b is first");
  EXPECT_EQ(RenderWhy(why),
            "demo-abcdef  QUEUED  position 3 in the queue\n  big-bbbbbb  is first\n");
  why.set_position(0);
  why.clear_message();
  EXPECT_EQ(RenderWhy(why), "demo-abcdef  QUEUED\n");
}

TEST(Render, DescribeShowsPlannedBesideMeasuredBytes) {
  const std::string text = RenderJob(FailedJob(), absl::UnixEpoch());
  EXPECT_THAT(text, testing::ContainsRegex("weights +1\\.0 KiB +1\\.0 KiB +equal"));
  EXPECT_THAT(text, testing::ContainsRegex("attn_q +3\\.0 KiB +2\\.5 KiB +-512 B off"));
  EXPECT_THAT(text, testing::ContainsRegex("all, live +4\\.0 KiB +4\\.0 KiB +equal"));
}

TEST(Render, DescribeShowsHostBytesWhereAnyAreUsed) {
  v1::Job job = FailedJob();
  EXPECT_THAT(RenderJob(job, absl::UnixEpoch()), Not(HasSubstr("HOST MEMORY")));
  v1::MemoryUsage& planned = *job.mutable_plan()->mutable_ranks(1)->mutable_host_memory();
  planned.set_peak_bytes(8192);
  SetTag(planned, "residual", 8192);
  EXPECT_THAT(RenderJob(job, absl::UnixEpoch()), HasSubstr("HOST MEMORY"));
  *job.mutable_ranks(1)->mutable_last_report()->mutable_host_memory() = planned;
  const std::string text = RenderJob(job, absl::UnixEpoch());
  const std::string host = text.substr(text.find("HOST MEMORY PER RANK (largest)"));
  EXPECT_THAT(host, testing::ContainsRegex("residual +8\\.0 KiB +8\\.0 KiB +equal"));
  EXPECT_THAT(host, testing::ContainsRegex("all, live +8\\.0 KiB +8\\.0 KiB +equal"));
}

TEST(Render, ListHasOneRowPerJob) {
  EXPECT_EQ(RenderJobs({}, absl::UnixEpoch()), "No jobs.\n");
  v1::Job running;
  running.set_id("tiny-aaaaaa");
  running.set_state(v1::JOB_STATE_STOPPING);
  running.set_shown_state("CANCELLING");
  running.set_started_unix_millis(1000);
  running.mutable_last_report()->set_step(3);
  running.mutable_last_report()->set_total_steps(20);
  running.mutable_last_report()->set_loss(5.5);
  const std::string text = RenderJobs({running, FailedJob()}, absl::FromUnixMillis(6000));
  EXPECT_THAT(
      text,
      AllOf(testing::ContainsRegex("tiny-aaaaaa +CANCELLING +0 +0 +0 +3/20 +5\\.5000 +- +5\\.0 s"),
            testing::ContainsRegex("demo-abcdef +FAILED +0 +2 +0 +- +- +2026.*rank 1 was killed")));
  v1::Job waits = RestartedJob();
  waits.mutable_cause()->set_message("rank 1 was killed");
  EXPECT_THAT(RenderJobs({waits}, absl::UnixEpoch()),
              testing::ContainsRegex("QUEUED +7 +0 +2 +.*starts again in 8\\.0 s\n"));
}

TEST(Render, DevicesOfANodeAndWhyOneTakesNoRanks) {
  v1::ListNodesResponse nodes;
  v1::Node& node = *nodes.add_nodes();
  node.set_worker("w1");
  node.set_backend("cuda");
  for (int i = 0; i < 2; ++i) {
    v1::Slot& slot = *node.add_slots();
    slot.set_index(i);
    slot.set_state(i == 0 ? v1::SLOT_STATE_FREE : v1::SLOT_STATE_SICK);
    v1::SlotDevice& device = *slot.mutable_device();
    device.set_name("NVIDIA H200");
    device.set_uuid(absl::StrCat("GPU-", i));
    device.set_memory_bytes(int64_t{140} << 30);
    device.set_nvlinks(18);
    device.set_ecc(i == 0);
  }
  v1::SlotDevice& sick = *node.mutable_slots(1)->mutable_device();
  sick.set_last_xid(79);
  sick.set_sick("XID 79, the device fell off the bus");
  const std::string text = RenderNodes(nodes);
  EXPECT_THAT(text, HasSubstr("1 FREE, 1 SICK"));
  EXPECT_THAT(
      text, ::testing::ContainsRegex("w1 +0 +NVIDIA H200 +140.0 GiB +18 +0 errors +none +GPU-0\n"));
  EXPECT_THAT(text,
              ::testing::ContainsRegex("w1 +1 +NVIDIA H200 +140.0 GiB +18 +off +79 +GPU-1\n"));
  EXPECT_THAT(text, HasSubstr("Slot 1 of w1 takes no new ranks: XID 79, the device fell off"));
}

TEST(Render, NodesShowSlotsAndWarnings) {
  v1::ListNodesResponse nodes;
  EXPECT_THAT(RenderNodes(nodes), HasSubstr("No worker"));
  v1::Node& node = *nodes.add_nodes();
  node.set_worker("worker-0");
  node.set_node_id("host-a");
  node.set_state(v1::NODE_STATE_SUSPECT);
  node.set_memory_per_rank_bytes(int64_t{2} << 30);
  node.set_metrics_address("127.0.0.1:4000");
  node.set_insecure_listen(true);
  node.add_slots()->set_state(v1::SLOT_STATE_FREE);
  v1::Slot& busy = *node.add_slots();
  busy.set_index(1);
  busy.set_state(v1::SLOT_STATE_BUSY);
  busy.set_job_id("demo-abcdef");
  busy.set_rank(3);
  const std::string text = RenderNodes(nodes);
  EXPECT_THAT(text,
              AllOf(testing::ContainsRegex("worker-0 +host-a +SUSPECT +1 BUSY, 1 FREE +2\\.0 GiB"),
                    HasSubstr("127.0.0.1:4000"),
                    testing::ContainsRegex("worker-0 +1 +BUSY +demo-abcdef +0 +3"),
                    HasSubstr("Warning: worker worker-0")));
  node.set_cordoned(true);
  node.set_cordon_reason("new disk\x1b");
  node.set_leaving(true);
  nodes.set_coordinator_version("1.2.3");
  nodes.set_coordinator_epoch(4);
  nodes.set_coordinator_metrics_address("127.0.0.1:5000");
  EXPECT_THAT(RenderNodes(nodes),
              HasSubstr("\nCoordinator: version 1.2.3, epoch 4, metrics at 127.0.0.1:5000\n"));
  EXPECT_THAT(RenderNodes(nodes), AllOf(HasSubstr("SUSPECT, cordoned, leaving"),
                                        HasSubstr("worker-0 is cordoned: new disk \n")));
}

TEST(Render, JsonKeepsProtoNamesAndEmptyFields) {
  v1::Job job = FailedJob();
  job.mutable_spec()->mutable_optimizer()->set_clip_norm(std::numeric_limits<double>::infinity());
  const auto json = nlohmann::json::parse(RenderJson(job));
  EXPECT_EQ(json.at("reason"), "");
  EXPECT_EQ(json.at("cause").at("log_tail").size(), 2u);
  EXPECT_EQ(json.at("spec").at("optimizer").at("clip_norm"), "Infinity");
}

}  // namespace
}  // namespace upipe::client
