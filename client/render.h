// What commands print: pure functions from messages to text.
#pragma once

#include <google/protobuf/message.h>

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::client {

// `text` on one line: control characters, terminal escapes among them, become spaces.
std::string Printable(absl::string_view text);

// Columns two spaces apart, as wide as their widest cell; no trailing spaces. The first row is the
// heading.
std::string RenderTable(const std::vector<std::vector<std::string>>& rows);

// One row per job, in the order given. `now` dates what is still running.
std::string RenderJobs(const std::vector<v1::Job>& jobs, absl::Time now);

// Everything about one job: state, cause, restarts, checkpoints, progress, ranks, earlier attempts,
// plan, memory planned beside measured, events, spec.
std::string RenderJob(const v1::Job& job, absl::Time now);

// Why a job failed or is failing: the sentence, then rank, node, exit, evidence, last log lines.
// Each line is indented by `indent` spaces. Empty without a cause.
std::string RenderCause(const v1::Cause& cause, int indent);

// State, the one reason, and the place in the queue.
std::string RenderWhy(const v1::WhyResponse& why);

std::string RenderNodes(const v1::ListNodesResponse& nodes);
// "READY, cordoned, leaving".
std::string NodeStateText(const v1::Node& node);
// "2 BUSY, 1 FREE".
std::string SlotsText(const v1::Node& node);

// "step 400 of generation 2, 1.2 GiB".
std::string CheckpointText(const v1::CheckpointRef& checkpoint);

// "restarted twice"; empty before the first restart.
std::string RestartsText(const v1::Job& job);

// "2026-01-31 08:15:30" in local time; "-" for 0.
std::string TimeText(int64_t unix_millis);

// Protobuf JSON with the names of the proto files; unset numbers and words are printed, so fields
// are always there.
std::string RenderJson(const google::protobuf::Message& message);

// The same on one line, newline included, unset fields left out: for streams.
std::string RenderJsonLine(const google::protobuf::Message& message);

// "CANCELLING": what the coordinator shows, else the state's own name.
std::string ShownState(const v1::Job& job);
bool IsTerminal(v1::JobState state);

// "demo-x3kqab SUCCEEDED after 5.0 s": the last word on a job that has ended.
std::string EndLine(const v1::Job& job);

// "8 heads on 4 ranks, upipe, U = 4": the parallel part of a spec in a few words.
std::string ParallelSummary(const v1::JobSpec& spec);

}  // namespace upipe::client
