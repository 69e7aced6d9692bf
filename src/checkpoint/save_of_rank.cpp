#include "checkpoint/save_of_rank.h"

#include <cstdio>

#include "base/check.h"
#include "checkpoint/contents.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/quietly.h"

namespace fsdp::disk {

namespace {

std::string file_name(int rank, const char* ending) {
  char name[64];
  std::snprintf(name, sizeof(name), "rank-%05d.%s", rank, ending);
  return name;
}

std::string part_path(const std::string& folder, int rank) {
  return folder + "/" + file_name(rank, "json");
}

CheckpointIndex read_part(const std::string& folder, int rank) {
  const std::string path = part_path(folder, rank);
  return parse_index(read_text(path, kLongestIndex, File::Links::kRefuse), path);
}

// Before older checkpoints make room for it.
void check_readable(const std::string& text, const std::string& path) {
  FSDP_CHECK(
      static_cast<int64_t>(text.size()) <= kLongestIndex,
      "[save] {} would have {} bytes, and no more than {} are read: give larger block_bytes",
      path,
      text.size(),
      kLongestIndex);
  parse_index(text, path);
}

} // namespace

SaveOfRank::SaveOfRank(const std::string& dir, int64_t step, const SaveOptions& options, int rank, int ranks)
    : dir_(dir),
      run_(dir),
      step_(step),
      folder_(run_.unfinished(step)),
      keep_last_(options.keep_last),
      block_bytes_(options.block_bytes),
      max_staged_bytes_(options.max_staged_bytes),
      keep_staging_memory_(options.keep_staging_memory),
      rank_(rank),
      ranks_(ranks) {}

void SaveOfRank::make_folder() {
  if (rank_ == 0) {
    has_made_folder_ = true;
    run_.begin(step_);
  }
}

void SaveOfRank::begin(const StateOfRank& state) {
  const Contents contents(rank_, step_, state, seats_);
  numbers_ = contents.numbers();
  numbers_.block_bytes = block_bytes_;
  writer_.emplace(contents.pieces(), PieceFile{folder_, file_name(rank_, "safetensors"), block_bytes_});
}

// What cannot be written goes on taking room as long as its file is open.
template <typename Body>
void SaveOfRank::with_writer(const Body& body) {
  try {
    body();
  } catch (...) {
    writer_.reset();
    throw;
  }
}

void SaveOfRank::stage() {
  with_writer([&] { writer_->stage(max_staged_bytes_, keep_staging_memory_); });
}

void SaveOfRank::write(bool with_bar) {
  with_writer([&] {
    Progress progress("saving step " + std::to_string(step_), writer_->bytes(), with_bar && rank_ == 0);
    numbers_.tensors = writer_->finish(progress);
  });
  writer_.reset();
  const std::string path = part_path(folder_, rank_), unfinished = path + ".tmp";
  write_text(unfinished, to_text(numbers_));
  rename_path(unfinished, path);
  numbers_ = {};
}

std::string SaveOfRank::finish() const {
  write_index();
  std::string finished = run_.finish(folder_, step_);
  if (keep_last_ > 0) {
    quietly([&] { run_.keep_last(keep_last_, finished); });
  }
  return finished;
}

void SaveOfRank::write_index() const {
  CheckpointIndex index = read_part(folder_, 0);
  for (int rank = 1; rank < ranks_; ++rank) {
    add_part(index, read_part(folder_, rank));
  }
  check_complete(index);
  const std::string path = folder_ + "/" + kIndexName, text = to_text(index);
  check_readable(text, path);
  write_text(path, text);
  for (int rank = 0; rank < ranks_; ++rank) {
    remove_file(part_path(folder_, rank));
  }
}

bool SaveOfRank::is_into(const std::string& run) const {
  return plain_path(run) == plain_path(dir_);
}

void SaveOfRank::note_failure() {
  writer_.reset();
  quietly([&] { write_text(folder_ + "/" + file_name(rank_, "failed"), ""); });
}

SaveOfRank::Part SaveOfRank::part_of(int rank) const {
  if (is_file(part_path(folder_, rank))) {
    return Part::kWritten;
  }
  return is_file(folder_ + "/" + file_name(rank, "failed")) ? Part::kFailed : Part::kUnwritten;
}

void SaveOfRank::give_up() const {
  if (has_made_folder_) { // or it is another's
    quietly([&] { remove_folder_tree(folder_); });
  }
}

} // namespace fsdp::disk
