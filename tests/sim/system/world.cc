#include "tests/sim/system/world.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace upipe::sim {
namespace {

constexpr size_t kMaxViolations = 5;

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

World::World(uint64_t seed, bool verbose)
    : random_{Mix(seed), Mix(seed + 0x51ed2701)}, verbose_(verbose) {}

uint64_t World::Next() {  // xoroshiro128+
  const uint64_t a = random_[0];
  uint64_t b = random_[1];
  const uint64_t result = a + b;
  b ^= a;
  random_[0] = ((a << 24) | (a >> 40)) ^ b ^ (b << 16);
  random_[1] = (b << 37) | (b >> 27);
  return result >> 4;
}

absl::Duration World::Between(absl::Duration low, absl::Duration high) {
  const int64_t span = absl::ToInt64Microseconds(high - low);
  return low + absl::Microseconds(span <= 0 ? 0 : static_cast<int64_t>(Random(span + 1)));
}

void World::Push(Item item) {
  heap_.push_back(std::move(item));
  std::push_heap(heap_.begin(), heap_.end(), Later());
}

void World::After(absl::Duration delay, Action action) {
  Push({now_ + std::max(delay, absl::ZeroDuration()), next_number_++, nullptr, 0,
        std::move(action)});
}

void World::After(Actor& actor, absl::Duration delay, Action action) {
  Push({now_ + std::max(delay, absl::ZeroDuration()), next_number_++, &actor, actor.life,
        std::move(action)});
}

void World::RunOne() {
  UPIPE_CHECK(!heap_.empty());
  std::pop_heap(heap_.begin(), heap_.end(), Later());
  Item item = std::move(heap_.back());
  heap_.pop_back();
  now_ = std::max(now_, item.due);
  if (item.actor != nullptr) {
    if (item.actor->life != item.life) return;
    const Time resumed = std::max(item.actor->stopped_until, item.actor->machine->suspended_until);
    if (resumed > now_) {
      item.due = resumed;
      return Push(std::move(item));
    }
  }
  digest_ = Mix(digest_ ^ item.number ^ static_cast<uint64_t>(absl::ToInt64Nanoseconds(now_)));
  item.action();
}

bool World::Mishap(double percent) {
  if (!faults_ || !Chance(percent)) return false;
  ++num_faults_;
  return true;
}

void World::CountFault(const char* what) {
  ++num_faults_;
  if (verbose_) Trace("FAULT", what);
}

void World::Violate(const std::string& what) {
  if (violations_.size() >= kMaxViolations) return;
  violations_.push_back(absl::StrCat("at ", absl::FormatDuration(now_), ": ", what));
  if (verbose_) Trace("VIOLATION", what);
}

void World::Trace(const std::string& who, const std::string& what) const {
  std::printf("%10.4f %-6s %s\n", absl::ToDoubleSeconds(now_), who.c_str(), what.c_str());
}

}  // namespace upipe::sim
