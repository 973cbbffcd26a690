#include "planner/search.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/in_threads.h"
#include "planner/notes.h"
#include "planner/points.h"

namespace upipe::planner {
namespace {

// A gain below this share of a step is none: what it buys is not worth a knob more.
constexpr double kWorthwhile = 2e-3;

// Prices each point once, several at a time.
class PriceList {
 public:
  PriceList(const Pricer& pricer, int num_threads) : pricer_(pricer), num_threads_(num_threads) {}

  // In the order of `specs`. The first error of any, when there is one.
  absl::StatusOr<std::vector<Price>> Of(const std::vector<v1::JobSpec>& specs) {
    std::vector<size_t> unknown;
    for (size_t i = 0; i < specs.size(); ++i) {
      if (!known_.contains(KeyOf(specs[i]))) unknown.push_back(i);
    }
    std::vector<Price> fresh(unknown.size());
    UPIPE_RETURN_IF_ERROR(InThreads(num_threads_, unknown.size(), [&](size_t i) -> absl::Status {
      UPIPE_ASSIGN_OR_RETURN(fresh[i], pricer_(specs[unknown[i]]));
      return absl::OkStatus();
    }));
    for (size_t i = 0; i < unknown.size(); ++i) known_[KeyOf(specs[unknown[i]])] = fresh[i];
    std::vector<Price> prices;
    for (const v1::JobSpec& spec : specs) prices.push_back(known_.at(KeyOf(spec)));
    return prices;
  }

  int64_t size() const { return static_cast<int64_t>(known_.size()); }

 private:
  static std::string KeyOf(const v1::JobSpec& spec) {
    return absl::StrCat(spec.parallel().SerializeAsString(), "|",
                        spec.memory().SerializeAsString());
  }

  const Pricer& pricer_;
  const int num_threads_;
  std::map<std::string, Price> known_;
};

struct Point {
  v1::JobSpec spec;
  Price price;
};

// One split on its way through the search.
struct Branch {
  v1::JobSpec split;
  std::vector<Knob> knobs;
  Point fastest;                 // were memory free; no policy of the split is faster
  std::optional<Point> leanest;  // where it was looked for
  std::optional<Point> start;    // the leanest that fits
  std::optional<Point> found;
};

// By how much of what there is a point does not fit.
double Excess(const Price& price, const Room& room) {
  const auto over = [](int64_t needed, int64_t available) {
    return std::max(0.0, static_cast<double>(needed) / static_cast<double>(available) - 1);
  };
  const double device = over(price.device_bytes, room.device_bytes);
  return room.host_bytes > 0 ? device + over(price.host_bytes, room.host_bytes) : device;
}

// Faster; or as fast and with less in host memory, then on the device.
bool IsBetter(const Price& a, const Price& b) {
  if (a.seconds < b.seconds * (1 - kWorthwhile)) return true;
  if (a.seconds > b.seconds) return false;
  if (a.host_bytes != b.host_bytes) return a.host_bytes < b.host_bytes;
  return a.seconds < b.seconds && a.device_bytes <= b.device_bytes;
}

// Goes from point to point of one split.
class Walk {
 public:
  Walk(PriceList& prices, const Room& room, const std::vector<Knob>& knobs)
      : prices_(prices), room_(room), knobs_(knobs) {}

  // From a point that does not fit to one that does, each time by the move that takes most of the
  // excess for its time; nothing where no move takes any.
  absl::StatusOr<std::optional<Point>> Down(Point at) {
    while (!Fits(at.price, room_)) {
      UPIPE_ASSIGN_OR_RETURN(std::vector<Point> points, PriceAll(MovesOf(at.spec, knobs_)));
      const double excess = Excess(at.price, room_);
      Point* best = nullptr;
      double best_worth = 0;
      for (Point& point : points) {
        const double taken = excess - Excess(point.price, room_);
        const double cost = std::max(point.price.seconds / at.price.seconds - 1, 1e-6);
        if (taken <= 0 || taken / cost <= best_worth) continue;
        best_worth = taken / cost;
        best = &point;
      }
      if (best == nullptr) return std::nullopt;
      at = std::move(*best);
    }
    return at;
  }

