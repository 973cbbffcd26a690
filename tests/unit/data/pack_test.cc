// Packing text: what is taken, how it is split, what is refused, and that nothing stays behind.
#include "engine/data/pack.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/data/text_files.h"
#include "engine/data/token_shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// The documents of a shard that passed Verify(), as text.
std::vector<std::string> Documents(const std::string& path) {
  const auto shard = TokenShard::Open(path);
  UPIPE_CHECK_OK(shard.status());
  UPIPE_CHECK_OK(shard->Verify());
  std::vector<std::string> documents;
  for (const uint16_t token : shard->tokens()) {
    if (token == 256) {
      documents.emplace_back();
    } else {
      documents.back().push_back(static_cast<char>(token));
    }
  }
  EXPECT_EQ(static_cast<int64_t>(documents.size()), shard->num_documents());
  return documents;
}

std::vector<std::string> Paths(const TextCollection& collection) {
  std::vector<std::string> paths;
  for (const TextDocument& document : collection.documents) paths.push_back(document.relative_path);
  return paths;
}

// 400 distinct files of about equal size in nested folders.
void WriteManyFiles(const TempFolder& folder) {
  for (int i = 0; i < 400; ++i) {
    folder.Write(absl::StrCat("in/", i % 7, "/file", i, ".h"),
                 absl::StrCat("// file ", i, "\n", std::string(100, 'x')));
  }
}

// Runs Pack on one input, expects a refusal that leaves no trace, returns the message.
std::string Refusal(const TempFolder& folder, PackOptions options) {
  const int entries = folder.CountEntries();
  const auto summary = Pack(options);
  EXPECT_FALSE(summary.ok());
  EXPECT_EQ(folder.CountEntries(), entries) << "something was left behind";
  return std::string(summary.status().message());
}

TEST(CollectTexts, WalksInByteOrderAndSkipsWhatIsNoText) {
  TempFolder folder;
  folder.Write("in/b.txt", "bee");
  folder.Write("in/a/z.txt", "zed");
  folder.Write("in/a/Z.txt", "Zed");
  folder.Write("in/B.txt", "Bee");
  folder.Write("in/empty", "");
  folder.Write("in/nul", std::string("a\0b", 3));
  folder.Write("in/latin", "\xe9\xe8\xe7 text");
  std::filesystem::create_symlink("b.txt", folder.Path("in/link"));
  std::filesystem::create_symlink(".", folder.Path("in/a/loop"));
  std::filesystem::create_symlink("missing", folder.Path("in/broken"));
  std::filesystem::create_hard_link(folder.Path("in/B.txt"), folder.Path("in/c.txt"));
  ASSERT_EQ(mkfifo(folder.Path("in/fifo").c_str(), 0600), 0);
  const auto found = CollectTexts({folder.Path("in")}, 1000);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(Paths(*found), ElementsAre("B.txt", "a/Z.txt", "a/z.txt", "b.txt"));
  EXPECT_EQ(found->documents[0].text, "Bee");
  EXPECT_EQ(found->bytes, 12);
  EXPECT_EQ(found->skipped_empty, 1);
  EXPECT_EQ(found->skipped_binary, 2);
  EXPECT_EQ(found->skipped_special, 4);
  EXPECT_EQ(found->skipped_duplicate, 1);
  EXPECT_FALSE(found->reached_max_bytes);
}

TEST(CollectTexts, FollowsALinkThatIsNamed) {
  TempFolder folder;
  folder.Write("real/a.txt", "one");
  std::filesystem::create_symlink("real", folder.Path("link"));
  const auto found = CollectTexts({folder.Path("link")}, 1000);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(Paths(*found), ElementsAre("a.txt"));
}

TEST(CollectTexts, TakesAFileOnceHoweverOftenNamed) {
  TempFolder folder;
  const std::string file = folder.Write("in/a.txt", "one");
  const auto found = CollectTexts({file, folder.Path("in"), file}, 1000);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(Paths(*found), ElementsAre("a.txt"));
  EXPECT_EQ(found->skipped_duplicate, 2);
}

TEST(CollectTexts, StopsAtTheByteLimit) {
  TempFolder folder;
  for (const char* name : {"in/a", "in/b", "in/c"}) folder.Write(name, "12345");
  const auto found = CollectTexts({folder.Path("in"), folder.Path("never looked at")}, 8);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(Paths(*found), ElementsAre("a", "b"));
  EXPECT_EQ(found->documents[1].text, "123");
  EXPECT_EQ(found->bytes, 8);
  EXPECT_TRUE(found->reached_max_bytes);
}

