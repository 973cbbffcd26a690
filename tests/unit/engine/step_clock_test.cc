// Slices of made-up streams: what nests, what is dropped, what is hidden; and of real ones, whose
// threads stamp while the host takes in.
#include "engine/step_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "kernels/host/host_device.h"
#include "tests/contract/kernels/fill_ops.h"

namespace upipe::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kMilli = 1'000'000;

// Passes its points when it is told to, or at once, at times of one clock.
class HandStream final : public kernels::Stream {
 public:
  explicit HandStream(int64_t* now, bool at_once = true) : now_(now), at_once_(at_once) {}
  const std::string& name() const override { return name_; }
  void Submit(kernels::Task) override {}
  kernels::Event Record() override { return kernels::Event(); }
  void Wait(const kernels::Event&) override {}
  void Stamp(kernels::TimeStamp* stamp) override {
    ++stamps;
    waiting_.push_back(stamp);
    if (at_once_) Pass();
  }
  void Pass() {
    for (; !waiting_.empty(); waiting_.pop_front()) waiting_.front()->store(*now_);
  }

  int stamps = 0;

 private:
  const std::string name_ = "by hand";
  int64_t* const now_;
  const bool at_once_;
  std::deque<kernels::TimeStamp*> waiting_;
};

class StepClockTest : public ::testing::Test {
 protected:
  explicit StepClockTest(const StepClock::Capacity& capacity = {}) : clock_(capacity) {
    for (auto* stream : {&streams_.compute, &streams_.side, &streams_.ring, &streams_.copy,
                         &streams_.host, &streams_.gather}) {
      *stream = std::make_unique<HandStream>(&now_);
    }
    clock_.Watch(streams_);
  }
  // At `milli`, on the compute stream where no other is named.
  void Begin(int64_t milli, std::optional<StageName> name, kernels::Stream* stream = nullptr) {
    now_ = milli * kMilli;
    clock_.Begin(stream == nullptr ? *streams_.compute : *stream, name, clock_.moment());
  }
  void End(int64_t milli, kernels::Stream* stream = nullptr) {
    now_ = milli * kMilli;
    clock_.End(stream == nullptr ? *streams_.compute : *stream);
  }
  int64_t Milliseconds(StageName name) const {
    return clock_.times().stage_nanos[static_cast<size_t>(name)] / kMilli;
  }
  // "lane name begin-end".
  std::vector<std::string> Slices() const {
    std::vector<std::string> texts;
    for (const Slice& slice : clock_.slices()) {
      texts.push_back(std::to_string(static_cast<int>(slice.lane)) + " " + NameOf(slice.name) +
                      " " + std::to_string(slice.begin_nanos / kMilli) + "-" +
                      std::to_string(slice.end_nanos / kMilli));
    }
    return texts;
  }

  int64_t now_ = 0;
  StepClock clock_;
  RankStreams streams_;
};

TEST_F(StepClockTest, WhatIsWithinIsTakenFromWhatIsAround) {
  clock_.BeginStep(/*keep_slices=*/true);
  Begin(1, StageName::kMlp);
  Begin(2, StageName::kGradients);
  Begin(3, StageName::kGradients);  // the same: no slice of its own
  End(4);
  End(5);
  Begin(6, std::nullopt);  // waits for another lane
  End(8);
  End(9);
  Begin(9, std::nullopt);  // nothing is around it
  End(10);
  ASSERT_TRUE(clock_.EndStep().ok());
  EXPECT_THAT(Slices(), ElementsAre("0 mlp 1-2", "0 gradients 2-5", "0 mlp 5-6", "0 mlp 8-9"));
  EXPECT_EQ(Milliseconds(StageName::kMlp), 3);
  EXPECT_EQ(Milliseconds(StageName::kGradients), 3);
  EXPECT_EQ(clock_.times().hidden_nanos, 0);
}

TEST_F(StepClockTest, TransfersBesideArithmeticAreHidden) {
  kernels::Stream *side = streams_.side.get(), *copy = streams_.copy.get();
  clock_.BeginStep(/*keep_slices=*/true);
  Begin(10, StageName::kExchange, side);  // alone: not hidden
  Begin(20, StageName::kAttention);       // hides 20 to 30
  End(30, side);
  Begin(30, StageName::kProjection, side);  // arithmetic itself
  Begin(35, StageName::kOffload, copy);     // hidden 35 to 50, and 60 to 70
  End(40, side);
  Begin(50, StageName::kGradients);  // the compute lane waits for peers: hides nothing
  End(60);
  End(70);
  End(80, copy);
  ASSERT_TRUE(clock_.EndStep().ok());
  EXPECT_THAT(Slices(), ElementsAre("1 exchange 10-30", "0 attention 20-50", "1 projection 30-40",
                                    "3 offload 35-80", "0 gradients 50-60", "0 attention 60-70"));
  EXPECT_EQ(clock_.times().hidden_nanos, (10 + 15 + 10) * kMilli);
}

