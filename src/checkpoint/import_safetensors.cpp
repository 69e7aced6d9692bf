#include <map>
#include <set>
#include <utility>

#include <fsdp/saved_state.h>

#include "base/check.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/check_model.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/folder.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/piece_reader.h"
#include "checkpoint/plain_name.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/transposed.h"
#include "layout/param_layout.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

constexpr int64_t kLongestWeightMap = 100'000'000;

/// Files that are read as one: their folder, and which tensor is in which.
struct Files {
  std::string folder{};
  std::map<std::string, std::vector<std::string>> names{}; // by file; none: all that the file has
};

Files one_file(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? Files{".", {{path, {}}}}
                                    : Files{path.substr(0, slash), {{path.substr(slash + 1), {}}}};
}

Files files_in(const std::string& folder) {
  const std::string path = folder + "/model.safetensors.index.json";
  const auto whole = nlohmann::json::parse(
      read_text(path, kLongestWeightMap, File::Links::kFollow), /*callback=*/nullptr, /*allow_exceptions=*/false);
  const JsonFields fields(whole, path, "the index");
  Files files{.folder = folder};
  for (const auto& item : fields.object("weight_map").items()) {
    fields.check(
        item.value().is_string() && is_plain_name(item.value().get_ref<const std::string&>()),
        "has '" + shown(item.key()) + "' in what is no file's name");
    files.names[item.value().get<std::string>()].push_back(item.key());
  }
  return files;
}

Files find_files(const std::string& path) {
  if (!is_folder(path)) {
    return one_file(path);
  }
  FSDP_CHECK(
      !is_file(path + "/" + kIndexName) && !RunFolder(path).latest(),
      "[import_safetensors] {} is what save has written, or has it: use load, or name a folder of export_safetensors",
      path);
  return exists(path + "/model.safetensors") ? one_file(path + "/model.safetensors") : files_in(path);
}

IndexedTensor whole_in(const SafetensorsFile& file, const std::string& name, const StoredTensor& tensor) {
  const int64_t numel = tensor.bytes() / static_cast<int64_t>(c10::elementSize(tensor.dtype));
  IndexedTensor indexed{tensor.dtype, tensor.sizes, layout::contiguous_strides(tensor.sizes)};
  if (numel > 0) {
    indexed.pieces.push_back({name, file.offset_of(tensor), Extent::one_run(0, numel)});
  }
  return indexed;
}

CheckpointIndex index_of(const Files& files) {
  CheckpointIndex index;
  for (const auto& [name, listed] : files.names) {
    const SafetensorsFile file(files.folder + "/" + name);
    for (const auto& tensor : listed) {
      index.tensors[tensor] = whole_in(file, name, file.tensor(tensor));
    }
    for (const auto& tensor : file.header().tensors) {
      if (listed.empty()) {
        index.tensors[tensor.name] = whole_in(file, name, tensor);
      }
    }
  }
  return index;
}

/// What a rank reads of the files.
class Import {
 public:
  Import(const std::string& path, const ImportSafetensorsOptions& options)
      : options_(options),
        files_(find_files(path)),
        index_(index_of(files_)),
        reader_(files_.folder, index_, File::Links::kFollow) {}

  ShardedStateDict read(const ShardedStateDict& here) {
    std::map<const c10::TensorImpl*, HeldTensor> read;
    for (const auto& item : here) {
      const std::string name = options_.name_in_files ? options_.name_in_files(item.key()) : item.key();
      const auto* impl = item.value().local.unsafeGetTensorImpl();
      if (unread_.erase(name) != 0 && read.count(impl) == 0) {
        read.emplace(impl, read_one(item.key(), name, item.value()));
      }
    }
    ShardedStateDict state;
    for (const auto& item : here) {
      if (const auto found = read.find(item.value().local.unsafeGetTensorImpl()); found != read.end()) {
        state.insert(item.key(), found->second);
      }
    }
    for (const auto& name : unread_) {
      state.insert(here.contains(name) ? name + " (of the file)" : name, {});
    }
    return state;
  }

 private:
  HeldTensor read_one(const std::string& in_model, const std::string& name, const HeldTensor& here) {
    if (!options_.transposed || !options_.transposed(in_model)) {
      return reader_.read(name, here);
    }
    IndexedTensor& tensor = index_.tensors.at(name);
    FSDP_CHECK(
        tensor.sizes.size() == 2,
        "[import_safetensors] {}: '{}' has sizes {}, and only a matrix can be transposed: let `transposed` say so of "
        "'{}'",
        files_.folder,
        name,
        c10::IntArrayRef(tensor.sizes),
        in_model);
    tensor = transposed(tensor);
    return read_transposed(reader_, name, here);
  }

  const ImportSafetensorsOptions& options_;
  Files files_;
  CheckpointIndex index_;
  PieceReader reader_;
  std::set<std::string> unread_ = names_of(index_);

  static std::set<std::string> names_of(const CheckpointIndex& index) {
    std::set<std::string> names;
    for (const auto& [name, tensor] : index.tensors) {
      names.insert(name);
    }
    return names;
  }
};

} // namespace

IncompatibleKeys saved_state::import_safetensors(
    const std::string& given,
    const std::function<ShardedStateDict()>& model,
    const std::function<void(const ShardedStateDict& read)>& take_over,
    const ImportSafetensorsOptions& options) {
  const auto group = group_or_world(options.group);
  const Label label{"import_safetensors", ""};
  const std::string path = group->exchange(given, label)[0];
  ShardedStateDict there;
  IncompatibleKeys keys;
  all_agree(*group, label, [&] {
    const auto here = model();
    there = Import(path, options).read(here);
    keys = check_model(path, here, there, options.strict);
  });
  all_agree(*group, label, [&] { take_over(there); });
  return keys;
}

IncompatibleKeys import_safetensors(
    const std::string& path, ModuleRef module, const ImportSafetensorsOptions& options) {
  return saved_state::import_safetensors(
      path,
      [&] { return sharded_state_dict(module); },
      [&](const ShardedStateDict& read) { load_state_dict(module, read, {.strict = options.strict}); },
      options);
}

} // namespace fsdp
