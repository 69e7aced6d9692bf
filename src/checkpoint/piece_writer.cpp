#include "checkpoint/piece_writer.h"

#include <algorithm>

#include <ATen/Parallel.h>

#include "base/check.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/stored_elements.h"
#include "checkpoint/stream_copy.h"
#include "engine/internal_scope.h"
#include "state/named_tensors.h"

namespace fsdp::disk {

namespace {

SafetensorsHeader header_of(const std::map<std::string, const PieceToWrite*>& contents) {
  SafetensorsHeader header;
  for (const auto& [name, piece] : contents) {
    header.tensors.push_back({name, piece->held.dtype(), {piece->held.extent.numel()}});
  }
  return header;
}

/// In the order of their extent.
at::Tensor elements_of(const HeldTensor& held) {
  return layout::in_memory_order(state::as_piece(held)).detach().reshape({-1});
}

/// On the CPU.
bool lie_side_by_side(const at::Tensor& elements) {
  return elements.is_cpu() && elements.is_contiguous() && !elements.is_conj() && !elements.is_neg();
}

/// By all threads that compute.
void copy(const at::Tensor& from, at::Tensor& to) {
  if (!lie_side_by_side(from)) {
    to.copy_(from);
    return;
  }
  constexpr int64_t kAtOnce = int64_t{1} << 18;
  const auto bytes = static_cast<int64_t>(from.nbytes());
  at::parallel_for(0, (bytes + kAtOnce - 1) / kAtOnce, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kAtOnce, last = std::min(end * kAtOnce, bytes);
    stream_copy(
        static_cast<char*>(to.data_ptr()) + first,
        static_cast<const char*>(from.const_data_ptr()) + first,
        static_cast<size_t>(last - first));
  });
}

/// Returns its checksum.
uint32_t write_block(SafetensorsWriter& writer, const at::Tensor& block) {
  const auto* place = static_cast<const char*>(block.const_data_ptr());
  const auto bytes = static_cast<int64_t>(block.nbytes());
  uint32_t checksum = 0;
  for (int64_t done = 0; done < bytes; done += kBytesInCache) {
    const int64_t count = std::min(kBytesInCache, bytes - done);
    checksum = crc32c(place + done, static_cast<size_t>(count), checksum);
    writer.write(place + done, count);
  }
  return checksum;
}

/// Returns the checksums of the blocks.
std::vector<uint32_t> write_elements(
    SafetensorsWriter& writer, const at::Tensor& elements, int64_t block_bytes, Progress& progress) {
  const int64_t at_once = block_bytes / static_cast<int64_t>(elements.element_size());
  std::vector<uint32_t> checksums;
  for (int64_t begin = 0; begin < elements.numel(); begin += at_once) {
    const int64_t count = std::min(at_once, elements.numel() - begin);
    const at::Tensor block = stored(elements.narrow(0, begin, count));
    checksums.push_back(write_block(writer, block));
    progress.add(static_cast<int64_t>(block.nbytes()));
  }
  return checksums;
}

} // namespace

PieceWriter::PieceWriter(const std::vector<PieceToWrite>& pieces, const PieceFile& file)
    : block_bytes_(file.block_bytes) {
  Contents contents;
  for (const auto& piece : pieces) {
    add(piece, contents);
  }
  first_names_.clear(); // their tensors may go
  writer_.emplace(file.folder + "/" + file.name, header_of(contents));
  for (const auto& tensor : writer_->tensors()) {
    const auto& [name, held, written_here, by_operators] = *contents.at(tensor.name);
    StoredPiece piece{file.name, writer_->offset_of(tensor), held.extent};
    stored_.push_back({.name = name, .held = held, .by_operators = by_operators, .piece = std::move(piece)});
  }
}

void PieceWriter::add(const PieceToWrite& piece, Contents& contents) {
  const HeldTensor& held = piece.held;
  FSDP_CHECK(
      held.local.layout() == c10::kStrided && !held.local.is_meta(),
      "[save] '{}' is {}: expected a dense tensor with values{}",
      piece.name,
      held.local.is_meta() ? "on the meta device" : "sparse",
      held.local.is_meta() ? "; materialize the model (to_empty) and load or initialize it first" : "");
  index_[piece.name] = {held.dtype(), held.sizes, held.strides};
  const auto [first, is_first] = first_names_.emplace(held.local.unsafeGetTensorImpl(), piece.name);
  if (piece.written_here && held.extent.numel() > 0) {
    name_in_file_[piece.name] = first->second;
    if (is_first) {
      contents.emplace(piece.name, &piece);
    }
  }
}

int64_t PieceWriter::bytes() const {
  return writer_->tensors().empty() ? 0 : writer_->tensors().back().end;
}

void PieceWriter::stage(int64_t most, bool keep_memory) {
  const engine::InternalScope scope;
  const auto [first, bytes] = what_fits(most);
  memory_.emplace(bytes, keep_memory);
  for (size_t i = first; i < stored_.size(); ++i) {
    stage(stored_[i]);
  }
  Progress unseen;
  write_until(first, unseen);
}

std::pair<size_t, int64_t> PieceWriter::what_fits(int64_t most) const {
  size_t first = stored_.size();
  int64_t bytes = 0;
  for (; first > 0; --first) {
    const auto& tensor = writer_->tensors()[first - 1];
    const int64_t taken = StagingMemory::taken_by(tensor.end - tensor.begin);
    if (taken > most - bytes) {
      break;
    }
    bytes += taken;
  }
  return {first, bytes};
}

void PieceWriter::stage(Stored& stored) {
  const at::Tensor elements = elements_of(stored.held);
  stored.staged = memory_->place_for(elements);
  if (stored.by_operators && lie_side_by_side(elements)) {
    stored.late = LateCopy::make(elements, stored.staged);
  }
  if (!stored.late) {
    copy(elements, stored.staged);
  }
  stored.held = {};
}

// At once, beside training: the sooner, the fewer are left to its writes.
void PieceWriter::finish_copies() {
  for (auto& stored : stored_) {
    if (stored.late) {
      stored.late->finish();
      stored.late.reset();
    }
  }
}

std::map<std::string, IndexedTensor> PieceWriter::finish(Progress& progress) {
  finish_copies();
  write_until(stored_.size(), progress);
  writer_->finish();
  std::map<std::string, const StoredPiece*> pieces;
  for (const auto& stored : stored_) {
    pieces[stored.name] = &stored.piece;
  }
  for (const auto& [name, name_in_file] : name_in_file_) {
    index_[name].pieces = {*pieces.at(name_in_file)};
  }
  return std::move(index_);
}

void PieceWriter::write_until(size_t end, Progress& progress) {
  const engine::InternalScope scope;
  for (; written_ < end; ++written_) {
    Stored& stored = stored_[written_];
    const at::Tensor elements = stored.staged.defined() ? std::move(stored.staged) : elements_of(stored.held);
    stored.piece.checksums = write_elements(*writer_, elements, block_bytes_, progress);
    stored.held = {};
  }
}

} // namespace fsdp::disk
