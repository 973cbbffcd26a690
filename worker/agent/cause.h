// Why a rank ended: classifies the launcher's evidence in the order out of memory, device
// fault, signal, peer failure, exit code.
#pragma once

#include <vector>

#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/report.pb.h"
#include "worker/agent/agent.h"

namespace upipe::worker {

// True when the trainer reported its end and left with exit code 0.
bool EndedWell(const Rank& rank, const ProcessExit& exit);

// True when it left at the step boundary all ranks of the gang agreed on after a notice, which may
// have been given to another worker's ranks.
bool LeftOnNotice(const Rank& rank, const ProcessExit& exit);

// Whether the worker itself ended the process; false for one that another's signal ended first.
bool SignalSentByWorker(const Rank& rank, const ProcessExit& exit);

// The cause of a rank that did not end well. Evidence names where all local ranks were; the rank
// with the lowest collective number is the culprit, equal numbers mean the communicator.
v1::Cause CauseOfExit(const Rank& rank, const ProcessExit& exit,
                      const std::vector<v1::RankPosition>& positions);

// "step 12, backward, layer 3, stage 1, inside collective 4711"
std::string DescribePosition(const v1::RankPosition& position);
std::string DescribeCulprit(const std::vector<v1::RankPosition>& positions);

}  // namespace upipe::worker
