// What the coordinator does under load: every worker busy with a job of its own, thousands of jobs
// waiting behind them, every fsync slowed down. Measured: submits while the queue grows and when it
// is full, the time to decide about an event, memory, processor, how late heartbeats are answered;
// then the coordinator is killed and started again, and all workers come back at once.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "benchmarks/coordinator/coordinator_process.h"
#include "benchmarks/coordinator/fleet.h"
#include "benchmarks/support/bench_report.h"
#include "common/status.h"
#include "upipe/v1/job_service.grpc.pb.h"

namespace upipe::bench {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::vector<int> workers = {500, 1000, 2000};
  int slots = 8;
  int jobs = 10'000;
  int clients = 16;
  int single_submits = 200;
  int streams_per_channel = 1;
  double fsync_millis = 10;
  double heartbeat_seconds = 2;
  double settle_seconds = 10;
  double window_seconds = 20;
  bool quick = false;
  std::string output;
  std::string commit = "unknown";
};

constexpr absl::Duration kLimit = absl::Minutes(10);  // of each wait

double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(std::ceil(share * values.size()));
  return values[std::max<size_t>(rank, 1) - 1];
}

ordered_json Quantiles(const std::vector<double>& values) {
  return {{"p50", Quantile(values, 0.5)},
          {"p99", Quantile(values, 0.99)},
          {"max", Quantile(values, 1)},
          {"samples", values.size()}};
}

v1::JobSpec MakeSpec(int ranks) {
  v1::JobSpec spec;
  spec.set_name("load");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(260);
  model.set_hidden_size(64);
  model.set_num_layers(1);
  model.set_num_heads(ranks);
  model.set_num_kv_heads(ranks);
  model.set_head_dim(8);
  model.set_intermediate_size(64);
  spec.mutable_data()->set_path("unused");
  spec.mutable_parallel()->set_ranks(ranks);
  spec.mutable_parallel()->set_method(v1::METHOD_ULYSSES);
  spec.mutable_train()->set_context(64 * ranks);
  spec.mutable_train()->set_steps(1000);
  return spec;
}

// One size of the fleet, from an empty store to the return of every worker.
class Trial {
 public:
  Trial(const Options& options, int workers, const std::string& folder)
      : options_(options),
        workers_(workers),
        coordinator_({.folder = folder,
                      .fsync = absl::Milliseconds(options.fsync_millis),
                      .heartbeat_seconds = options.heartbeat_seconds,
                      .settle_seconds = options.settle_seconds}) {}

  absl::StatusOr<ordered_json> Run() {
    row_["workers"] = workers_;
    UPIPE_RETURN_IF_ERROR(Connect());
    UPIPE_RETURN_IF_ERROR(FillSlots());
    UPIPE_RETURN_IF_ERROR(FillQueue());
    UPIPE_RETURN_IF_ERROR(Watch("steady"));
    UPIPE_ASSIGN_OR_RETURN(const std::vector<double> alone, SubmitAll(options_.single_submits, 1));
    row_["submit_alone_seconds"] = Quantiles(alone);
    UPIPE_RETURN_IF_ERROR(RestartCoordinator());
    UPIPE_RETURN_IF_ERROR(LoseNetwork());
    if (fleet_->num_stops() > 0) {
      return absl::InternalError(absl::StrCat(fleet_->num_stops(), " orders to stop a rank came"));
    }
    return row_;
  }

