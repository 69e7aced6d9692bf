#pragma once

#include <vector>

#include <fsdp/group.h>

namespace fsdp {

/// Errors for arguments that no collective can be started with. Every rank finds them by itself, before anything is
/// sent.
void check_pieces(const std::vector<Piece>& pieces, int size, const Label& label);
void check_reduce_scatter(const ReduceScatter& args, int rank, int size, const Label& label);
void check_all_reduce(const at::Tensor& tensor, ReduceOp op, const Label& label);
/// Its memory has its values, one after another.
void check_plain_memory(const at::Tensor& tensor, const Label& label);
void check_on_cpu(const at::Tensor& tensor, const Label& label);
void check_root(int root, int size, const Label& label);

/// For `split`: the ranks that give the same color as this one. Collective.
std::vector<int> ranks_of_color(Group& group, int color, const Label& label);

/// Before a tensor is written by an address: who watches what operators write hears of it as of one.
void announce_write(const at::Tensor& tensor);

} // namespace fsdp
