#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/group.h>

namespace fsdp {

/// An n-dimensional arrangement of ranks with names. A value; copies share the groups. Immutable.
class FSDP_API Mesh {
 public:
  /// One dimension, all ranks of the process group.
  static Mesh from_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::string name = "");
  static Mesh from_group(std::shared_ptr<Group> group, std::string name = "");
  /// One group per dimension, outermost first. `device`, if unset: the one that the first group serves.
  static Mesh from_groups(
      std::vector<std::shared_ptr<Group>> groups,
      std::vector<std::string> names,
      std::optional<c10::Device> device = std::nullopt);

  int ndim() const;
  const std::vector<int64_t>& sizes() const;
  const std::vector<std::string>& names() const;
  int64_t numel() const;
  c10::Device device() const;
  /// The ranks that differ from this one in dimension `dim` alone.
  const std::shared_ptr<Group>& group(int dim = 0) const;
  /// This rank's coordinate in dimension `dim`.
  int coordinate(int dim = 0) const;

  /// The slice along one named dimension, or several: `mesh["shard"]`, `mesh[{"replicate", "shard"}]`.
  Mesh operator[](const std::string& name) const;
  Mesh operator[](const std::vector<std::string>& names) const;
  Mesh operator[](std::initializer_list<std::string> names) const;

  bool operator==(const Mesh& other) const;
  /// `Mesh(2x2, replicate x shard, cpu)`
  std::string str() const;

  struct Impl;
  explicit Mesh(std::shared_ptr<const Impl> impl);

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Arranges all ranks of the job, row-major. `device` is "cpu", "cuda", ...; the product of `sizes` is the world size.
FSDP_API Mesh
init_device_mesh(const std::string& device, std::vector<int64_t> sizes, std::vector<std::string> names = {});
/// All ranks in one dimension.
FSDP_API Mesh default_mesh();

} // namespace fsdp
