// The report as one self-contained HTML document: no script, no network, light and dark. Pure.
#pragma once

#include <string>
#include <vector>

#include "tools/report/run_record.h"
#include "tools/report/step_profile.h"
#include "tools/report/summary.h"

namespace upipe::report {

struct PageInput {
  const RunRecord& record;
  const Summary& summary;
  std::vector<ProfileMoment> profile;          // of the fullest rank, thinned
  std::vector<ProfileMoment> ulysses_profile;  // of the same model with Ulysses
};

std::string RenderPage(const PageInput& input);

}  // namespace upipe::report