  // From a point that fits to one that no single move makes better; with `pairs`, no two either.
  absl::StatusOr<Point> Up(Point at, bool pairs) {
    for (;;) {
      std::vector<Move> moves = MovesOf(at.spec, knobs_);
      UPIPE_ASSIGN_OR_RETURN(std::optional<Point> best, BestOf(at, moves));
      if (!best.has_value() && pairs) {
        std::vector<Move> second;
        for (const Move& move : moves) {
          for (Move& next : MovesOf(move.spec, knobs_)) second.push_back(std::move(next));
        }
        UPIPE_ASSIGN_OR_RETURN(best, BestOf(at, second));
      }
      if (!best.has_value()) return at;
      at = *std::move(best);
    }
  }

 private:
  absl::StatusOr<std::vector<Point>> PriceAll(const std::vector<Move>& moves) {
    std::vector<v1::JobSpec> specs;
    for (const Move& move : moves) specs.push_back(move.spec);
    UPIPE_ASSIGN_OR_RETURN(const std::vector<Price> prices, prices_.Of(specs));
    std::vector<Point> points;
    for (size_t i = 0; i < moves.size(); ++i) points.push_back({specs[i], prices[i]});
    return points;
  }

  absl::StatusOr<std::optional<Point>> BestOf(const Point& at, const std::vector<Move>& moves) {
    UPIPE_ASSIGN_OR_RETURN(std::vector<Point> points, PriceAll(moves));
    std::optional<Point> best;
    for (Point& point : points) {
      if (!Fits(point.price, room_) || !IsBetter(point.price, at.price)) continue;
      if (!best.has_value() || IsBetter(point.price, best->price)) best = std::move(point);
    }
    return best;
  }

