#include "checkpoint/piece_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "base/check.h"
#include "checkpoint/covers.h"
#include "checkpoint/crc32c.h"
#include "engine/internal_scope.h"
#include "state/named_tensors.h"

namespace fsdp::disk {

namespace {

constexpr size_t kMostOpen = 32; // of files; processes have a limit

int64_t element_bytes(const IndexedTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

int64_t bytes_of(const StoredPiece& piece, const IndexedTensor& tensor) {
  return piece.extent.numel() * element_bytes(tensor);
}

// Dimensions of size 1 lie anywhere.
bool lie_alike(const IndexedTensor& tensor, const HeldTensor& here) {
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] > 1 && tensor.strides[d] != here.strides[d]) {
      return false;
    }
  }
  return true;
}

} // namespace

PieceReader::PieceReader(std::string folder, const CheckpointIndex& index, File::Links links)
    : folder_(std::move(folder)), index_(index), links_(links) {}

HeldTensor PieceReader::read(const std::string& name, const HeldTensor& here) {
  const engine::InternalScope scope;
  HeldTensor there = read_as_saved(name, here);
  there.local = there.local.to(here.dtype());
  return there;
}

HeldTensor PieceReader::read_as_saved(const std::string& name, const HeldTensor& here) {
  const engine::InternalScope scope;
  const IndexedTensor& tensor = index_.tensors.at(name);
  FSDP_CHECK(
      tensor.sizes == here.sizes,
      "[load] {}: '{}' has sizes {} there and {} in the model: build the model that was saved",
      folder_,
      name,
      c10::IntArrayRef(tensor.sizes),
      c10::IntArrayRef(here.sizes));
  FSDP_CHECK(
      here.local.numel() == here.extent.numel(),
      "[load] {}: this rank has {} elements of '{}', but the tensor for them has {}: give one that has as many",
      folder_,
      here.extent.numel(),
      name,
      here.local.numel());
  return lie_alike(tensor, here) ? read_piece(name, here) : in_order_of(here, name);
}

HeldTensor PieceReader::read_piece(const std::string& name, const HeldTensor& here) {
  const IndexedTensor& tensor = index_.tensors.at(name);
  check_covered({name, tensor}, here.extent);
  const auto options = at::TensorOptions().dtype(tensor.dtype);
  HeldTensor there = here;
  there.strides = tensor.strides;
  there.local = at::empty_strided(here.local.sizes(), here.local.strides(), options);
  if (!layout::in_memory_order(state::as_piece(there)).is_contiguous()) {
    there.local = at::empty({here.extent.numel()}, options);
  }
  read_elements({name, tensor}, here.extent, static_cast<char*>(there.local.data_ptr()));
  return there;
}

HeldTensor PieceReader::in_order_of(const HeldTensor& here, const std::string& name) {
  HeldTensor whole = here;
  whole.strides = index_.tensors.at(name).strides;
  whole.extent = Extent::one_run(0, index_.tensors.at(name).numel());
  whole.local = read_whole(name);
  HeldTensor there = here;
  there.local = at::empty_strided(here.local.sizes(), here.local.strides(), whole.local.options());
  there.local = layout::taken_from(state::as_piece(whole), state::as_piece(there));
  return there;
}

at::Tensor PieceReader::read_whole(const std::string& name) {
  const IndexedTensor& tensor = index_.tensors.at(name);
  const Extent all = Extent::one_run(0, tensor.numel());
  for (const auto& piece : tensor.pieces) {
    file_of({name, tensor}, piece); // is long enough, before memory is asked for
  }
  check_covered({name, tensor}, all);
  at::Tensor whole = at::empty_strided(tensor.sizes, tensor.strides, at::TensorOptions().dtype(tensor.dtype));
  read_elements({name, tensor}, all, static_cast<char*>(whole.data_ptr()));
  return whole;
}

