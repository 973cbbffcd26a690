// Pictures and traces of plans: well-formed whatever the job is called, with the limit, the peak
// and every category, and small whatever the plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "common/units.h"
#include "planner/plan_svg.h"
#include "planner/plan_trace.h"
#include "planner/sweep_svg.h"
#include "tests/unit/planner/tiny_plan.h"
#include "tests/unit/planner/xml_check.h"

namespace upipe::planner {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kMib = int64_t{1} << 20;

// Rates of no machine.
absl::StatusOr<MomentSeconds> Price(const MomentWork& work) {
  MomentSeconds seconds;
  const kernels::DryOpCount total = work.counts.ops.total();
  seconds.compute = 1e-9 * total.cost.flops + 1e-6 * static_cast<double>(total.calls);
  const comm::TrafficCount& sent = work.counts.traffic.at({});
  seconds.exchange = 1e-9 * static_cast<double>(sent.bytes_in_node);
  seconds.copies =
      1e-8 * static_cast<double>(work.counts.ops.bytes_to_host + work.counts.ops.bytes_from_host);
  seconds.elapsed = std::max(seconds.compute + seconds.exchange, seconds.copies);
  return seconds;
}

Timeline Record(const v1::RunPlan& plan, const PriceMoment& price = nullptr) {
  auto timeline = RecordTimeline(plan, 0, {.price = price});
  UPIPE_CHECK(timeline.ok()) << timeline.status();
  return *std::move(timeline);
}

v1::RunPlan Fpdt() { return TinyPlan({"parallel.method=fpdt", "parallel.heads_per_stage="}); }

v1::RunPlan ManyMoments() {
  return TinyPlan({"parallel.ranks=1", "parallel.heads_per_stage=1", "model.num_heads=16",
                   "model.num_layers=200", "train.context=16", "memory.layer_inputs=host"});
}

TEST(XmlCheck, FindsFaults) {
  EXPECT_EQ(XmlFault("<a b=\"1\"><c/>text &lt;</a>\n"), "");
  for (const char* bad : {"<a>", "<a></b>", "<a b=1/>", "<a b=\"1\" b=\"2\"/>", "<a>&x;</a>",
                          "<a/><b/>", "<a b=\"<\"/>", "<a>\x01</a>", "<a b=\"1\"c=\"2\"/>", "x"}) {
    EXPECT_NE(XmlFault(bad), "") << bad;
  }
}

TEST(PlanSvg, TellsLimitPeakAndEveryCategory) {
  for (v1::RunPlan plan : {TinyPlan({}), Fpdt()}) {
    plan.mutable_budget()->set_device_bytes(plan.ranks(0).memory().arena_bytes() + kMib / 4);
    plan.mutable_budget()->set_reserved_bytes(kMib / 8);
    for (const PriceMoment& price : {PriceMoment(), PriceMoment(Price)}) {
      const std::string svg = PlanSvg(Record(plan, price), plan);
      EXPECT_EQ(XmlFault(svg), "");
      const v1::RankPlan& rank = plan.ranks(0);
      EXPECT_THAT(svg, AllOf(HasSubstr("limit " + FormatBytes(plan.budget().device_bytes())),
                             HasSubstr("then 128.0 KiB reserved for context, communicators"),
                             HasSubstr("peak " + FormatBytes(rank.memory().peak_bytes())),
                             HasSubstr("arena " + FormatBytes(rank.memory().arena_bytes())),
                             HasSubstr("&quot;" + rank.memory().peak_moment() + "&quot;"),
                             HasSubstr(">forward, layers 0 to 2<"), HasSubstr(">loss<"),
                             HasSubstr(">backward, layers 2 to 0<"), HasSubstr(">optimizer<"),
                             HasSubstr("context 256"), HasSubstr("C 4 x R 1"),
                             HasSubstr(price ? "time in the step, " : "% of the step's FLOPs")))
          << plan.spec().name();
      for (const v1::TagBytes& tag : rank.memory().tags()) {
        if (tag.peak_bytes() == 0) continue;
        EXPECT_THAT(svg, HasSubstr(">" + tag.tag() + "</text>"));
        EXPECT_THAT(svg, HasSubstr(">" + FormatBytes(tag.peak_bytes()) + "</text>"));
        if (tag.at_peak_bytes() == 0) continue;
        EXPECT_THAT(svg, HasSubstr("<title>" + tag.tag() + "</title>"));
      }
    }
  }
}

TEST(PlanSvg, HostMemoryHasAPanelWhereThereIsAny) {
  EXPECT_THAT(PlanSvg(Record(TinyPlan({})), TinyPlan({})), Not(HasSubstr("host memory")));
  v1::RunPlan plan = Fpdt();
  const v1::MemoryUsage& host = plan.ranks(0).host_memory();
  plan.mutable_budget()->set_host_bytes(8 * host.arena_bytes());
  const std::string svg = PlanSvg(Record(plan), plan);
  EXPECT_THAT(svg, AllOf(HasSubstr("Peak of host memory: " + FormatBytes(host.peak_bytes())),
                         HasSubstr("limit " + FormatBytes(2 * host.arena_bytes())),
                         HasSubstr("of a node for 4 ranks"),
                         HasSubstr("pool " + FormatBytes(host.arena_bytes()))));
}

TEST(PlanSvg, SaysHowFarOverOrUnderTheLimitItIs) {
  v1::RunPlan plan = TinyPlan({});
  const Timeline timeline = Record(plan);
  const int64_t arena = plan.ranks(0).memory().arena_bytes();
  plan.mutable_budget()->set_device_bytes(arena - 4096);
  EXPECT_THAT(PlanSvg(timeline, plan), HasSubstr(", 4.0 KiB too much"));
  plan.mutable_budget()->set_device_bytes(1000 * arena);
  EXPECT_THAT(PlanSvg(timeline, plan), HasSubstr("1,000 times the arena"));
  plan.clear_budget();
  EXPECT_THAT(PlanSvg(timeline, plan), Not(HasSubstr(">limit ")));
  plan.mutable_spec()->mutable_train()->set_memory_per_rank(2 * arena);
  EXPECT_THAT(PlanSvg(timeline, plan), HasSubstr("limit " + FormatBytes(2 * arena)));
}

TEST(PlanSvg, NamesCannotBreakIt) {
  v1::RunPlan plan = TinyPlan({});
  plan.mutable_spec()->set_name("</svg><script>\"&\x01");
  plan.mutable_spec()->mutable_model()->set_preset("<b>");
  const std::string svg = PlanSvg(Record(plan), plan);
  EXPECT_EQ(XmlFault(svg), "");
  EXPECT_THAT(svg, HasSubstr("&lt;/svg&gt;&lt;script&gt;&quot;&amp;: memory of rank 0"));
}

// The top of the highest area, in pixels from the top.
double HighestPoint(const std::string& svg) {
  double highest = 1e9;
  const std::regex path("<path fill=\"var\\(--[a-z_]+\\)\" d=\"M[0-9.]+ ([^\"]*)\"");
  const std::regex vertical("(?:^|V)([0-9.]+)");
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), path); it != std::sregex_iterator();
       ++it) {
    const std::string points = (*it)[1];
    for (auto v = std::sregex_iterator(points.begin(), points.end(), vertical);
         v != std::sregex_iterator(); ++v) {
      highest = std::min(highest, std::stod((*v)[1]));
    }
  }
  return highest;
}

