// Chooses what a job leaves to the planner: the fastest point of schedule x policy that fits. Every
// price is a dry run of the job's own step; the search only decides which points to price. From the
// fastest policy of a split, were memory free, it goes down by the knobs that take most memory for
// their time until all fits, then up by whatever saves time and still fits; the best of all is
// looked at in pairs of knobs too. Splits are left out by two bounds: not even the leanest policy
// fits, or the fastest is no faster than what was found.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "upipe/v1/job.pb.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// What one point takes.
struct Price {
  int64_t device_bytes = 0;  // of the fullest rank
  int64_t host_bytes = 0;    // of all ranks of a node
  double seconds = 0;        // of a step
};

// What there is. On cpu the two are one RAM: there `device_bytes` holds both and host_bytes is 0.
struct Room {
  int64_t device_bytes = 0;  // of a rank
  int64_t host_bytes = 0;    // of a node; 0 = as much as is asked for
  int node_ranks = 1;        // that share it
};

bool Fits(const Price& price, const Room& room);
// "72.1 GiB of device memory per rank, 79.6 GiB there" and so on: what does not fit, the worst
// first; empty where all does.
std::string Shortage(const Price& price, const Room& room);

// Prices a spec without anything auto. Called from several threads at once.
using Pricer = std::function<absl::StatusOr<Price>(const v1::JobSpec& spec)>;

struct SearchOptions {
  Room room;
  int num_threads = 1;
  // Once something fits and so many points are priced, no other split is looked into.
  int64_t most_points = 300;
  // Told after every split: how many of all are done, points priced, seconds of the best so far (0:
  // none). Called from one thread at a time.
  std::function<void(int done, int all, int64_t priced, double best_seconds)> progress;
};

struct SearchResult {
  v1::JobSpec best;  // nothing auto
  Price price;
  std::vector<v1::Candidate> candidates;  // the best first, then the others by time, unfit last
  int64_t priced = 0;
};

// ResourceExhausted when not even the leanest policy of any split fits: names the split that comes
// nearest and what it lacks. InvalidArgument when what is written leaves no legal split.
absl::StatusOr<SearchResult> Search(const v1::JobSpec& spec, const Pricer& pricer,
                                    const SearchOptions& options);

// The first point that fits, splits of the narrowest stages first, each at its leanest; nothing
// where none does. Much cheaper than Search, and true whenever Search would find something.
absl::StatusOr<std::optional<v1::JobSpec>> AnythingThatFits(const v1::JobSpec& spec,
                                                            const Pricer& pricer, const Room& room,
                                                            int num_threads = 1);

// The largest number from `unit` to `limit` for which `fits` is true, to within 1 / precision of it
// or one `unit`, a multiple of `unit`; 0 when it is false at `unit`. `fits` must not become true
// again once it was false. Doubles from `start`, then halves.
absl::StatusOr<int64_t> LargestThatFits(int64_t unit, int64_t start, int64_t limit,
                                        const std::function<absl::StatusOr<bool>(int64_t)>& fits,
                                        int64_t precision = 128);

}  // namespace upipe::planner
