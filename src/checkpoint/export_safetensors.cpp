#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fsdp/saved_state.h>

#include "base/check.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/export_outline.h"
#include "checkpoint/export_parts.h"
#include "checkpoint/export_plan.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/replica_turns.h"
#include "checkpoint/rows_in_file.h"
#include "checkpoint/seats.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

constexpr const char* kWeightMapName = "model.safetensors.index.json";
constexpr std::string_view kAside = ".tmp-";
const Label kExport{"export_safetensors", ""};

/// A model that is being exported, by all ranks.
class Export {
 public:
  Export(const std::string& dir, const ExportSafetensorsOptions& options)
      : dir_(dir), options_(options), group_(group_or_world(options.group)) {}

  void run(const std::function<ShardedStateDict()>& model) {
    together([&] {
      state_ = model();
      files_ = plan_export(state_, options_);
    });
    expect_same_files(*group_, files_, kExport);
    share_out();
    const auto parts_of_ranks = group_->exchange(to_bytes(mine_), kExport);
    together([&] {
      if (group_->rank() == 0) {
        check_complete(files_, parts_of_ranks);
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
  /// What is half written makes room if there is an error.
  void together(const std::function<void()>& body) {
    all_agree(*group_, kExport, body, [&] { remove_what_is_aside(); });
  }

  std::string aside(const std::string& name) const {
    return dir_ + "/" + std::string(kAside) + name;
  }

  void share_out() {
    Seats seats;
    seats.add(state_);
    seats.exchange(*group_, kExport);
    ReplicaTurns turns(group_->rank() == 0, std::move(seats));
    for (size_t file = 0; file < files_.size(); ++file) {
      const auto& held = files_[file].held;
      for (size_t i = 0; i < held.size(); ++i) {
        if (turns.is_mine(held[i]) && held[i].extent.numel() > 0) {
          mine_.push_back({file, i, held[i].extent});
        }
      }
    }
  }

  // With their headers, and room for all elements.
  void make_files() const {
    FSDP_CHECK(!dir_.empty(), "[export_safetensors] expected a folder, got no name: name one");
    make_folders(dir_);
    remove_what_is_aside();
    for (const auto& file : files_) {
      File made = File::create(aside(file.name));
      made.write(file.text.data(), static_cast<int64_t>(file.text.size()));
      const auto& tensors = file.header.tensors;
      made.extend(made.size() + (tensors.empty() ? 0 : tensors.back().end));
      made.flush(); // before others write into it
    }
    if (files_.size() > 1) {
      write_text(aside(kWeightMapName), weight_map(files_));
    }
  }

  void write_elements() const {
    auto part = mine_.begin();
    for (size_t i = 0; i < files_.size(); ++i) {
      const ExportFile& file = files_[i];
      File opened = File::open_to_write(aside(file.name));
      for (; part != mine_.end() && part->file == i; ++part) {
        const int64_t begin = static_cast<int64_t>(file.text.size()) + file.header.tensors[part->tensor].begin;
        write_rows(opened, begin, file.held[part->tensor]);
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

  // Never together with what an earlier export has left. One file takes the place of what was there at once; before
  // several come, that is removed. The index comes last: it names the others.
  void show_files() const {
    const bool several = files_.size() > 1;
    if (several) {
      remove_if_there(dir_ + "/model.safetensors");
      remove_if_there(dir_ + "/" + kWeightMapName);
      flush_folder(dir_);
    }
    std::set<std::string> shown;
    for (const auto& file : files_) {
      rename_path(aside(file.name), dir_ + "/" + file.name);
      shown.insert(file.name);
    }
    flush_folder(dir_);
    if (several) {
      rename_path(aside(kWeightMapName), dir_ + "/" + kWeightMapName);
      shown.insert(kWeightMapName);
      flush_folder(dir_);
    }
    remove_older(shown);
  }

  void remove_older(const std::set<std::string>& shown) const {
    for (const auto& name : names_in(dir_)) {
      if (is_of_export(name) && shown.count(name) == 0) {
        remove_file(dir_ + "/" + name);
      }
    }
    flush_folder(dir_);
  }

  static bool is_of_export(std::string_view name) {
    return name == kWeightMapName || is_file_of_export(name);
  }

  static void remove_if_there(const std::string& path) {
    if (exists(path)) {
      remove_file(path);
    }
  }

  void remove_what_is_aside() const {
    for (const auto& name : names_in(dir_)) {
      if (name.starts_with(kAside) && is_of_export(std::string_view(name).substr(kAside.size()))) {
        remove_file(dir_ + "/" + name);
      }
    }
  }

  std::string dir_;
  const ExportSafetensorsOptions& options_;
  std::shared_ptr<Group> group_;
  ShardedStateDict state_{};
  std::vector<ExportFile> files_{};
  std::vector<ExportPart> mine_{}; // that this rank writes, in the order of the files
};

} // namespace

void saved_state::export_safetensors(
    const std::string& dir, const std::function<ShardedStateDict()>& model, const ExportSafetensorsOptions& options) {
  Export(dir, options).run(model);
}

void export_safetensors(const std::string& dir, ModuleRef module, const ExportSafetensorsOptions& options) {
  saved_state::export_safetensors(
      dir, [&] { return sharded_state_dict(module); }, options);
}

} // namespace fsdp