// Ten moments a pixel, one of them full.
TEST(PlanSvg, MergingMomentsKeepsThePeak) {
  Timeline timeline = {.arena_bytes = 1000};
  for (int i = 0; i < 7000; ++i) {
    TimelineMoment moment = {.at = {StepPass::kForward, i / 50, i % 50}, .flops = 1};
    moment.device.total_bytes = i == 2503 ? 1000 : 100;
    moment.device.bytes[0] = moment.device.total_bytes;
    timeline.moments.push_back(moment);
  }
  const std::string svg = PlanSvg(timeline, TinyPlan({}));
  EXPECT_THAT(svg, HasSubstr("peak 1000 B"));
  std::smatch circle;
  ASSERT_TRUE(std::regex_search(
      svg, circle, std::regex("<circle class=\"marker\" cx=\"[0-9.]+\" cy=\"([0-9.]+)\"")));
  EXPECT_NEAR(HighestPoint(svg), std::stod(circle[1]), 0.01);
}

TEST(PlanSvg, IsSmallWhateverThePlan) {
  const v1::RunPlan plan = ManyMoments();
  const std::string svg = PlanSvg(Record(plan), plan);
  EXPECT_EQ(XmlFault(svg), "");
  EXPECT_LT(svg.size(), 400'000);
}

struct TextBox {
  std::string text;
  double left, right, baseline;
};
std::vector<TextBox> TextBoxes(const std::string& svg) {
  constexpr double kCharacter = 5.5;  // a little less than it is
  const std::regex element(
      "<text x=\"([0-9.]+)\" y=\"([0-9.]+)\" text-anchor=\"([a-z]+)\" [^>]*>([^<]*)<");
  std::vector<TextBox> boxes;
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), element);
       it != std::sregex_iterator(); ++it) {
    const std::string text = (*it)[4];
    const double x = std::stod((*it)[1]), width = kCharacter * static_cast<double>(text.size());
    const double left = (*it)[3] == "start" ? x : (*it)[3] == "end" ? x - width : x - width / 2;
    boxes.push_back({text, left, left + width, std::stod((*it)[2])});
  }
  return boxes;
}

