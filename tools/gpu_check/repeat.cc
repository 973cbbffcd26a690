// The same call twice gives the same bits; and what ops ask of scratch is what the plan counted.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tools/gpu_check/parts.h"
#include "tools/gpu_check/sized_calls.h"

namespace upipe::gpu_check {
namespace {

// Of the sizes that are timed: results go to the host twice.
constexpr int64_t kPart = 8;

absl::StatusOr<std::vector<std::vector<char>>> ResultsOf(const NamedOps& ops, const SizedCall& call,
                                                         CheckDevice& device) {
  UPIPE_RETURN_IF_ERROR(call.reset());
  UPIPE_RETURN_IF_ERROR(device.RunToEnd(ops, call.params));
  std::vector<std::vector<char>> results;
  for (const kernels::TensorView& view : call.results) {
    UPIPE_ASSIGN_OR_RETURN(auto bytes, device.Bytes(view));
    results.push_back(std::move(bytes));
  }
  return results;
}

int64_t BytesThatDiffer(const std::vector<std::vector<char>>& a,
                        const std::vector<std::vector<char>>& b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(a[i].data(), b[i].data(), a[i].size()) == 0) continue;
    for (size_t j = 0; j < a[i].size(); ++j) count += a[i][j] != b[i][j];
  }
  return count;
}

absl::Status RepeatCall(const std::string& name, const NamedOps& ops, const SizedCall& call,
                        bool promised, CheckDevice& device, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(const auto first, ResultsOf(ops, call, device));
  UPIPE_ASSIGN_OR_RETURN(const auto second, ResultsOf(ops, call, device));
  const int64_t differ = BytesThatDiffer(first, second);
  if (promised) {
    findings.Expect(differ == 0, name, absl::StrCat(differ, " bytes differ between two runs"));
  } else {
    findings.Add({absl::StrCat(name, ", bytes that differ between two runs"),
                  static_cast<double>(differ),
                  "bytes, of which nothing is promised",
                  {}});
  }
  return absl::OkStatus();
}

absl::Status RepeatAttention(const AttentionSize& size, CheckDevice& device, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(
      const AttentionCalls calls,
      MakeAttention({.queries = {0, size.tokens}, .keys = {0, size.tokens}, .heads = size.heads},
                    device));
  const auto& b = calls.backward;
  const SizedCall forward = {calls.forward, {calls.forward.o, calls.forward.lse}};
  const SizedCall backward = {b, {b.dq, b.dk, b.dv}, [&] {
                                UPIPE_RETURN_IF_ERROR(device.Fill(b.dk, 0));
                                return device.Fill(b.dv, 0);
                              }};
  for (const NamedOps& ops : device.all_ops()) {
    const std::string name = absl::StrCat(ops.name, " attention, ", ToString(size), ", ");
    UPIPE_RETURN_IF_ERROR(
        RepeatCall(name + "forward", ops, forward, /*promised=*/true, device, findings));
    UPIPE_RETURN_IF_ERROR(device.Run(device.own(), calls.delta));
    // cuDNN adds dq up in the order of arrival: a plan that promises bits takes our own backward.
    UPIPE_RETURN_IF_ERROR(
        RepeatCall(name + "backward", ops, backward, ops.name != "cuDNN", device, findings));
  }
  return absl::OkStatus();
}

AttentionSize RepeatedAttention(bool small) {
  return small ? AttentionSize{48, 2} : AttentionSize{16 * 1024, 4};
}

absl::Status RepeatAll(const Settings& settings, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(
      const auto device,
      CheckDevice::Create(settings, settings.small ? int64_t{64} << 20 : int64_t{20} << 30));
  std::vector<CallSpec> specs = ElementwiseCalls(settings.small, kPart);
  for (CallSpec& spec : MatmulCalls(settings.small)) specs.push_back(std::move(spec));
  const AttentionSize size = RepeatedAttention(settings.small);
  absl::Status status = RepeatAttention(size, *device, findings);
  if (!status.ok()) findings.Failed(absl::StrCat(ToString(size), ": ", status.message()));
  UPIPE_RETURN_IF_ERROR(device->Clear());
  for (const CallSpec& spec : specs) {
    const auto call = spec.make(*device);
    status = call.ok() ? RepeatCall(spec.name, device->own(), *call, true, *device, findings)
                       : call.status();
    if (!status.ok()) findings.Failed(absl::StrCat(spec.name, ": ", status.message()));
    UPIPE_RETURN_IF_ERROR(device->Clear());
  }
  return absl::OkStatus();
}

