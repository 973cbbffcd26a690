// The allocator alone, on streams that only take notes.
#include "kernels/api/allocator.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::kernels {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Keeps the events it was told to wait for, and the order of calls.
class NotingStream final : public Stream {
 public:
  class Point final : public Event::State {
   public:
    Point(const NotingStream* stream, int number) : stream(stream), number(number) {}
    bool Done() const override { return false; }
    absl::Status Synchronize() override { return absl::OkStatus(); }
    const NotingStream* stream;
    int number;
  };

  const std::string& name() const override { return name_; }
  void Submit(Task task) override {
    calls.push_back("submit");
    tasks.push_back(std::move(task));
  }
  Event Record() override {
    calls.push_back("record");
    return Event(std::make_shared<Point>(this, ++records));
  }
  void Wait(const Event& event) override {
    const auto* point = dynamic_cast<const Point*>(event.state().get());
    waits.push_back({point->stream, point->number});
  }

  std::vector<std::pair<const NotingStream*, int>> waits;
  std::vector<std::string> calls;
  std::vector<Task> tasks;
  int records = 0;

 private:
  std::string name_ = "noting";
};

constexpr int64_t kKiB = 1024;
char* const kBase = reinterpret_cast<char*>(int64_t{1} << 40);

Allocator::Options Arena(int64_t bytes) { return {.base = kBase, .arena_bytes = bytes}; }

Buffer Take(Allocator& allocator, int64_t bytes, Stream& stream,
            MemoryTag tag = MemoryTag::kWorkspace) {
  absl::StatusOr<Buffer> buffer = allocator.Allocate(tag, bytes, stream);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return buffer.ok() ? *std::move(buffer) : Buffer();
}

int64_t Offset(const Buffer& buffer) { return static_cast<char*>(buffer.data()) - kBase; }

TEST(Allocator, AlignsAndCountsRequestedBytes) {
  NotingStream stream;
  Allocator allocator(Arena(kKiB));
  const Buffer a = Take(allocator, 1, stream, MemoryTag::kMlp);
  const Buffer b = Take(allocator, 257, stream, MemoryTag::kMlp);
  EXPECT_EQ(Offset(a), 0);
  EXPECT_EQ(Offset(b), 256);
  EXPECT_EQ(b.size_bytes(), 257);
  const MemoryStats stats = allocator.stats();
  EXPECT_EQ(stats.current_bytes[static_cast<int>(MemoryTag::kMlp)], 258);
  EXPECT_EQ(stats.current_total_bytes, 258);
  EXPECT_EQ(stats.arena_high_water_bytes, 768);
}

TEST(Allocator, ZeroBytesGiveAValidEmptyBuffer) {
  NotingStream stream;
  Allocator allocator(Arena(0));
  Buffer empty = Take(allocator, 0, stream);
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.size_bytes(), 0);
  empty.Free();
  EXPECT_FALSE(empty);
  EXPECT_TRUE(stream.calls.empty());
  EXPECT_FALSE(Buffer());
  EXPECT_EQ(allocator.Allocate(MemoryTag::kMlp, -1, stream).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Allocator, TakesTheSmallestHoleThatFitsThenTheLowest) {
  NotingStream stream;
  Allocator allocator(Arena(64 * kKiB));
  std::vector<Buffer> blocks;
  for (const int64_t kib : {4, 1, 2, 1, 3, 1, 2, 1}) {
    blocks.push_back(Take(allocator, kib * kKiB, stream));
  }
  for (const int hole : {0, 2, 4, 6}) blocks[hole].Free();  // holes of 4, 2, 3, 2 KiB
  EXPECT_EQ(Offset(Take(allocator, 2 * kKiB - 7, stream)), 5 * kKiB);
  EXPECT_EQ(Offset(Take(allocator, 3 * kKiB, stream)), 8 * kKiB);
  EXPECT_EQ(Offset(Take(allocator, 4 * kKiB, stream)), 0);
  EXPECT_EQ(Offset(Take(allocator, 5 * kKiB, stream)), 15 * kKiB);
}

