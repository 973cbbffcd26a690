// Listing jobs: filters, pages that stay stable, tokens that are checked.
#include "coordinator/core/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"

namespace upipe::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ListJobsTest : public ::testing::Test {
 protected:
  void Add(const std::string& id, v1::JobState state = v1::JOB_STATE_RUNNING) {
    Job& job = state_.jobs[id];
    job.record.set_id(id);
    job.record.set_state(state);
    job.record.set_submit_number(state_.next_submit_number);
    job.record.set_submitted_unix_millis(1000 * state_.next_submit_number++);
  }
  std::vector<std::string> Ids(const v1::ListJobsRequest& request) {
    std::vector<std::string> ids;
    const auto page = ListJobs(state_, request);
    EXPECT_TRUE(page.ok()) << page.status();
    if (!page.ok()) return ids;
    for (const v1::Job& job : page->jobs()) ids.push_back(job.id());
    token_ = page->next_page_token();
    return ids;
  }
  std::vector<std::string> WrongFields(const v1::ListJobsRequest& request) {
    const absl::Status error = ListJobs(state_, request).status();
    EXPECT_TRUE(HasReason(error, Reason::kRequestInvalid)) << error;
    std::vector<std::string> fields;
    for (const FieldViolation& violation : FieldViolationsOf(error))
      fields.push_back(violation.field);
    return fields;
  }

  State state_;
  std::string token_;
};

TEST_F(ListJobsTest, FiltersByStateIdAndTime) {
  Add("demo-a");
  Add("demo-b", v1::JOB_STATE_FAILED);
  Add("demonstration-c");
  Add("tiny-d");
  v1::ListJobsRequest request;
  EXPECT_THAT(Ids(request), ElementsAre("tiny-d", "demonstration-c", "demo-b", "demo-a"));
  request.set_id_prefix("demo-");
  EXPECT_THAT(Ids(request), ElementsAre("demo-b", "demo-a"));
  request.add_states(v1::JOB_STATE_RUNNING);
  EXPECT_THAT(Ids(request), ElementsAre("demo-a"));
  request.clear_states();
  request.clear_id_prefix();
  request.set_submitted_from_unix_millis(2000);
  request.set_submitted_until_unix_millis(4000);
  EXPECT_THAT(Ids(request), ElementsAre("demonstration-c", "demo-b"));
  request.set_id_prefix("x");
  EXPECT_THAT(Ids(request), IsEmpty());
}

TEST_F(ListJobsTest, PagesStayWhileJobsAreAddedAndEnd) {
  for (int i = 1; i <= 5; ++i) Add(absl::StrCat("job-", i));
  v1::ListJobsRequest request;
  request.set_page_size(2);
  EXPECT_THAT(Ids(request), ElementsAre("job-5", "job-4"));
  Add("job-6");
  Add("job-7");
  request.set_page_token(token_);
  EXPECT_THAT(Ids(request), ElementsAre("job-3", "job-2"));
  state_.jobs.at("job-1").record.set_state(v1::JOB_STATE_FAILED);
  request.set_page_token(token_);
  request.set_page_size(1000);  // the size may change on the way
  EXPECT_THAT(Ids(request), ElementsAre("job-1"));
  EXPECT_EQ(token_, "");
}

TEST_F(ListJobsTest, ATokenIsBelievedForItsOwnFiltersOnly) {
  for (int i = 1; i <= 5; ++i) Add(absl::StrCat("job-", i));
  v1::ListJobsRequest request;
  request.set_page_size(2);
  request.set_id_prefix("job");
  Ids(request);
  const std::string good = token_;
  request.set_page_token(good);
  EXPECT_THAT(Ids(request), ElementsAre("job-3", "job-2"));
  request.set_id_prefix("jo");
  EXPECT_THAT(WrongFields(request), ElementsAre("page_token"));
  request.set_id_prefix("job");
  std::vector<std::string> garbage = {"4",
                                      "-1",
                                      good + "A",
                                      good + "=",
                                      good.substr(1),
                                      std::string(100'000, 'A'),
                                      "\x01\x02",
                                      "99999999999999999999"};
  for (size_t i = 0; i < good.size(); ++i) {
    garbage.push_back(good);
    garbage.back()[i] = good[i] == 'x' ? 'y' : 'x';
  }
  for (const std::string& token : garbage) {
    request.set_page_token(token);
    EXPECT_THAT(WrongFields(request), ElementsAre("page_token")) << token.substr(0, 40);
  }
}

TEST_F(ListJobsTest, SaysEverythingThatIsWrong) {
  v1::ListJobsRequest request;
  request.set_page_size(1001);
  request.set_page_token("?");
  request.add_states(v1::JOB_STATE_RUNNING);
  request.add_states(static_cast<v1::JobState>(77));
  request.add_states(v1::JOB_STATE_UNSPECIFIED);
  request.set_id_prefix(std::string(1 << 20, 'a'));
  request.set_submitted_from_unix_millis(5);
  request.set_submitted_until_unix_millis(5);
  EXPECT_THAT(WrongFields(request), ElementsAre("page_size", "page_token", "states[1]", "states[2]",
                                                "id_prefix", "submitted_until_unix_millis"));
}

TEST_F(ListJobsTest, TenThousandJobsComeOnceEach) {
  for (int i = 0; i < 10'000; ++i) Add(absl::StrCat("job-", i));
  v1::ListJobsRequest request;
  request.set_page_size(1000);
  std::set<std::string> seen;
  int pages = 0;
  do {
    for (const std::string& id : Ids(request)) EXPECT_TRUE(seen.insert(id).second) << id;
    request.set_page_token(token_);
    ++pages;
  } while (!token_.empty() && pages < 100);
  EXPECT_EQ(seen.size(), 10'000u);
  EXPECT_EQ(pages, 10);
}

// Clients take messages of 4 MiB by default.
TEST_F(ListJobsTest, APageOfLargeJobsEndsEarly) {
  for (int i = 0; i < 8; ++i) {
    Add(absl::StrCat("job-", i));
    state_.jobs.at(absl::StrCat("job-", i)).reason = std::string(1 << 20, 'r');
  }
  v1::ListJobsRequest request;
  size_t seen = 0;
  do {
    const auto page = ListJobs(state_, request);
    ASSERT_TRUE(page.ok());
    EXPECT_LT(page->ByteSizeLong(), size_t{4} << 20);
    ASSERT_GT(page->jobs_size(), 0);
    seen += page->jobs_size();
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(seen, 8u);
}

}  // namespace
}  // namespace upipe::coordinator
