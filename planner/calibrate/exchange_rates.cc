#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/cpu_placement.h"
#include "common/ids.h"
#include "common/machine.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "planner/calibrate/rates.h"
#ifdef UPIPE_CALIBRATE_UCX
#include "engine/comm/ucx/ucx_communicator.h"
#endif

namespace upipe::planner {
namespace {

using kernels::DType;
using kernels::TensorView;
using Comms = std::vector<std::unique_ptr<comm::Communicator>>;

constexpr int64_t kExchangedBytes = int64_t{8} << 20;  // each rank to all others together
constexpr int64_t kSmallBytes = 8;

#ifdef UPIPE_CALIBRATE_UCX
constexpr bool kHasUcx = true;

// Ranks over UCX: of one node through shared memory, of different nodes through tcp on loopback.
// Their threads run where the ranks do.
absl::StatusOr<Comms> Connect(int ranks, bool one_node, const std::vector<std::vector<int>>& cpus) {
  std::vector<absl::Status> statuses(ranks);
  const auto on_each = [&](const std::function<absl::Status(int rank)>& body) -> absl::Status {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        if (!cpus.empty()) PlaceThisThread(cpus[rank]).IgnoreError();
        statuses[rank] = body(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) UPIPE_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  };
  comm::UcxOptions options;
  options.tcp_devices = "lo";
  options.close_deadline = absl::Seconds(1);
  std::vector<std::unique_ptr<comm::UcxContext>> contexts(ranks);
  UPIPE_RETURN_IF_ERROR(on_each([&](int rank) -> absl::Status {
    UPIPE_ASSIGN_OR_RETURN(contexts[rank], comm::UcxContext::Create(options));
    return absl::OkStatus();
  }));
  comm::PeerGroup group{.identity = {"calibrate", 1, 0, RandomNonce()}};
  for (int rank = 0; rank < ranks; ++rank) {
    group.addresses.push_back(contexts[rank]->address());
    group.node_ids.push_back(one_node ? "node" : absl::StrCat("node", rank));
  }
  Comms comms(ranks);
  UPIPE_RETURN_IF_ERROR(on_each([&](int rank) -> absl::Status {
    comm::PeerGroup own = group;
    own.rank = rank;
    UPIPE_ASSIGN_OR_RETURN(comms[rank], contexts[rank]->Connect(own, {}));
    return absl::OkStatus();
  }));
  return comms;
}
#else
constexpr bool kHasUcx = false;

absl::StatusOr<Comms> Connect(int ranks, bool /*one_node*/,
                              const std::vector<std::vector<int>>& /*cpus*/) {
  return comm::InprocGroup::Create(ranks, {});
}
#endif

// An all-to-all of `bytes` to each of the other ranks.
Probe ExchangeProbe(RankTeam& team, int64_t bytes) {
  std::vector<comm::AllToAllVParams> by_rank(team.size());
  for (int i = 0; i < team.size(); ++i) {
    const TensorView out = team.rank(i).Filled(DType::kInt64, {team.size(), bytes / 8}, 1);
    const TensorView in = team.rank(i).Filled(DType::kInt64, {team.size(), bytes / 8}, 1);
    for (int peer = 0; peer < team.size(); ++peer) {
      if (peer == i) continue;
      by_rank[i].sends.push_back({peer, out.At(peer), bytes});
      by_rank[i].receives.push_back({peer, in.At(peer), bytes});
    }
  }
  return {.enqueue =
              [by_rank](TeamRank& rank) {
                engine::RankContext& context = rank.context();
                return context.comm().AllToAllV(by_rank[context.rank()], context.stream());
              },
          .by_clock = true};
}

struct Exchange {
  double bytes_per_second = 0;
  double latency_seconds = 0;
  int64_t communicator_bytes = 0;
  double spread = 1;
  int rounds = 0;
};

absl::StatusOr<Exchange> TimeExchange(int ranks, bool one_node, const TeamOptions& team_options,
                                      const RateOptions& options) {
  UPIPE_ASSIGN_OR_RETURN(const int64_t before, ResidentMemoryBytes());
  UPIPE_ASSIGN_OR_RETURN(Comms comms, Connect(ranks, one_node, team_options.cpus));
  UPIPE_ASSIGN_OR_RETURN(const int64_t after, ResidentMemoryBytes());
  UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<RankTeam> team,
                         RankTeam::Create(std::move(comms), team_options));
  const int64_t to_each = kExchangedBytes / (ranks - 1) / 8 * 8;
  UPIPE_ASSIGN_OR_RETURN(
      const std::vector<Timing> timings,
      TimeInterleaved(*team, {ExchangeProbe(*team, to_each), ExchangeProbe(*team, kSmallBytes)},
                      {.seconds = options.quick ? 0.4 : 2.5,
                       .sample_seconds = options.quick || options.busy ? 0.002 : 0.01,
                       .busy = options.busy}));
  const double latency = timings[1].seconds;
  const double moving = std::max(timings[0].seconds - latency, timings[0].seconds / 2);
  return Exchange{.bytes_per_second = static_cast<double>(to_each * (ranks - 1)) / moving,
                  .latency_seconds = latency,
                  .communicator_bytes = std::max<int64_t>(0, after - before) / ranks,
                  .spread = WorstSpread(timings),
                  .rounds = timings[0].rounds};
}

}  // namespace

absl::StatusOr<double> MeasureExchange(int ranks, const TeamOptions& team,
                                       const RateOptions& options, v1::DeviceFile& device) {
  ranks = std::max(ranks, 2);
  const std::string through = kHasUcx ? "UCX, shared memory" : "memory of one process (no UCX)";
  options.say(absl::StrCat("exchange: ", ranks, " ranks over ", through));
  UPIPE_ASSIGN_OR_RETURN(const Exchange inside, TimeExchange(ranks, true, team, options));
  const std::string how = absl::StrCat("all-to-all of ", ranks, " ranks over ", through);
  device.mutable_exchange_in_node()->set_value(FourDigits(inside.bytes_per_second));
  device.mutable_exchange_in_node()->set_source(
      MeasuredSource(options, absl::StrCat(how, ", 8 MiB out of each"), inside.rounds));
  device.mutable_exchange_latency()->set_value(FourDigits(inside.latency_seconds));
  device.mutable_exchange_latency()->set_source(
      MeasuredSource(options, absl::StrCat(how, ", 8 bytes to each"), inside.rounds));
  device.mutable_communicator()->set_bytes(inside.communicator_bytes);
  device.mutable_communicator()->set_source(MeasuredSource(
      options, absl::StrCat("resident memory that connecting ", ranks, " ranks added, of each"),
      /*rounds=*/1));
  options.say(absl::StrFormat("exchange: %.2f GB/s; a collective takes %.0f us at least",
                              inside.bytes_per_second * 1e-9, inside.latency_seconds * 1e6));
  if (!kHasUcx) return inside.spread;
  options.say("exchange: the same over tcp, on this machine's loopback");
  UPIPE_ASSIGN_OR_RETURN(const Exchange outside, TimeExchange(ranks, false, team, options));
  device.mutable_exchange_between_nodes()->set_value(FourDigits(outside.bytes_per_second));
  device.mutable_exchange_between_nodes()->set_source(MeasuredSource(
      options,
      absl::StrCat("all-to-all of ", ranks,
                   " ranks over UCX, tcp on the loopback of one node: a network is slower"),
      outside.rounds));
  options.say(absl::StrFormat("exchange: %.2f GB/s over tcp", outside.bytes_per_second * 1e-9));
  return std::max(inside.spread, outside.spread);
}

}  // namespace upipe::planner
