#pragma once

#include <string>

namespace fsdp::disk {

/// An Error with what errno says, unless `succeeded`: "[checkpoint] could not `verb` `path`: no space left ...".
void check_system(bool succeeded, const char* verb, const std::string& path);

} // namespace fsdp::disk
