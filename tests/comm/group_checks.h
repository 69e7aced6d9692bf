#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/group.h>

/// What tests of groups have in common: backends to run them on, data that every rank can compute, and comparisons.
namespace fsdp::testing {

using GroupPointer = std::shared_ptr<Group>;
using RankBody = std::function<void(const GroupPointer&)>;

struct Backend {
  std::string name;
  int ranks;
  /// Runs a body on each rank, in a group of all ranks with that timeout.
  std::function<void(int ranks, std::chrono::milliseconds timeout, const RankBody& body)> run;
  bool sums_in_rank_order = true; ///< bit for bit; otherwise sums are tested with numbers that any order sums exactly
  bool checks_order = true; ///< ranks that call different collectives are told so
  bool names_peers = true; ///< a failure names the other rank and what it was doing
  bool splits = true; ///< groups of some of the ranks can be made of it
};

inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name << " of " << backend.ranks;
}

inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) {
  return info.param.name + std::to_string(info.param.ranks);
}

namespace group_checks {

inline const Label kTest{"test", "unit"};

inline int64_t even_chunk(int64_t numel, int ranks) {
  return (numel + ranks - 1) / ranks;
}

inline Piece piece(int64_t numel, int64_t chunk, c10::ScalarType stored, std::optional<c10::ScalarType> gathered = {}) {
  return {numel, chunk, stored, gathered.value_or(stored)};
}

constexpr int64_t kPeriod = 65521; // prime

/// A period of numbers that look random.
inline at::Tensor one_period(c10::ScalarType dtype, bool simple) {
  const at::Tensor mixed = at::arange(kPeriod, at::kLong).mul(2654435761).remainder(kPeriod);
  if (dtype == at::kBool) {
    return mixed.remainder(3).eq(0);
  }
  if (!c10::isFloatingType(dtype)) {
    return mixed.remainder(23).to(dtype);
  }
  return (simple ? mixed.remainder(17).to(at::kDouble) : mixed.to(at::kDouble).div(32760.5).sub(1).exp()).to(dtype);
}

/// A tensor that every rank can compute: numbers that are random, but not to the seed.
inline at::Tensor numbers(int64_t numel, c10::ScalarType dtype, int64_t seed, bool simple = false) {
  if (c10::isComplexType(dtype)) {
    const at::Tensor real = numbers(numel, c10::toRealValueType(dtype), seed, simple);
    return at::complex(real, real.flip(0).neg());
  }
  static std::mutex mutex;
  static std::map<std::pair<c10::ScalarType, bool>, at::Tensor> periods;
  const std::lock_guard lock(mutex);
  at::Tensor& period = periods[{dtype, simple}];
  if (!period.defined()) {
    period = one_period(dtype, simple);
  }
  const int64_t begin = (seed * 7919 + 1) % kPeriod, periods_long = (begin + numel) / kPeriod + 1;
  return (periods_long == 1 ? period : period.repeat({periods_long})).narrow(0, begin, numel).clone();
}

inline at::Tensor view_of(void* memory, int64_t numel, c10::ScalarType dtype) {
  return at::from_blob(memory, {numel}, dtype);
}

inline ::testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor a = got.contiguous();
  const at::Tensor b = expected.contiguous();
  if (a.nbytes() != b.nbytes()) {
    return ::testing::AssertionFailure() << a.nbytes() << " bytes, expected " << b.nbytes();
  }
  const auto* left = static_cast<const char*>(a.const_data_ptr());
  const auto* right = static_cast<const char*>(b.const_data_ptr());
  const bool same = a.nbytes() == 0 || std::memcmp(left, right, a.nbytes()) == 0;
  for (size_t i = 0; !same && i < a.nbytes(); ++i) {
    if (left[i] != right[i]) {
      const auto index = static_cast<int64_t>(i / a.element_size());
      return ::testing::AssertionFailure()
             << "element " << index << " of " << a.numel() << " is " << a.view(-1)[index].item().toComplexDouble()
             << ", expected " << b.view(-1)[index].item().toComplexDouble();
    }
  }
  return ::testing::AssertionSuccess();
}

/// The ranks' tensors added up one rank after another, half types in float.
inline at::Tensor rank_ordered(const std::vector<at::Tensor>& of_ranks, double divide_by) {
  const auto dtype = of_ranks[0].scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor sum = of_ranks[0].to(half ? at::kFloat : dtype, /*non_blocking=*/false, /*copy=*/true);
  for (size_t r = 1; r < of_ranks.size(); ++r) {
    const at::Tensor next = of_ranks[r].to(sum.scalar_type());
    sum = dtype == at::kBool ? sum.logical_or(next) : sum.add(next);
  }
  if (divide_by != 1) {
    const bool integer = !sum.is_floating_point() && !sum.is_complex();
    sum = integer ? sum.div(divide_by, "trunc").to(dtype) : at::div(sum, divide_by);
  }
  return sum.to(dtype);
}