TEST(Allocator, CoalescesWhateverTheOrderOfFrees) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    NotingStream stream;
    Allocator allocator(Arena(16 * kKiB));
    std::vector<Buffer> blocks;
    for (int i = 0; i < 16; ++i) blocks.push_back(Take(allocator, kKiB, stream));
    EXPECT_EQ(allocator.Allocate(MemoryTag::kMlp, 1, stream).status().code(),
              absl::StatusCode::kResourceExhausted);
    std::shuffle(blocks.begin(), blocks.end(), random);
    // All but the last free one run of holes below a live block, then everything.
    Buffer live = std::move(blocks.back());
    blocks.clear();
    const int64_t below = Offset(live);
    const int64_t above = 15 * kKiB - below;
    if (std::max(below, above) > 0) {
      EXPECT_EQ(Take(allocator, std::max(below, above), stream).size_bytes(),
                std::max(below, above));
    }
    live.Free();
    EXPECT_EQ(Offset(Take(allocator, 16 * kKiB, stream)), 0);
  }
}

TEST(Allocator, SpaceFreedAtTheTopJoinsTheUntouchedArena) {
  NotingStream stream;
  Allocator allocator(Arena(4 * kKiB));
  const Buffer low = Take(allocator, kKiB, stream);
  Take(allocator, kKiB, stream).Free();
  EXPECT_EQ(Offset(Take(allocator, 3 * kKiB, stream)), kKiB);
}

