#include <fsdp/gather_extension.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// Asks a Python object that has methods of the same names.
class PythonExtension final : public GatherExtension {
 public:
  explicit PythonExtension(py::object object) : object_(std::move(object)) {}

  std::vector<at::Tensor> stored() override {
    py::gil_scoped_acquire gil;
    return object_.get().attr("stored")().cast<std::vector<at::Tensor>>();
  }
  std::vector<at::Tensor> before_gather(const at::Tensor&) override {
    py::gil_scoped_acquire gil;
    return object_.get().attr("before_gather")().cast<std::vector<at::Tensor>>();
  }
  Whole after_gather(const std::vector<at::Tensor>& gathered) override {
    py::gil_scoped_acquire gil;
    auto [tensor, parts] = object_.get()
                               .attr("after_gather")(gathered)
                               .cast<std::pair<std::optional<at::Tensor>, std::vector<at::Tensor>>>();
    return {tensor.value_or(at::Tensor()), std::move(parts)};
  }

 private:
  Held object_;
};

} // namespace

void bind_gather_extension(py::module_& m) {
  py::class_<GatherExtension, std::shared_ptr<GatherExtension>>(m, "GatherExtension")
      .def(py::init([](py::object object) {
        return std::static_pointer_cast<GatherExtension>(std::make_shared<PythonExtension>(std::move(object)));
      }));
}

} // namespace fsdp::python
