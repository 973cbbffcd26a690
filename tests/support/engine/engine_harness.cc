#include "tests/support/engine/engine_harness.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "engine/comm/comm_factory.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/step_clock.h"
#include "kernels/dry/cuda_stand_in.h"
#include "planner/device_file.h"
#include "planner/plan.h"

namespace upipe::testing {

namespace {

void SetParallel(const SmallJob& job, v1::ParallelSpec& p) {
  p.set_ranks(job.ranks);
  p.set_method(job.method);
  p.set_backend(job.backend);
  if (job.fsdp_ranks > 1) p.set_fsdp_ranks(job.fsdp_ranks);
  if (job.dp_ranks > 1) p.set_dp_ranks(job.dp_ranks);
  if (job.ring_ranks > 1 && job.method != v1::METHOD_RING) p.set_ring_ranks(job.ring_ranks);
  if (job.method != v1::METHOD_UPIPE) return;
  const int ulysses = job.ranks / (job.fsdp_ranks * job.dp_ranks * job.ring_ranks);
  p.set_heads_per_stage(job.heads_per_rank * ulysses);
}

void SetMemory(const SmallJob& job, v1::MemorySpec& m) {
  if (job.attention_output) m.set_attention_output(*job.attention_output);
  if (job.layer_inputs) m.set_layer_inputs(*job.layer_inputs);
  if (job.hidden_stream) m.set_hidden_stream(*job.hidden_stream);
  if (job.stage_kv) m.set_stage_kv(*job.stage_kv);
  if (job.optimizer) m.set_optimizer(*job.optimizer);
  if (job.query_chunks) m.set_query_chunks(*job.query_chunks);
  if (job.stride != 1) m.set_checkpoint_stride(job.stride);
  if (job.overlap) m.set_overlap(true);
  if (job.ring_keep) m.set_ring_kv(v1::RING_KV_KEEP);
}

std::map<std::string, DeviceMaker>& Played() {
  static auto& played = *new std::map<std::string, DeviceMaker>();
  return played;
}

}  // namespace

void PlayBackend(const std::string& backend, DeviceMaker make) {
  Played()[backend] = std::move(make);
}

std::string& TestedBackend() {
  static std::string& backend = *new std::string("cpu");
  return backend;
}

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
  if (!job.causal) m.set_causal(false);
  if (job.window) m.set_window(*job.window);
  spec.mutable_data()->set_path("unused");
  if (job.documents != v1::DOCUMENTS_JOIN) spec.mutable_data()->set_documents(job.documents);
  SetParallel(job, *spec.mutable_parallel());
  SetMemory(job, *spec.mutable_memory());
  spec.mutable_train()->set_context(job.context);
  spec.mutable_train()->set_steps(20);
  spec.mutable_train()->set_dtype(job.bf16 ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
  if (job.accumulation != 1) spec.mutable_train()->set_gradient_accumulation(job.accumulation);
  return spec;
}

absl::StatusOr<v1::RunPlan> MakePlan(const v1::JobSpec& spec) {
  planner::PlanLimits limits{.check_data = false};
  v1::DeviceFile device;
  const v1::ParallelSpec parallel = WithDefaults(spec).parallel();
  if (Played().count(parallel.backend()) > 0) {
    UPIPE_ASSIGN_OR_RETURN(device, planner::FindDevice(parallel.device(), /*folder=*/""));
    device.set_attention_kernel(kernels::kOwnAttention);
    limits.device = &device;
    limits.must_run = false;
  }
  return planner::MakeRunPlan(spec, limits);
}

train::HostTokens RankTokens::host() const {
  return {.tokens = tokens.data(),
          .labels = labels.data(),
          .positions = positions.data(),
          .document_starts = document_starts};
}

RankTokens Sequence::Slice(const parallel::TokenMap& map, int context_rank) const {
  RankTokens part;
  part.document_starts = document_starts;
  for (const kernels::PositionRun& run : map.RunsOf(context_rank)) {
    for (int64_t position = run.begin; position < run.end; ++position) {
      const bool padding = position >= static_cast<int64_t>(tokens.size());
      part.tokens.push_back(padding ? 0 : tokens[position]);
      part.labels.push_back(padding ? -1 : labels[position]);
      const auto next = std::upper_bound(document_starts.begin(), document_starts.end(), position);
      part.positions.push_back(positions_restart ? position - *(next - 1) : position);
    }
  }
  return part;
}

Sequence MakeSequence(const v1::JobSpec& spec, uint64_t seed,
                      std::vector<int64_t> document_starts) {
  const v1::Documents documents =
      spec.data().has_documents() ? spec.data().documents() : v1::DOCUMENTS_JOIN;
  UPIPE_CHECK(documents != v1::DOCUMENTS_JOIN || document_starts.size() == 1)
      << "a sequence of joined documents is one document";
  Sequence sequence;
  uint64_t state = seed * 2654435761u + 1;
  auto next = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(spec.model().vocab_size()));
  };
  std::vector<int32_t> stream(spec.train().context() + 1);
  for (int32_t& token : stream) token = next();
  sequence.tokens.assign(stream.begin(), stream.end() - 1);
  sequence.labels.assign(stream.begin() + 1, stream.end());
  for (const int64_t start : document_starts) {
    if (start > 0) sequence.labels[start - 1] = -1;
  }
  sequence.document_starts = std::move(document_starts);
  sequence.positions_restart = documents == v1::DOCUMENTS_RESTART;
  return sequence;
}

