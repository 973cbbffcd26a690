#include "tools/memory/memory_figures.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/chart/chart_style.h"
#include "common/chart/charts.h"
#include "common/chart/palette.h"
#include "common/chart/scale.h"
#include "common/check.h"
#include "common/spec/model_presets.h"
#include "common/spec/model_rules.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/device_file.h"
#include "planner/released_model.h"
#include "tools/memory/engine_bytes.h"

namespace upipe::memory {
namespace {

using planner::ReleasedCode;

constexpr int64_t kK = 1024;
constexpr int64_t kM = 1024 * kK;
constexpr double kGiB = 1 << 30;

const std::vector<int64_t>& Contexts() {
  static const auto* contexts = new std::vector<int64_t>{128 * kK, 512 * kK, kM,     2 * kM, 3 * kM,
                                                         4 * kM,   5 * kM,   8 * kM, 12 * kM};
  return *contexts;
}

v1::ModelSpec Preset(const char* name) {
  const auto model = ModelPreset(name);
  UPIPE_CHECK(model.ok()) << model.status();
  return WithModelDefaults(*model);
}

// One of the two set-ups of the paper.
struct Paper {
  std::string name;
  v1::ModelSpec model;
  int ring_ranks = 1;
};
constexpr int kUlyssesRanks = 8;

Paper EightBillion() { return {"Llama3-8B on 8", Preset("llama3-8b"), 1}; }
// Qwen3 32B in width and depth, with Llama's tokenizer and without q/k-norm.
Paper ThirtyTwoBillion() {
  v1::ModelSpec model = Preset("qwen3-32b");
  model.set_vocab_size(128256);
  model.set_qk_norm(false);
  return {"32B on 16", model, 2};
}

v1::DeviceFile Card() {
  auto device = planner::FindDevice("h100-80gb", /*folder=*/"");
  UPIPE_CHECK(device.ok()) << device.status();
  return *std::move(device);
}

int64_t TakenBeside(const v1::DeviceFile& device) {
  return device.context().bytes() + device.communicator().bytes();
}

planner::ReleasedSetup Released(const Paper& paper, ReleasedCode code, int64_t context) {
  return {.code = code,
          .model = paper.model,
          .context = context,
          .ulysses_ranks = kUlyssesRanks,
          .ring_ranks = paper.ring_ranks,
          .device = Card()};
}
planner::ReleasedMemory ReleasedAt(const Paper& paper, ReleasedCode code, int64_t context) {
  const auto memory = planner::ReleasedMemoryOf(Released(paper, code, context));
  UPIPE_CHECK(memory.ok()) << memory.status();
  return *memory;
}

// ---- this engine's policies

struct Policy {
  std::string name;
  v1::Method method = v1::METHOD_UPIPE;
  v1::MemorySpec memory;
};

v1::MemorySpec OnHost(bool hidden_stream, int64_t query_chunks) {
  v1::MemorySpec memory;
  memory.set_layer_inputs(v1::PLACE_HOST);
  if (hidden_stream) memory.set_hidden_stream(v1::PLACE_HOST);
  if (query_chunks > 1) memory.set_query_chunks(query_chunks);
  return memory;
}
Policy S1() { return {.name = "S1", .memory = OnHost(false, 1)}; }
Policy S2() { return {.name = "S2", .memory = OnHost(true, 1)}; }
Policy S3() { return {.name = "S3", .memory = OnHost(true, 16)}; }
std::vector<Policy> Policies() { return {S1(), S2(), S3()}; }

EngineSetup SetupOf(const Paper& paper, const Policy& policy) {
  return {.model = paper.model,
          .method = policy.method,
          .ulysses_ranks = kUlyssesRanks,
          .ring_ranks = paper.ring_ranks,
          .memory = policy.memory};
}

// On the card: what the engine allocates, the context and the communicators.
using Curve = std::vector<EngineBytes>;  // [Contexts()]
absl::StatusOr<std::vector<Curve>> CurvesOf(const Paper& paper) {
  std::vector<Curve> curves;
  for (const Policy& policy : Policies()) {
    UPIPE_ASSIGN_OR_RETURN(Curve curve, ComposedSteps(SetupOf(paper, policy), Contexts()));
    for (EngineBytes& bytes : curve) bytes.device += TakenBeside(Card());
    curves.push_back(std::move(curve));
  }
  return curves;
}

// ---- tables

using Row = std::vector<std::string>;

std::string Table(const Row& head, const std::vector<Row>& rows) {
  std::string text;
  const auto add = [&text](const Row& cells) {
    absl::StrAppend(&text, "| ", absl::StrJoin(cells, " | "), " |\n");
  };
  add(head);
  add(Row(head.size(), "---"));
  for (const Row& row : rows) add(row);
  return text;
}

std::string GiB(int64_t bytes) {
  return absl::StrFormat("%.1f", static_cast<double>(bytes) / kGiB);
}

struct Reported {
  const char* what;
  ReleasedCode code;
  bool thirty_two;  // the 32B model
  int ring_ranks;
  int64_t context;
  double gib;
  const char* source;
};

std::string ReportedTable() {
  constexpr auto kUpipe = ReleasedCode::kUpipe, kUlysses = ReleasedCode::kUlysses;
  const std::vector<Reported> all = {
      {"UPipe, Llama3-8B on 8", kUpipe, false, 1, 128 * kK, 21.1, "listing"},
      {"UPipe, Llama3-8B on 8", kUpipe, false, 1, 3 * kM, 51.1, "stacked chart"},
      {"Ulysses, Llama3-8B on 8", kUlysses, false, 1, 3 * kM, 64.6, "stacked chart"},
      {"UPipe, 32B on 8 x 2", kUpipe, true, 2, 128 * kK, 39.98, "listing"},
      {"UPipe, Llama3-8B on 8 x 2", kUpipe, false, 2, 512 * kK, 15.8, "line chart"},
      {"UPipe, Llama3-8B on 8 x 2", kUpipe, false, 2, 4 * kM, 40.8, "line chart"},
      {"UPipe, Llama3-8B on 8 x 2", kUpipe, false, 2, 8 * kM, 69.6, "line chart"},
      {"Ulysses, Llama3-8B on 8 x 2", kUlysses, false, 2, 512 * kK, 16.3, "line chart"},
      {"Ulysses, Llama3-8B on 8 x 2", kUlysses, false, 2, 4 * kM, 45.4, "line chart"},
      {"Ulysses, Llama3-8B on 8 x 2", kUlysses, false, 2, 6 * kM, 62.1, "line chart"}};
  std::vector<Row> rows;
  for (const Reported& reported : all) {
    Paper paper = reported.thirty_two ? ThirtyTwoBillion() : EightBillion();
    paper.ring_ranks = reported.ring_ranks;
    const double here =
        static_cast<double>(ReleasedAt(paper, reported.code, reported.context).peak_bytes) / kGiB;
    rows.push_back({reported.what, FormatTokenCount(reported.context),
                    absl::StrFormat("%.4g", reported.gib), absl::StrFormat("%.1f", here),
                    absl::StrFormat("%+.1f %%", 100 * (here / reported.gib - 1)), reported.source});
  }
  return Table({"peak of PyTorch's allocator, GiB", "context", "reported", "here", "error", "from"},
               rows);
}

std::string CardTable() {
  const v1::DeviceFile card = Card();
  return Table(
      {card.name(), "", "from"},
      {{"memory", absl::StrCat(GiB(card.memory().bytes()), " GiB"), card.memory().source()},
       {"context", absl::StrCat(GiB(card.context().bytes()), " GiB"), card.context().source()},
       {"communicators", absl::StrCat(GiB(card.communicator().bytes()), " GiB"),
        card.communicator().source()},
       {"unusable share of what is allocated",
        absl::StrCat(chart::PlainNumber(100 * card.fragmentation().value()), " %"),
        card.fragmentation().source()}});
}

std::string TermsTable(ReleasedCode code) {
  const planner::ReleasedMemory memory = ReleasedAt(EightBillion(), code, 3 * kM);
  std::vector<Row> rows;
  const auto add = [&rows](const std::vector<planner::ReleasedTerm>& terms) {
    for (const auto& term : terms) {
      rows.push_back({term.name, absl::StrCat("`", term.formula, "`"), term.source,
                      absl::StrFormat("%.2f", static_cast<double>(term.bytes) / kGiB)});
    }
  };
  add(memory.throughout);
  add(memory.moments[memory.peak_moment].terms);
  rows.push_back({"**peak**", "", "", absl::StrFormat("**%.2f**", memory.peak_bytes / kGiB)});
  const char* name = code == ReleasedCode::kUpipe ? "UPipe" : "Ulysses";
  std::vector<std::string> others;
  for (size_t i = 0; i < memory.moments.size(); ++i) {
    if (i == memory.peak_moment) continue;
    others.push_back(absl::StrCat(memory.moments[i].name, " ",
                                  GiB(memory.peak_bytes - memory.moments[memory.peak_moment].bytes +
                                      memory.moments[i].bytes)));
  }
  return absl::StrCat(Table({absl::StrCat(name, ", ", memory.moments[memory.peak_moment].name),
                             "bytes", "read under", "GiB at 3M"},
                            rows),
                      "\nThe other moments, GiB: ", absl::StrJoin(others, "; "), ".\n");
}

Row ReleasedColumn(const Paper& paper, ReleasedCode code) {
  Row column;
  for (const int64_t context : Contexts()) {
    const planner::ReleasedMemory memory = ReleasedAt(paper, code, context);
    column.push_back(memory.fits ? GiB(memory.device_bytes)
                                 : absl::StrCat("*", GiB(memory.device_bytes), "*"));
  }
  return column;
}

std::string LengthsTable(const Paper& paper, const std::vector<Curve>& curves) {
  const Row upipe = ReleasedColumn(paper, ReleasedCode::kUpipe);
  const Row ulysses = ReleasedColumn(paper, ReleasedCode::kUlysses);
  const int64_t card = Card().memory().bytes();
  std::vector<Row> rows;
  for (size_t i = 0; i < Contexts().size(); ++i) {
    Row row = {FormatTokenCount(Contexts()[i]), ulysses[i], upipe[i]};
    for (const Curve& curve : curves) {
      const std::string text = GiB(curve[i].device);
      row.push_back(curve[i].device <= card ? text : absl::StrCat("*", text, "*"));
    }
    rows.push_back(std::move(row));
  }
  return Table({absl::StrCat(paper.name, ", GiB on the card"), "Ulysses, released",
                "UPipe, released", "S1", "S2", "S3, n = 16"},
               rows);
}

// Where the line through the curve's last two contexts meets the card.
int64_t LongestOf(const Curve& curve) {
  const size_t last = curve.size() - 1;
  const auto run = static_cast<double>(Contexts()[last] - Contexts()[last - 1]);
  const double slope = static_cast<double>(curve[last].device - curve[last - 1].device) / run;
  const auto left = static_cast<double>(Card().memory().bytes() - curve[last].device);
  return Contexts()[last] + static_cast<int64_t>(left / slope);
}

std::string Millions(int64_t tokens) {
  return absl::StrFormat("%.1fM", static_cast<double>(tokens) / kM);
}

std::string LongestTable(const std::vector<std::pair<Paper, std::vector<Curve>>>& papers) {
  std::vector<Row> rows;
  for (const auto& [paper, curves] : papers) {
    const auto longest = [&paper = paper](ReleasedCode code) {
      return Millions(ReleasedAt(paper, code, kM).context_max);
    };
    Row row = {paper.name, longest(ReleasedCode::kUlysses), longest(ReleasedCode::kUpipe)};
    for (const Curve& curve : curves) row.push_back(Millions(LongestOf(curve)));
    rows.push_back(std::move(row));
  }
  return Table({"longest context by device memory", "Ulysses, released", "UPipe, released", "S1",
                "S2", "S3, n = 16"},
               rows);
}

absl::StatusOr<std::string> HostTable(const std::vector<Paper>& papers) {
  Policy stride = S1();
  stride.name = "S1, `checkpoint_stride: 2`";
  stride.memory.set_checkpoint_stride(2);
  Policy outputs = S1();
  outputs.name = "S1, `attention_output: host`";
  outputs.memory.set_attention_output(v1::ATTENTION_OUTPUT_HOST);
  Policy fpdt = {.name = "`fpdt`", .method = v1::METHOD_FPDT};
  const std::vector<Policy> policies = {S1(), S2(), S3(), stride, outputs, fpdt};
  const auto per_token = [](const Paper& paper, int64_t rank_bytes, int64_t context) {
    return FormatCount(rank_bytes * kUlyssesRanks * paper.ring_ranks / context);
  };
  std::vector<Row> rows = {{"released code"}};
  for (const Paper& paper : papers) {
    const auto memory = ReleasedAt(paper, ReleasedCode::kUpipe, kM);
    rows[0].push_back(per_token(paper, memory.host_bytes, kM));
  }
  for (const Policy& policy : policies) {
    Row row = {policy.name};
    for (const Paper& paper : papers) {
      if (policy.method == v1::METHOD_FPDT && paper.ring_ranks > 1) {
        row.push_back("");  // one ring rank only
        continue;
      }
      UPIPE_ASSIGN_OR_RETURN(const Curve curve, ComposedSteps(SetupOf(paper, policy), {128 * kK}));
      row.push_back(per_token(paper, curve[0].host, 128 * kK));
    }
    rows.push_back(std::move(row));
  }
  Row head = {"host memory, bytes a token over all ranks"};
  for (const Paper& paper : papers) head.push_back(paper.name);
  return Table(head, rows);
}

std::string SavingTable() {
  std::vector<Row> rows;
  for (const Paper& paper : {EightBillion(), ThirtyTwoBillion()}) {
    const auto saving = planner::ReleasedAttentionSaving(paper.model, kUlyssesRanks);
    rows.push_back({absl::StrCat("H ", paper.model.num_heads(), ", K ", paper.model.num_kv_heads()),
                    absl::StrFormat("%.1f %%", 100 * saving.paper),
                    absl::StrFormat("%.1f %%", 100 * saving.forward),
                    absl::StrFormat("%.1f %%", 100 * saving.backward)});
  }
  return Table({"C = U = 8", "paper's count, 1 - U/H", "forward, q k v o as they are",
                "backward, as they are"},
               rows);
}

// ---- the plot

constexpr double kPlotTop = 100;  // GiB

chart::LineSeries Line(std::string name, std::string colour, const std::vector<int64_t>& bytes) {
  chart::LineSeries line = {.name = std::move(name), .colour = std::move(colour)};
  for (size_t i = 0; i < bytes.size(); ++i) {
    const chart::Point to = {static_cast<double>(Contexts()[i]) / kM,
                              static_cast<double>(bytes[i]) / kGiB};
    if (to.y > kPlotTop) {  // ends where it leaves the plot
      const chart::Point from = line.points.back();
      const double share = (kPlotTop - from.y) / (to.y - from.y);
      line.points.push_back({from.x + share * (to.x - from.x), kPlotTop});
      break;
    }
    line.points.push_back(to);
  }
  return line;
}

// A chart of a page, alone: its style in it and a background.
std::string Standalone(const std::string& chart, const chart::Canvas& canvas) {
  const std::string head =
      absl::StrCat("<style>", chart::kPalette, chart::kChartStyle, "</style>\n<rect width=\"",
                   static_cast<int>(canvas.width), "\" height=\"", static_cast<int>(canvas.height),
                   "\" fill=\"var(--card)\"/>\n");
  const size_t end_of_tag = chart.find('\n') + 1;
  std::string svg = chart;
  svg.insert(end_of_tag, head);
  return absl::StrReplaceAll(svg, {{"<svg ", "<svg xmlns=\"http://www.w3.org/2000/svg\" "}});
}

// What a place of the axis tells on hover: every series that is still in the plot there.
std::vector<chart::AxisColumn> HoverColumns(const std::vector<chart::LineSeries>& series) {
  std::vector<chart::AxisColumn> columns;
  for (size_t i = 0; i < Contexts().size(); ++i) {
    const auto at = [](size_t context) { return static_cast<double>(Contexts()[context]) / kM; };
    const bool last = i + 1 == Contexts().size();
    std::string text = absl::StrCat(FormatTokenCount(Contexts()[i]), " tokens");
    for (const chart::LineSeries& line : series) {
      if (line.points.size() <= i || line.points[i].x != at(i)) continue;
      absl::StrAppendFormat(&text, "\n%s %.1f GiB", line.name, line.points[i].y);
    }
    columns.push_back({.from = i == 0 ? at(0) : (at(i - 1) + at(i)) / 2,
                       .to = last ? at(i) : (at(i) + at(i + 1)) / 2,
                       .text = std::move(text)});
  }
  return columns;
}

std::string Picture(const Paper& paper, const std::vector<Curve>& curves) {
  const auto released = [&paper](ReleasedCode code) {
    std::vector<int64_t> bytes;
    for (const int64_t context : Contexts()) {
      bytes.push_back(ReleasedAt(paper, code, context).device_bytes);
    }
    return bytes;
  };
  const auto engine = [&curves](size_t policy) {
    std::vector<int64_t> bytes;
    for (const EngineBytes& at : curves[policy]) bytes.push_back(at.device);
    return bytes;
  };
  const double card = static_cast<double>(Card().memory().bytes()) / kGiB;
  chart::LineChart chart = {
      .title =
          "Memory of a rank by context, Llama3-8B on 8 ranks: the paper's Ulysses and UPipe "
          "and this engine's policies S1, S2 and S3, beside the memory of an H100",
      .canvas = {.width = 860, .height = 420},
      .series = {Line("Ulysses, paper", "--ulysses", released(ReleasedCode::kUlysses)),
                 Line("UPipe, paper", "--bigram", released(ReleasedCode::kUpipe)),
                 Line("this engine S1", "--upipe", engine(0)),
                 Line("this engine S2", "--rate", engine(1)),
                 Line("this engine S3", "--train", engine(2))},
      .levels = {{.value = card,
                  .label = absl::StrFormat("H100 %.1f GiB", card),
                  .colour = "--ink"}},
      .axis_name = "tokens",
      .axis_ticks = {{static_cast<double>(Contexts()[0]) / kM, FormatTokenCount(Contexts()[0])}},
      .from_zero = true,
      .format = [](double value) { return absl::StrCat(chart::PlainNumber(value), " GiB"); }};
  for (int64_t millions = 2; millions <= Contexts().back() / kM; millions += 2) {
    chart.axis_ticks.push_back({static_cast<double>(millions), absl::StrCat(millions, "M")});
  }
  chart.axis_columns = HoverColumns(chart.series);
  return Standalone(chart::RenderLineChart(chart), chart.canvas);
}

constexpr char kBegin[] = "<!-- table ";
constexpr char kBeginEnd[] = " -->\n";
constexpr char kEnd[] = "<!-- end -->";

}  // namespace

absl::StatusOr<Figures> MakeFigures() {
  const Paper eight = EightBillion(), thirty_two = ThirtyTwoBillion();
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Curve> eight_curves, CurvesOf(eight));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Curve> thirty_two_curves, CurvesOf(thirty_two));
  Figures figures;
  figures.tables["card"] = CardTable();
  figures.tables["reported"] = ReportedTable();
  figures.tables["terms_upipe"] = TermsTable(ReleasedCode::kUpipe);
  figures.tables["terms_ulysses"] = TermsTable(ReleasedCode::kUlysses);
  figures.tables["lengths_8b"] = LengthsTable(eight, eight_curves);
  figures.tables["lengths_32b"] = LengthsTable(thirty_two, thirty_two_curves);
  figures.tables["longest"] =
      LongestTable({{eight, eight_curves}, {thirty_two, thirty_two_curves}});
  UPIPE_ASSIGN_OR_RETURN(figures.tables["host"], HostTable({eight, thirty_two}));
  figures.tables["saving"] = SavingTable();
  figures.picture = Picture(eight, eight_curves);
  return figures;
}

