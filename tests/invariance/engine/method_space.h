// The dimensions of the space of methods and their values; the cases that hold every pair of them.
#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "tests/invariance/engine/method_case.h"

namespace upipe::testing {

struct Choice {
  std::string name;  // letters and digits; empty for what goes without saying
  std::function<void(MethodCase&)> apply;
};
struct Dimension {
  std::string name;
  std::vector<Choice> choices;
};
// Applied in this order, each on what the ones before made.
const std::vector<Dimension>& Dimensions();

struct NamedCase {
  std::string name;
  MethodCase test;
};
void PrintTo(const NamedCase& c, std::ostream* out);
// Every two choices of two dimensions stand together in some case, unless the rules of job files
// forbid it or it takes more ranks than a test should.
const std::vector<NamedCase>& PairwiseCases();

// A short list with every method, for properties that need several runs each.
std::vector<NamedCase> OneCasePerMethod();

}  // namespace upipe::testing
