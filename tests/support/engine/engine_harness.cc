#include "tests/support/engine/engine_harness.h"

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "planner/plan.h"

namespace upipe::testing {

v1::JobSpec MakeSpec(const SmallJob& job) {
  v1::JobSpec spec;
  spec.set_name("test");
  auto& m = *spec.mutable_model();
  m.set_vocab_size(job.vocab_size);
  m.set_hidden_size(job.hidden_size);
  m.set_num_layers(job.num_layers);
  m.set_num_heads(job.num_heads);
  m.set_num_kv_heads(job.num_kv_heads);
  m.set_head_dim(job.head_dim);
  m.set_intermediate_size(job.intermediate_size);
  m.set_tie_embeddings(job.tie_embeddings);
  m.set_qk_norm(job.qk_norm);
  m.set_qkv_bias(job.qkv_bias);
  m.set_init_stddev(0.2);
  spec.mutable_data()->set_path("unused");
  auto& p = *spec.mutable_parallel();
  p.set_ranks(job.ranks);
  p.set_method(job.ulysses ? v1::METHOD_ULYSSES : v1::METHOD_UPIPE);
  if (!job.ulysses) p.set_heads_per_stage(job.heads_per_rank * job.ranks);
  p.set_backend(job.backend);
  spec.mutable_train()->set_context(job.context);
  spec.mutable_train()->set_steps(20);
  spec.mutable_train()->set_dtype(job.bf16 ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
  return spec;
}

absl::StatusOr<v1::RunPlan> MakePlan(const v1::JobSpec& spec) {
  return planner::MakeRunPlan(spec, {.check_data = false});
}

train::HostTokens Sequence::Slice(const parallel::TokenMap& map, int rank) const {
  const int64_t begin = map.RunOf(rank).begin;
  return {.tokens = tokens.data() + begin, .labels = labels.data() + begin};
}

Sequence MakeSequence(int64_t context, int64_t padded_context, int64_t vocab_size, uint64_t seed) {
  Sequence sequence;
  uint64_t state = seed * 2654435761u + 1;
  auto next = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(vocab_size));
  };
  std::vector<int32_t> stream(context + 1);
  for (int32_t& token : stream) token = next();
  sequence.tokens.assign(stream.begin(), stream.end() - 1);
  sequence.labels.assign(stream.begin() + 1, stream.end());
  sequence.tokens.resize(padded_context, 0);
  sequence.labels.resize(padded_context, -1);
  return sequence;
}

absl::Status RunRanks(const RankThreads& threads, const std::function<absl::Status(Rank)>& body) {
  const int ranks = threads.plan.spec().parallel().ranks();
  const auto comms =
      comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<absl::Status> statuses(ranks);
  auto run = [&](int rank) -> absl::Status {
    kernels::DeviceOptions options;
    options.backend = threads.plan.spec().parallel().backend();
    options.arena_bytes = threads.plan.ranks(rank).memory().arena_bytes();
    options.num_threads = threads.plan.spec().parallel().threads_per_rank();
    if (threads.adjust) threads.adjust(rank, options);
    UPIPE_ASSIGN_OR_RETURN(auto device, kernels::CreateDevice(options));
    const auto stream = device->CreateStream(absl::StrCat("compute", rank));
    const engine::RankContext context(*device, *stream, *comms[rank], nullptr,
                                      model::StorageTypeOf(threads.plan.spec().train()));
    UPIPE_ASSIGN_OR_RETURN(auto step, train::TrainStep::Create(context, threads.plan));
    const absl::Status status = body({rank, context, *step});
    const absl::Status drained = stream->Synchronize();
    return status.ok() ? drained : status;
  };
  std::vector<std::thread> pool;
  for (int rank = 0; rank < ranks; ++rank) {
    pool.emplace_back([&, rank] {
      statuses[rank] = run(rank);
      if (!statuses[rank].ok()) comms[rank]->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : pool) thread.join();
  for (const absl::Status& status : statuses) UPIPE_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status SetWeights(Rank rank, const Tensors& weights) {
  auto& parameters = rank.step.parameters();
  for (const auto& piece : parameters.pieces()) {
    const auto it = weights.find(piece.tensor->name);
    if (it == weights.end() ||
        static_cast<int64_t>(it->second.size()) != piece.tensor->num_elements) {
      return absl::InvalidArgumentError(absl::StrCat("no weights for ", piece.tensor->name));
    }
    rank.context.device().CopyFromHost(
        parameters.weights().At(piece.shard_begin), it->second.data() + piece.tensor_begin,
        piece.count * static_cast<int64_t>(sizeof(float)), rank.context.stream());
  }
  return rank.context.stream().Synchronize();
}

Tensors RandomWeights(const v1::RunPlan& plan, uint64_t seed) {
  const v1::JobSpec& spec = plan.spec();
  const auto layout = model::ParameterLayout::Make(
      model::ModelConfig::From(spec.model(), spec.train().context()), 1);
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  Tensors weights;
  for (const model::ParameterUnit* unit : layout.Units()) {
    for (const model::ParameterTensor& tensor : unit->tensors) {
      const bool matrix = tensor.init_stddev != 0;
      for (int64_t i = 0; i < tensor.num_elements; ++i) {
        const double value = matrix ? tensor.init_stddev * normal(generator)
                                    : tensor.init_value + 0.25 * normal(generator);
        weights[tensor.name].push_back(static_cast<float>(value));
      }
    }
  }
  return weights;
}

absl::Status Collector::Add(Rank rank, const kernels::TensorView& shard, double scale) {
  std::vector<float> host(shard.shape[0]);
  rank.context.device().CopyToHost(host.data(), shard.data, shard.num_bytes(),
                                   rank.context.stream());
  UPIPE_RETURN_IF_ERROR(rank.context.stream().Synchronize());
  const std::lock_guard lock(mutex_);
  for (const auto& piece : rank.step.parameters().pieces()) {
    auto& tensor = tensors_[piece.tensor->name];
    tensor.resize(piece.tensor->num_elements);
    for (int64_t i = 0; i < piece.count; ++i) {
      tensor[piece.tensor_begin + i] = static_cast<float>(host[piece.shard_begin + i] * scale);
    }
  }
  return absl::OkStatus();
}

double RelativeError(absl::Span<const float> a, absl::Span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double delta = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    delta += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(delta) : std::sqrt(delta / norm);
}

}  // namespace upipe::testing