absl::StatusOr<train::StepResult> RunStep(Rank rank, int64_t step,
                                          absl::Span<const Sequence> sequences) {
  const parallel::Mesh& mesh = rank.context.mesh();
  std::vector<RankTokens> parts;
  for (size_t i = mesh.SequenceGroup(rank.rank); i < sequences.size();
       i += mesh.sequence_groups()) {
    parts.push_back(sequences[i].Slice(rank.step.tokens(), mesh.ContextRank(rank.rank)));
  }
  std::vector<train::HostTokens> micro_steps;
  for (const RankTokens& part : parts) micro_steps.push_back(part.host());
  return rank.step.Run(step, micro_steps);
}

absl::StatusOr<train::StepResult> RunStep(Rank rank, int64_t step, const Sequence& sequence) {
  return RunStep(rank, step, absl::MakeConstSpan(&sequence, 1));
}

absl::StatusOr<optim::StepScalars::ByPosition> Evaluate(Rank rank, int64_t step,
                                                        absl::Span<const Sequence> sequences) {
  const parallel::Mesh& mesh = rank.context.mesh();
  const RankTokens part = sequences[mesh.SequenceGroup(rank.rank)].Slice(
      rank.step.tokens(), mesh.ContextRank(rank.rank));
  return rank.step.Evaluate(step, part.host());
}

engine::RankContext MakeContext(const v1::RunPlan& plan, kernels::Device& device,
                                const engine::RankStreams& streams, comm::Communicator& comm,
                                engine::StepClock* clock) {
  return engine::RankContext({.device = device,
                              .streams = streams,
                              .comm = comm,
                              .clock = clock,
                              .storage = model::StorageTypeOf(plan.spec().train()),
                              .mesh = parallel::Mesh::From(plan.spec().parallel())});
}

absl::Status RunRanks(const RankThreads& threads, const std::function<absl::Status(Rank)>& body) {
  const int ranks = threads.plan.spec().parallel().ranks();
  const std::string& backend = threads.plan.spec().parallel().backend();
  const auto played = Played().find(backend);
  const DeviceMaker make = played != Played().end() ? played->second : kernels::CreateDevice;
  std::shared_ptr<comm::CommDevice> shared;
  if (played == Played().end()) {
    UPIPE_ASSIGN_OR_RETURN(shared, comm::OpenCommDevice(backend));
  }
  const auto comms = comm::InprocGroup::Create(
      ranks,
      {.deadline = absl::Minutes(1), .observer = {}, .reduce_room = comm::ReduceRoomOf(backend)},
      shared);
  std::vector<absl::Status> statuses(ranks);
  auto run = [&](int rank) -> absl::Status {
    kernels::DeviceOptions options;
    options.backend = backend;
    options.arena_bytes = threads.plan.ranks(rank).memory().arena_bytes();
    options.host_bytes = threads.plan.ranks(rank).host_memory().arena_bytes();
    options.num_threads = threads.plan.spec().parallel().threads_per_rank();
    if (threads.adjust) threads.adjust(rank, options);
    UPIPE_ASSIGN_OR_RETURN(auto device, make(options));
    engine::StepClock clock;
    const auto streams = engine::RankStreams::Create(*device, rank);
    const engine::RankContext context =
        MakeContext(threads.plan, *device, streams, *comms[rank], threads.timed ? &clock : nullptr);
    UPIPE_ASSIGN_OR_RETURN(auto step, train::TrainStep::Create(context, threads.plan));
    if (threads.timed) {
      clock.Watch(streams);
      clock.BeginStep(/*keep_slices=*/true);
    }
    const absl::Status status = body({rank, context, *step});
    if (status.ok()) UPIPE_RETURN_IF_ERROR(clock.EndStep());
    const absl::Status drained = context.stream().Synchronize();
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
  const bool on_host = parameters.place() == engine::Place::kHost;
  // Nothing may be reading or writing them.
  UPIPE_RETURN_IF_ERROR(rank.context.stream().Synchronize());
  for (const auto& piece : parameters.pieces()) {
    const auto it = weights.find(piece.tensor->name);
    if (it == weights.end() ||
        static_cast<int64_t>(it->second.size()) != piece.tensor->num_elements) {
      return absl::InvalidArgumentError(absl::StrCat("no weights for ", piece.tensor->name));
    }
    void* to = parameters.weights().At(piece.shard_begin);
    const float* from = it->second.data() + piece.tensor_begin;
    const int64_t bytes = piece.count * static_cast<int64_t>(sizeof(float));
    if (on_host) {
      std::memcpy(to, from, bytes);
    } else {
      rank.context.device().CopyFromHost(to, from, bytes, rank.context.stream());
    }
  }
  return rank.context.stream().Synchronize();
}

absl::StatusOr<std::vector<float>> ReadShard(Rank rank, const kernels::TensorView& shard) {
  std::vector<float> values(shard.shape[0]);
  if (rank.step.parameters().place() == engine::Place::kHost) {
    UPIPE_RETURN_IF_ERROR(rank.context.stream().Synchronize());
    std::memcpy(values.data(), shard.data, shard.num_bytes());
    return values;
  }
  rank.context.device().CopyToHost(values.data(), shard.data, shard.num_bytes(),
                                   rank.context.stream());
  UPIPE_RETURN_IF_ERROR(rank.context.stream().Synchronize());
  return values;
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
  UPIPE_ASSIGN_OR_RETURN(const std::vector<float> host, ReadShard(rank, shard));
  if (rank.context.at().dp > 0) return absl::OkStatus();
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
