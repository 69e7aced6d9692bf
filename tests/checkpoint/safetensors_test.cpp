// Safetensors files: what is written is read again, and what is damaged or hostile is refused before it is believed.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint/safetensors_file.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::disk {
namespace {

using testing::contains;
using testing::error_message;

void write_file(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path); // some file systems flush what is overwritten
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string bytes_of(const std::string& path) {
  return read_text(path, 1 << 30, File::Links::kFollow);
}

std::string with_length(const std::string& header) {
  const uint64_t bytes = header.size();
  return std::string(reinterpret_cast<const char*>(&bytes), sizeof(bytes)) + header;
}

// Each byte of the data tells its place.
std::string write_tensors(const std::string& path, const SafetensorsHeader& header) {
  SafetensorsWriter writer(path, header);
  std::string data(writer.tensors().empty() ? 0 : static_cast<size_t>(writer.tensors().back().end), '\0');
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(i * 7 + 1);
  }
  writer.write(data.data(), static_cast<int64_t>(data.size()));
  writer.finish();
  return data;
}

std::string data_of(const SafetensorsFile& file, const StoredTensor& tensor) {
  std::string data(static_cast<size_t>(tensor.bytes()), '\0');
  file.read(tensor, 0, data.data(), tensor.bytes());
  return data;
}

SafetensorsHeader some_header() {
  using Type = c10::ScalarType;
  return {
      .tensors =
          {{"odd", Type::Bool, {3}},
           {"a", Type::Float, {2, 3}},
           {"none", Type::Float, {2, 0}},
           {"one", Type::Long, {}},
           {"half", Type::BFloat16, {1, 5}},
           {"name with \"quotes\" and ../ \u00e9", Type::Float8_e4m3fn, {2}},
           {"pair", Type::ComplexFloat, {2}}},
      .metadata = {{"format", "pt"}, {"", "empty"}}};
}

class Safetensors : public ::testing::Test {
 protected:
  std::string path() const {
    return (folder_.path() / "model.safetensors").string();
  }
  std::string refusal(const std::string& bytes) const {
    write_file(path(), bytes);
    return error_message([&] { SafetensorsFile{path()}; });
  }

 private:
  testing::detail::TemporaryFolder folder_;
};

TEST_F(Safetensors, GiveBackWhatWasWritten) {
  const auto header = some_header();
  const std::string data = write_tensors(path(), header);
  const SafetensorsFile file(path());
  EXPECT_EQ(file.header().metadata, header.metadata);
  ASSERT_EQ(file.header().tensors.size(), header.tensors.size());
  for (const auto& written : header.tensors) {
    const auto& tensor = file.tensor(written.name);
    EXPECT_EQ(tensor.dtype, written.dtype) << written.name;
    EXPECT_EQ(tensor.sizes, written.sizes) << written.name;
    EXPECT_EQ(data_of(file, tensor), data.substr(tensor.begin, tensor.bytes())) << written.name;
  }
  EXPECT_TRUE(contains(error_message([&] { file.tensor("b"); }), "model.safetensors has no tensor 'b'"));
}

TEST_F(Safetensors, AreAligned) {
  SafetensorsHeader header = some_header();
  for (int i = 0; i < 8; ++i) {
    header.metadata["more"] += '.';
    std::filesystem::remove(path());
    const SafetensorsWriter writer(path(), header);
    EXPECT_EQ(writer.offset_of(writer.tensors()[0]) % 4096, 0);
    for (const auto& tensor : writer.tensors()) {
      EXPECT_EQ(writer.offset_of(tensor) % c10::elementSize(tensor.dtype), 0u) << tensor.name;
    }
  }
}

TEST_F(Safetensors, MayBeEmpty) {
  write_tensors(path(), {});
  EXPECT_TRUE(SafetensorsFile(path()).header().tensors.empty());
}

TEST_F(Safetensors, HaveNamesThatDifferAndAreText) {
  const auto refusal_of = [&](const std::vector<StoredTensor>& tensors) {
    return error_message([&] { SafetensorsWriter(path(), {.tensors = tensors}); });
  };
  EXPECT_TRUE(contains(refusal_of({{"a"}, {"a"}}), "cannot have the name 'a'"));
  EXPECT_TRUE(contains(refusal_of({{"__metadata__"}}), "cannot have the name '__metadata__'"));
  EXPECT_TRUE(contains(refusal_of({{"\xff"}}), "names have to be UTF-8"));
  EXPECT_TRUE(contains(refusal_of({{"a", c10::ScalarType::ComplexDouble}}), "'a' is ComplexDouble, for which"));
}

TEST_F(Safetensors, ThatAreCutShortOrTooLongAreRefused) {
  write_tensors(path(), some_header());
  const std::string whole = bytes_of(path());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_TRUE(contains(refusal(whole.substr(0, length)), path())) << length;
  }
  EXPECT_TRUE(contains(refusal(whole + "x"), "the file is cut short or damaged"));
}

struct Hostile {
  const char* header;
  const char* complaint;
};

