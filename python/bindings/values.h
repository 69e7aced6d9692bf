#pragma once

#include <map>
#include <string>

#include <ATen/core/ivalue.h>

#include "bindings.h"

namespace fsdp::python {

using Values = std::map<std::string, c10::IValue>;

/// Numbers, texts, tensors, None, and lists, tuples and dictionaries of these. An Error, which names it, for others.
c10::IValue to_value(const py::handle& object, const std::string& name);
py::object to_python(const c10::IValue& value);

Values to_values(const py::dict& objects);
py::dict to_python(const Values& values);

} // namespace fsdp::python
