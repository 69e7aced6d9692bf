#include <algorithm>

#include <fsdp/safetensors.h>

#include "base/check.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/export_plan.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/replica_turns.h"
#include "checkpoint/rows_in_file.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

constexpr const char* kWeightMapName = "model.safetensors.index.json";
constexpr const char* kAside = ".tmp-";

/// A model that is being exported, by all ranks.
class Export {
 public:
  Export(const std::string& dir, ModuleRef module, const ExportSafetensorsOptions& options)
      : dir_(dir), module_(module), options_(options), group_(group_or_world(options.group)) {}

  void run() {
    together([&] {
      state_ = sharded_state_dict(module_);
      files_ = plan_export(state_, options_);
      if (group_->rank() == 0) {
        make_files();
      }
    });
    together([&] { write_elements(); });
    together([&] {
      if (group_->rank() == 0) {
        show_files();
      }
    });
  }

 private:
  template <typename Body>
  void together(const Body& body) {
    all_agree(*group_, {"export_safetensors", ""}, body);
  }

  std::string aside(const std::string& name) const {
    return dir_ + "/" + kAside + name;
  }

  // With their headers, and room for all elements.
  void make_files() const {
    make_folders(dir_);
    for (const auto& name : names_in(dir_)) {
      if (name.starts_with(std::string(kAside) + "model")) {
        remove_file(dir_ + "/" + name);
      }
    }
    for (const auto& file : files_) {
      File made = File::create(aside(file.name));
      made.write(file.text.data(), static_cast<int64_t>(file.text.size()));
      const auto& tensors = file.header.tensors;
      made.extend(made.size() + (tensors.empty() ? 0 : tensors.back().end));
    }
    if (files_.size() > 1) {
      write_text(aside(kWeightMapName), weight_map(files_));
    }
  }

  void write_elements() const {
    ReplicaTurns turns(group_->rank() == 0);
    for (const auto& file : files_) {
      File opened = File::open_to_write(aside(file.name));
      for (size_t i = 0; i < file.held.size(); ++i) {
        if (turns.is_mine(*file.held[i])) {
          const int64_t begin = static_cast<int64_t>(file.text.size()) + file.header.tensors[i].begin;
          write_rows(opened, begin, *file.held[i]);
        }
      }
      opened.flush();
    }
  }

  static void write_rows(File& file, int64_t begin, const HeldTensor& held) {
    const RowsInFile rows = rows_in_file(held);
    const auto size = static_cast<int64_t>(rows.elements.element_size());
    const auto* elements = static_cast<const char*>(rows.elements.const_data_ptr());
    for (const auto& run : rows.runs) {
      file.write_at(begin + run.to * size, elements + run.from * size, run.length * size);
    }
  }

  // The index last: it names the others. What an earlier export has left besides would be read in their place.
  void show_files() const {
    std::vector<std::string> shown;
    for (const auto& file : files_) {
      shown.push_back(file.name);
    }
    if (files_.size() > 1) {
      shown.emplace_back(kWeightMapName);
    }
    for (const auto& name : shown) {
      rename_path(aside(name), dir_ + "/" + name);
    }
    for (const auto& name : names_in(dir_)) {
      const bool is_of_export = name == kWeightMapName || name == "model.safetensors" ||
                                (name.starts_with("model-") && name.ends_with(".safetensors"));
      if (is_of_export && std::find(shown.begin(), shown.end(), name) == shown.end()) {
        remove_file(dir_ + "/" + name);
      }
    }
    flush_folder(dir_);
  }

  std::string dir_;
  ModuleRef module_;
  const ExportSafetensorsOptions& options_;
  std::shared_ptr<Group> group_;
  ShardedStateDict state_{};
  std::vector<ExportFile> files_{};
};

} // namespace

void export_safetensors(const std::string& dir, ModuleRef module, const ExportSafetensorsOptions& options) {
  Export(dir, module, options).run();
}

} // namespace fsdp