TEST(CheckIsText, DrawsTheLineAtNulAndTenPercent) {
  EXPECT_TRUE(CheckIsText("plain", "f").ok());
  EXPECT_THAT(CheckIsText(std::string("0123456789\0", 11), "f").ToString(),
              HasSubstr("f is not text: byte 10 of it is NUL"));
  EXPECT_TRUE(CheckIsText("nine byte\xff", "f").ok());
  EXPECT_THAT(CheckIsText("eight by\xff", "f").ToString(),
              HasSubstr("1 of 9 bytes are not UTF-8, more than 10 %"));
}

TEST(CheckIsText, KnowsUtf8) {
  // Each valid piece repeated is text; each invalid one is not. A tail cut off is forgiven.
  const auto repeated = [](absl::string_view piece) {
    std::string text;
    for (int i = 0; i < 9; ++i) absl::StrAppend(&text, piece);
    return text;
  };
  for (const char* valid :
       {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    const std::string text = repeated(valid);
    for (size_t cut = 0; cut < strlen(valid); ++cut) {
      EXPECT_TRUE(CheckIsText(text.substr(0, text.size() - cut), "f").ok()) << text;
    }
  }
  for (const char* invalid : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2 ", "\xe0\x9f\xbf",
                              "\xed\xa0\x80", "\xe1\x80 ", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
                              "\xf1\x80\x80 ", "\xf5\x80\x80\x80", "\xfe", "\xff"}) {
    EXPECT_FALSE(CheckIsText(repeated(invalid), "f").ok()) << testing::PrintToString(invalid);
  }
}

TEST(Pack, SplitsWholeDocumentsBySeed) {
  TempFolder folder;
  WriteManyFiles(folder);
  std::set<std::string> all;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.Path("in"))) {
    if (entry.is_regular_file()) {
      all.insert(folder.Read(entry.path().lexically_relative(folder.Path("")).string()));
    }
  }
  std::vector<std::string> held_out_by_seed[2];
  for (const uint64_t seed : {0, 1}) {
    const std::string output = absl::StrCat("out", seed);
    const auto summary = Pack({.inputs = {folder.Path("in")},
                               .output = folder.Path(output),
                               .held_out = 0.25,
                               .seed = seed});
    ASSERT_TRUE(summary.ok()) << summary.status();
    EXPECT_EQ(summary->split, Split::kByDocument);
    EXPECT_EQ(summary->documents, 400);
    const auto train = Documents(folder.Path(output + "/train.tokens"));
    const auto held_out = Documents(folder.Path(output + "/held_out.tokens"));
    EXPECT_EQ(train.size() + held_out.size(), 400u);
    std::set<std::string> together(train.begin(), train.end());
    together.insert(held_out.begin(), held_out.end());
    EXPECT_EQ(together, all);
    // Binomial(400, 1/4): 100 expected, sigma 8.7.
    EXPECT_NEAR(static_cast<double>(held_out.size()), 100, 45);
    held_out_by_seed[seed] = held_out;
  }
  EXPECT_NE(held_out_by_seed[0], held_out_by_seed[1]);
}

TEST(Pack, TheSameTextGivesTheSameBytes) {
  TempFolder folder;
  WriteManyFiles(folder);
  for (const char* output : {"one", "deep/er/two/"}) {
    const auto summary = Pack({.inputs = {folder.Path("in")}, .output = folder.Path(output)});
    ASSERT_TRUE(summary.ok()) << summary.status();
  }
  for (const std::string name : {kTrainShardName, kHeldOutShardName, kManifestName}) {
    EXPECT_FALSE(folder.Read("one/" + name).empty());
    EXPECT_EQ(folder.Read("one/" + name), folder.Read("deep/er/two/" + name)) << name;
  }
  const std::filesystem::directory_iterator beside(folder.Path("deep/er"));
  EXPECT_EQ(std::distance(begin(beside), end(beside)), 1) << "the partial folder stayed";
}

TEST(Pack, CutsTheTailWhereDocumentsAreFew) {
  TempFolder folder;
  const std::string text = "0123456789abcdefghij";
  const std::string file = folder.Write("book.txt", text);
  const auto summary = Pack({.inputs = {file}, .output = folder.Path("out"), .held_out = 0.25});
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->split, Split::kTailOfEachDocument);
  EXPECT_THAT(Documents(folder.Path("out/train.tokens")), ElementsAre("0123456789abcde"));
  EXPECT_THAT(Documents(folder.Path("out/held_out.tokens")), ElementsAre("fghij"));
}

