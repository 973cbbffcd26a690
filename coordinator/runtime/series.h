// Every series of the coordinator, by subject. Counters start at zero with the process.
#pragma once

#include <vector>

#include "common/metrics/registry.h"
#include "coordinator/core/tally.h"

namespace upipe::coordinator {

struct ClusterSeries {
  MetricsRegistry& registry;
  Gauges jobs = registry.Gauge({.name = "upipe_jobs",
                                .labels = {"state"},
                                .help = "Jobs on record: `planning`, `queued`, `starting`, "
                                        "`running`, `stopping`, `succeeded`, `failed`, "
                                        "`cancelled`"});
  Gauges nodes = registry.Gauge({.name = "upipe_nodes",
                                 .labels = {"state"},
                                 .help = "Workers: `ready`, `suspect`, `lost`, `unknown`"});
  Gauges cordoned = registry.Gauge(
      {.name = "upipe_nodes_cordoned", .help = "Workers that an operator keeps new ranks from"});
  Gauges slots = registry.Gauge(
      {.name = "upipe_cluster_slots",
       .labels = {"state"},
       .help = "Slots of all known workers: `free`; `taken` by a rank; `unknown`, their worker is "
               "silent; `unavailable`, quarantined, sick, or free on a worker that takes no new "
               "ranks"});
  Gauges last_heard = registry.Gauge({.name = "upipe_worker_last_heard_timestamp_seconds",
                                      .unit = "seconds",
                                      .labels = {"worker"},
                                      .help = "When the worker's last message came, Unix time",
                                      .absent = "until the worker says hello to this coordinator"});
  Counters stalls =
      registry.Counter({.name = "upipe_stalls_total",
                        .help = "Attempts in which no rank moved within the stage deadline"});
};

struct QueueSeries {
  MetricsRegistry& registry;
  Gauges length = registry.Gauge(
      {.name = "upipe_queue_length",
       .labels = {"reason"},
       .help = "Jobs that wait, by what for, as `upipe why` tells it: `planning`, `held`, "
               "`too_few_slots`, `backoff`, `silent_workers`, `cordoned`, `settling`, `behind` "
               "another job, `busy_slots`, or to be placed `next`"});
  Histograms wait = registry.Histogram({.name = "upipe_queue_wait_seconds",
                                        .unit = "seconds",
                                        .help = "From a job's submit to the first time it runs"},
                                       {kWaitBounds.begin(), kWaitBounds.end()});
};

struct RestartSeries {
  MetricsRegistry& registry;
  Counters restarts = registry.Counter(
      {.name = "upipe_restarts_total",
       .labels = {"cause", "budget"},
       .help = "Attempts that ended and were queued again, by cause and by what they were charged "
               "to: `infrastructure`, `application`, `none` (drains)"});
  Histograms seconds = registry.Histogram(
      {.name = "upipe_restart_seconds",
       .unit = "seconds",
       .help = "From the moment an attempt began to end until the job ran again"},
      {kWaitBounds.begin(), kWaitBounds.end()});
  Counters lost_steps = registry.Counter(
      {.name = "upipe_lost_steps_total",
       .help = "Steps that no checkpoint held when their attempt ended, without success"});
  Counters attempt_seconds = registry.Counter(
      {.name = "upipe_attempt_seconds_total",
       .unit = "seconds",
       .labels = {"outcome"},
       .help = "Ranks x seconds of attempts: `kept`, up to a checkpoint or to success; `lost`, "
               "after the last checkpoint, or spent starting and ending. Counted at checkpoints "
               "and ends. kept / all is the goodput"});
  Counters commits = registry.Counter(
      {.name = "upipe_checkpoints_committed_total", .help = "Checkpoints committed"});
  Counters problems = registry.Counter(
      {.name = "upipe_coordinator_checkpoint_problems_total",
       .help = "Checkpoints that were not made, or were passed over at a start, as jobs told it"});
};

inline constexpr const char* kUnlessRunning = "unless the job runs";

struct JobSeries {
  MetricsRegistry& registry;
  Gauges step = registry.Gauge({.name = "upipe_job_step",
                                .labels = {"job"},
                                .help = "Last step done, as rank 0 reported it",
                                .absent = kUnlessRunning});
  Gauges ranks = registry.Gauge({.name = "upipe_job_ranks",
                                 .labels = {"job"},
                                 .help = "Its ranks",
                                 .absent = kUnlessRunning});
  Gauges checkpoint_step =
      registry.Gauge({.name = "upipe_job_checkpoint_step",
                      .labels = {"job"},
                      .help = "Step of its newest checkpoint",
                      .absent = "unless the job runs, and until it has committed one"});
  Gauges checkpoint_timestamp =
      registry.Gauge({.name = "upipe_job_checkpoint_timestamp_seconds",
                      .unit = "seconds",
                      .labels = {"job"},
                      .help = "When that was committed, Unix time",
                      .absent = "unless the job runs, and until it has committed one"});
  Gauges own_median = registry.Gauge(
      {.name = "upipe_job_own_seconds_median",
       .unit = "seconds",
       .labels = {"job"},
       .help = "Time of the last step outside collectives, median over its ranks. Every rank of a "
               "step waits for the slowest, so step times are alike; this is not",
       .absent = "unless the job runs, and until its first step"});
  Gauges own_max = registry.Gauge(
      {.name = "upipe_job_own_seconds_max",
       .unit = "seconds",
       .labels = {"job"},
       .help = "The same of its slowest rank; far above the median it is a straggler",
       .absent = "unless the job runs, and until its first step"});
  Gauges slowest_rank = registry.Gauge({.name = "upipe_job_slowest_rank",
                                        .labels = {"job"},
                                        .help = "The rank the maximum is of",
                                        .absent = "unless the job runs, and until its first step"});
};

struct ServiceSeries {
  MetricsRegistry& registry;
  Counters requests = registry.Counter(
      {.name = "upipe_rpc_requests_total",
       .labels = {"method", "code"},
       .help = "Calls that ended, by method (`JobService.Submit`, ..; `unknown` for what is none "
               "of ours) and gRPC code (`ok`, `not_found`, ..)"});
  Histograms seconds =
      registry.Histogram({.name = "upipe_rpc_seconds",
                          .unit = "seconds",
                          .labels = {"method"},
                          .help = "How long they took; a stream counts at its end"},
                         {1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 60, 600, 3600});
  Histograms decisions = registry.Histogram(
      {.name = "upipe_coordinator_step_seconds",
       .unit = "seconds",
       .labels = {"event"},
       .help = "Time to decide about one event, the scheduler's pass included; `tick` is the one "
               "that looks at everything"},
      {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3});
  Histograms commits =
      registry.Histogram({.name = "upipe_store_commit_seconds",
                          .unit = "seconds",
                          .help = "Time of one durable write, of all decisions that wait for it"},
                         {1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10});
  Gauges revision =
      registry.Gauge({.name = "upipe_store_revision", .help = "Writes decided, ever"});
  Gauges epoch = registry.Gauge(
      {.name = "upipe_coordinator_epoch", .help = "Starts of the coordinator on this store"});
  Gauges build = registry.Gauge(
      {.name = "upipe_build_info", .labels = {"version"}, .help = "1; what this coordinator is"});
};

// Declares everything; `registry` outlives it.
struct CoordinatorSeries {
  MetricsRegistry& registry;
  ClusterSeries cluster{registry.Section("Of the coordinator: jobs and workers")};
  QueueSeries queue{registry.Section("Of the coordinator: the queue")};
  RestartSeries restart{registry.Section("Of the coordinator: restarts and checkpoints")};
  JobSeries job{registry.Section("Of the coordinator: each running job")};
  ServiceSeries service{registry.Section("Of the coordinator: itself")};
};

}  // namespace upipe::coordinator
