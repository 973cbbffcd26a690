// Every series of a worker, by subject. Those of a slot are the slot's rank's; gauges go with the
// rank, counters stay for as long as the worker lives.
#pragma once

#include "common/metrics/registry.h"

namespace upipe::worker {

inline constexpr const char* kUntilFirstStep = "until the rank's first step";
inline constexpr const char* kWhileFree = "while the slot is free";

struct AttemptSeries {
  MetricsRegistry& registry;
  Gauges info = registry.Gauge(
      {.name = "upipe_attempt_info",
       .labels = {"slot", "job", "generation", "rank", "plan"},
       .help = "1 for the attempt that holds the slot; `plan` is the plan's hash. Join on it to "
               "learn whose the other series of a slot are",
       .absent = kWhileFree});
  Gauges slots = registry.Gauge({.name = "upipe_slots",
                                 .labels = {"state"},
                                 .help = "How many are `free`, `taken`, `quarantined` or `sick`"});
  Gauges connected =
      registry.Gauge({.name = "upipe_worker_connected",
                      .help = "1 while the session with the coordinator is up, 0 otherwise"});
  Counters rank_exits =
      registry.Counter({.name = "upipe_rank_exits_total",
                        .labels = {"outcome"},
                        .help = "Ranks that ended: `finished`, `left` on notice, `killed` by the "
                                "worker, `failed`, `not_started`"});
  Gauges build = registry.Gauge({.name = "upipe_build_info",
                                 .labels = {"version", "backend", "isa"},
                                 .help = "1; what this worker is"});
};

struct MemorySeries {
  MetricsRegistry& registry;
  Gauges bytes = registry.Gauge({.name = "upipe_memory_bytes",
                                 .unit = "bytes",
                                 .labels = {"slot", "pool", "tag"},
                                 .help = "Held after the last step, by pool (`device`, `host`) and "
                                         "tag; of the host pool tags in use only",
                                 .absent = kUntilFirstStep});
  Gauges tag_peak = registry.Gauge({.name = "upipe_memory_tag_peak_bytes",
                                    .unit = "bytes",
                                    .labels = {"slot", "pool", "tag"},
                                    .help = "Each tag's own peak, also inside steps",
                                    .absent = kUntilFirstStep});
  Gauges tag_at_peak = registry.Gauge({.name = "upipe_memory_tag_at_peak_bytes",
                                       .unit = "bytes",
                                       .labels = {"slot", "pool", "tag"},
                                       .help = "Each tag's share of upipe_memory_peak_bytes: what "
                                               "it held at that moment",
                                       .absent = kUntilFirstStep});
  Gauges planned_tag_peak = registry.Gauge({.name = "upipe_memory_planned_tag_peak_bytes",
                                            .unit = "bytes",
                                            .labels = {"slot", "pool", "tag"},
                                            .help = "The same as the plan foretold it",
                                            .absent = kWhileFree});
  Gauges peak = registry.Gauge({.name = "upipe_memory_peak_bytes",
                                .unit = "bytes",
                                .labels = {"slot", "pool"},
                                .help = "Most ever held by all tags together",
                                .absent = kUntilFirstStep});
  Gauges planned_peak = registry.Gauge({.name = "upipe_memory_planned_bytes",
                                        .unit = "bytes",
                                        .labels = {"slot", "pool"},
                                        .help = "The same as the plan foretold it",
                                        .absent = kWhileFree});
  Gauges arena = registry.Gauge({.name = "upipe_memory_arena_bytes",
                                 .unit = "bytes",
                                 .labels = {"slot", "pool"},
                                 .help = "High-water mark of the arena: taken from the machine",
                                 .absent = kUntilFirstStep});
  Gauges limit = registry.Gauge(
      {.name = "upipe_memory_limit_bytes",
       .unit = "bytes",
       .labels = {"slot", "pool"},
       .help = "What the rank may take: of its device what the plan was made for, of host memory "
               "its share of what the node offers",
       .absent = "while the slot is free, and of the host pool where nothing limits it"});
  Gauges attention_peak = registry.Gauge({.name = "upipe_attention_peak_bytes",
                                          .unit = "bytes",
                                          .labels = {"slot"},
                                          .help = "Intermediate attention bytes: the joint peak of "
                                                  "the `attn_*` tags on the device",
                                          .absent = kUntilFirstStep});
  Gauges attention_planned = registry.Gauge({.name = "upipe_attention_planned_bytes",
                                             .unit = "bytes",
                                             .labels = {"slot"},
                                             .help = "The same as the plan foretold it",
                                             .absent = kWhileFree});
};

struct StepSeries {
  MetricsRegistry& registry;
  Gauges step = registry.Gauge({.name = "upipe_step",
                                .labels = {"slot"},
                                .help = "Last optimizer step that is done",
                                .absent = kUntilFirstStep});
  Counters steps = registry.Counter({.name = "upipe_steps_total",
                                     .labels = {"slot"},
                                     .help = "Steps done by ranks of this slot"});
  Gauges seconds = registry.Gauge({.name = "upipe_step_seconds",
                                   .unit = "seconds",
                                   .labels = {"slot"},
                                   .help = "Duration of the last step, without evaluation",
                                   .absent = kUntilFirstStep});
  Gauges own_seconds =
      registry.Gauge({.name = "upipe_step_own_seconds",
                      .unit = "seconds",
                      .labels = {"slot"},
                      .help = "The part of it outside collectives: the rank with the most is the "
                              "straggler",
                      .absent = kUntilFirstStep});
  Gauges stage_seconds = registry.Gauge(
      {.name = "upipe_step_stage_seconds",
       .unit = "seconds",
       .labels = {"slot", "stage"},
       .help = "Time the rank's streams spent on a kind of work in the last step. Streams run "
               "beside each other: the sum may exceed the step",
       .absent = kUntilFirstStep});
  Counters stage_seconds_total = registry.Counter({.name = "upipe_stage_seconds_total",
                                                   .unit = "seconds",
                                                   .labels = {"slot", "stage"},
                                                   .help = "The same over all steps"});
  Counters hidden_seconds = registry.Counter(
      {.name = "upipe_hidden_seconds_total",
       .unit = "seconds",
       .labels = {"slot"},
       .help = "Time of exchanges and copies that went on while the rank computed"});
  Counters data_seconds = registry.Counter({.name = "upipe_data_seconds_total",
                                            .unit = "seconds",
                                            .labels = {"slot"},
                                            .help = "Time waiting for tokens"});
  Counters tokens = registry.Counter(
      {.name = "upipe_tokens_total",
       .unit = "tokens",
       .labels = {"slot"},
       .help = "Tokens trained on by the whole job, as each of its ranks tells it"});
  Gauges tokens_per_second =
      registry.Gauge({.name = "upipe_tokens_per_second",
                      .unit = "tokens/s",
                      .labels = {"slot"},
                      .help = "Of the whole job in the last step, as each of its ranks tells it",
                      .absent = kUntilFirstStep});
  Gauges mfu = registry.Gauge(
      {.name = "upipe_causal_mfu_ratio",
       .unit = "ratio",
       .labels = {"slot"},
       .help = "Causal MFU of the last step: the model's FLOPs of a step / ranks / seconds / peak "
               "of a device",
       .absent = "until the rank's first step, and where the plan's device description has no "
                 "peak"});
  Gauges loss = registry.Gauge({.name = "upipe_loss",
                                .unit = "nats",
                                .labels = {"slot"},
                                .help = "Mean over the last step's tokens, all ranks",
                                .absent = kUntilFirstStep});
  Gauges held_out_loss = registry.Gauge({.name = "upipe_held_out_loss",
                                         .unit = "nats",
                                         .labels = {"slot"},
                                         .help = "Of the last evaluation, all ranks",
                                         .absent = "until the rank's first evaluation"});
  Gauges grad_norm = registry.Gauge({.name = "upipe_grad_norm",
                                     .labels = {"slot"},
                                     .help = "Of all gradients of the last step, before clipping",
                                     .absent = kUntilFirstStep});
  Gauges learning_rate = registry.Gauge({.name = "upipe_learning_rate",
                                         .labels = {"slot"},
                                         .help = "Used in the last step",
                                         .absent = kUntilFirstStep});
  Counters skipped = registry.Counter(
      {.name = "upipe_skipped_steps_total",
       .labels = {"slot"},
       .help = "Steps whose update was left out: the norm was not finite, or no token was valid"});
  Gauges layers_done = registry.Gauge(
      {.name = "upipe_step_layers_done",
       .labels = {"slot"},
       .help = "Layers that the step in work has behind it, forward and then backward; with "
               "accumulated gradients, of the micro-step. Where layers are rebuilt in groups a "
               "group counts when it is through",
       .absent = "until the rank's position is first read"});
  Gauges layers = registry.Gauge({.name = "upipe_step_layers",
                                  .labels = {"slot"},
                                  .help = "Layers of both passes",
                                  .absent = kWhileFree});
  Gauges pass = registry.Gauge(
      {.name = "upipe_pass",
       .labels = {"slot", "pass"},
       .help = "1 for what the rank is doing, 0 for the others: `idle`, `starting`, `restoring`, "
               "`embed`, `forward`, `loss`, `backward`, `optimizer`, `evaluate`, `checkpoint`, "
               "`done`",
       .absent = "until the rank's position is first read"});
  Gauges in_place = registry.Gauge({.name = "upipe_rank_in_place_seconds",
                                    .unit = "seconds",
                                    .labels = {"slot"},
                                    .help = "Since the rank's position last changed",
                                    .absent = "until the rank's position is first read"});
};

struct CommSeries {
  MetricsRegistry& registry;
  Counters seconds = registry.Counter(
      {.name = "upipe_comm_seconds_total",
       .unit = "seconds",
       .labels = {"slot", "operation"},
       .help = "Time inside collectives, waiting for peers included: `all_to_all`, `ring`, "
               "`all_gather`, `reduce_scatter`, `all_reduce`, `barrier`"});
  Counters bytes = registry.Counter(
      {.name = "upipe_comm_bytes_total",
       .unit = "bytes",
       .labels = {"slot", "operation"},
       .help = "Sent to other ranks; the rate over that of the seconds is the bus bandwidth as "
               "nccl-tests defines it"});
  Counters calls = registry.Counter({.name = "upipe_comm_calls_total",
                                     .labels = {"slot", "operation"},
                                     .help = "How many there were"});
};

struct CheckpointSeries {
  MetricsRegistry& registry;
  Gauges step = registry.Gauge({.name = "upipe_checkpoint_step",
                                .labels = {"slot"},
                                .help = "Step of the last checkpoint committed; rank 0 tells it",
                                .absent = "until this attempt commits one"});
  Gauges bytes = registry.Gauge({.name = "upipe_checkpoint_bytes",
                                 .unit = "bytes",
                                 .labels = {"slot"},
                                 .help = "Of its shards, all ranks",
                                 .absent = "until this attempt commits one"});
  Gauges seconds = registry.Gauge({.name = "upipe_checkpoint_seconds",
                                   .unit = "seconds",
                                   .labels = {"slot"},
                                   .help = "From its step boundary to its manifest",
                                   .absent = "until this attempt commits one"});
  Gauges timestamp = registry.Gauge({.name = "upipe_checkpoint_timestamp_seconds",
                                     .unit = "seconds",
                                     .labels = {"slot"},
                                     .help = "When it was committed, Unix time",
                                     .absent = "until this attempt commits one"});
  Counters commits = registry.Counter({.name = "upipe_checkpoints_total",
                                       .labels = {"slot"},
                                       .help = "Checkpoints committed by ranks of this slot"});
  Counters problems =
      registry.Counter({.name = "upipe_checkpoint_problems_total",
                        .labels = {"slot"},
                        .help = "Checkpoints that were not made, or were passed over at a start"});
};

// Declares everything; `registry` has the labels worker and node, and outlives it.
struct WorkerSeries {
  MetricsRegistry& registry;
  AttemptSeries attempt{registry.Section("Of a worker: attempts and slots")};
  MemorySeries memory{registry.Section("Of a worker: memory of a rank")};
  StepSeries step{registry.Section("Of a worker: steps of a rank")};
  CommSeries comm{registry.Section("Of a worker: collectives of a rank")};
  CheckpointSeries checkpoint{registry.Section("Of a worker: checkpoints")};
};

}  // namespace upipe::worker
