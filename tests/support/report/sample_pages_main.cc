// upipe-sample-pages FOLDER: the pages of invented jobs, for tests that look at them in a browser.
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "common/report/job_page.h"
#include "tests/support/report/sample_record.h"

int main(int argc, char** argv) {
  using upipe::report::JobRecord;
  using upipe::testing::SampleRecord;
  if (argc != 2) {
    std::cerr << "usage: upipe-sample-pages FOLDER\n";
    return 2;
  }
  const std::string hostile =
      "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> "
      "\"quoted\" &amp; ]]> \xf0\x9f\x94\xa5 \xe6\xbc\xa2\xe5\xad\x97 \x1b[31m "
      "averyveryveryveryveryveryveryveryveryveryveryveryveryveryverylongwordwithoutaspace";
  const std::vector<std::pair<std::string, JobRecord>> pages = {
      {"whole", SampleRecord({})},
      {"old", SampleRecord({.stages = false, .timeline = false})},
      {"no-steps", SampleRecord({.steps = 0})},
      {"one-step", SampleRecord({.steps = 1})},
      {"refused", upipe::testing::RefusedRecord()},
      {"many-ranks", SampleRecord({.ranks = 64, .layers = 32})},
      {"many-steps", SampleRecord({.steps = 100'000})},
      {"not-a-number", SampleRecord({.not_a_number = true})},
      {"hostile", SampleRecord({.words = hostile})}};
  for (const auto& [name, record] : pages) {
    std::ofstream out(std::string(argv[1]) + "/" + name + ".html", std::ios::binary);
    if (!(out << upipe::report::RenderJobPage(record)) || !out.flush()) return 1;
  }
  return 0;
}
