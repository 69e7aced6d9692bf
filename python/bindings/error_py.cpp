#include <memory>
#include <string_view>
#include <thread>

#include <torch/csrc/Exceptions.h>

#include <fsdp/error.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

// Never dropped: the module that they belong to is not either.
PyObject* error_type = nullptr;
PyObject* comm_error_type = nullptr;

// Names of others may have been cut within a character.
void set_error(PyObject* type, std::string_view text) {
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  PyErr_SetObject(type, message.ptr());
}

} // namespace

void set_python_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const CommError& comm_error) {
    set_error(comm_error_type, comm_error.what());
  } catch (const Error& other) {
    set_error(error_type, other.what());
  } catch (python_error& from_python) {
    from_python.restore();
  }
}

void raise_in_python(std::exception_ptr error) {
  py::gil_scoped_acquire gil;
  set_python_error(std::move(error));
  python_error raised;
  raised.persist();
  throw raised;
}

std::exception_ptr python_interruption() {
  static const auto main_thread = std::this_thread::get_id(); // first asked at import
  if (std::this_thread::get_id() != main_thread || !Py_IsInitialized()) {
    return nullptr;
  }
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) {
    return nullptr;
  }
  python_error raised;
  raised.persist();
  return std::make_exception_ptr(raised);
}

static int raise_interruption(void* error) {
  const std::unique_ptr<python_error> interruption(static_cast<python_error*>(error));
  interruption->restore();
  return -1;
}

void raise_in_python_later(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const python_error& interruption) {
    auto kept = std::make_unique<python_error>(interruption);
    if (Py_AddPendingCall(&raise_interruption, kept.get()) == 0) {
      kept.release(); // NOLINT(bugprone-unused-return-value): the call owns it
    }
  } catch (...) { // was no interruption
  }
}

void bind_error(py::module_& m) {
  py::exception<Error> error(m, "Error", PyExc_RuntimeError);
  py::exception<CommError> comm_error(m, "CommError", error);
  error_type = error.inc_ref().ptr();
  comm_error_type = comm_error.inc_ref().ptr();
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (error) {
      set_python_error(std::move(error));
    }
  });
}

} // namespace fsdp::python