  PriceList& prices_;
  const Room room_;
  const std::vector<Knob>& knobs_;
};

// The knobs that move bytes between device and host.
std::vector<Knob> PlacesOf(const std::vector<Knob>& knobs) {
  std::vector<Knob> places;
  std::copy_if(knobs.begin(), knobs.end(), std::back_inserter(places), [](const Knob& knob) {
    const auto* values = knob.field->enum_type();
    return values == v1::Place_descriptor() || knob.field->name() == "checkpoint_stride";
  });
  return places;
}

// The leanest of a split in device memory need not be so in host memory: a longer stride takes from
// the host and gives to the device. The first stride with which both fit is the branch's start;
// else what is too much for the host may be left on the device.
absl::Status FindLeanest(PriceList& prices, const Room& room, Branch& branch) {
  std::vector<v1::JobSpec> specs = {Leanest(branch.split, branch.knobs)};
  for (const Knob& knob : branch.knobs) {
    if (knob.field->name() != "checkpoint_stride") continue;
    v1::JobSpec spec = specs[0];
    specs.clear();
    for (auto value = knob.values.rbegin(); value != knob.values.rend(); ++value) {
      spec.mutable_memory()->set_checkpoint_stride(static_cast<int32_t>(*value));
      specs.push_back(spec);
    }
  }
  for (const v1::JobSpec& spec : specs) {
    UPIPE_ASSIGN_OR_RETURN(const std::vector<Price> price, prices.Of({spec}));
    branch.leanest = Point{spec, price[0]};
    if (Fits(price[0], room)) {
      branch.start = Point{spec, price[0]};
      return absl::OkStatus();
    }
    // More of the host only: once the device is full a longer stride makes it worse.
    if (price[0].device_bytes > room.device_bytes) return absl::OkStatus();
  }
  // What leaves the host is no smaller on the device.
  const int64_t over = (branch.leanest->price.host_bytes - room.host_bytes) / room.node_ranks;
  if (branch.leanest->price.device_bytes + over > room.device_bytes) return absl::OkStatus();
  const std::vector<Knob> places = PlacesOf(branch.knobs);
  UPIPE_ASSIGN_OR_RETURN(branch.start, Walk(prices, room, places).Down(*branch.leanest));
  return absl::OkStatus();
}

// Down from the fastest of a split; where that ends nowhere, its leanest stays the start.
absl::Status StartFromFastest(PriceList& prices, const Room& room, Branch& branch) {
  UPIPE_ASSIGN_OR_RETURN(std::optional<Point> start,
                         Walk(prices, room, branch.knobs).Down(branch.fastest));
  if (start.has_value()) branch.start = std::move(start);
  return absl::OkStatus();
}

v1::Candidate CandidateOf(const Point& point, std::string verdict) {
  v1::Candidate candidate;
  *candidate.mutable_parallel() = point.spec.parallel();
  *candidate.mutable_memory() = point.spec.memory();
  candidate.set_device_bytes(point.price.device_bytes);
  candidate.set_host_bytes(point.price.host_bytes);
  candidate.set_step_seconds(point.price.seconds);
  candidate.set_verdict(std::move(verdict));
  return candidate;
}

std::string Slower(double seconds, double best) {
  const double percent = 100 * (seconds / best - 1);
  return percent < 0.05 ? "as fast" : absl::StrFormat("%.1f %% slower", percent);
}

std::vector<v1::Candidate> Explain(const std::vector<Branch>& branches, const Branch& best,
                                   const Room& room) {
  std::vector<v1::Candidate> lost, unfit;
  const double best_seconds = best.found->price.seconds;
  for (const Branch& branch : branches) {
    if (&branch == &best) continue;
    if (branch.found.has_value()) {
      lost.push_back(
          CandidateOf(*branch.found,
                      absl::StrCat("fits, ", Slower(branch.found->price.seconds, best_seconds))));
    } else if (branch.leanest.has_value() && !branch.start.has_value()) {
      unfit.push_back(CandidateOf(
          *branch.leanest,
          absl::StrCat("does not fit, at its leanest: ", Shortage(branch.leanest->price, room))));
    } else {
      lost.push_back(CandidateOf(branch.fastest,
                                 absl::StrCat("not looked into: were memory free, ",
                                              Slower(branch.fastest.price.seconds, best_seconds))));
    }
  }
  std::stable_sort(lost.begin(), lost.end(), [](const auto& a, const auto& b) {
    return a.step_seconds() < b.step_seconds();
  });
  std::vector<v1::Candidate> candidates = {CandidateOf(*best.found, "the fastest that fits")};
  candidates.insert(candidates.end(), lost.begin(), lost.end());
  candidates.insert(candidates.end(), unfit.begin(), unfit.end());
  return candidates;
}

// Looks for a split that fits at its leanest, those of the narrowest stages first, until one does:
// then the last of `tried` has a start. Wider stages take more of the device and no less of the
// host, so the narrowest of each ring decide.
absl::Status TryNarrowest(PriceList& prices, const Room& room, std::vector<v1::JobSpec> splits,
                          std::vector<Branch>& tried) {
  const auto width = [](const v1::JobSpec& split) {
    return split.parallel().method() == v1::METHOD_UPIPE
               ? split.parallel().heads_per_stage() * split.parallel().ring_ranks()
               : std::numeric_limits<int64_t>::max();
  };
  std::stable_sort(splits.begin(), splits.end(),
                   [&](const v1::JobSpec& a, const v1::JobSpec& b) { return width(a) < width(b); });
  std::set<int64_t> rings;
  for (v1::JobSpec& split : splits) {
    if (!rings.insert(split.parallel().ring_ranks()).second) continue;
    Branch& branch = tried.emplace_back();
    branch.knobs = KnobsOf(split);
    branch.split = std::move(split);
    UPIPE_RETURN_IF_ERROR(FindLeanest(prices, room, branch));
    if (branch.start.has_value()) break;
  }
  return absl::OkStatus();
}

absl::Status NothingFits(const std::vector<Branch>& tried, size_t splits, const Room& room) {
  const Branch& nearest =
      *std::min_element(tried.begin(), tried.end(), [&](const Branch& a, const Branch& b) {
        return Excess(a.leanest->price, room) < Excess(b.leanest->price, room);
      });
  const v1::JobSpec& spec = nearest.leanest->spec;
  return absl::ResourceExhaustedError(
      absl::StrCat("nothing fits: of ", splits, " splits at their leanest ",
                   MethodName(spec.parallel().method()), " ", MeshText(spec.parallel()), " with ",
                   PolicyText(spec.memory()), " comes nearest and needs ",
                   Shortage(nearest.leanest->price, room)));
}

}  // namespace

bool Fits(const Price& price, const Room& room) { return Shortage(price, room).empty(); }

std::string Shortage(const Price& price, const Room& room) {
  const auto lack = [](int64_t needed, int64_t available, const char* of) {
    return absl::StrCat(FormatBytes(needed), " of ", of, " and may take ", FormatBytes(available));
  };
  const bool device = price.device_bytes > room.device_bytes;
  const bool host = room.host_bytes > 0 && price.host_bytes > room.host_bytes;
  std::string text;
  if (device) text = lack(price.device_bytes, room.device_bytes, "device memory per rank");
  if (host) {
    absl::StrAppend(&text, device ? "; " : "",
                    lack(price.host_bytes, room.host_bytes, "host memory per node"));
  }
  return text;
}

absl::StatusOr<SearchResult> Search(const v1::JobSpec& spec, const Pricer& pricer,
                                    const SearchOptions& options) {
  PriceList prices(pricer, options.num_threads);
  std::vector<Branch> branches;
  for (v1::JobSpec& split : SplitsOf(spec)) {
    Branch& branch = branches.emplace_back();
    branch.knobs = KnobsOf(split);
    branch.split = std::move(split);
  }
  if (branches.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("no split of ", spec.parallel().ranks(),
                                                   " ranks and ", spec.model().num_heads(),
                                                   " heads goes with what is written"));
  }
  std::vector<Branch> tried;
  UPIPE_RETURN_IF_ERROR(TryNarrowest(prices, options.room, SplitsOf(spec), tried));
  if (!tried.back().start.has_value()) {
    return NothingFits(tried, branches.size(), options.room);
  }
  std::vector<v1::JobSpec> fastest;
  for (const Branch& branch : branches) fastest.push_back(Fastest(branch.split, branch.knobs));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Price> bounds, prices.Of(fastest));
  for (size_t i = 0; i < branches.size(); ++i) {
    branches[i].fastest = {std::move(fastest[i]), bounds[i]};
    if (Fits(bounds[i], options.room)) branches[i].found = branches[i].fastest;
  }
  std::stable_sort(branches.begin(), branches.end(), [](const Branch& a, const Branch& b) {
    return a.fastest.price.seconds < b.fastest.price.seconds;
  });
  Branch* best = nullptr;
  int done = 0;
  for (Branch& branch : branches) {
    const double limit = best == nullptr ? 0 : best->found->price.seconds * (1 - kWorthwhile);
    const bool open = best == nullptr || prices.size() < options.most_points;
    if (open && (best == nullptr || branch.fastest.price.seconds < limit)) {
      UPIPE_RETURN_IF_ERROR(FindLeanest(prices, options.room, branch));
      if (branch.start) {
        UPIPE_RETURN_IF_ERROR(StartFromFastest(prices, options.room, branch));
        UPIPE_ASSIGN_OR_RETURN(
            branch.found,
            Walk(prices, options.room, branch.knobs).Up(*branch.start, /*pairs=*/false));
        if (best == nullptr || branch.found->price.seconds < limit) best = &branch;
      }
    }
    if (options.progress != nullptr) {
      options.progress(++done, static_cast<int>(branches.size()), prices.size(),
                       best == nullptr ? 0 : best->found->price.seconds);
    }
  }
  UPIPE_CHECK(best != nullptr) << "a split fits and none was found";
  if (prices.size() < options.most_points) {
    UPIPE_ASSIGN_OR_RETURN(
        best->found, Walk(prices, options.room, best->knobs).Up(*best->found, /*pairs=*/true));
  }
  SearchResult result;
  result.best = best->found->spec;
  result.price = best->found->price;
  result.candidates = Explain(branches, *best, options.room);
  result.priced = prices.size();
  return result;
}

