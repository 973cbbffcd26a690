// How ranks over UCX find out whom they talk to.
#include <thread>

#include "engine/comm/ucx/ucx_communicator.h"
#include "gmock/gmock.h"
#include "tests/contract/engine/comm_groups.h"

namespace upipe::comm {
namespace {

using testing::HasSubstr;
using Connected = absl::StatusOr<std::unique_ptr<Communicator>>;

UcxOptions Quick() {
  return {.tcp_devices = "lo",
          .connect_deadline = absl::Seconds(20),
          .close_deadline = absl::Seconds(20)};
}

std::unique_ptr<UcxContext> Bind(const UcxOptions& options = Quick()) {
  auto context = UcxContext::Create(options);
  EXPECT_TRUE(context.ok()) << context.status();
  return *std::move(context);
}

// Connects ranks of the given identities on the given nodes; one outcome per rank.
std::vector<Connected> ConnectAll(const std::vector<AttemptIdentity>& identities,
                                  const std::vector<std::string>& nodes) {
  const size_t size = identities.size();
  std::vector<std::unique_ptr<UcxContext>> contexts;
  PeerGroup group{.node_ids = nodes};
  for (size_t rank = 0; rank < size; ++rank) {
    contexts.push_back(Bind());
    group.addresses.push_back(contexts.back()->address());
  }
  std::vector<Connected> outcomes(size);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank, own = group]() mutable {
      own.rank = static_cast<int>(rank);
      own.identity = identities[rank];
      outcomes[rank] = contexts[rank]->Connect(own, {});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

TEST(UcxConnect, AnotherAttemptIsRefusedNamingBoth) {
  const AttemptIdentity now{"train-7", 3, 0xABC, "n3"};
  const AttemptIdentity others[] = {{"train-8", 3, 0xABC, "n3"},
                                    {"train-7", 2, 0xABC, "n3"},
                                    {"train-7", 3, 0xABD, "n3"},
                                    {"train-7", 3, 0xABC, "n2"}};
  for (const std::vector<std::string>& nodes :
       {std::vector<std::string>{"a", "a", "a"}, {"a", "b", "c"}}) {
    for (const AttemptIdentity& other : others) {
      const std::vector<Connected> outcomes = ConnectAll({now, other, now}, nodes);
      for (const Connected& outcome : outcomes) {
        EXPECT_EQ(absl::StatusCode::kAborted, outcome.status().code()) << outcome.status();
        EXPECT_THAT(outcome.status().message(),
                    HasSubstr("job train-7, generation 3, plan abc, nonce n3"));
        EXPECT_THAT(
            outcome.status().message(),
            HasSubstr(absl::StrCat("job ", other.job, ", generation ", other.generation, ", plan ",
                                   absl::Hex(other.plan_hash), ", nonce ", other.nonce)));
      }
    }
  }
}

TEST(UcxConnect, APeerThatDoesNotComeCostsTheDeadline) {
  for (const std::string node : {"a", "b"}) {
    UcxOptions options = Quick();
    options.connect_deadline = absl::Milliseconds(300);
    auto present = Bind(options), absent = Bind();
    const Connected outcome = present->Connect(
        {.addresses = {present->address(), absent->address()}, .node_ids = {"a", node}}, {});
    EXPECT_EQ(absl::StatusCode::kDeadlineExceeded, outcome.status().code()) << outcome.status();
    EXPECT_THAT(outcome.status().message(),
                HasSubstr(absl::StrCat("rank 1 on node ", node, " did not")));
  }
}

TEST(UcxConnect, NonsenseIsRefused) {
  const auto refuse = [](const std::function<void(PeerGroup*)>& spoil, const char* complaint) {
    auto context = Bind();
    PeerGroup group{.addresses = {context->address(), context->address()}, .node_ids = {"a", "a"}};
    spoil(&group);
    const Connected outcome = context->Connect(group, {});
    EXPECT_EQ(absl::StatusCode::kInvalidArgument, outcome.status().code()) << outcome.status();
    EXPECT_THAT(outcome.status().message(), HasSubstr(complaint));
  };
  refuse([](PeerGroup* group) { group->rank = 2; }, "rank 2 with 2 addresses");
  refuse([](PeerGroup* group) { group->node_ids.pop_back(); }, "1 node ids");
  refuse([](PeerGroup* group) { group->addresses[1].pop_back(); }, "rank 1");
  refuse([](PeerGroup* group) { group->addresses[1] += "x"; }, "behind its end");
  refuse([](PeerGroup* group) { group->addresses[1].clear(); }, "cut short");
}

TEST(UcxConnect, OnlyOnce) {
  auto context = Bind();
  const PeerGroup group{.addresses = {context->address()}, .node_ids = {"a"}};
  EXPECT_TRUE(context->Connect(group, {}).ok());
  EXPECT_EQ(absl::StatusCode::kFailedPrecondition, context->Connect(group, {}).status().code());
}

}  // namespace
}  // namespace upipe::comm
