// A job's page: what is on it, what it says of what is missing, that nobody's words become markup,
// and that it stays small; and how step records are thinned on their way there.
#include "common/report/job_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "common/report/job_record.h"
#include "tests/support/report/sample_record.h"

namespace upipe::report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using upipe::testing::RefusedRecord;
using upipe::testing::SampleRecord;

bool HasSection(const std::string& page, const std::string& id) {
  return page.find("<section id=\"" + id + "\"") != std::string::npos;
}

v1::StepReport Report(int64_t step, double loss = 1) {
  v1::StepReport report;
  report.set_step(step);
  report.set_loss(loss);
  return report;
}

TEST(StepSeries, KeepsEveryNumberAndSomeReports) {
  StepSeries series;
  for (int step = 1; step <= 10'000; ++step) {
    v1::StepReport report = Report(step);
    if (step % 1000 == 0) report.set_held_out_loss(2);
    series.Take(report);
  }
  EXPECT_EQ(series.points().size(), 10'000u);
  const std::vector<v1::StepReport> samples = series.Samples();
  EXPECT_LE(samples.size(), 1000u);
  EXPECT_GE(samples.size(), 300u);
  EXPECT_EQ(samples.front().step(), 1);
  EXPECT_EQ(samples.back().step(), 10'000);
  int evaluations = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_TRUE(i == 0 || samples[i].step() > samples[i - 1].step()) << i;
    evaluations += samples[i].has_held_out_loss();
  }
  EXPECT_EQ(evaluations, 10);
}

TEST(StepSeries, AStepThatComesAgainReplacesWhatWasToldFromItOn) {
  StepSeries series;
  for (const int step : {1, 2, 3, 4, 5}) series.Take(Report(step, 1));
  for (const int step : {3, 4}) series.Take(Report(step, 2));
  ASSERT_EQ(series.points().size(), 4u);
  EXPECT_EQ(series.points()[1].loss, 1);
  EXPECT_EQ(series.points()[2].loss, 2);
  EXPECT_EQ(series.Samples().size(), 4u);
  EXPECT_EQ(series.last().step(), 4);
}

TEST(JobPage, HasEverySectionWithTheJobsNumbers) {
  const std::string page = RenderJobPage(SampleRecord({}));
  for (const char* id :
       {"loss", "throughput", "mfu", "gradients", "step-time", "memory", "collectives", "positions",
        "timeline", "ranks", "course", "checkpoints", "configuration"}) {
    EXPECT_TRUE(HasSection(page, id)) << id;
    EXPECT_THAT(page, HasSubstr(std::string("href=\"#") + id + "\""));
  }
  EXPECT_THAT(page, HasSubstr("240 of 240"));
  EXPECT_THAT(page, HasSubstr("151,234,560 parameters"));
  EXPECT_THAT(page, HasSubstr("as planned, to the byte"));
  EXPECT_THAT(page, HasSubstr(">planned peak 1.0 GiB<"));
  EXPECT_THAT(page, HasSubstr(">limit 1.3 GiB<"));
  EXPECT_THAT(page, HasSubstr("generation 1 ended"));
  EXPECT_THAT(page, HasSubstr("SIGNAL, rank 2 on w1: ended by SIGKILL"));
  EXPECT_THAT(page, HasSubstr("Step 240 of rank 3, generation 2"));
  EXPECT_THAT(page, HasSubstr("step 240 of generation 2, 1.8 GiB, written in 3.40 s"));
  EXPECT_THAT(page, HasSubstr("heads_per_stage: 4"));  // the job file
  EXPECT_THAT(page, HasSubstr("1,111,490,560"));       // bytes of rank 3, planned and measured
}

TEST(JobPage, NeedsNothingButItself) {
  const std::string page = RenderJobPage(SampleRecord({}));
  for (const char* outside : {"http:", "https:", "<script", "<link", "src=", "@import", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(page, HasSubstr("@media print"));
}

TEST(JobPage, WordsOfPeopleAreNoMarkup) {
  const std::string page =
      RenderJobPage(SampleRecord({.id = "<b>id", .words = "</pre><script>\"x\"</script>\x1b[31m"}));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("</pre><")));
  EXPECT_THAT(page, Not(HasSubstr("<b>")));
  EXPECT_THAT(page, Not(HasSubstr("\x1b")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;&quot;x&quot;"));
}

TEST(JobPage, SaysWhatIsMissing) {
  JobRecord record = SampleRecord({});
  record.missing = {"the timelines of rank 3: worker w1 is lost"};
  record.timeline.reset();
  record.steps.Take(Report(250), /*missing=*/9);
  const std::string page = RenderJobPage(record);
  EXPECT_THAT(page, HasSubstr("Missing on this page: the timelines of rank 3: worker w1 is lost"));
  EXPECT_THAT(page, HasSubstr("the records of 9 steps"));
  EXPECT_THAT(page, HasSubstr("No timeline of a step was recorded"));
}

TEST(JobPage, OfAJobThatNeverStepped) {
  const std::string none = RenderJobPage(SampleRecord({.steps = 0}));
  EXPECT_FALSE(HasSection(none, "loss"));
  EXPECT_THAT(none, HasSubstr("No step of this job was recorded"));
  EXPECT_TRUE(HasSection(none, "course"));
  EXPECT_TRUE(HasSection(none, "configuration"));
  const std::string refused = RenderJobPage(RefusedRecord());
  EXPECT_THAT(refused, HasSubstr("a rank needs 91.2 GiB"));
  EXPECT_THAT(refused, HasSubstr("There is no plan"));
  EXPECT_FALSE(HasSection(refused, "ranks"));
}

TEST(JobPage, OldRecordsAndSingleStepsHaveOne) {
  const std::string old = RenderJobPage(SampleRecord({.stages = false, .timeline = false}));
  EXPECT_THAT(old, HasSubstr("These records do not tell stages"));
  EXPECT_THAT(old, HasSubstr("own work"));
  EXPECT_FALSE(HasSection(old, "collectives"));
  EXPECT_TRUE(HasSection(RenderJobPage(SampleRecord({.steps = 1})), "memory"));
}

TEST(JobPage, WhatIsNoNumberIsNamedAndNotDrawn) {
  const std::string page = RenderJobPage(SampleRecord({.not_a_number = true}));
  EXPECT_THAT(page, HasSubstr("The loss was no finite number at: steps 5, 42, 79"));
  EXPECT_THAT(page, HasSubstr("The update was left out at: steps 5, 42, 79"));
  EXPECT_THAT(page, Not(HasSubstr("Lnan")));
  EXPECT_THAT(page, Not(HasSubstr("Mnan")));
  EXPECT_THAT(page, Not(HasSubstr("\"nan")));
  EXPECT_THAT(page, Not(HasSubstr("inf\"")));
}

TEST(JobPage, StaysSmall) {
  EXPECT_LT(RenderJobPage(SampleRecord({.steps = 100'000})).size(), size_t{2'000'000});
  EXPECT_LT(RenderJobPage(SampleRecord({.ranks = 64, .layers = 80})).size(), size_t{2'000'000});
}

TEST(JobPage, AHostileTimelineIsLeftOut) {
  JobRecord record = SampleRecord({});
  v1::StepTimeline& timeline = *record.timeline;
  for (const auto& [stage, begin, end] :
       {std::tuple<int, int64_t, int64_t>{99, 0, 5}, {-1, 0, 5}, {0, 9, 5}, {0, -7, 5}}) {
    auto& slice = *timeline.add_slices();
    slice.set_stage_name(stage);
    slice.set_begin_nanos(begin);
    slice.set_end_nanos(end);
  }
  timeline.add_memory()->set_tag(77);
  timeline.add_memory()->set_tag(-1);
  EXPECT_THAT(RenderJobPage(record), HasSubstr("4 slices are left out"));
}

TEST(JobPage, NumbersThatCannotBeAreSurvived) {
  JobRecord record = SampleRecord({.steps = 3});
  v1::StepReport report;
  report.set_step(std::numeric_limits<int64_t>::max());
  report.set_loss(1e308);
  report.set_grad_norm(-1e308);
  report.set_step_seconds(std::nan(""));
  report.set_tokens_per_second(std::numeric_limits<double>::infinity());
  report.set_comm_seconds(-5);
  v1::StageSeconds& stage = *report.add_stages();
  stage.set_stage("attention");
  stage.set_seconds(1e300);
  v1::TagBytes& tag = *report.mutable_memory()->add_tags();
  tag.set_tag("weights");
  tag.set_at_peak_bytes(std::numeric_limits<int64_t>::min());
  for (StepSeries* series : {&record.steps, &record.fullest}) series->Take(report);
  EXPECT_THAT(RenderJobPage(record), HasSubstr("</html>"));
  StepSeries alone;
  alone.Take(report);
  record.steps = record.fullest = alone;
  EXPECT_THAT(RenderJobPage(record), HasSubstr("</html>"));
}

TEST(JobPage, ExtrasHaveTheirPlaces) {
  const std::string page =
      RenderJobPage(SampleRecord({}), {.lead = "Text: <books>.",
                                       .problems = {"it is <not> as planned"},
                                       .loss_levels = {{2.5, "unigram 2.50", "--unigram"}},
                                       .cards = "<section id=\"more\"><h2>More</h2></section>"});
  EXPECT_THAT(page, AllOf(HasSubstr("Text: &lt;books&gt;."), HasSubstr("it is &lt;not&gt; as"),
                          HasSubstr(">unigram 2.50<"), HasSubstr("<a href=\"#more\">More</a>")));
}

}  // namespace
}  // namespace upipe::report
