#include <fsdp/shown_shard.h>

#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// A parameter that is a plain tensor, with this rank's part as its data: the tensor itself becomes the engine's shard,
/// so that it follows where its memory moves, and the engine sees other data that it is given. Python may put another
/// tensor behind the object that users hold.
class PlainShard final : public ShownShard {
 public:
  explicit PlainShard(py::object parameter) : parameter_(std::move(parameter)), known_(impl()) {}

  bool requires_grad() const override {
    return tensor().requires_grad();
  }
  void set_requires_grad(bool requires_grad) override {
    tensor().set_requires_grad(requires_grad);
  }
  at::Tensor gradient() const override {
    return tensor().grad();
  }
  void give_gradient(at::Tensor piece) override {
    const at::Tensor parameter = tensor(); // hooks may put another in its place
    give_gradient_to(parameter, std::move(piece));
  }
  bool replaced() const override {
    return replaced_ || impl() != known_;
  }
  at::Tensor replacement() override {
    known_ = impl();
    replaced_ = false;
    return tensor();
  }

  /// A tensor that is replaced twice may be followed by one at the first one's address.
  void note_replacement() {
    replaced_ = replaced();
  }
  /// Users put another parameter in its place.
  void set_parameter(py::object parameter) {
    parameter_ = Held(std::move(parameter));
    replaced_ = true;
  }

 private:
  const at::Tensor& tensor() const {
    return THPVariable_Unpack(parameter_.get().ptr());
  }
  const c10::TensorImpl* impl() const {
    return tensor().unsafeGetTensorImpl();
  }

  Held parameter_;
  const c10::TensorImpl* known_; // compared only
  bool replaced_ = true; // the engine's own is not this one yet
};

} // namespace

void bind_plain_shard(py::module_& m) {
  py::class_<PlainShard, ShownShard, std::shared_ptr<PlainShard>>(m, "PlainShard")
      .def(py::init<py::object>(), py::arg("parameter"))
      .def("set_parameter", &PlainShard::set_parameter)
      .def("note_replacement", &PlainShard::note_replacement);
}

} // namespace fsdp::python
