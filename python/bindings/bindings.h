#pragma once

#include <exception>
#include <memory>
#include <utility>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

namespace fsdp::python {

namespace py = pybind11;

void bind_clip_grad_norm(py::module_& m);
void bind_comm_hook(py::module_& m);
void bind_describe(py::module_& m);
void bind_error(py::module_& m);
void bind_front_end(py::module_& m);
void bind_gather_extension(py::module_& m);
void bind_fully_shard(py::module_& m);
void bind_group(py::module_& m);
void bind_held(py::module_& m);
void bind_mesh(py::module_& m);
void bind_module_state(py::module_& m);
void bind_plain_shard(py::module_& m);
void bind_policy(py::module_& m);
void bind_saved_checkpoint(py::module_& m);
void bind_saved_state(py::module_& m);
void bind_summon(py::module_& m);
void bind_trace(py::module_& m);

/// Makes an Error of the library the exception that a C function of Python returns with.
void set_python_error(std::exception_ptr error);
/// Throws an Error of the library as a Python exception that torch hands on as it is.
[[noreturn]] void raise_in_python(std::exception_ptr error);

/// What a signal handler of Python's has raised (Ctrl-C: KeyboardInterrupt); null if nothing, or on other threads than
/// the main one. Takes the GIL.
std::exception_ptr python_interruption();
/// Such an interruption, as soon as Python's code goes on; nothing for other errors.
void raise_in_python_later(std::exception_ptr error);

using NoGil = py::call_guard<py::gil_scoped_release>;

/// A Python object that C++ may keep, copy and drop on any thread.
class Held {
 public:
  explicit Held(py::object object)
      : object_(object.release().ptr(), [](PyObject* object) {
          if (Py_IsInitialized()) { // else it went with the interpreter
            py::gil_scoped_acquire gil;
            Py_DECREF(object);
          }
        }) {}
  py::handle get() const {
    return object_.get();
  }

 private:
  std::shared_ptr<PyObject> object_;
};

} // namespace fsdp::python