// Asks `ops` to ready the call, and holds its scratch to what plans count; nothing runs.
void Ask(const std::string& name, const NamedOps& ops, const kernels::OpParams& params,
         Findings& findings) {
  const absl::StatusOr<int64_t> bytes = ops.ops->Prepare(params);
  const int64_t planned = ops.ops->WorkspaceBytes(params);
  findings.Expect(bytes.ok() && *bytes <= planned, name,
                  bytes.ok() ? absl::StrCat("takes ", *bytes, " bytes of scratch, ", planned,
                                            " are planned")
                             : std::string(bytes.status().message()));
}

// At addresses nobody touches: sizes far beyond the device's memory may be asked for.
absl::Status AskOfAttention(int64_t tokens, int64_t documents, CheckDevice& device,
                            Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(AttentionCalls calls,
                         MakeAttention({.queries = {0, 1}, .keys = {0, 1}}, device));
  const auto grow = [&](auto& p) {
    p.queries = p.keys = {0, tokens};
    p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = p.o.shape[0] = tokens;
    p.lse.shape[1] = p.lse.stride[0] = tokens;
    std::vector<int64_t> starts(documents);
    for (int64_t i = 0; i < documents; ++i) starts[i] = i * (tokens / documents);
    p.mask.document_starts = std::make_shared<const std::vector<int64_t>>(std::move(starts));
    p.mask.total = tokens;
  };
  grow(calls.forward);
  grow(calls.backward);
  kernels::AttentionBwdParams& b = calls.backward;
  b.dout.shape[0] = b.delta.shape[0] = b.dq.shape[0] = b.dk.shape[0] = b.dv.shape[0] = tokens;
  for (const NamedOps& ops : device.all_ops()) {
    const std::string name = absl::StrCat(ops.name, " ", tokens, " tokens, ", documents,
                                          documents == 1 ? " document" : " documents");
    Ask(name + ", forward", ops, calls.forward, findings);
    Ask(name + ", backward", ops, calls.backward, findings);
    findings.Add({name + ", backward, planned",  // as the dry run counts it
                  static_cast<double>(ops.ops->WorkspaceBytes(b)) / (1 << 20),
                  "MiB",
                  {}});
  }
  return device.Clear();
}

std::vector<std::pair<int64_t, int64_t>> AskedAttention(bool small) {
  if (small) return {{64, 1}, {64, 4}};
  constexpr int64_t kMi = int64_t{1} << 20;
  return {{8192, 1}, {131072, 1}, {kMi, 1}, {kMi, 64}, {5 * kMi, 1}, {17 * kMi, 1}};
}

absl::Status AskAll(const Settings& settings, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(
      const auto device,
      CheckDevice::Create(settings, settings.small ? int64_t{64} << 20 : int64_t{8} << 30));
  if (!device->library()) {
    findings.Skipped(absl::StrCat("scratch of cuDNN: ", device->no_library()));
  }
  for (const auto& [tokens, documents] : AskedAttention(settings.small)) {
    UPIPE_RETURN_IF_ERROR(AskOfAttention(tokens, documents, *device, findings));
  }
  for (const CallSpec& spec : MatmulCalls(settings.small)) {
    UPIPE_ASSIGN_OR_RETURN(const SizedCall call, spec.make(*device));
    Ask(spec.name, device->own(), call.params, findings);
    UPIPE_RETURN_IF_ERROR(device->Clear());
  }
  return absl::OkStatus();
}

}  // namespace

Part RepeatPart(const Settings& settings) {
  Part part = {.name = "repeat",
               .what = "every op twice: the same bits",
               .budget = absl::Seconds(35),
               .cases = {ToString(RepeatedAttention(settings.small))},
               .run = [settings](Findings& f) { return RepeatAll(settings, f); }};
  for (const CallSpec& spec : ElementwiseCalls(settings.small, kPart))
    part.cases.push_back(spec.name);
  for (const CallSpec& spec : MatmulCalls(settings.small)) part.cases.push_back(spec.name);
  return part;
}

Part WorkspacePart(const Settings& settings) {
  Part part = {.name = "workspaces",
               .what = "scratch the libraries ask for against what plans count",
               .budget = absl::Seconds(25),
               .cases = {},
               .run = [settings](Findings& f) { return AskAll(settings, f); }};
  for (const auto& [tokens, documents] : AskedAttention(settings.small)) {
    part.cases.push_back(absl::StrCat("attention of ", tokens, " tokens in ", documents,
                                      documents == 1 ? " document" : " documents"));
  }
  return part;
}

}  // namespace upipe::gpu_check
