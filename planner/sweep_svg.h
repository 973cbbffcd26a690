// A sweep over context lengths as a picture: memory against the limit, and throughput.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace upipe::planner {

struct SweepPoint {
  std::string label;  // the line it belongs to: "upipe C 8 x R 1", or "best"
  int64_t context = 0;
  bool fits = true;
  int64_t device_bytes = 0;               // what is taken from the fullest rank's device
  int64_t host_bytes = 0;                 // and from the fullest node's host memory
  double tokens_per_second_per_rank = 0;  // 0 = not known
};

struct SweepTexts {
  std::string title;
  std::string subtitle;
};

// 0 = no limit known.
struct SweepLimits {
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
};

// An SVG file for light and dark backgrounds: over the context, on a logarithmic axis, GiB of a
// device with its limit, tokens per second and rank where they are known, and GiB of a node's host
// memory where any is used. One line per label, in the order of their first points; points that do
// not fit are hollow. At least one point.
std::string SweepSvg(const std::vector<SweepPoint>& points, const SweepTexts& texts,
                     const SweepLimits& limits);

}  // namespace upipe::planner
