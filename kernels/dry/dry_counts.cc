#include "kernels/dry/dry_counts.h"

#include "kernels/api/op_name.h"

namespace upipe::kernels {

void DryCounts::Add(const DryCalls& calls) {
  std::vector<DryCalls>& kinds = by_kind_[calls.op];
  size_t& last = last_[calls.op];
  // A step repeats itself: what comes next is most often what came last, or what followed it.
  for (size_t i = 0; i < kinds.size(); ++i) {
    const size_t at = last + i < kinds.size() ? last + i : last + i - kinds.size();
    if (!kinds[at].SameKind(calls)) continue;
    kinds[at].calls += calls.calls;
    last = at;
    return;
  }
  last = kinds.size();
  kinds.push_back(calls);
}

void DryCounts::AddTimes(const DryCounts& other, int64_t times) {
  for (const std::vector<DryCalls>& kinds : other.by_kind_) {
    for (DryCalls calls : kinds) {
      calls.calls *= times;
      Add(calls);
    }
  }
  copies_to_host += times * other.copies_to_host;
  bytes_to_host += times * other.bytes_to_host;
  copies_from_host += times * other.copies_from_host;
  bytes_from_host += times * other.bytes_from_host;
}

std::map<std::string, DryOpCount> DryCounts::by_op() const {
  std::map<std::string, DryOpCount> by_op;
  for (int op = 0; op < kNumOps; ++op) {
    for (const DryCalls& calls : by_kind_[op]) {
      if (calls.calls != 0) by_op[NameOfOp(op)].Add(calls.cost, calls.calls);
    }
  }
  return by_op;
}

DryOpCount DryCounts::total() const {
  DryOpCount total;
  for (const std::vector<DryCalls>& kinds : by_kind_) {
    for (const DryCalls& calls : kinds) total.Add(calls.cost, calls.calls);
  }
  return total;
}

bool DryCounts::operator==(const DryCounts& other) const {
  DryCounts difference = *this;
  difference.AddTimes(other, -1);
  for (const std::vector<DryCalls>& kinds : difference.by_kind_) {
    for (const DryCalls& calls : kinds) {
      if (calls.calls != 0) return false;
    }
  }
  return difference.copies_to_host == 0 && difference.bytes_to_host == 0 &&
         difference.copies_from_host == 0 && difference.bytes_from_host == 0;
}

}  // namespace upipe::kernels