TEST(PlanSvg, WordsDoNotCoverEachOther) {
  constexpr double kHeight = 10;
  for (const bool fpdt : {false, true}) {
    v1::RunPlan plan = fpdt ? Fpdt() : TinyPlan({});
    const Timeline timeline = Record(plan, Price);
    for (const double limit : {0.3, 0.5, 0.9, 0.98, 1.0, 1.02, 1.05, 1.1, 1.3, 2.0, 4.0, 1e4}) {
      for (const double reserved : {0.0, 0.02, 0.1}) {
        const auto arena = static_cast<double>(timeline.arena_bytes);
        plan.mutable_budget()->set_device_bytes(std::llround(limit * arena));
        plan.mutable_budget()->set_reserved_bytes(std::llround(reserved * limit * arena));
        plan.mutable_budget()->set_host_bytes(
            std::llround(4 * limit * static_cast<double>(timeline.host_pool_bytes)));
        const std::vector<TextBox> boxes = TextBoxes(PlanSvg(timeline, plan));
        ASSERT_GT(boxes.size(), 20);
        for (size_t i = 0; i < boxes.size(); ++i) {
          for (size_t j = 0; j < i; ++j) {
            const TextBox &a = boxes[i], &b = boxes[j];
            EXPECT_TRUE(a.right <= b.left || b.right <= a.left ||
                        std::abs(a.baseline - b.baseline) >= kHeight)
                << "\"" << a.text << "\" covers \"" << b.text << "\" at limit " << limit << " x"
                << ", reserved " << reserved << " x";
          }
        }
      }
    }
  }
}

using Json = nlohmann::json;

void ExpectSlicesNest(const std::vector<Json>& slices) {
  constexpr double kNanosecond = 1e-3;
  std::vector<double> ends;
  double before = 0;
  for (const Json& slice : slices) {
    const double begin = slice.at("ts"), end = begin + slice.at("dur").get<double>();
    EXPECT_GE(begin, before);
    EXPECT_GE(slice.at("dur"), 0);
    before = begin;
    while (!ends.empty() && ends.back() <= begin + kNanosecond / 2) ends.pop_back();
    if (!ends.empty()) {
      EXPECT_LE(end, ends.back() + kNanosecond / 2) << slice;
    }
    ends.push_back(end);
  }
}

TEST(PlanTrace, IsTraceEventJson) {
  v1::RunPlan plan = TinyPlan({"memory.layer_inputs=host"});
  plan.mutable_spec()->set_name("quote \" and \\");
  const Timeline timeline = Record(plan, Price);
  const Json trace = Json::parse(PlanTrace(timeline, plan));
  std::map<int, std::vector<Json>> slices;
  std::map<std::string, std::vector<Json>> counters;
  std::map<std::string, int> names;
  double last_begin = 0;
  for (const Json& event : trace.at("traceEvents")) {
    const std::string kind = event.at("ph");
    EXPECT_EQ(event.at("pid"), 1);
    EXPECT_GE(event.value("ts", 0.0), last_begin);
    last_begin = event.value("ts", 0.0);
    if (kind == "X") {
      slices[event.at("tid")].push_back(event);
    } else if (kind == "C") {
      counters[event.at("name")].push_back(event);
    } else {
      ASSERT_EQ(kind, "M");
      if (event.at("name") == "thread_name") names[event.at("args").at("name")] = event.at("tid");
    }
  }
  ASSERT_EQ(names.size(), 4);
  for (const char* track : {"step", "compute", "exchange", "host copies"}) {
    ASSERT_TRUE(names.contains(track)) << track;
    EXPECT_FALSE(slices[names[track]].empty()) << track;
    ExpectSlicesNest(slices[names[track]]);
  }
  double elapsed = 0;
  for (const TimelineMoment& moment : timeline.moments) elapsed += moment.seconds.elapsed;
  const Json& last = counters.at("device memory").back();
  EXPECT_LE(last.at("ts"), elapsed * 1e6 + 1e-3);
  for (const auto& [name, usage] : {std::pair{"device memory", plan.ranks(0).memory()},
                                    std::pair{"host memory", plan.ranks(0).host_memory()}}) {
    int64_t most = 0;
    double before = 0;
    for (const Json& counter : counters.at(name)) {
      most = std::max(most, counter.at("args").at("total").get<int64_t>());
      EXPECT_GE(counter.at("ts"), before);
      before = counter.at("ts");
    }
    EXPECT_EQ(most, usage.peak_bytes());
    for (const v1::TagBytes& tag : usage.tags()) {
      EXPECT_EQ(last.at("ph"), "C");
      if (tag.at_peak_bytes() == 0) continue;
      EXPECT_TRUE(counters.at(name)[0].at("args").contains(tag.tag())) << tag.tag();
    }
  }
  EXPECT_EQ(trace.at("otherData").at("peak_moment"), plan.ranks(0).memory().peak_moment());
}

