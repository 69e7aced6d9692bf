#include "base/env.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

constexpr const char* kName = "FSDP_ENV_TEST";

class Env : public testing::Test {
 protected:
  void set(const char* value) {
    setenv(kName, value, /*overwrite=*/1);
  }
  void TearDown() override {
    unsetenv(kName);
  }

  template <typename Read>
  std::string error_of(Read read) {
    try {
      read();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
};

TEST_F(Env, UnsetAndEmptyGiveNothing) {
  EXPECT_FALSE(env::string(kName));
  EXPECT_FALSE(env::integer(kName));
  set("");
  EXPECT_FALSE(env::string(kName));
  EXPECT_FALSE(env::flag(kName));
  EXPECT_FALSE(env::seconds(kName));
  EXPECT_FALSE(env::choice(kName, {"a", "b"}));
}

TEST_F(Env, ReadsIntegersInRange) {
  set("-7");
  EXPECT_EQ(env::integer(kName), -7);
  set("65535");
  EXPECT_EQ(env::integer(kName, 0, 65535), 65535);
}

TEST_F(Env, MalformedIntegersNameVariableValueAndRange) {
  for (const char* value : {"65536", "-1", "12x", " 5", "x", "99999999999999999999"}) {
    set(value);
    std::string message = error_of([] { env::integer(kName, 0, 65535); });
    EXPECT_EQ(
        message,
        "[environment] FSDP_ENV_TEST should be a whole number from 0 to 65535, but is \"" + std::string(value) +
            "\". Correct it or unset it.");
  }
}

TEST_F(Env, ReadsFlagsInAnyCase) {
  for (const char* value : {"1", "true", "ON", "Yes"}) {
    set(value);
    EXPECT_EQ(env::flag(kName), true) << value;
  }
  for (const char* value : {"0", "False", "off", "NO"}) {
    set(value);
    EXPECT_EQ(env::flag(kName), false) << value;
  }
  set("2");
  EXPECT_THROW(env::flag(kName), Error);
}

TEST_F(Env, ReadsSecondsWithFractions) {
  set("1.5");
  EXPECT_EQ(env::seconds(kName), std::chrono::milliseconds(1500));
  set("0.0001");
  EXPECT_EQ(env::seconds(kName), std::chrono::milliseconds(1)) << "a positive time is never rounded to none";
  for (const char* value : {"0", "-3", "nan", "inf", "10s"}) {
    set(value);
    EXPECT_THROW(env::seconds(kName), Error) << value;
  }
}

TEST_F(Env, ReadsChoicesByPosition) {
  set("B");
  EXPECT_EQ(env::choice(kName, {"a", "b"}), 1u);
  set("c");
  EXPECT_EQ(
      error_of([] {
        env::choice(kName, {"a", "b"});
      }),
      "[environment] FSDP_ENV_TEST should be one of a, b, but is \"c\". Correct it or unset it.");
}

TEST_F(Env, RequiredVariablesNameTheOperationThatNeedsThem) {
  EXPECT_EQ(
      error_of([] { env::required_integer(kName, "init", 0, 9); }),
      "[init] the environment variable FSDP_ENV_TEST is needed, but is not set. Set it.");
  set("3");
  EXPECT_EQ(env::required_integer(kName, "init", 0, 9), 3);
  set("10");
  EXPECT_THROW(env::required_integer(kName, "init", 0, 9), Error);
}

} // namespace
} // namespace fsdp
