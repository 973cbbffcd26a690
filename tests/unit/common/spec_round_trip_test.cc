// Random legal specs, every field of job.proto among them: written as YAML and read back equal, and
// defaults filled in twice are those filled in once.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string>

#include "common/spec/job_spec.h"
#include "common/spec/model_presets.h"
#include "common/spec/yaml_spec.h"

namespace upipe {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

constexpr uint64_t kSeed = 20261130;
constexpr int kRounds = 1000;

class SpecMaker {
 public:
  explicit SpecMaker(uint64_t seed) : random_(seed) {}

  v1::JobSpec Make() {
    v1::JobSpec spec;
    spec.set_name("a" + std::string(Whole(0, 62), 'b'));
    FillModel(*spec.mutable_model());
    for (int64_t n = Whole(1, 8); n > 0; --n)
      spec.mutable_data()->mutable_path()->push_back("aZ0-_ .:#'\"\\\n\x01,{["[Whole(0, 16)]);
    FillParallel(spec.model().num_heads(), *spec.mutable_parallel());
    if (Maybe()) FillOptimizer(*spec.mutable_optimizer());
    v1::TrainSpec& train = *spec.mutable_train();
    train.set_context(Whole(1, int64_t{1} << 30));
    train.set_steps(Whole(1, int64_t{1} << 31));
    if (Maybe()) train.set_seed(random_());
    if (Maybe()) train.set_eval_every(Whole(0, 1000));
    if (Maybe()) train.set_eval_sequences(Whole(0, 1000));
    if (Maybe()) train.set_memory_per_rank(Whole(1, int64_t{1} << 50));
    if (Maybe()) train.set_dtype(Maybe() ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
    if (Maybe()) train.set_selfcheck(Maybe());
    if (Maybe()) train.set_deterministic(Maybe());
    if (Maybe()) train.set_gradient_accumulation(Whole(1, 1 << 20));
    if (Maybe()) spec.mutable_data()->set_documents(static_cast<v1::Documents>(Whole(1, 3)));
    if (Maybe()) {
      FillMemory(spec.parallel(), WithDefaults(spec).model().num_layers(), *spec.mutable_memory());
    }
    if (Maybe()) FillCheckpoint(*spec.mutable_checkpoint());
    if (Maybe()) FillRestarts(*spec.mutable_restarts());
    if (Maybe()) spec.set_priority(static_cast<int32_t>(Whole(0, 2000)) - 1000);
    if (Maybe()) spec.set_time_limit_seconds(Whole(1, 1'000'000));
    if (Maybe()) spec.mutable_model()->set_window(Whole(1, int64_t{1} << 30));
    if (Maybe()) spec.mutable_model()->set_causal(Maybe());
    return spec;
  }

 private:
  bool Maybe() { return random_() % 2 == 0; }
  int64_t Whole(int64_t first, int64_t last) {
    return std::uniform_int_distribution<int64_t>(first, last)(random_);
  }
  // All magnitudes alike, all bits of the fraction used.
  double Real(double first, double last) {
    return std::exp(std::uniform_real_distribution<>(std::log(first), std::log(last))(random_));
  }

  void FillRestarts(v1::RestartSpec& restarts) {
    if (Maybe()) restarts.set_infrastructure(static_cast<int32_t>(Whole(0, 1000)));
    if (Maybe()) restarts.set_application(static_cast<int32_t>(Whole(0, 1000)));
    if (Maybe()) restarts.set_no_progress(static_cast<int32_t>(Whole(0, 1000)));
  }

  void FillCheckpoint(v1::CheckpointSpec& checkpoint) {
    checkpoint.set_path("/a b");
    if (Maybe()) checkpoint.set_every_steps(Whole(1, int64_t{1} << 31));
    if (Maybe()) checkpoint.set_keep(static_cast<int32_t>(Whole(1, 1000)));
  }

  void FillModel(v1::ModelSpec& model) {
    const auto& presets = ModelPresets();
    const auto& preset = presets[static_cast<size_t>(Whole(0, presets.size() - 1))];
    model = preset.model;
    if (Maybe()) {
      model.Clear();
      model.set_preset(preset.name);
    }
    model.set_num_kv_heads(1);
    model.set_num_heads(Whole(1, 64));
    if (Maybe()) model.set_rms_norm_eps(Real(1e-12, 1));
    if (Maybe()) model.set_tie_embeddings(Maybe());
    if (Maybe()) model.set_init_stddev(Real(1e-6, 10));
    if (Maybe()) model.set_qk_norm(Maybe());
    if (Maybe()) model.set_qkv_bias(Maybe());
    if (Maybe()) model.set_max_position(Whole(1, int64_t{1} << 30));
    FillRope(*model.mutable_rope());
  }

  void FillRope(v1::RopeSpec& rope) {
    if (Maybe()) rope.set_theta(Real(1.001, 1e9));
    if (Maybe()) rope.set_hf_parity(Maybe());
    const int64_t kind = Whole(0, 4);
    if (kind == 0) return;
    rope.clear_llama3();
    if (kind == 1) {
      rope.mutable_llama3()->set_factor(Real(1, 1e6));
      rope.mutable_llama3()->set_low_freq_factor(Real(0.1, 1));
      rope.mutable_llama3()->set_high_freq_factor(Real(1.01, 10));
      rope.mutable_llama3()->set_original_context(Whole(1, int64_t{1} << 30));
    } else if (kind == 2) {
      rope.mutable_linear()->set_factor(Real(1, 1e6));
    } else if (kind == 3) {
      rope.mutable_dynamic()->set_factor(Real(1, 1e6));
      rope.mutable_dynamic()->set_original_context(Whole(1, int64_t{1} << 30));
    } else {
      v1::YarnRopeScaling& yarn = *rope.mutable_yarn();
      yarn.set_factor(Real(1, 1e6));
      yarn.set_original_context(Whole(1, 1 << 10) << 10);
      if (Maybe()) yarn.set_beta_fast(Real(2.5, 100));
      if (Maybe()) yarn.set_beta_slow(Real(0.1, 2.4));
      if (Maybe()) yarn.set_attention_factor(Real(0.1, 10));
      if (Maybe()) yarn.set_truncate(Maybe());
    }
  }

  void FillMemory(const v1::ParallelSpec& parallel, int64_t num_layers, v1::MemorySpec& memory) {
    const bool fpdt = parallel.method() == v1::METHOD_FPDT;
    const bool ring =
        parallel.ring_ranks() > 1 ||
        (parallel.method() == v1::METHOD_RING && WithParallelDefaults(parallel).ring_ranks() > 1);
    if (Maybe()) memory.set_attention_output(v1::ATTENTION_OUTPUT_RECOMPUTE);
    if (Maybe()) memory.set_attention_output(v1::ATTENTION_OUTPUT_HOST);
    if (Maybe()) memory.set_layer_inputs(v1::PLACE_HOST);
    if (memory.has_layer_inputs() && Maybe()) memory.set_hidden_stream(v1::PLACE_HOST);
    if (!fpdt && !memory.has_hidden_stream() && Maybe()) {
      memory.set_attention_output(v1::ATTENTION_OUTPUT_DEVICE);
      memory.set_hidden_stream(v1::PLACE_DEVICE);
    }
    if (!ring && Maybe()) memory.set_stage_kv(v1::PLACE_HOST);
    if (Maybe()) memory.set_checkpoint_stride(static_cast<int32_t>(Whole(1, num_layers)));
    if (Maybe()) memory.set_query_chunks(Whole(fpdt ? 2 : 1, 1024));
    if (Maybe()) memory.set_overlap(Maybe());
    if (ring && Maybe()) memory.set_ring_kv(v1::RING_KV_KEEP);
    if (Maybe()) memory.set_ring_kv(ring && Maybe() ? v1::RING_KV_KEEP : v1::RING_KV_PASS);
    if (Maybe()) memory.set_optimizer(Maybe() ? v1::PLACE_HOST : v1::PLACE_DEVICE);
    if (Maybe()) {
      memory.set_policy(Maybe() ? v1::POLICY_CHOICE_AUTO : v1::POLICY_CHOICE_WRITTEN);
    }
  }

  void FillParallel(int64_t num_heads, v1::ParallelSpec& parallel) {
    parallel.set_method(static_cast<v1::Method>(Whole(1, 5)));
    if (Maybe()) parallel.set_fsdp_ranks(static_cast<int32_t>(Whole(1, 4)));
    if (Maybe()) parallel.set_dp_ranks(static_cast<int32_t>(Whole(1, 4)));
    const int64_t ulysses = parallel.method() == v1::METHOD_RING ? 1 : Whole(1, 8);
    int64_t ring = 1;
    if (parallel.method() == v1::METHOD_USP) ring = Whole(2, 4);
    if (parallel.method() == v1::METHOD_RING) ring = Whole(1, 8);
    if (parallel.method() == v1::METHOD_UPIPE) ring = Whole(1, 4);
    if (ring > 1 && parallel.method() != v1::METHOD_RING) {
      parallel.set_ring_ranks(static_cast<int32_t>(ring));
    }
    const int64_t groups =
        int64_t{std::max(1, parallel.fsdp_ranks())} * std::max(1, parallel.dp_ranks());
    parallel.set_ranks(static_cast<int32_t>(groups * ulysses * ring));
    if (parallel.method() == v1::METHOD_UPIPE) {
      parallel.set_heads_per_stage(ulysses * Whole(1, (num_heads + ulysses - 1) / ulysses));
    }
    if (Maybe()) parallel.set_threads_per_rank(static_cast<int32_t>(Whole(1, 64)));
    if (Maybe()) parallel.set_isa_cap(Maybe() ? "AVX3_BF16" : "");
    if (Maybe()) parallel.set_backend(Maybe() ? "cpu" : "cuda");
    if (Maybe()) parallel.set_device(Maybe() ? "h200" : "cpu-2.x");
    if (Maybe()) parallel.set_ranks_per_node(static_cast<int32_t>(Maybe() ? ulysses : groups));
    if (parallel.method() == v1::METHOD_UPIPE && Maybe()) parallel.set_heads_per_stage(0);
    if (parallel.method() == v1::METHOD_UPIPE && Maybe()) parallel.set_ring_ranks(0);
  }

  void FillOptimizer(v1::OptimizerSpec& optimizer) {
    optimizer.set_learning_rate(Real(1e-6, 1));
    if (Maybe()) optimizer.set_min_learning_rate(optimizer.learning_rate() * Real(1e-6, 1));
    if (Maybe()) optimizer.set_warmup_steps(Whole(0, int64_t{1} << 31));
    if (Maybe()) optimizer.set_beta1(Real(0.1, 0.99));
    if (Maybe()) optimizer.set_beta2(Real(0.1, 0.99));
    if (Maybe()) optimizer.set_eps(Real(1e-12, 1));
    if (Maybe()) optimizer.set_weight_decay(Maybe() ? 0 : Real(1e-6, 1));
    if (Maybe()) optimizer.set_clip_norm(Maybe() ? HUGE_VAL : Real(1e-3, 10));
    if (Maybe()) optimizer.set_max_skipped_steps(static_cast<int32_t>(Whole(1, 100)));
  }

  std::mt19937_64 random_;
};

void CollectFields(const Message& message, std::set<std::string>& names) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    names.insert(field->full_name());
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE)
      CollectFields(message.GetReflection()->GetMessage(message, field), names);
  }
}

