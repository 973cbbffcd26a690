// upipe-coordinator as a child process over a slow disk: started, killed and started again on the
// same state, and what the machine and its metrics endpoint say of it.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace upipe::bench {

// One series of a Prometheus histogram, or the difference of two readings of it.
struct Histogram {
  std::map<double, double> up_to;  // observations not above a bound
  double count = 0;
  double sum = 0;

  Histogram Since(const Histogram& earlier) const;
  double Mean() const { return count == 0 ? 0 : sum / count; }
  // The least bound that this share of the observations is not above; infinity above all bounds.
  double Bound(double share) const;
};

class CoordinatorProcess {
 public:
  struct Options {
    std::string folder;  // holds the state, the address file and the log
    absl::Duration fsync;
    double heartbeat_seconds = 2;
    double settle_seconds = 10;
  };
  explicit CoordinatorProcess(Options options) : options_(std::move(options)) {}
  ~CoordinatorProcess() { Kill(); }

  // Waits until it serves; a later start serves at the same address. An error quotes its log's
  // place.
  absl::Status Start();
  void Kill();  // SIGKILL, reaped

  const std::string& address() const { return address_; }
  double CpuSeconds() const;  // without its children
  double RssBytes() const;
  // The text of its metrics endpoint.
  absl::StatusOr<std::string> Scrape() const;

 private:
  void Exec() const;
  absl::Status FindMetrics();

  const Options options_;
  std::string address_ = "127.0.0.1:0";
  std::string metrics_address_;
  pid_t pid_ = -1;
};

// upipe_coordinator_step_seconds of a scrape, by event.
std::map<std::string, Histogram> StepSeconds(const std::string& scrape);
// The value of a series as the endpoint spells it, such as upipe_jobs{state="queued"}; 0 if absent.
double Value(const std::string& scrape, const std::string& series);

}  // namespace upipe::bench
