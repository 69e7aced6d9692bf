#pragma once

#include <cstddef>
#include <filesystem>

namespace fsdp {

/// How much memory this process and those beside it can use: the machine's, or what the control groups (v1 or v2) that
/// it is in allow. `root` is another than "/" in tests.
size_t memory_limit(const std::filesystem::path& root = "/");

} // namespace fsdp