TEST(Allocator, ExhaustionNamesTagBytesAskedFreeAndLargest) {
  NotingStream stream;
  Allocator allocator(Arena(10 * kKiB));
  std::vector<Buffer> blocks;
  for (const int64_t kib : {2, 1, 3, 1}) blocks.push_back(Take(allocator, kib * kKiB, stream));
  blocks[0].Free();
  blocks[2].Free();  // holes of 2 and 3 KiB, 3 KiB above
  const absl::Status status = allocator.Allocate(MemoryTag::kLogits, 3100, stream).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("logits asked for 3100 bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("8192 of 10240 are free"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("largest free block 3072"));
  EXPECT_EQ(allocator.Allocate(MemoryTag::kLogits, INT64_MAX, stream).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(allocator.stats().current_total_bytes, 2 * kKiB);
}

TEST(Allocator, ReuseOnTheSameStreamCostsNothing) {
  NotingStream stream;
  Allocator allocator(Arena(kKiB));
  Take(allocator, kKiB, stream).Free();
  const Buffer again = Take(allocator, kKiB, stream);
  EXPECT_TRUE(stream.waits.empty());
}

TEST(Allocator, AStreamLeavesWhatOthersFreedWhileThereIsUnusedSpace) {
  NotingStream compute, side;
  Allocator allocator(Arena(8 * kKiB));
  Buffer hole = Take(allocator, 2 * kKiB, compute);
  const Buffer live = Take(allocator, kKiB, compute);
  hole.Free();
  Buffer other = Take(allocator, kKiB, side);
  EXPECT_EQ(Offset(other), 3 * kKiB);
  EXPECT_EQ(Offset(Take(allocator, kKiB, compute)), 0);
  other.Free();
  // Its own space, which ends where nobody was, goes on there.
  const Buffer longer = Take(allocator, 2 * kKiB, side);
  EXPECT_EQ(Offset(longer), 3 * kKiB);
  const Buffer above = Take(allocator, 3 * kKiB, compute);
  EXPECT_EQ(Offset(above), 5 * kKiB);
  EXPECT_TRUE(compute.waits.empty());
  EXPECT_TRUE(side.waits.empty());
  // The arena is full: the hole goes to who needs it, behind a wait.
  const Buffer forced = Take(allocator, 2 * kKiB, side);
  EXPECT_EQ(Offset(forced), 0);
  EXPECT_THAT(side.waits, ElementsAre(std::pair<const NotingStream*, int>{&compute, 2}));
}

TEST(Allocator, ReuseOnAnotherStreamWaitsForItsFree) {
  NotingStream compute, comm;
  Allocator allocator(Arena(kKiB));
  Take(allocator, kKiB, compute).Free();
  {
    const Buffer moved = Take(allocator, kKiB, comm);
    EXPECT_THAT(comm.waits, ElementsAre(std::pair<const NotingStream*, int>{&compute, 1}));
  }
  // The block is now known by comm's free, not by compute's.
  const Buffer back = Take(allocator, kKiB, compute);
  EXPECT_THAT(compute.waits, ElementsAre(std::pair<const NotingStream*, int>{&comm, 1}));
  EXPECT_EQ(comm.waits.size(), 1u);
}

TEST(Allocator, WaitsOncePerStreamForTheLatestFreeInsideTheBlockOnly) {
  NotingStream compute, comm, copy, taker;
  Allocator allocator(Arena(4 * kKiB));
  std::vector<Buffer> blocks;
  for (Stream* stream : std::vector<Stream*>{&compute, &comm, &compute, &copy}) {
    blocks.push_back(Take(allocator, kKiB, *stream));
  }
  blocks[2].Free();                                           // compute, 1st
  blocks[0].Free();                                           // compute, 2nd
  blocks[1].Free();                                           // comm
  blocks[3].Free();                                           // copy
  const Buffer big = Take(allocator, 2 * kKiB + 512, taker);  // half of compute's first
  EXPECT_THAT(taker.waits, ElementsAre(std::pair<const NotingStream*, int>{&compute, 2},
                                       std::pair<const NotingStream*, int>{&comm, 1}));
  const Buffer rest = Take(allocator, 512, comm);  // the other half
  EXPECT_THAT(comm.waits, ElementsAre(std::pair<const NotingStream*, int>{&compute, 1}));
}

TEST(Allocator, TheLatestFreeOfAStreamCountsWhereverItLies) {
  for (const int first : {0, 1}) {
    NotingStream compute, taker;
    Allocator allocator(Arena(2 * kKiB));
    std::vector<Buffer> blocks;
    for (int i = 0; i < 2; ++i) blocks.push_back(Take(allocator, kKiB, compute));
    blocks[first].Free();
    blocks[1 - first].Free();
    const Buffer both = Take(allocator, 2 * kKiB, taker);
    EXPECT_THAT(taker.waits, ElementsAre(std::pair<const NotingStream*, int>{&compute, 2}));
  }
}

TEST(Allocator, PoisonIsSubmittedBeforeTheBlockIsGivenUp) {
  std::vector<unsigned char> memory(1024, 0);
  void* base = memory.data();
  size_t space = memory.size();
  std::align(Allocator::kAlignmentBytes, 512, base, space);
  NotingStream stream;
  Allocator allocator({.base = base, .arena_bytes = 512, .poison = Allocator::PoisonOnHost});
  Take(allocator, 300, stream).Free();
  EXPECT_THAT(stream.calls, ElementsAre("submit", "record"));
  struct Inline final : ParallelFor {
    int num_threads() const override { return 1; }
    void Run(int64_t, const std::function<void(int64_t, int64_t, int)>&) override {}
  } parallel;
  ExecContext context{parallel};
  ASSERT_TRUE(stream.tasks[0](context).ok());
  const auto* bytes = static_cast<unsigned char*>(base);
  EXPECT_TRUE(std::all_of(bytes, bytes + 300, [](unsigned char byte) { return byte == 0xFF; }));
}

TEST(Allocator, KeepsPeaksSplitAndMoment) {
  NotingStream stream;
  Allocator allocator(Arena(64 * kKiB));
  const auto bytes_of = [](const TagBytes& bytes, MemoryTag tag) {
    return bytes[static_cast<int>(tag)];
  };
  allocator.set_moment("forward");
  Buffer q = Take(allocator, 100, stream, MemoryTag::kAttnQ);
  Buffer grad = Take(allocator, 200, stream, MemoryTag::kAttnGrad);
  q.Free();
  allocator.set_moment("mlp");
  Buffer mlp = Take(allocator, 1000, stream, MemoryTag::kMlp);
  grad.Free();
  mlp.Free();
  MemoryStats stats = allocator.stats();
  EXPECT_EQ(stats.current_total_bytes, 0);
  EXPECT_EQ(stats.attention_peak_bytes, 300);
  EXPECT_EQ(stats.peak_total_bytes, 1200);
  EXPECT_EQ(stats.peak_moment, "mlp");
  EXPECT_EQ(bytes_of(stats.peak_bytes, MemoryTag::kAttnQ), 100);
  EXPECT_EQ(bytes_of(stats.at_peak_bytes, MemoryTag::kAttnQ), 0);
  EXPECT_EQ(bytes_of(stats.at_peak_bytes, MemoryTag::kAttnGrad), 200);
  EXPECT_EQ(bytes_of(stats.at_peak_bytes, MemoryTag::kMlp), 1000);
  const int64_t high_water = stats.arena_high_water_bytes;
  const Buffer weights = Take(allocator, 50, stream, MemoryTag::kWeights);
  allocator.set_moment("idle");
  allocator.ResetPeaks();
  stats = allocator.stats();
  EXPECT_EQ(stats.peak_total_bytes, 50);
  EXPECT_EQ(stats.attention_peak_bytes, 0);
  EXPECT_EQ(stats.peak_moment, "idle");
  EXPECT_EQ(bytes_of(stats.peak_bytes, MemoryTag::kMlp), 0);
  EXPECT_EQ(bytes_of(stats.at_peak_bytes, MemoryTag::kWeights), 50);
  EXPECT_EQ(stats.arena_high_water_bytes, high_water);
}

TEST(Allocator, MovedBuffersFreeOnce) {
  NotingStream stream;
  Allocator allocator(Arena(kKiB));
  Buffer a = Take(allocator, 512, stream);
  Buffer b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT: moved-from buffers are empty by contract
  a = Take(allocator, 512, stream);
  EXPECT_EQ(allocator.stats().current_total_bytes, 1024);
  a = std::move(b);  // frees what a held
  EXPECT_EQ(allocator.stats().current_total_bytes, 512);
  EXPECT_EQ(Offset(a), 0);
}

TEST(AllocatorDeathTest, ABufferMustNotOutliveItsAllocator) {
  NotingStream stream;
  EXPECT_DEATH(
      {
        auto* allocator = new Allocator(Arena(kKiB));
        auto* buffer = new Buffer(Take(*allocator, 10, stream));
        delete allocator;
        delete buffer;
      },
      "1 buffers outlive their allocator");
}

// The rule of Allocate again, on one cell per 256 bytes, as slow and as plain as can be.
class CellAllocator {
 public:
  static constexpr int kUnused = -1, kLive = -2;

  explicit CellAllocator(int64_t cells) : cells_(cells, kUnused) {}

  // First cell, or -1.
  int64_t Take(int64_t count, int stream) {
    int64_t at = FindFor(count, [&](int cell) { return cell == stream || cell == kUnused; });
    if (at < 0) at = FindFor(count, [&](int cell) { return cell != kLive; });
    if (at >= 0) std::fill_n(cells_.begin() + at, count, kLive);
    return at;
  }
  void Free(int64_t at, int64_t count, int stream) {
    std::fill_n(cells_.begin() + at, count, stream);
  }

 private:
  // Of the longest runs of usable cells: the shortest that fits, then the lowest; one at the end
  // only when no other fits.
  int64_t FindFor(int64_t count, const std::function<bool(int)>& usable) const {
    const auto num_cells = static_cast<int64_t>(cells_.size());
    int64_t best = -1, best_length = INT64_MAX;
    for (int64_t begin = 0, end; begin < num_cells; begin = end + 1) {
      for (end = begin; end < num_cells && usable(cells_[end]); ++end) continue;
      const int64_t length = end == num_cells ? INT64_MAX - 1 : end - begin;
      if (end - begin >= count && length < best_length) {
        best = begin;
        best_length = length;
      }
    }
    return best;
  }

  std::vector<int> cells_;
};

TEST(Allocator, FollowsTheRuleCellForCell) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    const int64_t cells = 40 + seed * 20;
    std::mt19937 random(seed);
    NotingStream streams[3];
    Allocator allocator(Arena(cells * 256));
    CellAllocator expected(cells);
    struct Block {
      Buffer buffer;
      int64_t at;
      int64_t count;
      int stream;
    };
    std::vector<Block> live;
    for (int i = 0; i < 1000; ++i) {
      if (live.size() > 12 || (!live.empty() && random() % 2 == 0)) {
        const auto block = live.begin() + random() % live.size();
        expected.Free(block->at, block->count, block->stream);
        live.erase(block);
        continue;
      }
      const int64_t count = 1 + random() % (random() % 2 ? 4 : 30);
      const int stream = static_cast<int>(random() % 3);
      auto buffer = allocator.Allocate(MemoryTag::kMlp, count * 256, streams[stream]);
      const int64_t at = expected.Take(count, stream);
      ASSERT_EQ(buffer.ok(), at >= 0) << "seed " << seed << " step " << i;
      if (at < 0) continue;
      ASSERT_EQ(Offset(*buffer), at * 256) << "seed " << seed << " step " << i;
      live.push_back({*std::move(buffer), at, count, stream});
    }
  }
}

