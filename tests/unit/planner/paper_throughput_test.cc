// The throughput tables of the UPipe paper by dry steps of our own engine and the H100 file: what
// is executed comes from the engine, how long it takes from published rates; nothing is fitted.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/spec/yaml_spec.h"
#include "common/units.h"
#include "planner/device_file.h"
#include "planner/plan.h"
#include "planner/step_time.h"

namespace upipe::planner {
namespace {

constexpr char kLlama8B[] = R"(name: llama3-8b
model: {vocab_size: 128256, hidden_size: 4096, num_layers: 32, num_heads: 32, num_kv_heads: 8,
  head_dim: 128, intermediate_size: 14336}
data: {path: none}
parallel: {ranks: 8, ranks_per_node: 8, backend: cuda}
memory: {layer_inputs: host}
train: {context: 1M, steps: 2, dtype: bf16}
)";
// The shape of Qwen3-32B as the paper ran it: a Llama model without q/k-norm, of Llama's
// vocabulary.
constexpr char kQwen32B[] = R"(name: qwen3-32b-shape
model: {vocab_size: 128256, hidden_size: 5120, num_layers: 64, num_heads: 64, num_kv_heads: 8,
  head_dim: 128, intermediate_size: 25600}
data: {path: none}
parallel: {ranks: 16, ranks_per_node: 8, backend: cuda, ring_ranks: 2}
memory: {layer_inputs: host}
train: {context: 1M, steps: 2, dtype: bf16}
)";

// A row of the paper's table: tokens/s per GPU by context (project page of arXiv 2602.21196).
struct Row {
  const char* model;
  const char* method;
  const char* job;
  std::vector<std::string> overrides;
  std::vector<std::pair<const char*, double>> cells;
};
const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = {
      {"Llama3-8B, 8 x H100",
       "Ulysses",
       kLlama8B,
       {"parallel.method=ulysses"},
       {{"128K", 2320.47},
        {"256K", 1503.80},
        {"512K", 878.63},
        {"1M", 475.33},
        {"2M", 246.05},
        {"3M", 162.41}}},
      {"Llama3-8B, 8 x H100",
       "UPipe",
       kLlama8B,
       {"parallel.method=upipe", "parallel.heads_per_stage=8"},
       {{"128K", 2281.05},
        {"256K", 1487.29},
        {"512K", 867.17},
        {"1M", 472.53},
        {"2M", 246.07},
        {"3M", 166.32},
        {"4M", 125.56},
        {"5M", 98.25}}},
      {"Qwen3-32B's shape, 2 x 8 H100",
       "Ulysses 8 x ring 2",
       kQwen32B,
       {"parallel.method=usp"},
       {{"128K", 545.29}, {"256K", 370.70}, {"512K", 217.04}, {"1M", 117.02}, {"2M", 59.98}}},
      {"Qwen3-32B's shape, 2 x 8 H100",
       "UPipe 8 x ring 2",
       kQwen32B,
       {"parallel.method=upipe", "parallel.heads_per_stage=8"},
       {{"128K", 483.29},
        {"256K", 339.56},
        {"512K", 204.46},
        {"1M", 113.26},
        {"2M", 59.56},
        {"3M", 40.42},
        {"4M", 29.97}}},
  };
  return rows;
}

