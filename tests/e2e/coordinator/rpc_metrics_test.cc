// What the coordinator's process tells those who watch it: calls by method and code on its metrics,
// and whether it lives and is ready on its health port.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/e2e/coordinator/coordinator_daemon.h"
#include "tests/support/metrics/scrape.h"

namespace upipe::coordinator {
namespace {

class RpcMetrics : public CoordinatorDaemon {
 protected:
  double CountOf(const std::string& method, const std::string& code) {
    if (metrics_.empty()) metrics_ = Nodes().coordinator_metrics_address();
    const auto series = testing::SeriesOf(testing::Scrape(metrics_));
    const auto found = series.find(
        absl::StrCat("upipe_rpc_requests_total{code=\"", code, "\",method=\"", method, "\"}"));
    return found == series.end() ? -1 : found->second;
  }
  // Whether the count comes to `wanted`: a call counts when gRPC is done with it.
  bool Counts(const std::string& method, const std::string& code, double wanted) {
    return Eventually([&] { return CountOf(method, code) == wanted; });
  }
  // A call in bytes.
  static grpc::Status Raw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& request, std::string* answer) {
    grpc::GenericStub stub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(15));
    grpc::CompletionQueue queue;
    const grpc::Slice slice(request);
    const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), &queue);
    call->StartCall();
    grpc::ByteBuffer bytes;
    grpc::Status status;
    call->Finish(&bytes, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    grpc::Slice whole;
    if (status.ok() && bytes.DumpToSingleSlice(&whole).ok())
      *answer = std::string(whole.begin(), whole.end());
    return status;
  }
  // "SERVING", "NOT_SERVING" or how the call failed.
  std::string HealthOf(const std::string& service) {
    const auto channel = grpc::CreateChannel(HealthAddress(), grpc::InsecureChannelCredentials());
    std::string answer;
    std::string request;  // field 1, a string
    if (!service.empty())
      request = absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
    const grpc::Status status = Raw(channel, "/grpc.health.v1.Health/Check", request, &answer);
    if (!status.ok()) return absl::StrCat("code ", static_cast<int>(status.error_code()));
    return answer == "\x08\x01" ? "SERVING" : "NOT_SERVING";
  }
  std::string HealthAddress() {
    const v1::ListNodesResponse nodes = Nodes();
    for (const std::string& setting : nodes.coordinator_configuration()) {
      absl::string_view value = setting;
      if (absl::ConsumePrefix(&value, "health-listen=")) return std::string(value);
    }
    return "";
  }

  std::string metrics_;
};

TEST_F(RpcMetrics, ACallCountsUnderItsMethodAndCode) {
  EXPECT_EQ(CountOf("JobService.GetJob", "not_found"), 0);
  v1::GetJobRequest request;
  request.set_id("nobody");
  for (int i = 0; i < 3; ++i) {
    v1::Job job;
    grpc::ClientContext context;
    EXPECT_EQ(jobs_->GetJob(&context, request, &job).error_code(), grpc::StatusCode::NOT_FOUND);
  }
  EXPECT_TRUE(Counts("JobService.GetJob", "not_found", 3));
  EXPECT_EQ(CountOf("JobService.GetJob", "ok"), 0);
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("counted", 2), "once", &job).ok());
  EXPECT_TRUE(Counts("JobService.Submit", "ok", 1));
  const auto series = testing::SeriesOf(testing::Scrape(metrics_));
  EXPECT_EQ(series.at("upipe_rpc_seconds_count{method=\"JobService.GetJob\"}"), 3);
  EXPECT_GE(series.at("upipe_store_commit_seconds_count"), 1);
}

TEST_F(RpcMetrics, AStreamCountsAtItsEnd) {
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("watched", 2), "once", &job).ok());
  v1::WatchRequest request;
  request.set_id(job.id());
  grpc::ClientContext context;
  const auto stream = jobs_->Watch(&context, request);
  v1::WatchResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(CountOf("JobService.Watch", "cancelled"), 0);
  context.TryCancel();
  stream->Finish();
  EXPECT_TRUE(Counts("JobService.Watch", "cancelled", 1));
  auto worker = Worker("w");
  ASSERT_TRUE(Eventually([&] { return worker->epoch() > 0; }));
  const auto sessions = [&] {
    double sum = 0;
    for (const auto& [series, count] :
         testing::SeriesOf(testing::Scrape(metrics_), "upipe_rpc_requests_total")) {
      if (absl::StrContains(series, "WorkerService.Session")) sum += count;
    }
    return sum;
  };
  EXPECT_EQ(sessions(), 0);
  worker.reset();
  EXPECT_TRUE(Eventually([&] { return sessions() == 1; }));
}

TEST_F(RpcMetrics, WhatIsNoMethodOfOursIsUnknown) {
  std::string answer;
  EXPECT_EQ(Raw(channel_, "/made.Up/Call", "", &answer).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Raw(channel_, "/upipe.v1.JobService/MadeUp", "", &answer).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_TRUE(Counts("unknown", "unimplemented", 2));
  EXPECT_EQ(testing::SeriesOf(testing::Scrape(metrics_), "upipe_rpc_requests_total").size() % 17,
            0u);
}

TEST_F(RpcMetrics, TheHealthPortTellsLifeFromReadiness) {
  EXPECT_NE(HealthAddress(), address_);
  EXPECT_EQ(HealthOf(""), "SERVING");
  EXPECT_TRUE(Eventually([&] { return HealthOf("upipe.v1.JobService") == "SERVING"; }));
  EXPECT_EQ(HealthOf("somebody.Else"), "code 5");
}

}  // namespace
}  // namespace upipe::coordinator