absl::StatusOr<std::optional<v1::JobSpec>> AnythingThatFits(const v1::JobSpec& spec,
                                                            const Pricer& pricer, const Room& room,
                                                            int num_threads) {
  PriceList prices(pricer, num_threads);
  std::vector<Branch> tried;
  UPIPE_RETURN_IF_ERROR(TryNarrowest(prices, room, SplitsOf(spec), tried));
  if (tried.empty() || !tried.back().start.has_value()) return std::nullopt;
  return std::move(tried.back().start->spec);
}

absl::StatusOr<int64_t> LargestThatFits(int64_t unit, int64_t start, int64_t limit,
                                        const std::function<absl::StatusOr<bool>(int64_t)>& fits,
                                        int64_t precision) {
  const int64_t end = limit / unit + 1;
  int64_t good = 0, bad = end;  // in units
  int64_t at = std::clamp<int64_t>(start / unit, 1, std::max<int64_t>(1, end - 1));
  while (good + 1 < bad && (bad == end || bad - good > good / precision)) {
    UPIPE_ASSIGN_OR_RETURN(const bool fitted, fits(at * unit));
    (fitted ? good : bad) = at;
    at = bad == end ? std::min(2 * at, end - 1) : good + (bad - good) / 2;
  }
  return good * unit;
}

}  // namespace upipe::planner
