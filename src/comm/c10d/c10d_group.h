#pragma once

#include <memory>
#include <string>
#include <vector>

#include <fsdp/group.h>

#include "comm/c10d/channel.h"
#include "comm/c10d/factory.h"

namespace fsdp {

/// Any c10d backend behind the interface of the engine.
class C10dGroup final : public Group {
 public:
  C10dGroup(ProcessGroupPtr process_group, const C10dOptions& options);

  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override;
  bool gathers_in_place() const override {
    return false;
  }
  void begin_unseen_writes(const Label&) override {} // nobody reads what another rank writes
  void end_unseen_writes() override {}
  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override;
  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override;
  void broadcast(at::Tensor tensor, int root, const Label& label) override;
  void barrier(const Label& label) override;
  std::vector<std::string> exchange(const std::string& bytes, const Label& label) override;
  std::shared_ptr<Group> split(int color, const Label& label) override;
  void abort(const std::string& reason) override;

  void set_backend_memory(bool enable);
  c10::Device device() const {
    return adapter::training_device(*channel_->process_group());
  }

 private:
  /// `part`: a name for it within this process group.
  MakeProcessGroup splitting(const std::vector<int>& members, const std::string& part, const Label& label) const;
  ProcessGroupPtr make_part(const std::vector<int>& members, const std::string& part, const Label& label);

  std::shared_ptr<adapter::Channel> channel_;
  C10dOptions options_;
};

} // namespace fsdp