TEST(Pack, TheHeldOutShareIsNearWhatWasAskedForHoweverUnlikeDocumentsAre) {
  // The one large file would be all of a side; some of these seeds hold it out, most do not.
  TempFolder folder;
  for (int i = 0; i < 40; ++i) {
    folder.Write(absl::StrCat("in/", i), absl::StrCat(i, std::string(1000, 's')));
  }
  folder.Write("in/large", std::string(400000, 'l'));
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::string out = folder.Path(absl::StrCat("out", seed));
    const auto summary = Pack({.inputs = {folder.Path("in")}, .output = out, .seed = seed});
    ASSERT_TRUE(summary.ok()) << summary.status();
    const auto held_out = static_cast<double>(summary->held_out.tokens);
    EXPECT_NEAR(held_out / (held_out + static_cast<double>(summary->train.tokens)), 0.05, 0.002)
        << "seed " << seed;
    std::filesystem::remove_all(out);
  }
}

TEST(Pack, TheManifestTellsWhatTheShardsHold) {
  TempFolder folder;
  WriteManyFiles(folder);
  folder.Write("in/empty", "");
  const auto summary =
      Pack({.inputs = {folder.Path("in")}, .output = folder.Path("out"), .seed = 4});
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(folder.Read("out/manifest.json"), PackSummaryJson(*summary));
  const auto manifest = nlohmann::json::parse(folder.Read("out/manifest.json"));
  EXPECT_EQ(manifest["vocab_size"], 257);
  EXPECT_EQ(manifest["options"]["seed"], 4);
  EXPECT_EQ(manifest["source"]["documents"], 400);
  EXPECT_EQ(manifest["source"]["skipped_empty"], 1);
  EXPECT_EQ(manifest["split"], "by_document");
  for (const std::string part : {"train", "held_out"}) {
    const std::string file = manifest[part]["file"];
    EXPECT_EQ(file, part + ".tokens");
    const auto shard = TokenShard::Open(folder.Path("out/" + file));
    ASSERT_TRUE(shard.ok()) << shard.status();
    const auto stats = MeasureCorpus(*shard);
    ASSERT_TRUE(stats.ok());
    EXPECT_EQ(manifest[part]["tokens"], stats->tokens);
    EXPECT_EQ(manifest[part]["documents"], stats->documents);
    EXPECT_EQ(manifest[part]["unigram_nats"], stats->unigram_nats);
    EXPECT_EQ(manifest[part]["bigram_nats"], stats->bigram_nats);
    EXPECT_GT(stats->unigram_nats, 0);
  }
}

TEST(Pack, RefusesInputsNamingPathAndNumber) {
  TempFolder folder;
  const std::string out = folder.Path("out");
  const auto refusal = [&](std::vector<std::string> inputs) {
    return Refusal(folder, {.inputs = std::move(inputs), .output = out});
  };
  const std::string good = folder.Write("good", std::string(100, 'g'));
  const std::string binary = folder.Write("binary", std::string("ELF\0", 4));
  EXPECT_THAT(refusal({good, folder.Path("missing")}),
              AllOf(HasSubstr("cannot read"), HasSubstr(folder.Path("missing"))));
  EXPECT_THAT(refusal({good, binary}), AllOf(HasSubstr(binary), HasSubstr("byte 3")));
  EXPECT_THAT(refusal({folder.Write("empty", "")}), HasSubstr("0 bytes"));
  EXPECT_THAT(refusal({"/dev/null"}), HasSubstr("/dev/null is neither"));
  // Opens, and fails to read whoever asks.
  EXPECT_THAT(refusal({"/proc/self/mem"}), HasSubstr("cannot read /proc/self/mem"));
  EXPECT_THAT(refusal({folder.Write("tiny", "x")}), HasSubstr("1 bytes of text in 1 files"));
  folder.Write("junk/a", std::string("\0", 1));
  folder.Write("junk/b", "");
  EXPECT_THAT(refusal({folder.Path("junk")}),
              AllOf(HasSubstr(folder.Path("junk")), HasSubstr("1 binary, 1 empty")));
  EXPECT_THAT(refusal({}), HasSubstr("0 inputs"));
}

