// What leaves a rank in a dry run, by kind of collective, by whether the compute stream waits for
// it, and by whether it leaves the node. Plain data that adds up over runs.
#pragma once

#include <array>
#include <cstdint>

namespace upipe::comm {

enum class TrafficKind : uint8_t {
  kExchange,  // all-to-all: heads of a stage, K/V round the ring
  kGather,    // all-gather: weights
  kReduce,    // reduce-scatter: gradients
  kAgree,     // all-reduce and barrier: a few scalars
};
inline constexpr int kNumTrafficKinds = 4;

struct TrafficCount {
  int64_t collectives = 0;
  int64_t bytes_in_node = 0;        // to all peers of the own node together
  int64_t bytes_between_nodes = 0;  // to all others

  void AddTimes(const TrafficCount& other, int64_t times) {
    collectives += times * other.collectives;
    bytes_in_node += times * other.bytes_in_node;
    bytes_between_nodes += times * other.bytes_between_nodes;
  }
  bool operator==(const TrafficCount&) const = default;
};

class DryTraffic {
 public:
  struct Where {
    TrafficKind kind = TrafficKind::kExchange;
    bool beside_compute = false;  // enqueued on another stream than the compute stream
    bool leaves_node = false;     // the collective sends anything to another node
  };
  TrafficCount& at(const Where& where) { return counts_[IndexOf(where)]; }
  const TrafficCount& at(const Where& where) const { return counts_[IndexOf(where)]; }
  // Adds everything in `other` that many times, which may be negative.
  void AddTimes(const DryTraffic& other, int64_t times) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i].AddTimes(other.counts_[i], times);
  }
  bool operator==(const DryTraffic&) const = default;

 private:
  static size_t IndexOf(const Where& where) {
    return static_cast<size_t>(where.kind) * 4 + (where.beside_compute ? 2 : 0) +
           (where.leaves_node ? 1 : 0);
  }
  std::array<TrafficCount, kNumTrafficKinds* 4> counts_ = {};
};

}  // namespace upipe::comm
