#include <fsdp/error.h>
#include <fsdp/front_end.h>
#include <fsdp/sharded_tensor.h>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

struct Names {
  py::object local = py::str("_local_tensor");
  py::object spec = py::str("_spec");
  py::object dtensor = py::module_::import("torch.distributed.tensor").attr("DTensor");
  py::object make = dtensor.attr("__new__");
};

const Names& names() {
  static const auto* names = new Names(); // never destroyed: the interpreter may be gone by then
  return *names;
}

at::Tensor local_of(py::handle dtensor) {
  return py::getattr(dtensor, names().local).cast<at::Tensor>();
}

/// A parameter that is a DTensor. Python may put another tensor behind the object that users hold (`module.to(dtype)`
/// swaps them), so the object is kept, and asked for its tensor each time.
class DTensorShard : public ShownShard {
 public:
  explicit DTensorShard(py::object parameter) : parameter_(std::move(parameter)), known_(impl()) {}

  bool requires_grad() const override {
    return tensor().requires_grad();
  }

  void set_requires_grad(bool requires_grad) override {
    tensor().set_requires_grad(requires_grad);
  }

  at::Tensor gradient() const override {
    const at::Tensor gradient = tensor().grad();
    if (!gradient.defined()) {
      return {};
    }
    py::gil_scoped_acquire gil;
    return local_of(py::cast(gradient));
  }

  void give_gradient(at::Tensor piece) override {
    const at::Tensor parameter = tensor(); // hooks may put another in its place
    if (const auto& hooks = torch::autograd::impl::hooks(parameter); !hooks.empty()) {
      at::Tensor gradient = as_dtensor(piece);
      for (const auto& hook : hooks) {
        gradient = (*hook)({std::move(gradient)})[0];
      }
      piece = piece_given(gradient).clone(); // what a hook keeps, or gives each time, is not ours to add to
    }
    if (at::Tensor present = gradient(); present.defined()) {
      c10::AutoGradMode no_grad(false);
      present.add_(piece);
    } else {
      tensor().mutable_grad() = as_dtensor(piece);
    }
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor())) {
      (*hook)(tensor());
    }
  }

  bool replaced() const override {
    return replaced_ || impl() != known_;
  }

  at::Tensor replacement() override {
    py::gil_scoped_acquire gil;
    known_ = impl();
    replaced_ = false;
    return local_of(parameter_.get());
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

 protected:
  const at::Tensor& tensor() const {
    return THPVariable_Unpack(parameter_.get().ptr());
  }
  const c10::TensorImpl* impl() const {
    return tensor().unsafeGetTensorImpl();
  }

 private:
  at::Tensor as_dtensor(const at::Tensor& piece) const {
    py::gil_scoped_acquire gil;
    const auto spec = py::getattr(parameter_.get(), names().spec);
    return names().make(names().dtensor, piece, spec, py::arg("requires_grad") = false).cast<at::Tensor>();
  }

  /// Of what a hook has returned.
  at::Tensor piece_given(const at::Tensor& gradient) const {
    py::gil_scoped_acquire gil;
    const py::object given = py::cast(gradient);
    const py::object expected = py::getattr(parameter_.get(), "placements");
    const py::object placements = py::getattr(given, "placements", py::none()); // a plain tensor has none
    if (!placements.equal(expected)) {
      const std::string got =
          placements.is_none() ? "a plain tensor" : "one with " + py::str(placements).cast<std::string>();
      throw Error(
          "[gradient hook] expected a DTensor with the parameter's placements, " +
          py::str(expected).cast<std::string>() + ", got " + got +
          ": return what operations on the given gradient make, redistribute() it, or return nothing");
    }
    return local_of(given);
  }

  Held parameter_;
  const c10::TensorImpl* known_; // compared only
  bool replaced_ = false;
};

/// The same around a tensor subclass, which has no memory of its own: the engine's shard is a tensor beside it.
class ExtendedShard final : public DTensorShard {
 public:
  /// `shard`: the engine's, while it is on the meta device.
  ExtendedShard(py::object parameter, at::Tensor shard)
      : DTensorShard(std::move(parameter)), shard_(std::move(shard)) {}

  bool replaced() const override {
    const bool first_values = shard_.is_meta() && !tensor().is_meta();
    return first_values || (DTensorShard::replaced() && !tensor().is_meta());
  }
  at::Tensor replacement() override {
    const at::Tensor local = DTensorShard::replacement();
    shard_ = at::empty({0}, at::TensorOptions().dtype(local.scalar_type()).device(local.device()));
    return shard_;
  }
  const at::Tensor& shard() const {
    return shard_;
  }

 private:
  at::Tensor shard_;
};