TEST(PlanTrace, WithoutRatesAStepIsOneSecond) {
  const v1::RunPlan plan = TinyPlan({});
  const Json trace = Json::parse(PlanTrace(Record(plan), plan));
  double end = 0;
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X")
      end = std::max(end, event.at("ts").get<double>() + event.at("dur").get<double>());
    EXPECT_EQ(event.at("ph") == "M" ? 1 : event.value("tid", 1), 1);
  }
  EXPECT_NEAR(end, 1e6, 1e-3);
}

TEST(PlanTrace, IsSmallWhateverThePlan) {
  const v1::RunPlan plan = ManyMoments();
  const std::string trace = PlanTrace(Record(plan, Price), plan);
  EXPECT_LT(trace.size(), 10'000'000);
  EXPECT_TRUE(Json::accept(trace));
}

std::vector<SweepPoint> Sweep() {
  std::vector<SweepPoint> points;
  for (const int64_t k : {128, 256, 1024}) {
    for (const char* label : {"upipe & co", "ulysses <C 8>"}) {
      points.push_back({.label = label,
                        .context = k << 10,
                        .fits = k < 1024 || points.size() % 2 == 0,
                        .device_bytes = k * kMib,
                        .tokens_per_second_per_rank = 1e6 / static_cast<double>(k)});
    }
  }
  return points;
}

TEST(SweepSvg, TellsLinesLimitAndWhatFits) {
  const std::string svg =
      SweepSvg(Sweep(), {.title = "<sweep>", .subtitle = "a & b"}, {.device_bytes = 600 * kMib});
  EXPECT_EQ(XmlFault(svg), "");
  EXPECT_THAT(svg, AllOf(HasSubstr("&lt;sweep&gt;"), HasSubstr("limit 600.0 MiB"),
                         HasSubstr("upipe &amp; co"), HasSubstr("fits to 1M"),
                         HasSubstr("fits to 256K"), HasSubstr("does not fit"), HasSubstr(">512K<"),
                         HasSubstr("tokens per second and rank"), Not(HasSubstr("host memory"))));
}

TEST(SweepSvg, ContextIsLogarithmic) {
  const std::string svg = SweepSvg(Sweep(), {}, {});
  std::vector<double> x;
  const std::regex circle("<circle cx=\"([0-9.]+)\" cy=\"[0-9.]+\" r=\"4\" style=\"stroke:var");
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), circle);
       it != std::sregex_iterator() && x.size() < 3; ++it) {
    x.push_back(std::stod((*it)[1]));
  }
  ASSERT_EQ(x.size(), 3);
  EXPECT_NEAR(x[2] - x[1], 2 * (x[1] - x[0]), 0.05);
}

TEST(SweepSvg, OnePointIsAPicture) {
  const std::string svg = SweepSvg({{.label = "best", .context = 5 << 20, .fits = false}}, {}, {});
  EXPECT_EQ(XmlFault(svg), "");
  EXPECT_THAT(svg, AllOf(HasSubstr("fits nowhere here"), Not(HasSubstr("nan"))));
}

}  // namespace
}  // namespace upipe::planner