void ListAllFields(const google::protobuf::Descriptor& type, std::set<std::string>& names) {
  for (int i = 0; i < type.field_count(); ++i) {
    names.insert(type.field(i)->full_name());
    if (type.field(i)->message_type() != nullptr)
      ListAllFields(*type.field(i)->message_type(), names);
  }
}

TEST(SpecRoundTrip, RandomSpecsAreReadBackEqual) {
  SpecMaker maker(kSeed);
  std::set<std::string> seen;
  for (int round = 0; round < kRounds; ++round) {
    const v1::JobSpec spec = maker.Make();
    const std::string yaml = JobSpecToYaml(spec);
    const auto again = ParseJobSpecYaml(yaml, "again");
    ASSERT_TRUE(again.ok()) << again.status() << "\n" << yaml;
    ASSERT_TRUE(MessageDifferencer::Equals(*again, spec)) << yaml;
    const v1::JobSpec full = WithDefaults(spec);
    ASSERT_TRUE(ValidateJobSpec(full).empty()) << yaml;
    ASSERT_TRUE(MessageDifferencer::Equals(WithDefaults(full), full)) << yaml;
    CollectFields(spec, seen);
  }
  std::set<std::string> all;
  ListAllFields(*v1::JobSpec::descriptor(), all);
  all.erase("upipe.v1.ModelSpec.hf_config");  // never in a spec that has been read
  EXPECT_EQ(seen, all) << "a field of job.proto is never set here";
}

}  // namespace
}  // namespace upipe
