#include "common/metrics/timeline_line.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/metrics/json_members.h"

namespace upipe {
namespace {

// Numbers of a slice: lane, stage name, pass, layer, stage, begin, end. Of a sample: nanos, tag,
// host, bytes.
constexpr size_t kSliceNumbers = 7;
constexpr size_t kSampleNumbers = 4;
constexpr int64_t kMostNames = std::numeric_limits<int>::max();

std::vector<std::string> PassesOf(const v1::StepTimeline& timeline) {
  std::vector<std::string> passes;
  for (const auto& slice : timeline.slices()) {
    if (std::find(passes.begin(), passes.end(), slice.pass()) == passes.end()) {
      passes.push_back(slice.pass());
    }
  }
  return passes;
}

Json SlicesJson(const v1::StepTimeline& timeline, const std::vector<std::string>& passes) {
  Json list = Json::array();
  for (const auto& slice : timeline.slices()) {
    const auto pass = std::find(passes.begin(), passes.end(), slice.pass()) - passes.begin();
    list.push_back({static_cast<int>(slice.lane()), slice.stage_name(), pass, slice.layer(),
                    slice.stage(), slice.begin_nanos(), slice.end_nanos()});
  }
  return list;
}

Json SamplesJson(const v1::StepTimeline& timeline) {
  Json list = Json::array();
  for (const auto& sample : timeline.memory()) {
    list.push_back({sample.nanos(), sample.tag(), sample.host() ? 1 : 0, sample.bytes()});
  }
  return list;
}

// Below, what is wrong is an exception, which ParseTimelineLine catches.

const Json& Numbers(const Json& list, size_t count) {
  if (!list.is_array() || list.size() != count) {
    throw std::out_of_range(absl::StrCat("no array of ", count, " numbers: ", list.dump()));
  }
  return list;
}

// From `least` to `end` - 1.
int Index(const Json& value, int64_t end, int64_t least = 0) {
  const int64_t index = Integer(value);
  if (index < least || index >= end) {
    throw std::out_of_range(absl::StrCat(index, " is not from ", least, " to ", end - 1));
  }
  return static_cast<int>(index);
}

template <typename Names>
void ReadNames(const Json& object, const char* member, Names* names) {
  if (!object.contains(member)) return;
  for (const Json& name : object.at(member)) *names->Add() = name.get<std::string>();
}

void ReadSlice(const Json& numbers, const google::protobuf::RepeatedPtrField<std::string>& passes,
               const v1::StepTimeline& timeline, v1::StepTimeline::Slice& slice) {
  Numbers(numbers, kSliceNumbers);
  slice.set_lane(
      static_cast<v1::StepTimeline::Lane>(Index(numbers[0], v1::StepTimeline::Lane_ARRAYSIZE)));
  slice.set_stage_name(Index(numbers[1], timeline.stages_size()));
  slice.set_pass(passes[Index(numbers[2], passes.size())]);
  slice.set_layer(Index(numbers[3], kMostNames, -1));
  slice.set_stage(Index(numbers[4], kMostNames, -1));
  slice.set_begin_nanos(Integer(numbers[5]));
  slice.set_end_nanos(Integer(numbers[6]));
  if (slice.end_nanos() < slice.begin_nanos()) {
    throw std::out_of_range(absl::StrCat("a slice ends before it begins: ", numbers.dump()));
  }
}

v1::StepTimeline Read(const Json& object) {
  v1::StepTimeline timeline;
  timeline.set_rank(Index(object.at("rank"), kMostNames));
  timeline.set_step(Integer(object.at("step")));
  timeline.set_generation(IntegerOf(object, "generation"));
  timeline.set_start_unix_micros(IntegerOf(object, "start_unix_micros"));
  timeline.set_dropped_slices(IntegerOf(object, "dropped_slices"));
  google::protobuf::RepeatedPtrField<std::string> passes;
  ReadNames(object, "stages", timeline.mutable_stages());
  ReadNames(object, "passes", &passes);
  ReadNames(object, "tags", timeline.mutable_tags());
  if (object.contains("slices")) {
    for (const Json& numbers : object.at("slices")) {
      ReadSlice(numbers, passes, timeline, *timeline.add_slices());
    }
  }
  if (object.contains("memory")) {
    for (const Json& numbers : object.at("memory")) {
      Numbers(numbers, kSampleNumbers);
      v1::StepTimeline::MemorySample& sample = *timeline.add_memory();
      sample.set_nanos(Integer(numbers[0]));
      sample.set_tag(Index(numbers[1], timeline.tags_size()));
      sample.set_host(Index(numbers[2], 2) == 1);
      sample.set_bytes(Integer(numbers[3]));
    }
  }
  return timeline;
}

}  // namespace

std::string FormatTimelineLine(const v1::StepTimeline& timeline) {
  const std::vector<std::string> passes = PassesOf(timeline);
  const Json object = {{"rank", timeline.rank()},
                       {"step", timeline.step()},
                       {"generation", timeline.generation()},
                       {"start_unix_micros", timeline.start_unix_micros()},
                       {"dropped_slices", timeline.dropped_slices()},
                       {"stages", timeline.stages()},
                       {"passes", passes},
                       {"tags", timeline.tags()},
                       {"slices", SlicesJson(timeline, passes)},
                       {"memory", SamplesJson(timeline)}};
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<v1::StepTimeline> ParseTimelineLine(absl::string_view text) {
  try {
    return Read(Json::parse(text.begin(), text.end()));
  } catch (const std::exception& error) {
    return absl::DataLossError(absl::StrCat("no line of timeline.jsonl: ", error.what()));
  }
}

}  // namespace upipe
