#include "tests/invariance/engine/pairwise.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

namespace upipe::testing {
namespace {

// Value a of dimension i beside value b of dimension j, i < j.
using Pair = std::tuple<int, int, int, int>;

Pair PairOf(int i, int a, int j, int b) { return i < j ? Pair(i, a, j, b) : Pair(j, b, i, a); }

class Search {
 public:
  Search(const std::vector<int>& sizes, const std::function<bool(const Row&)>& legal)
      : sizes_(sizes), legal_(legal) {
    const int dimensions = static_cast<int>(sizes.size());
    for (int i = 0; i < dimensions; ++i) {
      for (int j = i + 1; j < dimensions; ++j) {
        for (int a = 0; a < sizes[i]; ++a) {
          for (int b = 0; b < sizes[j]; ++b) open_.insert({i, a, j, b});
        }
      }
    }
  }

  std::vector<Row> Run() {
    std::vector<Row> rows;
    while (!open_.empty()) {
      const Pair first = *open_.begin();
      const Row row = BestRow(first);
      open_.erase(first);
      if (row.empty()) continue;
      Close(row);
      rows.push_back(row);
    }
    return rows;
  }

 private:
  // Legal rows looked at for each new one, and tries to find one at all.
  static constexpr int kCandidates = 12;
  static constexpr int kTries = 400;

  Row BestRow(const Pair& with) {
    Row best;
    int best_gain = 0, found = 0;
    for (int attempt = 0; attempt < kTries && found < kCandidates; ++attempt) {
      // Greedy rows first; purely random ones where the rules leave little room.
      const Row row = Complete(with, /*greedy=*/attempt % 2 == 0);
      if (!legal_(row)) continue;
      ++found;
      const int gain = Gain(row);
      if (gain > best_gain) {
        best_gain = gain;
        best = row;
      }
    }
    return best;
  }

  Row Complete(const Pair& with, bool greedy) {
    const auto [i, a, j, b] = with;
    Row row(sizes_.size(), -1);
    row[i] = a;
    row[j] = b;
    std::vector<int> order(sizes_.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (int dimension : order) {
      if (row[dimension] >= 0) continue;
      const int first = Draw(sizes_[dimension]);
      int best_gain = -1;
      for (int step = 0; greedy && step < sizes_[dimension]; ++step) {
        const int value = (first + step) % sizes_[dimension];
        const int gain = GainOf(row, dimension, value);
        if (gain > best_gain) {
          best_gain = gain;
          row[dimension] = value;
        }
      }
      if (!greedy) row[dimension] = first;
    }
    return row;
  }

  int GainOf(const Row& row, int dimension, int value) const {
    int gain = 0;
    for (int other = 0; other < static_cast<int>(row.size()); ++other) {
      if (other == dimension || row[other] < 0) continue;
      gain += open_.contains(PairOf(dimension, value, other, row[other])) ? 1 : 0;
    }
    return gain;
  }

  int Gain(const Row& row) const {
    int gain = 0;
    for (int i = 0; i < static_cast<int>(row.size()); ++i) {
      for (int j = i + 1; j < static_cast<int>(row.size()); ++j) {
        gain += open_.contains({i, row[i], j, row[j]}) ? 1 : 0;
      }
    }
    return gain;
  }

  void Close(const Row& row) {
    for (int i = 0; i < static_cast<int>(row.size()); ++i) {
      for (int j = i + 1; j < static_cast<int>(row.size()); ++j) {
        open_.erase({i, row[i], j, row[j]});
      }
    }
  }

  int Draw(int size) { return static_cast<int>(random_() % static_cast<uint64_t>(size)); }

  const std::vector<int>& sizes_;
  const std::function<bool(const Row&)>& legal_;
  std::set<Pair> open_;
  std::mt19937_64 random_{1};
};

}  // namespace

std::vector<Row> EveryPair(const std::vector<int>& sizes,
                           const std::function<bool(const Row&)>& legal) {
  return Search(sizes, legal).Run();
}

}  // namespace upipe::testing
