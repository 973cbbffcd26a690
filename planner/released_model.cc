#include "planner/released_model.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/rounding.h"
#include "common/spec/model_presets.h"
#include "common/units.h"

namespace upipe::planner {
namespace {

using Terms = std::vector<ReleasedTerm>;

constexpr char kModelStates[] = "model states";
constexpr char kThroughout[] = "held throughout";
constexpr char kUpipeStage[] = "a stage of UPipe";
constexpr char kUlysses[] = "Ulysses";
constexpr char kRing[] = "ring";
constexpr char kLayer[] = "the layer";
constexpr char kTiles[] = "tiles";

constexpr int64_t kBf16 = 2;
constexpr int64_t kF32 = 4;
constexpr int64_t kStatesPerParameter = 4 * kF32;  // weight, gradient, two moments
constexpr int64_t kLongestContext = int64_t{1} << 30;

std::string Times(int64_t number, const char* unit) {
  return number == 1 ? unit : absl::StrCat(number, " ", unit);
}

int64_t Sum(const Terms& terms) {
  int64_t bytes = 0;
  for (const ReleasedTerm& term : terms) bytes += term.bytes;
  return bytes;
}

// Sizes of one rank. Units as in docs/memory.md.
class Released {
 public:
  explicit Released(const ReleasedSetup& setup)
      : code_(setup.code),
        model_(setup.model),
        context_(setup.context),
        ulysses_(setup.ulysses_ranks),
        ranks_(int64_t{setup.ulysses_ranks} * setup.ring_ranks),
        ring_(setup.ring_ranks > 1) {}

  Terms Throughout() const;
  std::vector<ReleasedMoment> Moments() const;
  int64_t HostBytes() const;

 private:
  int64_t N() const { return context_ / ranks_; }
  int64_t X() const { return kBf16 * N() * model_.hidden_size(); }
  int64_t hh() const { return kBf16 * N() * model_.num_heads() * model_.head_dim(); }
  // Of a stage's query heads, and of the K/V heads that attend with them: one head of either in
  // UPipe, all in Ulysses, where K < C repeats K/V heads until there are C.
  int64_t q() const { return code_ == ReleasedCode::kUpipe ? hh() * ulysses_ / H() : hh(); }
  int64_t kv() const {
    return code_ == ReleasedCode::kUpipe ? q() : hh() * std::max(K(), ulysses_) / H();
  }
  int64_t H() const { return model_.num_heads(); }
  int64_t K() const { return model_.num_kv_heads(); }
  int64_t VocabularyWeights() const {
    return (model_.tie_embeddings() ? 1 : 2) * model_.vocab_size() * model_.hidden_size();
  }
  // Cosines and sines of every position of the context as complex fp32: not shared out.
  int64_t RopeTable(int64_t tokens) const { return kF32 * tokens * model_.head_dim(); }

  ReleasedTerm LogSumExp() const {
    return {"log-sum-exp of all heads", "4 N H", kUpipeStage, kF32 * N() * H()};
  }
  ReleasedTerm VocabularyGradients() const {
    return {"gradients of embedding and head, fp32", "4 * 2 V d", kModelStates,
            kF32 * VocabularyWeights()};
  }
  ReleasedTerm Buffers(std::string name, int64_t queries, int64_t keys, const char* source) const {
    std::string formula;
    if (code_ == ReleasedCode::kUpipe) {
      formula = Times(queries + keys, "q");
    } else {
      if (queries > 0) formula = Times(queries, "hh");
      if (keys > 0) absl::StrAppend(&formula, queries > 0 ? " + " : "", Times(keys, "kv"));
    }
    return {std::move(name), formula, source, queries * q() + keys * kv()};
  }
  ReleasedTerm Streams(std::string name, int64_t number) const {
    return {std::move(name), Times(number, "X"), kLayer, number * X()};
  }
  ReleasedTerm Heads(std::string name, int64_t number) const {
    return {std::move(name), Times(number, "hh"), kLayer, number * hh()};
  }
  Terms ForwardStage() const;
  Terms Loss() const;
  Terms MlpBackward() const;
  Terms AttentionBackward() const;

