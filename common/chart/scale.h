// From numbers to positions and tick labels: what every chart's axes share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace upipe::chart {

struct Range {
  double low = 0;
  double high = 1;
};

// Maps a value range onto pixels; `to` may run downwards, as y does.
struct Scale {
  Range from;
  Range to;
  double operator()(double value) const;
};

// Round values inside `range`, about `wanted` of them, ascending: multiples of 1, 2 or 5 times a
// power of ten.
std::vector<double> RoundTicks(Range range, int wanted);
// The same for byte counts: multiples of a power of two.
std::vector<double> ByteTicks(Range range, int wanted);
// Whole numbers only: steps of a job.
std::vector<double> WholeTicks(Range range, int wanted);

// "2.5", "-0.25", "3": no more digits than the value needs, at most four after the point.
std::string PlainNumber(double value);
// "6.8K", "950": for rates.
std::string ShortNumber(double value);
std::string Bytes(double value);

}  // namespace upipe::chart
