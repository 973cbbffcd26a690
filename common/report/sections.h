// The sections of a job's page, each a pure function from the record to HTML; empty where there is
// nothing to show and nothing to say. In files by what they are about.
#pragma once

#include <string>
#include <vector>

#include "common/chart/charts.h"
#include "common/report/job_record.h"

namespace upipe::report {

// step_sections.cc: what every step told.
std::string LossSection(const JobRecord& record, const std::vector<chart::Level>& levels,
                        const std::string& words);
std::string ThroughputSection(const JobRecord& record);
std::string MfuSection(const JobRecord& record);
std::string GradientSection(const JobRecord& record);
std::string StepTimeSection(const JobRecord& record);
std::string CollectivesSection(const JobRecord& record);
std::string PositionSection(const JobRecord& record);

// memory_sections.cc: planned and measured.
std::string MemorySection(const JobRecord& record);
std::string RanksSection(const JobRecord& record);

// timeline_section.cc: one measured step of one rank.
std::string TimelineSection(const JobRecord& record);

// time_sections.cc: the job's life on the clock.
std::string CourseSection(const JobRecord& record);
std::string CheckpointSection(const JobRecord& record);

// configuration.cc
std::string ConfigurationSection(const JobRecord& record);

// Columns of charts over steps: the samples shared out evenly, each column at least one.
struct StepColumns {
  std::vector<std::vector<const v1::StepReport*>> columns;
  chart::Range steps;               // first and last
  std::vector<std::string> titles;  // "steps 11 to 20"
};
// `samples` is not empty and outlives the columns.
StepColumns ColumnsOf(const std::vector<v1::StepReport>& samples);

// The CSS variable of a stage (docs/metrics.md) or a memory tag.
std::string StageColour(const std::string& stage);
std::string TagColour(const std::string& tag);

}  // namespace upipe::report