// A seeded sequence of allocations and frees; what it got is returned as text.
struct Trace {
  std::string offsets;
  MemoryStats stats;
  size_t waits = 0;
};

Trace RandomTrace(uint32_t seed, int64_t arena_bytes) {
  Trace trace;
  std::mt19937 random(seed);
  NotingStream streams[3];
  Allocator allocator(Arena(arena_bytes));
  std::vector<Buffer> live;
  TagBytes current = {}, peak = {};
  int64_t total_peak = 0;
  for (int i = 0; i < 2000; ++i) {
    if (live.size() > 30 || (!live.empty() && random() % 2 == 0)) {
      live.erase(live.begin() + random() % live.size());
    } else {
      const auto tag = static_cast<MemoryTag>(random() % kNumMemoryTags);
      Buffer buffer =
          Take(allocator, random() % (random() % 2 ? 600 : 9000), streams[random() % 3], tag);
      for (const Buffer& other : live) {
        if (buffer.size_bytes() == 0 || other.size_bytes() == 0) continue;
        EXPECT_TRUE(Offset(buffer) + buffer.size_bytes() <= Offset(other) ||
                    Offset(other) + other.size_bytes() <= Offset(buffer));
      }
      trace.offsets += std::to_string(Offset(buffer)) + " ";
      live.push_back(std::move(buffer));
    }
    current = allocator.stats().current_bytes;
    int64_t total = 0, live_total = 0;
    for (int tag = 0; tag < kNumMemoryTags; ++tag) {
      peak[tag] = std::max(peak[tag], current[tag]);
      total += current[tag];
    }
    for (const Buffer& buffer : live) live_total += buffer.size_bytes();
    EXPECT_EQ(total, live_total);
    total_peak = std::max(total_peak, total);
  }
  trace.stats = allocator.stats();
  for (const NotingStream& stream : streams) trace.waits += stream.waits.size();
  EXPECT_EQ(trace.stats.peak_bytes, peak);
  EXPECT_EQ(trace.stats.peak_total_bytes, total_peak);
  return trace;
}