 private:
  // Seconds until done(); an error naming `what` after the limit.
  absl::StatusOr<double> Await(const std::string& what, const std::function<bool()>& done) const {
    const absl::Time start = absl::Now();
    while (!done()) {
      if (absl::Now() - start > kLimit) {
        return absl::DeadlineExceededError(
            absl::StrCat(what, ": not after ", absl::FormatDuration(kLimit)));
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    return absl::ToDoubleSeconds(absl::Now() - start);
  }

  absl::StatusOr<double> AwaitWorkers(int64_t epoch) const {
    return Await("acknowledging every worker",
                 [&] { return fleet_->NumAcknowledged(epoch) == workers_; });
  }

  void Say(const std::string& text) const {
    std::cerr << absl::StrFormat("%5d workers: %s\n", workers_, text);
  }

  absl::Status Connect() {
    UPIPE_RETURN_IF_ERROR(coordinator_.Start());
    fleet_ = std::make_unique<Fleet>(
        Fleet::Options{.address = coordinator_.address(),
                       .workers = workers_,
                       .slots = options_.slots,
                       .streams_per_channel = options_.streams_per_channel,
                       .heartbeat = absl::Seconds(options_.heartbeat_seconds)});
    UPIPE_ASSIGN_OR_RETURN(row_["connect_seconds"], AwaitWorkers(1));
    Say(absl::StrFormat("connected in %.2f s", row_["connect_seconds"].get<double>()));
    jobs_ = v1::JobService::NewStub(
        grpc::CreateChannel(coordinator_.address(), grpc::InsecureChannelCredentials()));
    return absl::OkStatus();
  }

  // A job for every worker.
  absl::Status FillSlots() {
    const absl::Time start = absl::Now();
    UPIPE_RETURN_IF_ERROR(SubmitAll(workers_, options_.clients).status());
    UPIPE_RETURN_IF_ERROR(Await("running every slot's rank", [&] {
                            return fleet_->NumRunning() == int64_t{workers_} * options_.slots;
                          }).status());
    row_["fill_seconds"] = absl::ToDoubleSeconds(absl::Now() - start);
    Say(absl::StrFormat("%d ranks run after %.1f s", workers_ * options_.slots,
                        row_["fill_seconds"].get<double>()));
    return absl::OkStatus();
  }

  absl::Status FillQueue() {
    const absl::Time start = absl::Now();
    UPIPE_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                           SubmitAll(options_.jobs, options_.clients));
    const double took = absl::ToDoubleSeconds(absl::Now() - start);
    row_["submit_seconds"] = Quantiles(seconds);
    row_["submits_per_second"] = options_.jobs / took;
    Say(absl::StrFormat("%d submits, p50 %.1f ms, p99 %.1f ms, %.0f a second", options_.jobs,
                        1e3 * Quantile(seconds, 0.5), 1e3 * Quantile(seconds, 0.99),
                        options_.jobs / took));
    if (Quantile(seconds, 0) * 1e3 < options_.fsync_millis) {
      return absl::InternalError(absl::StrFormat("a submit took %.2f ms: fsync is not slowed",
                                                 1e3 * Quantile(seconds, 0)));
    }
    // Planners are processes: the queue is planned when the metrics, told once a second, say so.
    UPIPE_RETURN_IF_ERROR(Await("planning every job", [&] {
                            const absl::StatusOr<std::string> scrape = coordinator_.Scrape();
                            absl::SleepFor(absl::Milliseconds(100));
                            return scrape.ok() &&
                                   Value(*scrape, "upipe_jobs{state=\"queued\"}") == options_.jobs;
                          }).status());
    row_["planned_seconds"] = absl::ToDoubleSeconds(absl::Now() - start);
    return absl::OkStatus();
  }

  // Latencies of `count` submits by `clients` that each wait for their answer.
  absl::StatusOr<std::vector<double>> SubmitAll(int count, int clients) {
    std::atomic<int> next = 0;
    std::vector<std::vector<double>> seconds(clients);
    std::vector<absl::Status> statuses(clients);
    std::vector<std::thread> threads;
    for (int c = 0; c < clients; ++c) {
      threads.emplace_back([&, c] {
        while (next++ < count && statuses[c].ok()) statuses[c] = SubmitOne(seconds[c]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<double> all;
    for (int c = 0; c < clients; ++c) {
      UPIPE_RETURN_IF_ERROR(statuses[c]);
      all.insert(all.end(), seconds[c].begin(), seconds[c].end());
    }
    return all;
  }

  absl::Status SubmitOne(std::vector<double>& seconds) {
    v1::SubmitRequest request;
    request.set_request_id(absl::StrCat("load-", ++submitted_));
    *request.mutable_spec() = MakeSpec(options_.slots);
    v1::SubmitResponse response;
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(absl::ToChronoTime(absl::Now() + kLimit));
    const absl::Time start = absl::Now();
    const grpc::Status status = jobs_->Submit(&context, request, &response);
    if (!status.ok()) {
      return absl::UnavailableError(absl::StrCat("Submit: ", status.error_message()));
    }
    seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));
    return absl::OkStatus();
  }

  // One window in which only time passes.
  absl::Status Watch(const std::string& name) {
    UPIPE_ASSIGN_OR_RETURN(const std::string before, coordinator_.Scrape());
    const double cpu = coordinator_.CpuSeconds();
    const absl::Time start = absl::Now();
    fleet_->TakeAckSeconds();
    absl::SleepFor(absl::Seconds(options_.window_seconds));
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    const std::vector<double> acks = fleet_->TakeAckSeconds();
    ordered_json& window = row_[name];
    window["seconds"] = seconds;
    window["cpu_seconds_per_second"] = (coordinator_.CpuSeconds() - cpu) / seconds;
    window["rss_bytes"] = coordinator_.RssBytes();
    if (!acks.empty()) window["heartbeat_ack_seconds"] = Quantiles(acks);
    UPIPE_ASSIGN_OR_RETURN(const std::string after, coordinator_.Scrape());
    const auto earlier = StepSeconds(before);
    for (const auto& [event, histogram] : StepSeconds(after)) {
      const Histogram steps = histogram.Since(earlier.at(event));
      if (steps.count == 0) continue;
      window["step_seconds"][event] = {
          {"count", steps.count}, {"mean", steps.Mean()}, {"p99_at_most", steps.Bound(0.99)}};
    }
    Say(absl::StrFormat("%s: pass %.2f ms, %.3f CPU s a second, %.0f MiB, acks p99 %.1f ms", name,
                        1e3 * window["step_seconds"]["tick"]["mean"].get<double>(),
                        window["cpu_seconds_per_second"].get<double>(),
                        window["rss_bytes"].get<double>() / (1 << 20), 1e3 * Quantile(acks, 0.99)));
    return absl::OkStatus();
  }

  absl::Status RestartCoordinator() {
    const int64_t epoch = fleet_->epoch();
    const absl::Time start = absl::Now();
    coordinator_.Kill();
    UPIPE_RETURN_IF_ERROR(coordinator_.Start());
    row_["restart_serving_seconds"] = absl::ToDoubleSeconds(absl::Now() - start);
    UPIPE_RETURN_IF_ERROR(AwaitWorkers(epoch + 1).status());
    row_["reconnect_seconds"] = absl::ToDoubleSeconds(absl::Now() - start);
    Say(absl::StrFormat("killed and started again: serving after %.2f s, every worker after %.2f s",
                        row_["restart_serving_seconds"].get<double>(),
                        row_["reconnect_seconds"].get<double>()));
    return absl::OkStatus();
  }

  // Every worker is silent, long enough that no job is promised their slots.
  absl::Status LoseNetwork() {
    fleet_->SetAway(true);
    absl::SleepFor(
        absl::Seconds(1 + std::max(options_.settle_seconds, 3 * options_.heartbeat_seconds)));
    UPIPE_RETURN_IF_ERROR(Watch("silence"));
    fleet_->SetAway(false);
    UPIPE_ASSIGN_OR_RETURN(row_["return_seconds"], AwaitWorkers(fleet_->epoch()));
    Say(absl::StrFormat("every worker is back after %.2f s of network",
                        row_["return_seconds"].get<double>()));
    return absl::OkStatus();
  }

  const Options& options_;
  const int workers_;
  CoordinatorProcess coordinator_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::atomic<int64_t> submitted_ = 0;
  ordered_json row_;
};

// In a folder of its own, which goes with it.
absl::StatusOr<ordered_json> Measure(const Options& options, int workers) {
  std::string folder = std::filesystem::temp_directory_path() / "upipe-bench-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return absl::UnavailableError("cannot make a folder");
  absl::StatusOr<ordered_json> row = Trial(options, workers, folder).Run();
  std::filesystem::remove_all(folder);
  return row;
}

void Declare(CLI::App& app, Options& options) {
  app.add_flag("--quick", options.quick, "50 workers, 200 jobs, beats of 0.2 s: seconds");
  app.add_option("--output", options.output, "JSON file; standard output when absent");
  app.add_option("--commit", options.commit, "Commit recorded in the JSON");
  app.add_option("--workers", options.workers, "Sizes of the fleet")->check(CLI::Range(1, 5000));
  app.add_option("--slots", options.slots, "Slots of a worker, ranks of a job")
      ->check(CLI::Range(1, 64));
  app.add_option("--jobs", options.jobs, "Jobs in the queue")->check(CLI::Range(1, 100'000));
  app.add_option("--clients", options.clients, "Clients that submit, one call each at a time")
      ->check(CLI::Range(1, 256));
  app.add_option("--streams-per-channel", options.streams_per_channel,
                 "Sessions that share a connection; real workers share none")
      ->check(CLI::Range(1, 100));
  app.add_option("--fsync-millis", options.fsync_millis, "What every fsync takes longer")
      ->check(CLI::Range(0, 1000));
  app.add_option("--window-seconds", options.window_seconds, "Of the two quiet measurements")
      ->check(CLI::Range(1, 600));
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("The coordinator under the load of thousands of workers and a full queue");
  Declare(app, options);
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    options.workers = {50};
    options.jobs = 200;
    options.single_submits = 20;
    options.heartbeat_seconds = 0.2;
    options.settle_seconds = 1;
    options.window_seconds = 2;
  }
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  ordered_json report = ReportHead(options.commit, argc, argv);
  report["jobs"] = options.jobs;
  report["slots_per_worker"] = options.slots;
  report["clients"] = options.clients;
  report["streams_per_channel"] = options.streams_per_channel;
  report["fsync_millis"] = options.fsync_millis;
  report["heartbeat_seconds"] = options.heartbeat_seconds;
  for (const int workers : options.workers) {
    const absl::StatusOr<ordered_json> row = Measure(options, workers);
    if (!row.ok()) {
      std::cerr << "upipe_bench_coordinator: " << row.status().message() << "\n";
      return 1;
    }
    report["rows"].push_back(*row);
  }
  return WriteReport(report, options.output) ? 0 : 1;
}

}  // namespace
}  // namespace upipe::bench

int main(int argc, char** argv) { return upipe::bench::Main(argc, argv); }
