#include <fsdp/front_end.h>
#include <fsdp/summon.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// Whole parameters until `end`.
class Summoned {
 public:
  /// `replace[i]` puts a tensor into the place of slot i.
  Summoned(
      const std::vector<std::pair<std::string, at::Tensor>>& slots,
      const std::vector<py::function>& replace,
      const std::optional<FSDPModule>& only,
      const SummonOptions& options) {
    std::vector<Slot> places;
    for (size_t i = 0; i < slots.size(); ++i) {
      places.push_back({slots[i].first, slots[i].second, [held = Held(replace[i])](const at::Tensor& tensor) {
                          py::gil_scoped_acquire gil;
                          held.get()(tensor);
                        }});
    }
    py::gil_scoped_release no_gil;
    params_ = std::make_unique<SummonedParams>(summon_full_params(places, only ? &*only : nullptr, options));
  }
  void end() {
    params_.reset();
  }

 private:
  std::unique_ptr<SummonedParams> params_;
};

} // namespace

void bind_summon(py::module_& m) {
  py::class_<SummonOptions>(m, "SummonOptions")
      .def(
          py::init([](bool writeback, bool rank0_only, bool offload_to_cpu, bool with_grads) {
            return SummonOptions{true, writeback, rank0_only, offload_to_cpu, with_grads};
          }),
          py::arg("writeback"),
          py::arg("rank0_only"),
          py::arg("offload_to_cpu"),
          py::arg("with_grads"));
  py::class_<Summoned>(m, "Summoned")
      .def(
          py::init<
              const std::vector<std::pair<std::string, at::Tensor>>&,
              const std::vector<py::function>&,
              const std::optional<FSDPModule>&,
              const SummonOptions&>(),
          py::arg("slots"),
          py::arg("replace"),
          py::arg("only"),
          py::arg("options"))
      .def("end", &Summoned::end, NoGil());
}

} // namespace fsdp::python