void PieceReader::check_covered(const Named& named, const Extent& want) const {
  FSDP_CHECK(
      covers(named.tensor, want),
      "[load] {}: the index lacks elements of '{}', or has some twice: it is damaged",
      folder_,
      named.name);
}

void PieceReader::read_elements(const Named& named, const Extent& want, char* to) {
  for (const auto& piece : named.tensor.pieces) {
    for (const auto& run : overlap(piece.extent, want)) {
      read_run(named, piece, run, to);
    }
  }
}

void PieceReader::read_run(const Named& named, const StoredPiece& piece, const OverlapRun& run, char* to) {
  if (!piece.checksums.empty()) {
    return read_checked(named, piece, run, to);
  }
  const int64_t size = element_bytes(named.tensor);
  file_of(named, piece).read(piece.offset + run.from * size, to + run.to * size, run.length * size);
}

void PieceReader::read_checked(const Named& named, const StoredPiece& piece, const OverlapRun& run, char* to) {
  const int64_t size = element_bytes(named.tensor), total = bytes_of(piece, named.tensor);
  const int64_t end = (run.from + run.length) * size;
  char* place = to + run.to * size;
  for (int64_t begin = run.from * size; begin < end;) {
    const int64_t number = begin / index_.block_bytes, first = number * index_.block_bytes;
    const int64_t last = std::min(first + index_.block_bytes, total), count = std::min(end, last) - begin;
    if (count == last - first) {
      read_block(named, piece, number, place);
    } else {
      std::memcpy(place, block(named, piece, number) + (begin - first), static_cast<size_t>(count));
    }
    place += count;
    begin += count;
  }
}

const char* PieceReader::block(const Named& named, const StoredPiece& piece, int64_t number) {
  if (piece_of_block_ != &piece || number_of_block_ != number) {
    piece_of_block_ = nullptr; // until it has been read
    const int64_t total = bytes_of(piece, named.tensor);
    block_.resize(static_cast<size_t>(std::min(index_.block_bytes, total)));
    read_block(named, piece, number, block_.data());
    piece_of_block_ = &piece;
    number_of_block_ = number;
  }
  return block_.data();
}

void PieceReader::read_block(const Named& named, const StoredPiece& piece, int64_t number, char* to) {
  const int64_t begin = number * index_.block_bytes;
  const int64_t count = std::min(index_.block_bytes, bytes_of(piece, named.tensor) - begin);
  const File& file = file_of(named, piece);
  uint32_t checksum = 0;
  for (int64_t done = 0; done < count; done += kBytesInCache) {
    const int64_t bytes = std::min(kBytesInCache, count - done);
    file.read(piece.offset + begin + done, to + done, bytes);
    checksum = crc32c(to + done, static_cast<size_t>(bytes), checksum);
  }
  FSDP_CHECK(
      checksum == piece.checksums[static_cast<size_t>(number)],
      "[load] {}: '{}' is damaged: bytes [{}, {}) of the file are not those that were saved. Load another checkpoint",
      file.path(),
      named.name,
      piece.offset + begin,
      piece.offset + begin + count);
}

const File& PieceReader::file_of(const Named& named, const StoredPiece& piece) {
  auto found = files_.find(piece.file);
  if (found == files_.end()) {
    if (files_.size() == kMostOpen) {
      files_.clear();
    }
    try {
      found = files_.emplace(piece.file, File::open(folder_ + "/" + piece.file, links_)).first;
    } catch (const Error& error) {
      fail("[load] '{}' cannot be read: {}", named.name, error.what());
    }
  }
  const File& file = found->second;
  const int64_t bytes = bytes_of(piece, named.tensor);
  FSDP_CHECK(
      bytes <= file.size() && piece.offset <= file.size() - bytes,
      "[load] {}: '{}' has bytes up to {}, but the file has {}: it is cut short. Load another checkpoint",
      file.path(),
      named.name,
      piece.offset + bytes,
      file.size());
  return file;
}

} // namespace fsdp::disk
