#pragma once

#include <string>

#include "history.h"

namespace train_gpt {

/// One HTML file that needs nothing else: curves of the run, the units, the sample, the configuration.
void write_report(const History& history, const std::string& path);

} // namespace train_gpt
