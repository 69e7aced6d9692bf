// What a call of a sharded module does before it goes on to the module's own: nothing that takes a Python frame, unless
// there is something to do.

#include <algorithm>
#include <unordered_set>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>

#include <fsdp/error.h>
#include <fsdp/front_end.h>
#include <fsdp/shown_shard.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// The registered parameters of a unit's modules as sharding left them. Holds `_parameters` dictionaries, not modules,
/// so that modules are freed by reference counting.
class ModuleState {
 public:
  explicit ModuleState(FSDPModule unit) : unit(std::move(unit)) {
    expect_calls(this->unit);
    all_.insert(this);
  }
  ~ModuleState() {
    all_.erase(this);
  }
  ModuleState(const ModuleState&) = delete;
  ModuleState& operator=(const ModuleState&) = delete;

  /// `parameter` is registered, `handle` is what the engine reads; both are None where nothing is. Data that users put
  /// behind the parameter count as another parameter.
  void watch(
      py::dict registered,
      py::object name,
      py::object parameter,
      py::object handle,
      std::shared_ptr<ShownShard> shown) {
    const bool is_plain = shown && is_intact_handle(THPVariable_Unpack(handle.ptr()));
    entries_.push_back(
        {std::move(registered), std::move(name), std::move(parameter), std::move(handle), std::move(shown), is_plain});
  }
  /// PyTorch takes what a module reads away before it refuses to register a tensor that is no leaf in its place.
  void watch_shadow(py::weakref module, py::object name, py::object shadow, py::object parameter) {
    shadows_.push_back({std::move(module), std::move(name), std::move(shadow), std::move(parameter)});
  }
  void forget() {
    entries_.clear();
    shadows_.clear();
  }
  bool intact() const {
    if (pending) {
      return false;
    }
    for (const auto& entry : entries_) {
      PyObject* const present = PyDict_GetItem(entry.registered.ptr(), entry.name.ptr());
      if ((present ? present : Py_None) != entry.parameter.ptr()) {
        return false;
      }
      if (entry.shown && (entry.shown->replaced() || requires_grad(entry.handle) != requires_grad(entry.parameter))) {
        return false;
      }
      if (entry.is_plain && !is_intact_handle(THPVariable_Unpack(entry.handle.ptr()))) {
        return false;
      }
    }
    for (const auto& each : shadows_) {
      const py::object module = each.module();
      if (requires_grad(each.tensor) != requires_grad(each.parameter) ||
          (!module.is_none() && !is_read(module, each))) {
        return false;
      }
    }
    return true;
  }

  static bool all_intact() {
    return std::all_of(all_.begin(), all_.end(), [](const ModuleState* state) { return state->intact(); });
  }

  static void note_replacement() {
    ++replacements;
  }

  /// How often users have put another parameter into some module's place. That module need not be called to be read.
  static inline size_t replacements = 0;
  size_t followed_below = replacements; ///< so many of them were followed in the modules below
  FSDPModule unit;
  bool pending = false; ///< something has to be made before the modules' code can read their parameters
  bool converts = false; ///< inputs or outputs are cast, or moved

 private:
  struct Entry {
    py::dict registered;
    py::object name;
    py::object parameter;
    py::object handle;
    std::shared_ptr<ShownShard> shown;
    bool is_plain; // the handle is one tensor, unless users give it other data
  };
  struct Shadow {
    py::weakref module;
    py::object name;
    py::object tensor;
    py::object parameter;
  };
  static bool requires_grad(const py::object& tensor) {
    return THPVariable_Unpack(tensor.ptr()).requires_grad();
  }
  static bool is_read(const py::object& module, const Shadow& shadow) {
    const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
    return PyDict_GetItem(attributes.ptr(), shadow.name.ptr()) == shadow.tensor.ptr();
  }

  static inline std::unordered_set<const ModuleState*> all_;
  std::vector<Entry> entries_;
  std::vector<Shadow> shadows_; ///< that are not the handles themselves
};

py::object call(const py::tuple& arguments, PyObject* keywords) {
  static const auto* state_name = new py::str("_fsdp_state");
  static const auto* call_name = new py::str("_original_call");
  const py::object module = arguments[0];
  const auto original_call = py::getattr(py::type::handle_of(module), *call_name);
  const auto state = py::getattr(module, *state_name);
  auto& watched = state.cast<ModuleState&>();
  // Before it runs: what it records would keep parameters from being given other data, those of modules below too. The
  // graph of an open forward keeps them only as long as it lives.
  const size_t replacements = ModuleState::replacements;
  if (watched.followed_below != replacements || (has_open_forward(watched.unit) && !ModuleState::all_intact())) {
    state.attr("follow_below")(module);
    watched.followed_below = replacements;
  }
  if (!watched.intact()) {
    state.attr("follow")(module);
  }
  const ModuleCall running(watched.unit);
  check_materialized(watched.unit);
  if (watched.converts) {
    return state.attr("call")(original_call, arguments, keywords ? py::handle(keywords) : py::dict());
  }
  return py::reinterpret_steal<py::object>(PyObject_Call(original_call.ptr(), arguments.ptr(), keywords));
}

PyObject* call_sharded(PyObject*, PyObject* arguments, PyObject* keywords) {
  try {
    return call(py::reinterpret_borrow<py::tuple>(arguments), keywords).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const Error&) {
    set_python_error(std::current_exception());
  } catch (const python_error&) { // an interrupted wait
    set_python_error(std::current_exception());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef call_method{
    "__call__",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_sharded)),
    METH_VARARGS | METH_KEYWORDS,
    "Calls the module."};

} // namespace

void bind_module_state(py::module_& m) {
  py::class_<ModuleState>(m, "ModuleState")
      .def(py::init<FSDPModule>(), py::arg("unit"))
      .def_property_readonly("unit", [](const ModuleState& state) { return state.unit; }) // does not keep the state
      .def("watch", &ModuleState::watch)
      .def("watch_shadow", &ModuleState::watch_shadow)
      .def("forget", &ModuleState::forget)
      .def("intact", &ModuleState::intact)
      .def_static("note_replacement", &ModuleState::note_replacement)
      .def_readwrite("pending", &ModuleState::pending)
      .def_readwrite("converts", &ModuleState::converts);
  const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&call_method, nullptr));
  m.attr("call_sharded") = py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
}

} // namespace fsdp::python
