#include "tests/support/metrics/scrape.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace upipe::testing {

std::string Scrape(const std::string& address) {
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  uint32_t port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port)) << address;
  peer.sin_port = htons(static_cast<uint16_t>(port));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0) << address;
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string text;
  char chunk[65536];
  for (ssize_t got = 0; (got = recv(fd, chunk, sizeof(chunk), 0)) > 0;) {
    text.append(chunk, static_cast<size_t>(got));
  }
  close(fd);
  const size_t body = text.find("\r\n\r\n");
  EXPECT_NE(body, std::string::npos) << text;
  std::string ours;
  for (const absl::string_view line : absl::StrSplit(text.substr(body + 4), '\n')) {
    if (!absl::StrContains(line, "exposer_")) absl::StrAppend(&ours, line, "\n");
  }
  return ours;
}

std::map<std::string, double> SeriesOf(const std::string& text) {
  std::map<std::string, double> series;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    if (line[0] == '#') continue;
    const size_t space = line.rfind(' ');
    double value = 0;
    EXPECT_TRUE(absl::SimpleAtod(line.substr(space + 1), &value)) << line;
    EXPECT_TRUE(series.emplace(line.substr(0, space), value).second) << "twice: " << line;
  }
  return series;
}

std::map<std::string, double> SeriesOf(const std::string& text, const std::string& name) {
  std::map<std::string, double> found;
  for (const auto& [series, value] : SeriesOf(text)) {
    if (series == name || absl::StartsWith(series, absl::StrCat(name, "{"))) found[series] = value;
  }
  return found;
}

std::set<std::string> NamesOf(const std::string& text) {
  std::set<std::string> names;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() > 2 && words[0] == "#" && words[1] == "TYPE") names.insert(words[2]);
  }
  return names;
}

std::set<std::string> NeverAbsent(const std::vector<MetricDescriptor>& descriptors) {
  std::set<std::string> names;
  for (const MetricDescriptor& metric : descriptors) {
    if (metric.absent.empty()) names.insert(metric.name);
  }
  return names;
}

std::set<std::string> NamesOf(const std::vector<MetricDescriptor>& descriptors) {
  std::set<std::string> names;
  for (const MetricDescriptor& metric : descriptors) names.insert(metric.name);
  return names;
}

namespace {

// Empty: nothing.
std::vector<std::string> NamingFaults(const std::vector<MetricDescriptor>& descriptors) {
  static const std::set<std::string> units = {"",     "seconds", "bytes",   "tokens",
                                              "nats", "ratio",   "tokens/s"};
  std::vector<std::string> faults;
  std::set<std::string> names;
  for (const MetricDescriptor& metric : descriptors) {
    const auto fault = [&](const char* what) {
      faults.push_back(absl::StrCat(metric.name, ": ", what));
    };
    if (!absl::StartsWith(metric.name, "upipe_")) fault("is not upipe_..");
    if (!names.insert(metric.name).second) fault("is there twice");
    const bool counter = metric.type == MetricType::kCounter;
    if (absl::EndsWith(metric.name, "_total") != counter) fault("is a counter or named like one");
    if (!units.contains(metric.unit)) fault("has an unknown unit");
    const bool base = metric.unit == "seconds" || metric.unit == "bytes" ||
                      metric.unit == "tokens" || metric.unit == "ratio";
    if (base && !absl::StrContains(metric.name, absl::StrCat("_", metric.unit)))
      fault("does not name its unit");
    for (const char* unit : {"seconds", "bytes", "ratio"}) {
      if (metric.unit != unit && absl::EndsWith(metric.name, absl::StrCat("_", unit)))
        fault("names another unit");
    }
    if (metric.help.empty() || metric.help.back() == '.') fault("has no help, or one with a stop");
    if (counter && !metric.absent.empty()) fault("is a counter that may be absent");
  }
  return faults;
}

// Of `promtool check metrics`; none where there is no promtool.
std::optional<std::string> PromtoolFaults(const std::string& text) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/metrics-", getpid(), ".txt");
  std::ofstream(path) << text;
  FILE* pipe = popen(absl::StrCat("promtool check metrics < '", path, "' 2>&1").c_str(), "r");
  std::string said;
  char chunk[4096];
  while (const size_t size = fread(chunk, 1, sizeof(chunk), pipe)) said.append(chunk, size);
  const int status = pclose(pipe);
  unlink(path.c_str());
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return std::nullopt;  // the shell found none
  return status == 0 ? said : absl::StrCat(said, "exit status ", status);
}

}  // namespace

void ExpectServedAndWellNamed(const std::string& text,
                              const std::vector<MetricDescriptor>& descriptors) {
  EXPECT_EQ(NamesOf(text), NamesOf(descriptors));
  EXPECT_EQ(NamingFaults(descriptors), std::vector<std::string>());
  const std::optional<std::string> faults = PromtoolFaults(text);
  if (!faults) std::cout << "promtool is not installed: its lint was skipped\n";
  EXPECT_EQ(faults.value_or(""), "");
}

}  // namespace upipe::testing
