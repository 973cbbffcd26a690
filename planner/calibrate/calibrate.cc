#include "planner/calibrate/calibrate.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/check.h"
#include "common/cpu_placement.h"
#include "common/machine.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "kernels/cpu/isa.h"
#include "planner/calibrate/rank_team.h"
#include "planner/calibrate/rates.h"
#include "planner/device_file.h"

namespace upipe::planner {
namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxThreads = 64;

absl::Status CheckOptions(const CalibrateOptions& options) {
  if (!IsDeviceName(options.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a device's name has 1 to 64 letters, digits, '.' or '-', and '", options.name,
                     "' has others; give --name"));
  }
  if (options.ranks < 1 || options.ranks > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks is ", options.ranks, "; it is 1 to ", kMaxRanks));
  }
  if (options.threads_per_rank < 1 || options.threads_per_rank > kMaxThreads) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--threads-per-rank is ", options.threads_per_rank, "; it is 1 to ", kMaxThreads));
  }
  UPIPE_ASSIGN_OR_RETURN(const std::vector<int> cpus, AllowedCpus());
  if (options.busy &&
      (options.threads_per_rank > 1 || options.ranks > static_cast<int>(cpus.size()))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--busy counts processor time, which tells how long a rank takes only with "
        "one thread each and a CPU for each; there are ",
        cpus.size(), " CPUs, ", options.ranks, " ranks of ", options.threads_per_rank, " threads"));
  }
  UPIPE_ASSIGN_OR_RETURN(const int64_t available, AvailableMemoryBytes());
  const int64_t needed = options.ranks * (kTeamArenaBytes + kTeamHostBytes);
  if (available < needed) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options.ranks, " ranks take ", FormatBytes(needed), " to be measured and ",
                     FormatBytes(available), " are available; give fewer --ranks"));
  }
  return absl::OkStatus();
}

// CPUs of each rank, as `upipe run` would give them; none when there are too few free ones.
std::vector<CpuClaim> ClaimCpus(const CalibrateOptions& options) {
  std::vector<CpuClaim> claims;
  for (int rank = 0; rank < options.ranks; ++rank) {
    absl::StatusOr<CpuClaim> claim = CpuClaim::Take(options.ranks, options.threads_per_rank);
    if (!claim.ok()) {
      options.say(absl::StrCat("cpus: any (", claim.status().message(), ")"));
      return {};
    }
    claims.push_back(*std::move(claim));
  }
  return claims;
}

std::string CommandOf(const CalibrateOptions& options) {
  return absl::StrCat("upipe calibrate --ranks ", options.ranks, " --threads-per-rank ",
                      options.threads_per_rank, options.quick ? " --quick" : "",
                      options.busy ? " --busy" : "");
}

// What is known without timing anything.
absl::Status DescribeNode(const CalibrateOptions& options, const std::string& command, int num_cpus,
                          v1::DeviceFile& device) {
  device.set_name(options.name);
  device.set_summary(absl::StrCat(CpuModel(), ", ", num_cpus, " processors; each of ",
                                  options.ranks, " ranks with ", options.threads_per_rank,
                                  " threads"));
  device.set_backend("cpu");
  device.set_attention_kernel("own");
  device.mutable_memory()->set_bytes(0);
  device.mutable_memory()->set_source("none of its own: ranks on a CPU share host_memory");
  UPIPE_ASSIGN_OR_RETURN(const int64_t total, TotalMemoryBytes());
  device.mutable_host_memory()->set_bytes(total);
  device.mutable_host_memory()->set_source(
      absl::StrCat("measured: ", command, ": MemTotal of /proc/meminfo"));
  device.set_devices_per_node(options.ranks);
  UPIPE_ASSIGN_OR_RETURN(const int64_t resident, ResidentMemoryBytes());
  device.mutable_context()->set_bytes(resident);
  device.mutable_context()->set_source(
      absl::StrCat("measured: ", command, ": resident memory of the process at its start"));
  device.mutable_fragmentation()->set_value(0);
  device.mutable_fragmentation()->set_source(
      "an arena of our own, whose high-water mark is planned to the byte");
  device.add_notes(absl::StrCat("Measured ",
                                absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone()),
                                " by upipe ", options.version, " on ", kernels::Arithmetic(), "."));
  device.add_notes(
      absl::StrCat("Every rate is of one rank while all of the node's ranks, ", options.ranks,
                   " here, do the same; more ranks on these processors are slower than it says."));
  device.add_notes("peak_flops is absent: what the processor could do at best was not measured.");
  if (options.quick) {
    device.add_notes("Measured with --quick: shorter sequences and fewer repeats.");
  }
  if (options.busy) {
    device.add_notes(
        "Measured with --busy, on a node that did other work: what runs on one thread by processor "
        "time, exchange by the clock, from samples that one in ten is faster than.");
  }
  return absl::OkStatus();
}