// Eight bytes of data follow each.
TEST_F(Safetensors, ThatAreHostileAreRefusedByFileAndTensor) {
  const std::vector<Hostile> all{
      {R"()", "no JSON"},
      {R"([])", "a list where a header has none"},
      {R"({"a":1})", "'a': a number where"},
      {R"({"a":null})", "'a': null"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}x)", "no JSON from its letter"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})", "no JSON from its letter"},
      {R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", "'a': its dtype is 'F31'"},
      {R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,8]}})", "'a': its dtype is 'F4'"},
      {R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", "'a': a number where"},
      {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", "'a': a number where"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "'a' of sizes [2] and Float has 8 bytes, but 4"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "tensors have 4 bytes, but 8 follow"},
      {R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", "tensors have 16 bytes, but 8 follow"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "'a' lies at [4, 8) of the data"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "'a' lies at [8, 0)"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "'a': dtype, shape or data_offsets are missing"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", "'a': more than two data_offsets"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", "'a': dtype, shape or data_offsets are missing"},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", "'a': dtype, shape or data_offsets are missing"},
      {R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", "'shape' is there twice"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":[1]}})", "'a': 'more', which no tensor has"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "'a': -2, where a number has to be 0 or more"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "'a': 2.0, where a number has to be whole"},
      {R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", "'a': a list where"},
      {R"({"a":{"dtype":"F32","shape":[{}],"data_offsets":[0,8]}})", "'a': an object within a value"},
      {R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]}})", "less than 2^63"},
      {R"({"a":{"dtype":"F32","shape":[1e30],"data_offsets":[0,8]}})", "'a': 1e30, where"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", "'a' of sizes [4294967296"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,2,0],"data_offsets":[0,8]}})", "more than 2^63 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8]}})", "more than 2^63 bytes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}})",
       "cannot have the name 'a'"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "'b' lies at [4, 8) of the data, but what lies before it ends at 8"},
      {R"({"__metadata__":{"a":1}})", "'__metadata__': a number where"},
      {R"({"__metadata__":{"a":{}}})", "'__metadata__': an object within a value"},
      {R"({"__metadata__":{"a":"1","a":"1"}})", "'__metadata__': 'a' is there twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", "'__metadata__': is there twice"},
      {"{\"\xff\":1}", "no JSON"},
  };
  for (const auto& [header, complaint] : all) {
    const auto message = refusal(with_length(header) + "12345678");
    EXPECT_TRUE(contains(message, complaint)) << header;
    EXPECT_TRUE(contains(message, path())) << header;
  }
}

TEST_F(Safetensors, WithHeadersLongerThanTheFileAreRefused) {
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 40, uint64_t{1} << 63, ~uint64_t{0}}) {
    const std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
    EXPECT_TRUE(contains(refusal(bytes + "{}"), "and would have a header of " + std::to_string(length)));
  }
}

TEST_F(Safetensors, OfListsWithinListsNeedNoStack) {
  EXPECT_TRUE(contains(refusal(with_length(std::string(10'000'000, '['))), "a list where a header has none"));
  const std::string names(1'000'000, 'n');
  EXPECT_LT(refusal(with_length("{\"" + names + "\":1}")).size(), 1000u) << "long names are shortened";
}

TEST_F(Safetensors, WithTooManyDimensionsAreRefused) {
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) {
    ones += ",1";
  }
  const std::string header = R"({"a":{"dtype":"F64","shape":[)" + ones + R"(],"data_offsets":[0,8]}})";
  EXPECT_TRUE(contains(refusal(with_length(header) + "12345678"), "'a': more than 64 dimensions"));
}

// Either refused, or sound.
TEST(SafetensorsHeaders, WithLettersChangedDoNoHarm) {
  SafetensorsHeader header = some_header();
  const std::string text = lay_out_safetensors(header, "file");
  const int64_t bytes = header.tensors.back().end;
  std::mt19937 random(1); // NOLINT: the same each time
  int refused = 0;
  for (int i = 0; i < 10000; ++i) {
    std::string changed = text;
    for (size_t n = random() % 3 + 1; n > 0; --n) {
      changed[random() % changed.size()] = "{}[]\",:0129.-eF\\ \xc3"[random() % 19];
    }
    try {
      int64_t end = 0;
      for (const auto& tensor : parse_safetensors_header(changed, bytes, "file").tensors) {
        EXPECT_EQ(tensor.begin, end);
        end = tensor.end;
      }
      EXPECT_EQ(end, bytes);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

// Not a test by itself: tests/python/test_safetensors.py has it copy files that Python wrote.
TEST(SafetensorsOfPython, DISABLED_AreCopied) {
  const SafetensorsFile from(std::getenv("FSDP_TEST_FROM"));
  SafetensorsWriter to(std::getenv("FSDP_TEST_TO"), from.header());
  for (const auto& tensor : to.tensors()) {
    const std::string data = data_of(from, from.tensor(tensor.name));
    to.write(data.data(), static_cast<int64_t>(data.size()));
  }
  to.finish();
}

} // namespace
} // namespace fsdp::disk
