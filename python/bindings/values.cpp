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

std::vector<IValue> to_each(const py::handle& objects, const std::string& name) {
  std::vector<IValue> values;
  for (const auto& object : objects) {
    values.push_back(to_value(object, name));
  }
  return values;
}

IValue to_list(const py::handle& objects, const std::string& name) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (auto& value : to_each(objects, name)) {
    list.push_back(std::move(value));
  }
  return list;
}

IValue to_dict(const py::dict& objects, const std::string& name) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, object] : objects) {
    if (!py::isinstance<py::str>(key) && !PyLong_CheckExact(key.ptr())) {
      throw Error("[save] '" + name + "' has a dictionary with a key that is neither a text nor a whole number");
    }
    dict.insert(to_value(key, name), to_value(object, name));
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

} // namespace

IValue to_value(const py::handle& object, const std::string& name) {
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
    return object.cast<std::string>();
  }
  if (THPVariable_Check(object.ptr())) {
    return object.cast<at::Tensor>();
  }
  if (py::isinstance<py::tuple>(object)) {
    return c10::ivalue::Tuple::create(to_each(object, name));
  }
  if (py::isinstance<py::list>(object)) {
    return to_list(object, name);
  }
  if (py::isinstance<py::dict>(object)) {
    return to_dict(py::reinterpret_borrow<py::dict>(object), name);
  }
  throw Error(
      "[save] '" + name + "' is, or has in it, " + py::repr(py::type::handle_of(object)).cast<std::string>() +
      ": expected numbers, texts, tensors, None, and lists, tuples and dictionaries of these");
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