  const ReleasedCode code_;
  const v1::ModelSpec& model_;
  const int64_t context_;
  const int64_t ulysses_;
  const int64_t ranks_;
  const bool ring_;
};

Terms Released::Throughout() const {
  return {
      {"fp32 weights, gradients, moments, a share", "16 P / (C R)", kModelStates,
       kStatesPerParameter * ParameterCount(model_) / ranks_},
      {"embedding and head, bf16, whole", "2 * 2 V d", kModelStates, kBf16 * VocabularyWeights()},
      {"RoPE table of the whole context", "4 L D", kThroughout, RopeTable(context_)},
      {"input of layer 0", "X", kThroughout, X()}};
}

Terms Released::ForwardStage() const {
  Terms terms = {Streams("layer input, normed input", 2), Heads("attention output", 1),
                 LogSumExp()};
  if (code_ == ReleasedCode::kUlysses) {
    terms.push_back(Buffers("q, o; k, v", 2, 2, kUlysses));
    return terms;
  }
  terms.push_back(Buffers("q, k, v", 1, 2, kUpipeStage));
  terms.push_back(Buffers("ring receive buffer, unused without a ring", 0, 1, kUpipeStage));
  terms.push_back(Buffers("o, and o in fp32", 3, 0, kUpipeStage));
  return terms;
}

Terms Released::Loss() const {
  // Liger's chunk: logits as large as the hidden states, to the next power of two.
  const int64_t chunks = CeilDiv(model_.vocab_size(), model_.hidden_size());
  const auto rows =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(CeilDiv(N(), chunks))));
  return {Streams("last hidden states, normed, their gradient", 3),
          VocabularyGradients(),
          {"logits of a chunk, bf16", "2 V 2^ceil(log2(N / ceil(V / d)))", kTiles,
           kBf16 * model_.vocab_size() * std::min(rows, N())}};
}

Terms Released::MlpBackward() const {
  // Tiles are about as long as the model is wide.
  const int64_t tile = CeilDiv(N(), CeilDiv(N(), model_.hidden_size()));
  return {Streams("streams of the layer, rebuilt", 4),
          Heads("attention output, two orders", 2),
          LogSumExp(),
          Streams("gradients of output and input", 2),
          VocabularyGradients(),
          {"an MLP tile", "10 d F", kTiles, 5 * kBf16 * tile * model_.intermediate_size()}};
}

Terms Released::AttentionBackward() const {
  Terms terms = {Streams("layer input, normed input, dh, dx", 4),
                 Heads("attention output, its gradient", 2), LogSumExp(), VocabularyGradients()};
  const bool upipe = code_ == ReleasedCode::kUpipe;
  terms.push_back(Buffers("q, O, dO, dq; k, v, dk, dv", 4, 4, upipe ? kUpipeStage : kUlysses));
  terms.push_back(Buffers("dq in fp32, of the kernel", 2, 0, upipe ? kUpipeStage : kUlysses));
  if (upipe) {
    terms.push_back(Buffers("dk, dv summed over a group", 0, 2, kUpipeStage));
  } else if (H() > std::max(K(), ulysses_)) {
    terms.push_back(Buffers("dk, dv in fp32, of the kernel", 0, 4, kUlysses));
  }
  if (ring_) {
    terms.push_back(Buffers("ring: dq in fp32", 2, 0, kRing));
    terms.push_back(Buffers("ring: dk, dv in fp32, sent and received", 0, 8, kRing));
    terms.push_back(Buffers("ring: k, v of another rank", 0, 2, kRing));
  }
  return terms;
}

std::vector<ReleasedMoment> Released::Moments() const {
  std::vector<ReleasedMoment> moments = {
      {code_ == ReleasedCode::kUpipe ? "forward, a stage" : "forward", ForwardStage()}};
  if (code_ == ReleasedCode::kUpipe) {
    moments.push_back({"forward, heads put in order",
                       {Streams("layer input, normed input", 2),
                        Heads("attention output, two orders", 2), LogSumExp()}});
  }
  moments.push_back({"loss", Loss()});
  moments.push_back({"MLP backward", MlpBackward()});
  moments.push_back(
      {code_ == ReleasedCode::kUpipe ? "attention backward, a stage" : "attention backward",
       AttentionBackward()});
  for (ReleasedMoment& moment : moments) moment.bytes = Sum(moment.terms);
  return moments;
}

// Every layer's input but the first's, each with the rank's rows of the RoPE table.
int64_t Released::HostBytes() const { return (model_.num_layers() - 1) * (X() + RopeTable(N())); }

absl::Status Check(const ReleasedSetup& setup) {
  const int64_t heads = setup.model.num_heads(), kv_heads = setup.model.num_kv_heads();
  const int64_t ulysses = setup.ulysses_ranks;
  if (ulysses < 1 || setup.ring_ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("C ", ulysses, " x R ", setup.ring_ranks, " is no mesh; both are 1 or more"));
  }
  if (heads % ulysses != 0 || (kv_heads % ulysses != 0 && ulysses % kv_heads != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the released code shares out whole heads: ", ulysses, " Ulysses ranks do not divide ",
        heads, " query and ", kv_heads, " K/V heads; choose a number that divides both"));
  }
  const int64_t multiple = 2 * ulysses * setup.ring_ranks;
  if (setup.context < multiple || setup.context % multiple != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the released code takes contexts that are a multiple of 2 x ", multiple / 2, " ranks; ",
        setup.context, " is not, ", RoundUp(setup.context, multiple), " would be"));
  }
  return absl::OkStatus();
}

int64_t PeakBytes(const ReleasedSetup& setup) {
  const Released released(setup);
  int64_t most = 0;
  for (const ReleasedMoment& moment : released.Moments()) most = std::max(most, moment.bytes);
  return Sum(released.Throughout()) + most;
}

