// The bar that shows how far a save or a load has come.

#include <gtest/gtest.h>

#include "checkpoint/progress.h"

namespace fsdp::testing {
namespace {

using disk::Progress;
using namespace std::chrono_literals;

struct Terminal {
  std::string text{};
  Progress::Clock::time_point now{};

  std::function<void(const std::string&)> write() {
    return [this](const std::string& more) { text += more; };
  }
  std::function<Progress::Clock::time_point()> clock() {
    return [this] { return now; };
  }
};

TEST(ProgressBar, SaysHowMuchIsDoneAndHowLongItTakes) {
  Terminal terminal;
  {
    Progress progress("saving step 7", 4'000'000'000, terminal.write(), terminal.clock());
    terminal.now += 3s;
    progress.add(1'000'000'000);
    EXPECT_EQ(terminal.text, "\rsaving step 7 [#######.......................] 1.00 of 4.00 GB,  25%, 9 s left\033[K");
    progress.add(1'000'000'000);
    EXPECT_EQ(terminal.text.find("2.00 of"), std::string::npos) << "two of a moment";
    terminal.now += 1s;
    progress.add(1'000'000'000);
    EXPECT_NE(terminal.text.find("3.00 of 4.00 GB,  75%, 1 s left"), std::string::npos) << terminal.text;
    terminal.text.clear();
  }
  EXPECT_EQ(terminal.text, "\r\033[K") << "makes room in the end";
}

TEST(ProgressBar, IsNotThereForShortWork) {
  Terminal terminal;
  {
    Progress progress("loading", 100, terminal.write(), terminal.clock());
    terminal.now += 1s;
    progress.add(100);
  }
  EXPECT_EQ(terminal.text, "");
}

TEST(ProgressBar, StaysWithinItsLengthIfThereIsMoreThanWasSaid) {
  Terminal terminal;
  Progress progress("loading", 0, terminal.write(), terminal.clock());
  terminal.now += 3s;
  progress.add(5);
  EXPECT_NE(terminal.text.find("100%, 0 s left"), std::string::npos) << terminal.text;
}

} // namespace
} // namespace fsdp::testing