absl::StatusOr<std::string> Filled(const std::string& text,
                                   const std::map<std::string, std::string>& tables) {
  std::string filled;
  std::set<std::string> unused;
  for (const auto& [name, table] : tables) unused.insert(name);
  size_t at = 0;
  for (size_t begin; (begin = text.find(kBegin, at)) != std::string::npos;) {
    const size_t name_begin = begin + sizeof(kBegin) - 1;
    const size_t name_end = text.find(kBeginEnd, name_begin);
    const size_t end = text.find(kEnd, name_begin);
    if (name_end == std::string::npos || end == std::string::npos || name_end > end) {
      return absl::InvalidArgumentError(
          absl::StrCat("no \"", kEnd, "\" follows ", text.substr(begin, 40)));
    }
    const std::string name = text.substr(name_begin, name_end - name_begin);
    const auto table = tables.find(name);
    if (table == tables.end()) return absl::NotFoundError(absl::StrCat("no table ", name));
    unused.erase(name);
    absl::StrAppend(&filled, text.substr(at, name_end + sizeof(kBeginEnd) - 1 - at), table->second);
    at = end;
  }
  if (!unused.empty()) {
    return absl::NotFoundError(absl::StrCat("no place for table ", *unused.begin()));
  }
  return absl::StrCat(filled, text.substr(at));
}

}  // namespace upipe::memory