int64_t DeviceBytes(int64_t peak_bytes, const v1::DeviceFile& device) {
  const double usable = 1 - device.fragmentation().value();
  return static_cast<int64_t>(static_cast<double>(peak_bytes) / usable) + device.context().bytes() +
         device.communicator().bytes();
}

int64_t ContextMax(ReleasedSetup setup) {
  const int64_t multiple = 2 * int64_t{setup.ulysses_ranks} * setup.ring_ranks;
  int64_t fits = 0, fails = kLongestContext / multiple + 1;
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    setup.context = middle * multiple;
    const bool yes = DeviceBytes(PeakBytes(setup), setup.device) <= setup.device.memory().bytes();
    (yes ? fits : fails) = middle;
  }
  return fits * multiple;
}

void AppendTerms(const std::string& title, const Terms& terms, std::string& text) {
  absl::StrAppend(&text, title, "\n");
  for (const ReleasedTerm& term : terms) {
    absl::StrAppend(&text, absl::StrFormat("  %-44s %12s   %s\n", term.name,
                                           FormatBytes(term.bytes), term.formula));
  }
}

}  // namespace

absl::StatusOr<ReleasedMemory> ReleasedMemoryOf(const ReleasedSetup& setup) {
  if (absl::Status status = Check(setup); !status.ok()) return status;
  const Released released(setup);
  ReleasedMemory memory;
  memory.throughout = released.Throughout();
  memory.moments = released.Moments();
  const auto largest =
      std::max_element(memory.moments.begin(), memory.moments.end(),
                       [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  memory.peak_moment = largest - memory.moments.begin();
  memory.peak_bytes = Sum(memory.throughout) + largest->bytes;
  memory.device_bytes = DeviceBytes(memory.peak_bytes, setup.device);
  memory.host_bytes = released.HostBytes();
  memory.fits = memory.device_bytes <= setup.device.memory().bytes();
  memory.context_max = ContextMax(setup);
  return memory;
}

AttentionSaving ReleasedAttentionSaving(const v1::ModelSpec& model, int ulysses_ranks) {
  const auto heads = static_cast<double>(model.num_heads());
  const double stage = ulysses_ranks / heads;  // q / hh
  const double kv =
      static_cast<double>(std::max<int64_t>(model.num_kv_heads(), ulysses_ranks)) / heads;
  const double kernel_kv = kv < 1 ? 4 * kv : 0;  // fp32 dk, dv where K/V heads are shared
  return {.paper = 1 - stage,
          .forward = 1 - 4 * stage / (2 + 2 * kv),
          .backward = 1 - 12 * stage / (6 + 4 * kv + kernel_kv)};
}

std::string RenderReleased(const ReleasedSetup& setup, const ReleasedMemory& memory) {
  const bool upipe = setup.code == ReleasedCode::kUpipe;
  std::string text =
      absl::StrCat("released   ", upipe ? "UPipe" : "Ulysses",
                   ", the published code (not this engine): context ",
                   FormatTokenCount(setup.context), ", ", setup.ulysses_ranks * setup.ring_ranks,
                   " ranks: C ", setup.ulysses_ranks, " x R ", setup.ring_ranks, "\n");
  const ReleasedMoment& peak = memory.moments[memory.peak_moment];
  absl::StrAppend(&text, "memory     peak ", FormatBytes(memory.peak_bytes), " at \"", peak.name,
                  "\", layer inputs of a rank in host memory ", FormatBytes(memory.host_bytes),
                  "\n\n");
  AppendTerms("  held throughout", memory.throughout, text);
  for (size_t i = 0; i < memory.moments.size(); ++i) {
    const ReleasedMoment& moment = memory.moments[i];
    AppendTerms(absl::StrCat("  ", moment.name, ": ", FormatBytes(moment.bytes),
                             i == memory.peak_moment ? ", the peak" : ""),
                moment.terms, text);
  }
  const v1::DeviceFile& device = setup.device;
  absl::StrAppend(&text, "\ndevice     ", device.name(), ": ", FormatBytes(memory.device_bytes),
                  " of ", FormatBytes(device.memory().bytes()), " with context ",
                  FormatBytes(device.context().bytes()), ", communicators ",
                  FormatBytes(device.communicator().bytes()), " and ",
                  absl::StrFormat("%.3g", 100 * device.fragmentation().value()),
                  " % unusable: ", memory.fits ? "fits" : "does not fit", "\nlongest    ",
                  memory.context_max == 0
                      ? std::string("none fits")
                      : absl::StrFormat("%s tokens (%.2fM)", FormatCount(memory.context_max),
                                        static_cast<double>(memory.context_max) / (1 << 20)),
                  "\n");
  if (!upipe) return text;
  const AttentionSaving saving = ReleasedAttentionSaving(setup.model, setup.ulysses_ranks);
  absl::StrAppendFormat(
      &text,
      "saving     of attention's intermediate tensors: %.1f %% by the paper's count "
      "(1 - U/H); with the K/V heads there are %.1f %% forward, %.1f %% backward\n",
      100 * saving.paper, 100 * saving.forward, 100 * saving.backward);
  return text;
}

}  // namespace upipe::planner