/// One module of a call, as Python lists it: its name, its slots, the units below it, its buffers.
using Listed = std::tuple<
    std::string,
    std::vector<std::pair<std::string, at::Tensor>>,
    std::vector<std::pair<std::string, FSDPModule>>,
    std::vector<at::Tensor>>;

void* let_go_of_gil() {
  return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

void take_back_gil(void* thread) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(thread));
}

using Shards = std::vector<std::vector<std::optional<at::Tensor>>>;

/// The unit, and for each module and each of its slots the shard that belongs there.
std::pair<FSDPModule, Shards> shard_modules(
    const std::vector<Listed>& modules, const FullyShardOptions& options, const std::optional<FlatCut>& flat) {
  Shards shards(modules.size());
  std::vector<ModuleView> views;
  for (size_t i = 0; i < modules.size(); ++i) {
    const auto& [name, slots, below, buffers] = modules[i];
    ModuleView view{name, {}, below, buffers};
    shards[i].resize(slots.size());
    for (size_t j = 0; j < slots.size(); ++j) {
      const auto& [path, tensor] = slots[j];
      view.slots.push_back({path, tensor, [place = &shards[i][j]](const at::Tensor& shard) { *place = shard; }});
    }
    views.push_back(std::move(view));
  }
  auto unit = fully_shard(views, options, flat);
  return {std::move(unit), std::move(shards)};
}

} // namespace

void bind_front_end(py::module_& m) {
  python_interruption(); // notes the main thread
  set_caller(&let_go_of_gil, &take_back_gil, &raise_in_python, &python_interruption, &raise_in_python_later);
  py::class_<ShownShard, std::shared_ptr<ShownShard>>(m, "ShownShard");
  py::class_<DTensorShard, ShownShard, std::shared_ptr<DTensorShard>>(m, "DTensorShard")
      .def(py::init<py::object>(), py::arg("parameter"))
      .def("set_parameter", &DTensorShard::set_parameter)
      .def("note_replacement", &DTensorShard::note_replacement);
  py::class_<ExtendedShard, DTensorShard, std::shared_ptr<ExtendedShard>>(m, "ExtendedShard")
      .def(py::init<py::object, at::Tensor>(), py::arg("parameter"), py::arg("shard"))
      .def_property_readonly("shard", &ExtendedShard::shard);
  py::class_<FlatCut>(m, "FlatCut")
      .def(
          py::init([](int64_t alignment, bool shown_as_one) {
            return FlatCut{alignment, shown_as_one};
          }),
          py::arg("alignment"),
          py::arg("shown_as_one"));
  m.def("shard_modules", &shard_modules, py::arg("modules"), py::arg("options"), py::arg("flat") = py::none(), NoGil());
  m.def("flat_shard_of", &flat_shard_of, py::arg("unit"));
  m.def(
      "is_flat_shard",
      [](const FSDPModule& unit, const at::Tensor& tensor) { return flat_shard_of(unit).is_same(tensor); },
      py::arg("unit"),
      py::arg("tensor"));
  m.def("set_flat_shard", &set_flat_shard, py::arg("unit"), py::arg("tensor"), NoGil());
  m.def("shard_behind", &shard_behind, py::arg("handle"));
  m.def("shown_in_flat", &shown_in_flat, py::arg("handle"));
  m.def("is_root", &is_root, py::arg("unit"));
  m.def(
      "full_tensor", [](const at::Tensor& shard) { return sharded(shard).full_tensor(); }, py::arg("shard"), NoGil());
  m.def("full_tensors", &full_tensors, py::arg("pieces"), py::arg("device"), NoGil());
  m.def("belongs_to_unit", &belongs_to_unit, py::arg("tensor"));
  m.def("module_of", &module_of, py::arg("shard"));
  m.def("restore_handle", &restore_handle, py::arg("unit"), py::arg("handle"), NoGil());
  m.def(
      "is_as_registered",
      [](const at::Tensor& handle, const at::Tensor& parameter) {
        return is_intact_handle(handle) && handle.requires_grad() == parameter.requires_grad();
      },
      py::arg("handle"),
      py::arg("parameter"));
  m.def("follow_requires_grad", &follow_requires_grad, py::arg("tensor"));
  m.def("handle_of", &handle_of, py::arg("shard"), NoGil());
  m.def("piece_of", &piece_of, py::arg("shard"), py::arg("whole"), NoGil());
  m.def("compute_in", &compute_in, py::arg("unit"), py::arg("param_dtype"));
  m.def("copy_settings", &copy_settings, py::arg("from_unit"), py::arg("to_unit"));
  m.def("show_as", &show_as, py::arg("shard"), py::arg("shown"), NoGil());
  m.def("show_in_place", &show_in_place, py::arg("shard"), py::arg("shown"), NoGil());
}

} // namespace fsdp::python
