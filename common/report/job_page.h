// A job as one self-contained HTML document: no script, no network, light and dark, for a desk, a
// phone and paper. Pure. A job without a plan or without a step has a page as well: it says what is
// known.
#pragma once

#include <string>
#include <vector>

#include "common/chart/charts.h"
#include "common/report/job_record.h"

namespace upipe::report {

// What somebody who knows more of a job adds to its page.
struct PageExtras {
  std::string lead;                       // a sentence below the title
  std::vector<std::string> problems;      // sentences, shown in red
  std::string tiles;                      // HTML (page_parts.h), behind the others
  std::vector<chart::Level> loss_levels;  // to compare the loss with
  std::string loss_words;                 // HTML above that chart, instead of the usual
  std::string cards;                      // HTML, behind the sections of memory
};

std::string RenderJobPage(const JobRecord& record, const PageExtras& extras = {});

}  // namespace upipe::report