absl::Status MeasureRates(const CalibrateOptions& options, const std::vector<CpuClaim>& claims,
                          const RateOptions& rates, v1::DeviceFile& device) {
  TeamOptions team_options = {.threads_per_rank = options.threads_per_rank,
                              .arena_bytes = kTeamArenaBytes,
                              .host_bytes = kTeamHostBytes};
  for (const CpuClaim& claim : claims) team_options.cpus.push_back(claim.cpus());
  double worst = 1;
  {
    UPIPE_ASSIGN_OR_RETURN(
        const std::unique_ptr<RankTeam> team,
        RankTeam::Create(comm::InprocGroup::Create(options.ranks, {}), team_options));
    for (const auto measure : {MeasureMatmul, MeasureAttention, MeasureElementwise, MeasureHost}) {
      UPIPE_ASSIGN_OR_RETURN(const double spread, measure(*team, rates, device));
      worst = std::max(worst, spread);
    }
  }
  if (options.ranks < 2) team_options.cpus.clear();  // two ranks meet there
  UPIPE_ASSIGN_OR_RETURN(const double spread,
                         MeasureExchange(options.ranks, team_options, rates, device));
  device.add_notes(absl::StrFormat(
      "The middle half of the samples of each number%s lies within a factor of %.2f; near 1 on a "
      "quiet machine.",
      options.busy ? " of processor time" : "", std::max(worst, spread)));
  return absl::OkStatus();
}

void AppendRow(const std::string& what, const std::string& value, std::string& out) {
  absl::StrAppendFormat(&out, "  %-24s %s\n", what, value);
}

void AppendMatmul(const char* type, const v1::DeviceFile::MatmulRate& rate, std::string& out) {
  AppendRow(absl::StrCat("matmul ", type),
            absl::StrFormat("%.1f GFLOP/s, half of it at %.0f rows", rate.flops() * 1e-9,
                            rate.half_rows()),
            out);
}

template <typename Rates>
void AppendAttention(const char* type, const Rates& rates, std::string& out) {
  for (const v1::DeviceFile::AttentionRate& rate : rates) {
    AppendRow(absl::StrCat("attention ", type, " ", FormatTokenCount(rate.length())),
              absl::StrFormat("%.1f GFLOP/s forward, %.1f backward", rate.forward_flops() * 1e-9,
                              rate.backward_flops() * 1e-9),
              out);
  }
}

}  // namespace

absl::StatusOr<v1::DeviceFile> Calibrate(const CalibrateOptions& options) {
  UPIPE_RETURN_IF_ERROR(CheckOptions(options));
  const std::string command = CommandOf(options);
  UPIPE_ASSIGN_OR_RETURN(const std::vector<int> allowed, AllowedCpus());
  v1::DeviceFile device;
  UPIPE_RETURN_IF_ERROR(DescribeNode(options, command, static_cast<int>(allowed.size()), device));
  const std::vector<CpuClaim> claims = ClaimCpus(options);
  UPIPE_RETURN_IF_ERROR(MeasureRates(
      options, claims,
      {.quick = options.quick, .busy = options.busy, .command = command, .say = options.say},
      device));
  UPIPE_CHECK(CheckDeviceFile(device).empty()) << DeviceFileToYaml(device);
  return device;
}

std::string RenderDevice(const v1::DeviceFile& device) {
  std::string out = absl::StrCat(device.name(), ": ", device.summary(), "\n");
  if (device.has_matmul_bf16()) AppendMatmul("bf16", device.matmul_bf16(), out);
  if (device.has_matmul_fp32()) AppendMatmul("fp32", device.matmul_fp32(), out);
  AppendAttention("bf16", device.attention_bf16(), out);
  AppendAttention("fp32", device.attention_fp32(), out);
  struct Row {
    const char* what;
    bool present;
    double value;
    double scale;
    const char* unit;
  };
  const Row rows[] = {
      {"memory", device.has_memory_bandwidth(), device.memory_bandwidth().value(), 1e-9, "GB/s"},
      {"exchange in node", device.has_exchange_in_node(), device.exchange_in_node().value(), 1e-9,
       "GB/s"},
      {"exchange between nodes", device.has_exchange_between_nodes(),
       device.exchange_between_nodes().value(), 1e-9, "GB/s"},
      {"collective, at least", device.has_exchange_latency(), device.exchange_latency().value(),
       1e6, "us"},
      {"host copy", device.has_host_copy(), device.host_copy().value(), 1e-9, "GB/s"},
      {"host AdamW", device.has_host_update(), device.host_update().value(), 1e-6,
       "M parameters/s"},
      {"op, at least", device.has_launch(), device.launch().value(), 1e6, "us"},
  };
  for (const Row& row : rows) {
    if (!row.present) continue;
    AppendRow(row.what, absl::StrFormat("%.4g %s", row.value * row.scale, row.unit), out);
  }
  if (device.has_host_memory()) {
    AppendRow("host memory", FormatBytes(device.host_memory().bytes()), out);
  }
  if (device.has_context()) AppendRow("context", FormatBytes(device.context().bytes()), out);
  if (device.has_communicator()) {
    AppendRow("communicator", FormatBytes(device.communicator().bytes()), out);
  }
  return out;
}

}  // namespace upipe::planner
