// What a dry run adds up instead of computing: calls of ops by what one of them costs, and copies
// to and from host memory. Plain data: counts of several runs add up, so a long step's can be made
// of shorter ones'.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "kernels/api/op_table.h"

namespace upipe::kernels {

inline constexpr int kNumOps = static_cast<int>(std::variant_size_v<OpParams>);

struct DryOpCount {
  int64_t calls = 0;
  OpCost cost;  // of all of them

  void Add(const OpCost& call, int64_t times = 1) {
    const auto factor = static_cast<double>(times);
    calls += times;
    cost.flops += factor * call.flops;
    cost.bytes_read += factor * call.bytes_read;
    cost.bytes_written += factor * call.bytes_written;
  }
};

// Calls of one op that cost the same.
struct DryCalls {
  int op = 0;                     // OpParams::index(), see op_name.h
  DType dtype = DType::kFloat32;  // storage type of a product or an attention; else fp32
  bool on_host = false;           // over host memory
  OpCost cost;                    // of one call
  int64_t extent = 0;             // rows of a product's left side; keys an attention attends over
  int64_t calls = 0;

  bool SameKind(const DryCalls& other) const {
    return cost.flops == other.cost.flops && cost.bytes_read == other.cost.bytes_read &&
           cost.bytes_written == other.cost.bytes_written && extent == other.extent &&
           op == other.op && dtype == other.dtype && on_host == other.on_host;
  }
};

// Index of a params type in OpParams: kOpIndex<MatmulParams>.
template <typename Params, typename Variant = OpParams>
inline constexpr int kOpIndex = -1;
template <typename Params, typename... Types>
inline constexpr int kOpIndex<Params, std::variant<Types...>> = [] {
  int index = 0;
  static_cast<void>(((std::is_same_v<Params, Types> || (++index, false)) || ...));
  return index;
}();

class DryCounts {
 public:
  int64_t copies_to_host = 0;
  int64_t bytes_to_host = 0;
  int64_t copies_from_host = 0;
  int64_t bytes_from_host = 0;

  // Adds `calls.calls` calls, which may be negative.
  void Add(const DryCalls& calls);
  // Adds everything in `other` that many times, which may be negative.
  void AddTimes(const DryCounts& other, int64_t times);

  // By op, in the order they were first seen; every element another kind.
  const std::array<std::vector<DryCalls>, kNumOps>& by_kind() const { return by_kind_; }
  // By op name, host and device together; ops without calls are left out.
  std::map<std::string, DryOpCount> by_op() const;
  DryOpCount total() const;
  // As many calls of every kind, and the same copies.
  bool operator==(const DryCounts& other) const;

 private:
  std::array<std::vector<DryCalls>, kNumOps> by_kind_;
  std::array<size_t, kNumOps> last_ = {};  // where the op was found last
};

}  // namespace upipe::kernels
