#pragma once

#include <vector>

#include <fsdp/group.h>

#include "checkpoint/export_plan.h"

namespace fsdp::disk {

/// An Error on all ranks, which says what the first difference is, unless all of them are about to write the same
/// files. Collective.
void expect_same_files(Group& group, const std::vector<ExportFile>& files, const Label& label);

} // namespace fsdp::disk
