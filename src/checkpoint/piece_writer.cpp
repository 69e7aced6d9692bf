#include "checkpoint/piece_writer.h"

#include <algorithm>
#include <unordered_map>

#include "checkpoint/crc32c.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/stored_elements.h"
#include "engine/internal_scope.h"
#include "state/named_tensors.h"

namespace fsdp::disk {

namespace {

using FirstNames = std::unordered_map<const c10::TensorImpl*, std::string>;

bool has_bytes_here(const PieceToWrite& piece) {
  return piece.written_here && piece.held.extent.numel() > 0;
}

/// The pieces of which the file consists, by their names in it.
std::map<std::string, const PieceToWrite*> contents(const std::vector<PieceToWrite>& pieces, FirstNames& first_names) {
  std::map<std::string, const PieceToWrite*> contents;
  for (const auto& piece : pieces) {
    const bool is_first = first_names.emplace(piece.held.local.unsafeGetTensorImpl(), piece.name).second;
    if (is_first && has_bytes_here(piece)) {
      contents[piece.name] = &piece;
    }
  }
  return contents;
}

SafetensorsHeader header_of(const std::map<std::string, const PieceToWrite*>& contents) {
  SafetensorsHeader header;
  for (const auto& [name, piece] : contents) {
    header.tensors.push_back({name, piece->held.dtype(), {piece->held.extent.numel()}});
  }
  return header;
}

/// Writes the elements in the order of their extent, and returns the checksums of their blocks.
std::vector<uint32_t> write_elements(SafetensorsWriter& writer, const HeldTensor& held, int64_t block_bytes) {
  const at::Tensor elements = layout::in_memory_order(state::as_piece(held)).detach().reshape({-1});
  const int64_t at_once = block_bytes / static_cast<int64_t>(elements.element_size());
  std::vector<uint32_t> checksums;
  for (int64_t begin = 0; begin < elements.numel(); begin += at_once) {
    const int64_t count = std::min(at_once, elements.numel() - begin);
    const at::Tensor block = stored(elements.narrow(0, begin, count));
    checksums.push_back(crc32c(block.const_data_ptr(), block.nbytes()));
    writer.write(block.const_data_ptr(), static_cast<int64_t>(block.nbytes()));
  }
  return checksums;
}

} // namespace

std::map<std::string, IndexedTensor> write_pieces(const std::vector<PieceToWrite>& pieces, const PieceFile& file) {
  const engine::InternalScope scope;
  FirstNames first_names;
  const auto by_name = contents(pieces, first_names);
  SafetensorsWriter writer(file.folder + "/" + file.name, header_of(by_name));
  std::map<std::string, StoredPiece> written;
  for (const auto& tensor : writer.tensors()) {
    const HeldTensor& held = by_name.at(tensor.name)->held;
    auto checksums = write_elements(writer, held, file.block_bytes);
    written[tensor.name] = {file.name, writer.offset_of(tensor), held.extent, std::move(checksums)};
  }
  writer.finish();
  std::map<std::string, IndexedTensor> index;
  for (const auto& piece : pieces) {
    auto& tensor = index[piece.name] = {piece.held.dtype(), piece.held.sizes, piece.held.strides};
    if (has_bytes_here(piece)) {
      tensor.pieces.push_back(written.at(first_names.at(piece.held.local.unsafeGetTensorImpl())));
    }
  }
  return index;
}

} // namespace fsdp::disk
