// The collectives that do nothing, as a backend of torch.distributed: both contenders of bench/host.py use them.
#include <torch/csrc/utils/pybind.h>

#include "no_op_backend.h"

PYBIND11_MODULE(fsdp_bench_no_op, module) {
  module.def("make_backend", [](int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<bench::NoOpBackend>(rank, size);
  });
  module.def("stop_answering", [] { bench::NoOpBackend::answers = false; });
}
