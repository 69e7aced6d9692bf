#pragma once

#include <string>
#include <vector>

namespace fsdp {

/// The same for all processes of one running host, and for no other.
std::string host_identity();

/// How many ranks below `rank` have its identity.
int rank_on_host(int rank, const std::vector<std::string>& identities);

} // namespace fsdp
