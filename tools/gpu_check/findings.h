// What a part of the check finds out, told line by line while it runs, so that nothing is lost when
// the process that runs it dies or is stopped.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace upipe::gpu_check {

// A measured number and what it should be, if anything: an aim missed is no failure.
struct Number {
  std::string name;
  double value = 0;
  std::string unit;
  std::optional<double> aim;
  bool at_most = false;  // the aim is an upper limit

  bool Meets() const { return !aim || (at_most ? value <= *aim : value >= *aim); }
};

// Written by the process of a part to a file of its own.
class Findings {
 public:
  // `fd` is borrowed, open for writing.
  explicit Findings(int fd) : fd_(fd) {}

  void Add(const Number& number);
  void Passed(const std::string& check);     // one check held
  void Failed(const std::string& sentence);  // one did not, and why
  void Skipped(const std::string& sentence);
  void Note(const std::string& name, const std::string& text);  // of the machine
  // `held`, or the sentence.
  void Expect(bool held, const std::string& check, const std::string& sentence);

 private:
  void Write(const std::string& kind, const std::string& json);
  const int fd_;
};

// The lines of a file, read.
struct FindingsRead {
  std::vector<Number> numbers;
  int passed = 0;
  std::vector<std::string> failures;
  std::vector<std::string> skipped;
  std::vector<std::pair<std::string, std::string>> notes;
};
// A last line that was cut off is left out.
FindingsRead ReadFindings(const std::string& text);

}  // namespace upipe::gpu_check