v1::RunPlan Shape(const Row& row, const std::string& context, int64_t layers) {
  std::vector<std::string> overrides = row.overrides;
  overrides.push_back("train.context=" + context);
  if (layers > 0) overrides.push_back(absl::StrCat("model.num_layers=", layers));
  const auto spec = ParseJobSpecYaml(row.job, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  auto plan = PlanShape(*spec);
  UPIPE_CHECK(plan.ok()) << plan.status();
  return *std::move(plan);
}

// Of the whole model by runs of one layer and of two: each more adds what the second did, which
// StepCounts.OfManyLayersAreThoseOfFewer proves. All ranks do the same work here.
v1::StepTime TimeOf(const Row& row, const std::string& context, const v1::DeviceFile& device) {
  const v1::RunPlan whole = Shape(row, context, 0);
  const auto counts = [&](int64_t layers) {
    auto dry = DryRunRank(Shape(row, context, layers), 0, device.attention_kernel());
    UPIPE_CHECK(dry.ok()) << dry.status();
    return std::move(dry->counts);
  };
  const StepCounts one = counts(1), two = counts(2);
  const int64_t more = whole.spec().model().num_layers() - 2;
  StepCounts all = two;
  all.AddTimes(two, more);
  all.AddTimes(one, -more);
  auto time = TimeStep(all, StepShape::From(whole), device);
  UPIPE_CHECK(time.ok()) << time.status();
  return *std::move(time);
}

struct Cell {
  const Row* row = nullptr;
  std::string context;
  double paper = 0;
  v1::StepTime time;
  double error() const { return time.tokens_per_second_per_rank() / paper - 1; }
};

const std::vector<Cell>& Cells() {
  static const std::vector<Cell> cells = [] {
    auto h100 = FindDevice("h100-80gb", /*folder=*/"");
    UPIPE_CHECK(h100.ok()) << h100.status();
    const v1::DeviceFile& device = *h100;
    std::vector<Cell> timed;
    for (const Row& row : Rows()) {
      for (const auto& [context, paper] : row.cells) {
        timed.push_back({&row, context, paper, TimeOf(row, context, device)});
      }
    }
    return timed;
  }();
  return cells;
}

int64_t Tokens(const Cell& cell) { return *ParseTokenCount(cell.context); }

TEST(PaperThroughput, EveryCellFrom512KUpIsWithinTenPercent) {
  int cells = 0;
  for (const Cell& cell : Cells()) {
    if (Tokens(cell) < 512 * 1024) continue;
    ++cells;
    EXPECT_LT(std::abs(cell.error()), 0.10)
        << cell.row->model << " " << cell.row->method << " " << cell.context << ": "
        << cell.time.tokens_per_second_per_rank() << " against " << cell.paper;
  }
  EXPECT_EQ(cells, 4 + 6 + 3 + 5);
}

// Who is faster, and that the lead of one stage over several shrinks with the context, comes out as
// the paper reports it.
TEST(PaperThroughput, StagesCostLessTheLongerTheContext) {
  const auto rate = [](const char* method, const char* context) {
    for (const Cell& cell : Cells()) {
      if (cell.row->method == std::string(method) && cell.context == context) {
        return cell.time.tokens_per_second_per_rank();
      }
    }
    return 0.0;
  };
  double before = 0;
  for (const char* context : {"128K", "512K", "2M"}) {
    const double ratio = rate("UPipe", context) / rate("Ulysses", context);
    EXPECT_GT(ratio, before) << context;
    EXPECT_LT(ratio, 1) << context;
    before = ratio;
  }
  EXPECT_GT(before, 0.97);
}

std::string PaperTable() {
  std::string table =
      "| model | method | context | seconds a step | tokens/s/GPU | paper | error | causal MFU |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const Cell& cell : Cells()) {
    const double rate = cell.time.tokens_per_second_per_rank();
    absl::StrAppendFormat(&table, "| %s | %s | %s | %.1f | %.2f | %.2f | %+.1f %% | %.1f %% |\n",
                          cell.row->model, cell.row->method, cell.context, cell.time.seconds(),
                          rate, cell.paper, 100 * cell.error(), 100 * cell.time.causal_mfu());
  }
  return table;
}

// Where the time of the shortest and the longest UPipe step of each model goes.
std::string PartsTable() {
  std::vector<const Cell*> columns;
  for (const Cell& cell : Cells()) {
    if (cell.row->method[1] != 'P') continue;
    const bool longest = cell.context == cell.row->cells.back().first;
    if (cell.context == "512K" || longest) columns.push_back(&cell);
  }
  std::string table = "| seconds of a UPipe step |", rule = "| --- |";
  for (const Cell* cell : columns) {
    const std::string model = cell->row->model;
    absl::StrAppend(&table, " ", model.substr(0, model.find(',')), ", ", cell->context, " |");
    absl::StrAppend(&rule, " --- |");
  }
  absl::StrAppend(&table, "\n", rule, "\n");
  const auto& parts = columns[0]->time.parts();
  for (int i = 0; i < parts.size(); ++i) {
    absl::StrAppend(&table, "| ", parts[i].name(), " |");
    for (const Cell* cell : columns) {
      EXPECT_EQ(cell->time.parts(i).name(), parts[i].name());
      absl::StrAppendFormat(&table, " %.2f |", cell->time.parts(i).seconds());
    }
    absl::StrAppend(&table, "\n");
  }
  absl::StrAppend(&table, "| beside computation, not counted |");
  for (const Cell* cell : columns) {
    absl::StrAppendFormat(&table, " %.2f |", cell->time.hidden_seconds());
  }
  return table + "\n";
}

// The text between "<!-- table NAME -->" and "<!-- end -->" of the page.
std::string TableOfPage(const std::string& name) {
  const char* root = std::getenv("UPIPE_SOURCE_DIR");
  UPIPE_CHECK(root != nullptr) << "UPIPE_SOURCE_DIR is not set";
  std::ifstream in(absl::StrCat(root, "/docs/planning-throughput.md"));
  std::stringstream page;
  page << in.rdbuf();
  const std::string text = page.str(), begin = absl::StrCat("<!-- table ", name, " -->\n");
  const size_t from = text.find(begin);
  if (from == std::string::npos) return "";
  const size_t first = from + begin.size();
  return text.substr(first, text.find("<!-- end -->", first) - first);
}

TEST(PaperThroughput, ThePageShowsTheseNumbers) {
  EXPECT_EQ(TableOfPage("paper"), PaperTable()) << PaperTable();
  EXPECT_EQ(TableOfPage("parts"), PartsTable()) << PartsTable();
}

}  // namespace
}  // namespace upipe::planner