TEST(Pack, RefusesOptionsNamingTheNumber) {
  TempFolder folder;
  const std::string good = folder.Write("good", std::string(100, 'g'));
  const PackOptions options{.inputs = {good}, .output = folder.Path("out")};
  for (const double share :
       {0.0, 1.0, -0.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
    PackOptions changed = options;
    changed.held_out = share;
    EXPECT_THAT(Refusal(folder, changed), HasSubstr("held-out share is"));
  }
  for (const int64_t bytes : {int64_t{0}, int64_t{-9}}) {
    PackOptions changed = options;
    changed.max_bytes = bytes;
    EXPECT_THAT(Refusal(folder, changed), HasSubstr(absl::StrCat("are ", bytes)));
  }
  PackOptions nameless = options;
  nameless.output = "";
  EXPECT_THAT(Refusal(folder, nameless), HasSubstr("0 characters"));
}

TEST(Pack, LeavesWhatIsThereAlone) {
  TempFolder folder;
  const std::string good = folder.Write("good", std::string(100, 'g'));
  folder.Write("full/keep", "me");
  EXPECT_THAT(Refusal(folder, {.inputs = {good}, .output = folder.Path("full")}),
              HasSubstr("full exists and is not empty"));
  EXPECT_EQ(folder.Read("full/keep"), "me");
  EXPECT_THAT(Refusal(folder, {.inputs = {good}, .output = good}), HasSubstr("no folder"));
  EXPECT_THAT(Refusal(folder, {.inputs = {good}, .output = good + "/below"}),
              AllOf(HasSubstr("cannot create"), HasSubstr(good)));
  std::filesystem::create_directory(folder.Path("hollow"));
  EXPECT_TRUE(Pack({.inputs = {good}, .output = folder.Path("hollow")}).ok());
}

TEST(Pack, AWriteThatFailsLeavesNothing) {
  TempFolder folder;
  const std::string good = folder.Write("good", std::string(200000, 'g'));
  const FileSizeLimit limit(100000);
  const std::string message = Refusal(folder, {.inputs = {good}, .output = folder.Path("out")});
  EXPECT_THAT(message, AllOf(HasSubstr("cannot write"), HasSubstr("train.tokens"),
                             HasSubstr("File too large")));
}

// What the executable prints to both streams, and its exit code.
std::pair<std::string, int> RunTool(const std::string& arguments) {
  const char* bin = getenv("UPIPE_BIN_DIR");
  UPIPE_CHECK(bin != nullptr) << "UPIPE_BIN_DIR is set by ctest";
  FILE* pipe = popen(absl::StrCat(bin, "/upipe-data ", arguments, " 2>&1").c_str(), "r");
  UPIPE_CHECK(pipe != nullptr);
  std::string output;
  for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) output.push_back(static_cast<char>(c));
  return {output, WEXITSTATUS(pclose(pipe))};
}

TEST(Tool, PacksAndDescribes) {
  TempFolder folder;
  WriteManyFiles(folder);
  const std::string out = folder.Path("out");
  const auto [packed, pack_code] = RunTool(
      absl::StrCat("pack ", folder.Path("in"), " --output ", out, " --max-bytes 16KiB -o json"));
  EXPECT_EQ(pack_code, 0) << packed;
  EXPECT_EQ(packed, folder.Read("out/manifest.json"));
  EXPECT_EQ(nlohmann::json::parse(packed)["source"]["bytes"], 16384);
  const auto [stats, stats_code] = RunTool(absl::StrCat("stats ", out, " -o json"));
  EXPECT_EQ(stats_code, 0);
  EXPECT_EQ(nlohmann::json::parse(stats)["held_out"]["unigram_nats"],
            nlohmann::json::parse(packed)["held_out"]["unigram_nats"]);
  EXPECT_THAT(RunTool("stats " + out).first, AllOf(HasSubstr("held out"), HasSubstr("unigram")));
}

TEST(Tool, RefusesInOneSentence) {
  TempFolder folder;
  const auto [missing, missing_code] = RunTool("pack /missing --output " + folder.Path("out"));
  EXPECT_EQ(missing_code, 1);
  EXPECT_EQ(missing, "upipe-data: cannot read /missing: No such file or directory\n");
  folder.Write("out/train.tokens", "garbage");
  const auto [damaged, damaged_code] = RunTool("stats " + folder.Path("out"));
  EXPECT_EQ(damaged_code, 1);
  EXPECT_EQ(std::count(damaged.begin(), damaged.end(), '\n'), 1) << damaged;
  EXPECT_THAT(damaged, HasSubstr("7 bytes"));
  EXPECT_EQ(RunTool("pack").second, 2);
  EXPECT_EQ(RunTool("--help").second, 0);
}

}  // namespace
}  // namespace upipe::data
