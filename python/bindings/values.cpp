#include "values.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/autograd/python_variable.h>

#include <fsdp/error.h>

namespace fsdp::python {

namespace {

using c10::IValue;

constexpr int kDeepest = 33; // as C++ writes them

IValue to_value(const py::handle& object, const std::string& name, int depth);

std::vector<IValue> to_each(const py::handle& objects, const std::string& name, int depth) {
  std::vector<IValue> values;
  for (const auto& object : objects) {
    values.push_back(to_value(object, name, depth));
  }
  return values;
}

IValue to_list(const py::handle& objects, const std::string& name, int depth) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (auto& value : to_each(objects, name, depth)) {
    list.push_back(std::move(value));
  }
  return list;
}

IValue to_dict(const py::dict& objects, const std::string& name, int depth) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, object] : objects) {
    if (!py::isinstance<py::str>(key) && !PyLong_CheckExact(key.ptr())) {
      throw Error("[save] '" + name + "' has a dictionary with a key that is neither a text nor a whole number");
    }
    dict.insert(to_value(key, name, depth), to_value(object, name, depth));
  }
  return dict;
}

int64_t to_int(const py::handle& object, const std::string& name) {
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow != 0) {
    throw Error("[save] '" + name + "' is, or has in it, a number that 64 bits do not hold: give it as a text");
  }
  return number;
}

template <typename Items>
py::tuple to_tuple(const Items& items) {
  py::tuple tuple(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    tuple[i] = to_python(items[i]);
  }
  return tuple;
}

std::string to_text(const py::handle& object, const std::string& name) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &length);
  if (text == nullptr) {
    PyErr_Clear();
    throw Error("[save] '" + name + "' is, or has in it, a text that is no Unicode");
  }
  return {text, static_cast<size_t>(length)};
}

at::Tensor to_tensor(const py::handle& object, const std::string& name) {
  auto tensor = object.cast<at::Tensor>();
  if (tensor.key_set().has(c10::DispatchKey::Python)) {
    throw Error(
        "[save] '" + name + "' is, or has in it, " + py::repr(py::type::handle_of(object)).cast<std::string>() +
        ", whose values only its own code knows: give a plain tensor, of a DTensor full_tensor()");
  }
  return tensor;
}

IValue to_value(const py::handle& object, const std::string& name, int depth) {
  if (depth == kDeepest) {
    throw Error("[save] '" + name + "' contains itself, or has more than 32 levels: give it flatter, or as a text");
  }
  if (object.is_none()) {
    return {};
  }
  if (PyBool_Check(object.ptr())) {
    return object.cast<bool>();
  }
  if (PyLong_Check(object.ptr())) {
    return to_int(object, name);
  }
  if (PyFloat_Check(object.ptr())) {
    return object.cast<double>();
  }
  if (py::isinstance<py::str>(object)) {
    return to_text(object, name);
  }
  if (THPVariable_Check(object.ptr())) {
    return to_tensor(object, name);
  }
  if (py::isinstance<py::tuple>(object)) {
    return c10::ivalue::Tuple::create(to_each(object, name, depth + 1));
  }
  if (py::isinstance<py::list>(object)) {
    return to_list(object, name, depth + 1);
  }
  if (py::isinstance<py::dict>(object)) {
    return to_dict(py::reinterpret_borrow<py::dict>(object), name, depth + 1);
  }
  throw Error(
      "[save] '" + name + "' is, or has in it, " + py::repr(py::type::handle_of(object)).cast<std::string>() +
      ": expected a number, a text, a tensor, None, or a list, tuple or dictionary of numbers and texts; give the "
      "state_dict() of an object that has one, and of numpy's values .item() or torch.from_numpy");
}

} // namespace

IValue to_value(const py::handle& object, const std::string& name) {
  return to_value(object, name, 0);
}

py::object to_python(const IValue& value) {
  if (value.isNone()) {
    return py::none();
  }
  if (value.isBool()) {
    return py::bool_(value.toBool());
  }
  if (value.isInt()) {
    return py::int_(value.toInt());
  }
  if (value.isDouble()) {
    return py::float_(value.toDouble());
  }
  if (value.isString()) {
    return py::str(value.toStringRef());
  }
  if (value.isTensor()) {
    return py::cast(value.toTensor());
  }
  if (value.isTuple()) {
    return to_tuple(value.toTupleRef().elements());
  }
  if (value.isList()) {
    return py::list(to_tuple(value.toListRef()));
  }
  py::dict dict;
  for (const auto& item : value.toGenericDict()) {
    dict[to_python(item.key())] = to_python(item.value());
  }
  return dict;
}

Values to_values(const py::dict& objects) {
  Values values;
  for (const auto& [name, object] : objects) {
    if (!py::isinstance<py::str>(name)) {
      throw Error("[save] expected texts as names of values, got " + py::repr(name).cast<std::string>());
    }
    const auto text = name.cast<std::string>();
    values[text] = to_value(object, text);
  }
  return values;
}

py::dict to_python(const Values& values) {
  py::dict dict;
  for (const auto& [name, value] : values) {
    dict[py::str(name)] = to_python(value);
  }
  return dict;
}

} // namespace fsdp::python