inline void fill_slices(const Group& group, Home& home, const std::vector<Piece>& pieces, int64_t seed) {
  home.begin_write(kTest);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    const at::Tensor whole = numbers(p.numel, p.stored, seed + static_cast<int64_t>(i));
    if (p.length(group.rank()) > 0) {
      view_of(home.slice(i), p.length(group.rank()), p.stored)
          .copy_(whole.narrow(0, p.begin(group.rank()), p.length(group.rank())));
    }
  }
}

inline void expect_pieces(const Gathered& gathered, const std::vector<Piece>& pieces, int64_t seed) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    const at::Tensor expected = numbers(p.numel, p.stored, seed + static_cast<int64_t>(i)).to(p.gathered);
    EXPECT_TRUE(same_bits(view_of(gathered.piece(i), p.numel, p.gathered), expected))
        << "piece " << i << ", seed " << seed;
  }
}

inline void nap(std::mt19937& random, int most_microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(most_microseconds)));
}

/// The message of the CommError that `action` throws.
template <typename Action>
std::string comm_error(const Action& action) {
  try {
    action();
  } catch (const CommError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a CommError";
  return "";
}

inline ::testing::AssertionResult mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos ? ::testing::AssertionSuccess()
                                              : ::testing::AssertionFailure() << "no \"" << part << "\" in: " << text;
}

inline std::vector<Piece> all_sorts(int ranks) {
  return {
      piece(1000, even_chunk(1000, ranks), at::kFloat),
      piece(7, even_chunk(7, ranks), at::kDouble),
      piece(1, 1, at::kFloat), // only rank 0 has anything
      piece(0, 0, at::kFloat),
      piece(33, 64, at::kLong), // chunks larger than the piece
      piece(129, 16 * even_chunk(129, 16 * ranks), at::kBFloat16),
      piece(5, even_chunk(5, ranks), at::kBool),
      piece(4099, even_chunk(4099, ranks), at::kByte),
  };
}

inline std::vector<Piece> with_casts(int ranks) {
  return {
      piece(1001, even_chunk(1001, ranks), at::kFloat, at::kBFloat16),
      piece(17, even_chunk(17, ranks), at::kLong),
      piece(1, 1, at::kFloat, at::kHalf),
      piece(0, 0, at::kFloat, at::kBFloat16),
      piece(70, even_chunk(70, ranks), at::kBFloat16, at::kFloat),
  };
}

struct Reduced {
  std::vector<at::Tensor> expected; // this rank's slices
  std::vector<at::Tensor> slices;
  std::unique_ptr<Work> work;

  void expect_equal() const {
    for (size_t i = 0; i < slices.size(); ++i) {
      EXPECT_TRUE(same_bits(slices[i], expected[i])) << "tensor " << i << " of " << slices.size();
    }
  }
};

struct ToReduce {
  std::vector<int64_t> numels;
  c10::ScalarType dtype = at::kFloat;
  double divide_by = 1;
  int64_t seed = 1;
  bool simple = false;
};

inline Reduced start_reduce_of_cuts(
    Group& group, const std::vector<Cut>& cuts, const ToReduce& what, const Label& label = kTest) {
  Reduced reduced;
  ReduceScatter args;
  args.cuts = cuts;
  args.divide_by = what.divide_by;
  int64_t numel = 0;
  for (const Cut& cut : cuts) {
    numel += cut.numel;
  }
  std::vector<at::Tensor> of_ranks;
  for (int r = 0; r < group.size(); ++r) {
    of_ranks.push_back(numbers(numel, what.dtype, what.seed * 1000 + r, what.simple));
  }
  const at::Tensor mine = of_ranks[static_cast<size_t>(group.rank())], sum = rank_ordered(of_ranks, what.divide_by);
  int64_t offset = 0;
  for (const Cut& cut : cuts) {
    const int64_t begin = offset + cut.begin(group.rank()), length = cut.length(group.rank());
    args.wholes.push_back(mine.narrow(0, offset, cut.numel).clone());
    args.slices.push_back(at::full({length}, 77, what.dtype));
    reduced.expected.push_back(sum.narrow(0, begin, length));
    offset += cut.numel;
  }
  reduced.slices = args.slices;
  reduced.work = group.reduce_scatter(std::move(args), label);
  return reduced;
}

/// Each tensor cut by itself.
inline Reduced start_reduce(Group& group, const ToReduce& what, const Label& label = kTest) {
  std::vector<Cut> cuts;
  for (const int64_t numel : what.numels) {
    cuts.push_back({numel, even_chunk(numel, group.size())});
  }
  return start_reduce_of_cuts(group, cuts, what, label);
}

} // namespace group_checks

using namespace group_checks;

} // namespace fsdp::testing