TEST_F(StepClockTest, ASliceSaysWhereTheStepIs) {
  clock_.BeginStep(/*keep_slices=*/true);
  clock_.set_moment({StepPass::kBackward, 3, 1});
  Begin(1, StageName::kAttention);
  clock_.set_moment({StepPass::kOptimizer, -1, -1});
  End(2);
  ASSERT_TRUE(clock_.EndStep().ok());
  ASSERT_EQ(clock_.slices().size(), 1u);
  EXPECT_EQ(clock_.slices()[0].moment, (Moment{StepPass::kBackward, 3, 1}));
}

TEST_F(StepClockTest, NothingIsSaidOutsideAStepOrToOtherStreams) {
  Begin(1, StageName::kMlp);
  End(2);
  HandStream other(&now_);
  clock_.BeginStep(/*keep_slices=*/true);
  Begin(3, StageName::kMlp, &other);
  End(4, &other);
  ASSERT_TRUE(clock_.EndStep().ok());
  EXPECT_THAT(Slices(), IsEmpty());
  EXPECT_EQ(other.stamps, 0);
  EXPECT_EQ(static_cast<HandStream&>(*streams_.compute).stamps, 0);
}

TEST_F(StepClockTest, AStepForgetsTheOneBefore) {
  for (int step = 0; step < 2; ++step) {
    clock_.BeginStep(/*keep_slices=*/step == 0);
    Begin(10 * step + 1, StageName::kMlp);
    End(10 * step + 3);
    ASSERT_TRUE(clock_.EndStep().ok());
    EXPECT_EQ(Milliseconds(StageName::kMlp), 2);
    EXPECT_EQ(clock_.slices().size(), step == 0 ? 1u : 0u);
  }
}

class SmallStepClockTest : public StepClockTest {
 protected:
  SmallStepClockTest() : StepClockTest({.pending = 4, .slices = 3}) {}
};

TEST_F(SmallStepClockTest, TimesGoOnWhereSlicesHaveNoRoom) {
  clock_.BeginStep(/*keep_slices=*/true);
  for (int i = 0; i < 100; ++i) {
    Begin(10 * i + 1, StageName::kMlp);
    End(10 * i + 2);
  }
  ASSERT_TRUE(clock_.EndStep().ok());
  EXPECT_EQ(Milliseconds(StageName::kMlp), 100);
  EXPECT_THAT(Slices(), ElementsAre("0 mlp 1-2", "0 mlp 11-12", "0 mlp 21-22"));
  EXPECT_EQ(clock_.times().dropped_slices, 97);
}

TEST_F(SmallStepClockTest, WhatAStreamHasNotPassedIsNotPushedOut) {
  auto held = std::make_unique<HandStream>(&now_, /*at_once=*/false);
  HandStream& stream = *held;
  RankStreams streams;
  for (auto* each : {&streams.side, &streams.ring, &streams.copy, &streams.host, &streams.gather}) {
    *each = std::make_unique<HandStream>(&now_);
  }
  streams.compute = std::move(held);
  StepClock clock({.pending = 4, .slices = 8});
  clock.Watch(streams);
  clock.BeginStep(/*keep_slices=*/true);
  const auto begin = [&](StageName name) { clock.Begin(stream, name, {}); };
  begin(StageName::kMlp);
  begin(StageName::kLoss);  // room for its end and that of what is around it
  begin(StageName::kProjection);
  clock.End(stream);
  clock.End(stream);
  clock.End(stream);
  EXPECT_EQ(stream.stamps, 4);
  now_ = kMilli;
  stream.Pass();
  ASSERT_TRUE(clock.EndStep().ok());
  EXPECT_EQ(clock.times().dropped_slices, 1);
}

// The threads of real streams stamp while the host takes in what they have passed.
TEST(StepClockOfRealStreams, SlicesOfALaneFollowEachOther) {
  auto device = kernels::HostDevice::Create({.name = "cpu", .arena_bytes = 1 << 20},
                                            std::make_unique<kernels::FillOpTable>());
  ASSERT_TRUE(device.ok()) << device.status();
  StepClock clock({.pending = 16, .slices = 100'000});
  const RankStreams streams = RankStreams::Create(**device, 0);
  clock.Watch(streams);
  for (int step = 0; step < 3; ++step) {
    clock.BeginStep(/*keep_slices=*/true);
    for (int i = 0; i < 2000; ++i) {
      for (kernels::Stream* stream : {streams.compute.get(), streams.copy.get()}) {
        clock.Begin(*stream, StageName::kOffload, {StepPass::kForward, i, -1});
        stream->Submit([](kernels::ExecContext&) { return absl::OkStatus(); });
        clock.End(*stream);
      }
    }
    ASSERT_TRUE(clock.EndStep().ok());
    EXPECT_FALSE(clock.slices().empty());
    std::array<int64_t, kNumLanes> end = {};
    int64_t sum = 0;
    for (const Slice& slice : clock.slices()) {
      EXPECT_LT(slice.begin_nanos, slice.end_nanos);
      EXPECT_LE(end[static_cast<int>(slice.lane)], slice.begin_nanos);
      end[static_cast<int>(slice.lane)] = slice.end_nanos;
      sum += slice.end_nanos - slice.begin_nanos;
    }
    EXPECT_EQ(sum, clock.times().stage_nanos[static_cast<int>(StageName::kOffload)]);
  }
}

}  // namespace
}  // namespace upipe::engine
