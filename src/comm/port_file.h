#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace fsdp {

/// Where rank 0 tells the ranks of its host which port it was given, if no launcher did: a file in a folder that
/// belongs to this user alone.
std::filesystem::path port_file(const std::string& job);
void publish_port(const std::string& job, uint16_t port);
/// Nothing until it was published.
std::optional<uint16_t> published_port(const std::string& job);
/// Once all ranks have it.
void withdraw_port(const std::string& job);

} // namespace fsdp
