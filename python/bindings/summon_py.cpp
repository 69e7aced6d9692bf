#include <fsdp/front_end.h>
#include <fsdp/summon.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// Whole parameters until `end`.
class Summoned {
 public:
  /// Of a slot: its path, its parameter, and what puts a whole tensor into its place.
  using PySlot = std::tuple<std::string, at::Tensor, py::function>;

  Summoned(const std::vector<PySlot>& slots, const std::optional<FSDPModule>& only, const SummonOptions& options) {
    auto begins = std::make_shared<bool>(true); // at the end Python puts its parameters back itself
    std::vector<Slot> places;
    for (const auto& [path, parameter, show] : slots) {
      places.push_back({path, parameter, [begins, held = Held(show)](const at::Tensor& tensor) {
                          if (*begins) {
                            py::gil_scoped_acquire gil;
                            held.get()(tensor);
                          }
                        }});
    }
    py::gil_scoped_release no_gil;
    params_ = std::make_unique<SummonedParams>(summon_full_params(places, only ? &*only : nullptr, options));
    *begins = false;
  }
  void end() {
    params_->end();
  }

 private:
  std::unique_ptr<SummonedParams> params_;
};

} // namespace

void bind_summon(py::module_& m) {
  m.def(
      "check_may_summon",
      [](const std::vector<FSDPModule>& units, bool writeback) { check_may_summon(units, {.writeback = writeback}); },
      py::arg("units"),
      py::arg("writeback"));
  m.def("is_summoned", &is_summoned, py::arg("unit"));
  py::class_<Summoned>(m, "Summoned")
      .def(
          py::init([](const std::vector<Summoned::PySlot>& slots,
                      const std::optional<FSDPModule>& only,
                      bool writeback,
                      bool rank0_only,
                      bool offload_to_cpu,
                      bool with_grads) {
            const SummonOptions options{true, writeback, rank0_only, offload_to_cpu, with_grads};
            return std::make_unique<Summoned>(slots, only, options);
          }),
          py::arg("slots"),
          py::arg("only"),
          py::arg("writeback"),
          py::arg("rank0_only"),
          py::arg("offload_to_cpu"),
          py::arg("with_grads"))
      .def("end", &Summoned::end, NoGil());
}

} // namespace fsdp::python
