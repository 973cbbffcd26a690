#include "tests/support/report/sample_record.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace upipe::testing {
namespace {

constexpr int64_t kBegin = 1'785'000'000'000;  // unix milliseconds
constexpr int64_t kMiB = 1 << 20;

struct Tag {
  const char* name;
  int64_t bytes;
};
constexpr Tag kTags[] = {{"weights", 220 * kMiB},      {"gradients", 110 * kMiB},
                         {"optimizer", 330 * kMiB},    {"residual", 140 * kMiB},
                         {"attn_q", 30 * kMiB},        {"attn_kv", 42 * kMiB},
                         {"attn_exchange", 24 * kMiB}, {"attn_out", 36 * kMiB},
                         {"mlp", 90 * kMiB},           {"workspace", 8 * kMiB}};

v1::MemoryUsage Memory(int rank) {
  v1::MemoryUsage memory;
  int64_t sum = 0;
  for (const Tag& tag : kTags) {
    v1::TagBytes& bytes = *memory.add_tags();
    bytes.set_tag(tag.name);
    bytes.set_peak_bytes(tag.bytes + rank * kMiB);
    bytes.set_at_peak_bytes(tag.bytes + rank * kMiB);
    bytes.set_bytes(tag.bytes / 2);
    sum += bytes.at_peak_bytes();
  }
  memory.set_peak_bytes(sum);
  memory.set_current_bytes(sum / 2);
  memory.set_attention_peak_bytes(132 * kMiB + 4 * rank * kMiB);
  memory.set_arena_bytes(sum + kMiB);
  memory.set_peak_moment("backward layer 2 stage 1");
  return memory;
}

void AddStages(double seconds, v1::StepReport& report) {
  constexpr struct {
    const char* stage;
    double share;
  } kShares[] = {{"projection", 0.16}, {"exchange", 0.11},  {"attention", 0.35},
                 {"return", 0.07},     {"mlp", 0.22},       {"loss", 0.04},
                 {"weights", 0.05},    {"gradients", 0.04}, {"optimizer", 0.03}};
  for (const auto& part : kShares) {
    v1::StageSeconds& stage = *report.add_stages();
    stage.set_stage(part.stage);
    stage.set_seconds(part.share * seconds);
  }
  report.set_hidden_seconds(0.12 * seconds);
  v1::CommUse& use = *report.add_comm();
  use.set_operation("all_to_all");
  use.set_bytes_sent(512 * kMiB);
  use.set_seconds(0.11 * seconds);
  use.set_calls(64);
}

v1::StepReport Step(const SampleOptions& options, int rank, int step) {
  v1::StepReport report;
  const double seconds = 2.1 + 0.15 * std::sin(step * 0.7) + (step % 57 == 0 ? 1.2 : 0);
  report.set_step(step);
  report.set_total_steps(options.steps);
  report.set_loss(1.9 + 3.6 * std::exp(-step / (0.2 * options.steps)) +
                  0.05 * std::sin(step * 1.9));
  report.set_grad_norm(0.8 + 2 * std::exp(-step / 20.0) + 0.1 * std::sin(step * 2.3));
  report.set_learning_rate(3e-4);
  report.set_tokens(262144);
  report.set_step_seconds(seconds);
  report.set_tokens_per_second(262144 / seconds);
  report.set_comm_seconds(0.18 * seconds);
  report.set_data_seconds(0.01 * seconds);
  report.set_unix_millis(kBegin + 60'000 + static_cast<int64_t>(step) * 2'100);
  *report.mutable_memory() = Memory(rank);
  for (int peer = 0; peer < options.ranks; ++peer) {
    report.add_bytes_sent_to_peer(peer == rank ? 0 : 96 * kMiB);
  }
  if (options.stages) AddStages(seconds, report);
  if (step % std::max(1, options.steps / 12) == 0) {
    report.set_held_out_loss(report.loss() + 0.08);
    for (int range = 0; range < 3; ++range) {
      v1::PositionLoss& positions = *report.add_held_out_loss_by_position();
      positions.set_begin(range == 0 ? 0 : int64_t{4096} << (2 * range - 2));
      positions.set_end(int64_t{4096} << (2 * range));
      positions.set_loss(report.held_out_loss() - 0.1 * range);
      positions.set_tokens(1000);
    }
  }
  if (options.not_a_number && (step % 37 == 5 || step > options.steps * 3 / 4)) {
    report.set_loss(std::nan(""));
    report.set_grad_norm(std::numeric_limits<double>::infinity());
    report.set_skipped(true);
  }
  return report;
}

void FillPlan(const SampleOptions& options, v1::RunPlan& plan) {
  v1::JobSpec& spec = *plan.mutable_spec();
  spec.set_name("demo");
  spec.mutable_model()->set_num_layers(options.layers);
  spec.mutable_model()->set_hidden_size(1024);
  spec.mutable_model()->set_num_heads(16);
  spec.mutable_model()->set_num_kv_heads(4);
  spec.mutable_model()->set_head_dim(64);
  spec.mutable_model()->set_intermediate_size(4096);
  spec.mutable_model()->set_vocab_size(32000);
  spec.mutable_train()->set_steps(options.steps);
  spec.mutable_train()->set_context(262144);
  spec.mutable_optimizer()->set_clip_norm(1);
  spec.mutable_parallel()->set_ranks(options.ranks);
  spec.mutable_parallel()->set_method(v1::METHOD_UPIPE);
  spec.mutable_parallel()->set_heads_per_stage(4);
  spec.mutable_data()->set_path("/data/books");
  spec.mutable_checkpoint()->set_path("/checkpoints/demo");
  spec.mutable_checkpoint()->set_every_steps(50);
  plan.mutable_schedule()->set_ulysses_ranks(options.ranks);
  plan.mutable_schedule()->set_ring_ranks(1);
  plan.mutable_schedule()->set_num_heads(16);
  plan.mutable_schedule()->set_heads_per_rank(1);
  plan.mutable_schedule()->set_query_chunks(1);
  for (int stage = 0; stage < 4; ++stage) plan.mutable_schedule()->add_stages();
  plan.set_padded_context(262144);
  plan.set_tokens_per_rank(262144 / options.ranks);
  plan.set_num_parameters(151'234'560);
  plan.set_model_flops(4.2e14);
  plan.set_peak_flops(9.89e13 * 4 / options.ranks);
  plan.set_attention_kernel("cpu own fp32");
  plan.mutable_budget()->set_device_bytes(1300 * kMiB);
  plan.add_notes(options.words.empty() ? "deterministic" : options.words);
  for (int rank = 0; rank < options.ranks; ++rank) {
    v1::RankPlan& planned = *plan.add_ranks();
    planned.set_rank(rank);
    *planned.mutable_memory() = Memory(rank);
  }
}

void AddEvent(v1::Job& job, int64_t at, int64_t generation, const std::string& kind,
              const std::string& message) {
  v1::JobEvent& event = *job.add_events();
  event.set_unix_millis(kBegin + at);
  event.set_generation(generation);
  event.set_kind(kind);
  event.set_message(message);
}

// Two attempts, the first of which lost a rank.
void FillCourse(const SampleOptions& options, v1::Job& job) {
  const std::string why = options.words.empty() ? "ended by SIGKILL" : options.words;
  job.set_submitted_unix_millis(kBegin);
  job.set_started_unix_millis(kBegin + 40'000);
  job.set_ended_unix_millis(kBegin + 640'000);
  job.set_generation(2);
  job.mutable_restarts()->set_infrastructure(1);
  v1::AttemptSummary& first = *job.add_attempts();
  first.set_generation(1);
  first.set_placed_unix_millis(kBegin + 30'000);
  first.set_ended_unix_millis(kBegin + 250'000);
  first.set_intent(v1::STOP_INTENT_RESTART);
  first.set_last_step(options.steps / 3);
  first.mutable_cause()->set_kind(v1::CAUSE_KIND_SIGNAL);
  first.mutable_cause()->set_rank(2);
  first.mutable_cause()->set_node(options.words.empty() ? "w1" : options.words);
  first.mutable_cause()->set_message(why);
  AddEvent(job, 0, 0, "PLANNING", "submitted");
  AddEvent(job, 2'000, 0, "QUEUED", "planned: 1.0 GiB per rank");
  AddEvent(job, 30'000, 1, "STARTING", "placed on slots");
  AddEvent(job, 40'000, 1, "RUNNING", "all ranks passed the first barrier");
  AddEvent(job, 245'000, 1, "CAUSE", why);
  AddEvent(job, 260'000, 2, "STARTING", "placed on slots");
  AddEvent(job, 270'000, 2, "RESUME", "step 50 of generation 1");
  AddEvent(job, 400'000, 2, "CHECKPOINT_PROBLEM", why);
  AddEvent(job, 640'000, 2, "SUCCEEDED", "");
  v1::CheckpointRef& commit = *job.mutable_last_commit();
  commit.set_generation(2);
  commit.set_step(options.steps);
  commit.set_bytes(1800 * kMiB);
  commit.set_write_seconds(3.4);
  commit.set_content_sha256(std::string(64, 'a'));
}

}  // namespace

v1::StepTimeline SampleTimeline(int rank, int64_t step, int layers) {
  v1::StepTimeline timeline;
  timeline.set_step(step);
  timeline.set_rank(rank);
  timeline.set_generation(2);
  timeline.set_start_unix_micros(kBegin * 1000 + rank * 150);
  for (const char* stage :
       {"projection", "exchange", "attention", "return", "mlp", "loss", "weights"})
    timeline.add_stages(stage);
  for (const Tag& tag : kTags) timeline.add_tags(tag.name);
  int64_t now = 0;
  const auto slice = [&](v1::StepTimeline::Lane lane, int stage, const char* pass, int layer,
                         int head_stage, int64_t begin, int64_t nanos) {
    v1::StepTimeline::Slice& it = *timeline.add_slices();
    it.set_lane(lane);
    it.set_stage_name(stage);
    it.set_pass(pass);
    it.set_layer(layer);
    it.set_stage(head_stage);
    it.set_begin_nanos(begin);
    it.set_end_nanos(begin + nanos);
  };
  const auto memory = [&](int tag, int64_t bytes, bool host = false) {
    v1::StepTimeline::MemorySample& it = *timeline.add_memory();
    it.set_nanos(now);
    it.set_tag(tag);
    it.set_bytes(bytes);
    it.set_host(host);
  };
  for (int tag = 0; tag < 3; ++tag) memory(tag, kTags[tag].bytes);
  for (const char* pass : {"forward", "backward"}) {
    const int64_t unit = pass[0] == 'f' ? 4'000'000 : 9'000'000;
    for (int i = 0; i < layers; ++i) {
      const int layer = pass[0] == 'f' ? i : layers - 1 - i;
      slice(v1::StepTimeline::LANE_GATHER, 6, pass, layer, -1, now, unit);
      for (int stage = 0; stage < 4; ++stage) {
        memory(4, kTags[4].bytes);
        slice(v1::StepTimeline::LANE_COMPUTE, 0, pass, layer, stage, now, unit);
        slice(v1::StepTimeline::LANE_SIDE, 1, pass, layer, stage, now + unit, unit);
        now += unit;
        slice(v1::StepTimeline::LANE_COMPUTE, 2, pass, layer, stage, now, 3 * unit);
        now += 3 * unit;
        memory(4, 0);
      }
      slice(v1::StepTimeline::LANE_SIDE, 3, pass, layer, 3, now, unit / 2);
      memory(8, kTags[8].bytes);
      slice(v1::StepTimeline::LANE_COMPUTE, 4, pass, layer, -1, now, 4 * unit);
      now += 4 * unit;
      memory(8, 0);
      memory(3, kTags[3].bytes * (pass[0] == 'f' ? i + 1 : layers - i) / layers);
    }
    if (pass[0] == 'f') {
      slice(v1::StepTimeline::LANE_COMPUTE, 5, pass, -1, -1, now, 8'000'000);
      now += 8'000'000;
    }
  }
  return timeline;
}

report::JobRecord SampleRecord(const SampleOptions& options) {
  report::JobRecord record;
  v1::Job& job = record.job;
  job.set_id(options.id);
  job.set_state(v1::JOB_STATE_SUCCEEDED);
  FillPlan(options, *job.mutable_plan());
  *job.mutable_spec() = job.plan().spec();
  FillCourse(options, job);
  for (int step = 1; step <= options.steps; ++step) {
    const v1::StepReport report = Step(options, options.ranks - 1, step);
    record.steps.Take(report);
    record.fullest.Take(report);
  }
  for (int rank = 0; rank < options.ranks && options.steps > 0; ++rank) {
    v1::RankStatus& status = *job.add_ranks();
    status.set_rank(rank);
    status.set_slot(rank % 2);
    status.set_node(options.words.empty() ? absl::StrCat("w", rank / 2) : options.words);
    status.set_state(v1::RANK_STATE_GONE);
    *status.mutable_last_report() = Step(options, rank, options.steps);
  }
  if (options.steps > 0) *job.mutable_last_report() = record.steps.last();
  if (options.timeline && options.steps > 0) {
    record.timeline = SampleTimeline(options.ranks - 1, options.steps, options.layers);
  }
  if (!options.words.empty()) record.missing.push_back(options.words);
  record.versions = {{"coordinator", "0.2.0"}, {"w0", "0.2.0, cpu, AVX2, node n0"}};
  record.made_unix_millis = kBegin + 700'000;
  return record;
}

report::JobRecord RefusedRecord() {
  report::JobRecord record;
  v1::Job& job = record.job;
  job.set_id("large-abcdef");
  job.set_state(v1::JOB_STATE_FAILED);
  job.mutable_spec()->set_name("large");
  job.mutable_spec()->mutable_train()->set_steps(100);
  job.set_submitted_unix_millis(kBegin);
  job.set_ended_unix_millis(kBegin + 1'500);
  job.mutable_cause()->set_kind(v1::CAUSE_KIND_PLAN_REFUSED);
  job.mutable_cause()->set_message(
      "a rank needs 91.2 GiB and may take 80.0 GiB; more ranks would help");
  AddEvent(job, 0, 0, "PLANNING", "submitted");
  AddEvent(job, 1'500, 0, "FAILED", job.cause().message());
  record.made_unix_millis = kBegin + 2'000;
  return record;
}

}  // namespace upipe::testing
