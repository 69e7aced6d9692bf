// Random models, units, options and steps on a device whose memory and streams are watched: no use of memory may
// overtake another, and the numbers are those of unsharded training on the same device.
//   FSDP_TRIALS_SEED=17 FSDP_TRIALS=1 OMP_NUM_THREADS=1 build/tests/random_streams_test

#include "base/stream.h"
#include "nn/random_sharded.h"
#include "streams/devices.h"

namespace fsdp::testing::random {
namespace {

/// One for each device: its backward runs on another thread than its forward.
const Stream& stream_beside(c10::Device device) {
  static const auto streams = [] {
    std::vector<Stream> streams;
    for (int i = 0; i < queued_device::kDevices; ++i) {
      streams.push_back(new_stream(queued_device::device(i)));
    }
    return streams;
  }();
  return streams[static_cast<size_t>(device.index())];
}

/// A copy in memory of the other stream, which then waits, so that what goes from one to the other is used on one only.
struct Cross : torch::autograd::Function<Cross> {
  static at::Tensor copy(const at::Tensor& x, bool to_beside) {
    const Stream here = current_stream(x.device()), beside = stream_beside(x.device());
    wait_stream(to_beside ? beside : here, to_beside ? here : beside);
    at::Tensor copy;
    {
      const StreamGuard guard(to_beside ? beside : here);
      copy = x.clone();
    }
    wait_stream(to_beside ? here : beside, to_beside ? beside : here);
    return copy;
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool to_beside) {
    context->saved_data["to_beside"] = to_beside;
    return copy(x, to_beside);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    return {copy(gradients[0], !context->saved_data["to_beside"].toBool()), {}};
  }
};

at::Tensor beside(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& x) {
  const auto input = Cross::apply(x, true);
  at::Tensor y;
  {
    const StreamGuard guard(stream_beside(x.device()));
    y = function(input);
  }
  return Cross::apply(y, false);
}

/// As kernels of other libraries are queued, or by the host where shards are offloaded.
void use_raw(const at::Tensor& tensor, bool writes) {
  auto& detector = queued_device::detector();
  if (!tensor.is_cpu()) {
    queued_device::use(tensor, writes, current_stream(tensor.device()), "kernel");
  } else if (writes) {
    detector.written_by_host(tensor.data_ptr(), rank(), "write");
  } else {
    detector.read_by_host(tensor.data_ptr(), rank(), "read");
  }
}

bool has_penalties(const Program& program) {
  for (const auto& step : program.steps) {
    for (const auto& micro : step.micros) {
      if (micro.loss == Loss::kPenaltyOnInput || micro.loss == Loss::kPenaltyOnWeights) {
        return true;
      }
    }
  }
  return false;
}

void run_on_devices(const Program& program, BlockImpl& start) {
  auto& detector = queued_device::detector();
  device_of_inputs = queued_device::device(0);
  Unsharded unsharded(program, start, device_of_inputs);
  unsharded.beside = beside;
  const auto notes = unsharded.run();
  detector.begin_test();
  on_devices(program.arrangement, [&](const Mesh& mesh) {
    Sharded trial(program, start, mesh, notes[static_cast<size_t>(rank())]);
    trial.compares_late = true;
    trial.beside = beside;
    trial.differs_by_roundings = has_penalties(program); // nodes of their graphs are numbered by autograd's own thread
    trial.run();
  });
  if (const auto races = detector.take_races(); !races.empty()) {
    std::string text;
    for (const auto& race : races) {
      text += "\n" + race;
    }
    throw std::runtime_error(std::to_string(races.size()) + " races:" + text);
  }
}

TEST(RandomOnStreams, TrialsTrainAsUnshardedWithoutRaces) {
  note_raw_use = use_raw;
  run_trials(30, {.most_ranks = queued_device::kDevices, .on_host = false}, run_on_devices);
}

} // namespace
} // namespace fsdp::testing::random
