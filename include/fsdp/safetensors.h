#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <fsdp/export.h>
#include <fsdp/group.h>
#include <fsdp/module_ref.h>
#include <fsdp/state_dict.h>

/// Weights in the files that the Hugging Face libraries read and write.
namespace fsdp {

/// From the name that a tensor has in the model to the one that it has in the files.
using NameInFiles = std::function<std::string(const std::string& name)>;
/// Whether a matrix, by its name in the model, lies in the files with rows and columns exchanged.
using TransposedInFiles = std::function<bool(const std::string& name)>;

struct ExportSafetensorsOptions {
  int64_t max_shard_bytes = 5'000'000'000; ///< of a file; more than that is spread over numbered ones
  NameInFiles name_in_files = nullptr; ///< null: the same
  TransposedInFiles transposed = nullptr; ///< null: none
  std::shared_ptr<Group> group = nullptr; ///< null: all ranks of the job; those of one replica are enough
};

/// Writes DIR/model.safetensors, or DIR/model-00001-of-00003.safetensors and so on with model.safetensors.index.json.
/// Each rank writes what it has to its places, so that nothing is gathered; all ranks need to see the folder. A tied
/// weight is there under its first name. Files appear when all of them are on the disk; other files of the folder stay.
/// An Error on one rank is one on all, and so are ranks with different tensors or options. Collective.
FSDP_API void export_safetensors(
    const std::string& dir, ModuleRef module, const ExportSafetensorsOptions& options = {});

struct ImportSafetensorsOptions {
  bool strict = true; ///< names that are missing, or too many, are an error
  NameInFiles name_in_files = nullptr; ///< null: the same
  TransposedInFiles transposed = nullptr; ///< null: none
  std::shared_ptr<Group> group = nullptr; ///< null: all ranks of the job
};

/// Reads such a folder, or one file, into a model, sharded or not: each rank its elements, whose dtype becomes the
/// model's. A tied weight has to be there under one of its names. Nothing changes if there is an Error, which is one on
/// all ranks. Collective.
FSDP_API IncompatibleKeys
import_safetensors(const std::string& path, ModuleRef module, const ImportSafetensorsOptions& options = {});

} // namespace fsdp
