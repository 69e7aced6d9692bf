#include "checkpoint/open_index.h"

#include "base/check.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/run_folder.h"

namespace fsdp::disk {

std::string find_checkpoint(const std::string& dir) {
  if (is_file(dir + "/" + kIndexName)) {
    return dir;
  }
  FSDP_CHECK(is_folder(dir) || !exists(dir), "[load] {} is no folder: give the one that save was given", dir);
  FSDP_CHECK(
      !exists(dir + "/model.safetensors") && !exists(dir + "/model.safetensors.index.json"),
      "[load] {} is what export_safetensors has written: use import_safetensors, or give the folder that save was "
      "given",
      dir);
  const auto found = RunFolder(dir).latest();
  FSDP_CHECK(
      found,
      "[load] {} has no checkpoint, and is none (one that is saved again is named step-N.1, .2 and so on): give the "
      "folder "
      "that save was given",
      dir);
  return *found;
}

CheckpointIndex read_index(const std::string& checkpoint) {
  const std::string path = checkpoint + "/" + kIndexName;
  return parse_index(read_text(path, kLongestIndex, File::Links::kRefuse), path);
}

} // namespace fsdp::disk