// Beside blocks that stay, the same sequence gets the same addresses after every Settle, and so the
// arena of the first holds all of them.
TEST(Allocator, EveryPassAfterASettleIsTheFirst) {
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    NotingStream streams[3];
    Allocator allocator(Arena(int64_t{1} << 50));
    const Buffer low = Take(allocator, 1000, streams[0]);
    Buffer gone = Take(allocator, 3000, streams[1]);
    const Buffer high = Take(allocator, 500, streams[2]);
    gone.Free();
    std::string first;
    int64_t high_water = 0;
    for (int pass = 0; pass < 4; ++pass) {
      allocator.Settle();
      std::mt19937 random(seed);
      std::vector<Buffer> live;
      std::string offsets;
      for (int i = 0; i < 300; ++i) {
        if (live.size() > 10 || (!live.empty() && random() % 2 == 0)) {
          live.erase(live.begin() + random() % live.size());
        } else {
          live.push_back(Take(allocator, random() % 6000, streams[random() % 3]));
          offsets += std::to_string(Offset(live.back())) + " ";
        }
      }
      if (pass == 0) {
        first = offsets;
        high_water = allocator.stats().arena_high_water_bytes;
      }
      EXPECT_EQ(offsets, first) << "seed " << seed << " pass " << pass;
    }
    EXPECT_EQ(allocator.stats().arena_high_water_bytes, high_water);
    for (const NotingStream& stream : streams) EXPECT_TRUE(stream.waits.empty());
  }
}

