#pragma once

#include <string>

#include <fsdp/held.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/piece_reader.h"

/// Matrices that lie in files with rows and columns exchanged.
namespace fsdp::disk {

/// The same elements in the same memory, as rows of what were columns.
HeldTensor transposed(const HeldTensor& matrix);
IndexedTensor transposed(const IndexedTensor& matrix);

/// What `here` has, of a matrix that the index has as `transposed` gives it. Reads no more than the rows, or the
/// columns, of which something is here.
HeldTensor read_transposed(PieceReader& reader, const std::string& name, const HeldTensor& here);

} // namespace fsdp::disk