TEST(Allocator, AnArenaOfTheHighWaterMarkGivesTheAddressesOfAnUnlimitedOne) {
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    const Trace dry = RandomTrace(seed, int64_t{1} << 50);
    const Trace real = RandomTrace(seed, dry.stats.arena_high_water_bytes);
    EXPECT_EQ(dry.offsets, real.offsets) << "seed " << seed;
    EXPECT_EQ(dry.waits, 0u);
    EXPECT_EQ(real.waits, 0u);
    EXPECT_EQ(dry.stats.arena_high_water_bytes, real.stats.arena_high_water_bytes);
    EXPECT_EQ(dry.stats.peak_bytes, real.stats.peak_bytes);
    EXPECT_EQ(dry.stats.attention_peak_bytes, real.stats.attention_peak_bytes);
  }
}

TEST(Allocator, AnObserverIsToldOfWhatIsHandedOutAndTakenBack) {
  class Notes final : public AllocatorObserver {
   public:
    void OnAllocate(MemoryTag tag, int64_t bytes, int64_t offset, const Stream& stream) override {
      lines.push_back(absl::StrCat("+", NameOf(tag), " ", bytes, " @", offset, " ", stream.name()));
    }
    void OnRelease(MemoryTag tag, int64_t bytes, int64_t offset) override {
      lines.push_back(absl::StrCat("-", NameOf(tag), " ", bytes, " @", offset));
    }
    void OnSettle() override { lines.push_back("settle"); }
    std::vector<std::string> lines;
  };
  NotingStream stream;
  Notes notes;
  Allocator allocator(Arena(kKiB));
  allocator.set_observer(&notes);
  Buffer mlp = Take(allocator, 300, stream, MemoryTag::kMlp);
  Buffer empty = Take(allocator, 0, stream);
  Buffer logits = Take(allocator, 1, stream, MemoryTag::kLogits);
  empty.Free();
  mlp.Free();
  allocator.Settle();
  allocator.set_observer(nullptr);
  logits.Free();
  EXPECT_THAT(notes.lines,
              ElementsAre("+mlp 300 @0 noting", "+logits 1 @512 noting", "-mlp 300 @0", "settle"));
  // A full arena hands out nothing.
  allocator.set_observer(&notes);
  EXPECT_FALSE(allocator.Allocate(MemoryTag::kMlp, 2 * kKiB, stream).ok());
  EXPECT_EQ(notes.lines.size(), 4u);
}

}  // namespace
}  // namespace upipe::kernels
