#include <fsdp/error.h>
#include <fsdp/save_async.h>
#include <fsdp/saved_state.h>

#include "bindings.h"
#include "values.h"

namespace fsdp::python {

namespace {

using Named = std::vector<std::pair<std::string, HeldTensor>>;
/// Of a parameter: its tensors and its numbers.
using OptimizerState = std::tuple<std::string, std::map<std::string, HeldTensor>, py::dict>;
using OptimizerGroup = std::pair<std::vector<std::string>, py::dict>;
using OptimizerByName = std::pair<std::vector<OptimizerState>, std::vector<OptimizerGroup>>;

ShardedStateDict to_state_dict(const Named& named) {
  ShardedStateDict state;
  for (const auto& [name, held] : named) {
    state.insert(name, held).name = name;
  }
  return state;
}

/// Without what has a name only.
Named to_named(const ShardedStateDict& state) {
  Named named;
  for (const auto& item : state) {
    if (item.value().local.defined()) {
      named.emplace_back(item.key(), item.value());
    }
  }
  return named;
}

ShardedOptimStateDict to_optim_state_dict(const OptimizerByName& by_name) {
  ShardedOptimStateDict dict;
  for (const auto& [name, tensors, numbers] : by_name.first) {
    dict.state.insert(name, {tensors, to_values(numbers)});
  }
  for (const auto& [params, options] : by_name.second) {
    dict.param_groups.push_back({params, to_values(options)});
  }
  return dict;
}

OptimizerByName to_by_name(const ShardedOptimStateDict& dict) {
  OptimizerByName by_name;
  for (const auto& item : dict.state) {
    by_name.first.emplace_back(item.key(), item.value().tensors, to_python(item.value().scalars));
  }
  for (const auto& group : dict.param_groups) {
    by_name.second.emplace_back(group.params, to_python(group.options));
  }
  return by_name;
}

/// What Python raised, in a form that other ranks can be told.
[[noreturn]] void raise(const py::error_already_set& error) {
  const auto library = py::module_::import("libfsdp._C");
  const std::string text = py::str(error.value());
  if (error.matches(library.attr("CommError"))) {
    throw CommError(text);
  }
  throw Error(
      error.matches(library.attr("Error")) ? text : std::string(py::str(error.type().attr("__name__"))) + ": " + text);
}

/// Asks Python, whose objects `body` is to let go of before it returns.
template <typename Body>
auto in_python(const Body& body) {
  const py::gil_scoped_acquire gil;
  try {
    return body();
  } catch (const py::error_already_set& error) {
    raise(error);
  }
}

StateOfRank state_of_rank(
    const Named& model, const std::optional<OptimizerByName>& optimizer, const py::dict& extra, c10::Device device) {
  StateOfRank state{.model = to_state_dict(model), .extra = to_values(extra), .device = device};
  if (optimizer) {
    state.optimizer = to_optim_state_dict(*optimizer);
  }
  return state;
}

std::function<ShardedStateDict()> model_of(const py::object& target) {
  return [&target] { return in_python([&] { return to_state_dict(target.attr("model")().cast<Named>()); }); };
}

/// `save` is of saved_state.
template <typename Save>
auto save_state(
    const Save& save, const std::string& dir, int64_t step, const py::function& state, const SaveOptions& options) {
  const py::gil_scoped_release no_gil;
  return save(
      dir, step, [&] { return in_python([&] { return state().cast<StateOfRank>(); }); }, options);
}

/// Lets go of the save without the GIL: that may wait for the disk.
struct DeletePendingSave {
  void operator()(PendingSave* save) const {
    const py::gil_scoped_release no_gil;
    delete save;
  }
};

LoadedState load_state(
    const std::string& dir,
    const py::object& target,
    bool with_optimizer,
    c10::Device device,
    const LoadOptions& options) {
  StateTarget from_python{.model = model_of(target), .with_optimizer = with_optimizer, .device = device};
  from_python.prepare = [&](StateOfRank read) {
    in_python([&] {
      const py::object optimizer = read.optimizer ? py::cast(to_by_name(*read.optimizer)) : py::none();
      target.attr("prepare")(to_named(read.model), optimizer);
    });
  };
  from_python.take_over = [&] { in_python([&] { target.attr("take_over")(); }); };
  const py::gil_scoped_release no_gil;
  return saved_state::load(dir, from_python, options);
}

NameInFiles name_in_files(const py::object& function) {
  if (function.is_none()) {
    return nullptr;
  }
  return [&function](const std::string& name) {
    return in_python([&] {
      const py::object in_files = function(name);
      if (!py::isinstance<py::str>(in_files)) {
        throw Error(
            "[safetensors] expected a text from name_in_files for '" + name + "', got " +
            py::repr(in_files).cast<std::string>());
      }
      return in_files.cast<std::string>();
    });
  };
}

TransposedInFiles transposed_in_files(const py::object& function) {
  if (function.is_none()) {
    return nullptr;
  }
  return [&function](const std::string& name) { return in_python([&] { return function(name).cast<bool>(); }); };
}

void export_model(
    const std::string& dir,
    const py::object& target,
    int64_t max_shard_bytes,
    const py::object& name,
    const py::object& transposed,
    const std::shared_ptr<Group>& group) {
  const ExportSafetensorsOptions options{max_shard_bytes, name_in_files(name), transposed_in_files(transposed), group};
  const auto model = model_of(target);
  const py::gil_scoped_release no_gil;
  saved_state::export_safetensors(dir, model, options);
}

IncompatibleKeys import_model(
    const std::string& path,
    const py::object& target,
    bool strict,
    const py::object& name,
    const py::object& transposed,
    const std::shared_ptr<Group>& group) {
  const ImportSafetensorsOptions options{strict, name_in_files(name), transposed_in_files(transposed), group};
  const auto model = model_of(target);
  const py::gil_scoped_release no_gil;
  return saved_state::import_safetensors(
      path,
      model,
      [&](const ShardedStateDict& read) {
        in_python([&] {
          target.attr("prepare")(to_named(read), py::none());
          target.attr("take_over")();
        });
      },
      options);
}

} // namespace

void bind_saved_state(py::module_& m) {
  m.def("held_behind", &held_behind, py::arg("tensor"), NoGil());
  m.def("copy_elements", &copy_elements, py::arg("source"), py::arg("target"), NoGil());
  m.def("latest", &latest, py::arg("dir"));
  py::class_<StateOfRank>(m, "StateOfRank")
      .def(py::init(&state_of_rank), py::arg("model"), py::arg("optimizer"), py::arg("extra"), py::arg("device"));
  py::class_<IncompatibleKeys>(m, "IncompatibleKeys")
      .def_readonly("missing", &IncompatibleKeys::missing)
      .def_readonly("unexpected", &IncompatibleKeys::unexpected);
  py::class_<LoadedState>(m, "LoadedState")
      .def_readonly("path", &LoadedState::path)
      .def_readonly("step", &LoadedState::step)
      .def_readonly("keys", &LoadedState::keys)
      .def_property_readonly("extra", [](const LoadedState& state) { return to_python(state.extra); });
  py::class_<PendingSave, std::unique_ptr<PendingSave, DeletePendingSave>>(m, "PendingSave")
      .def("done", &PendingSave::done)
      .def("wait", &PendingSave::wait, NoGil());
  m.def(
      "save",
      [](const std::string& dir,
         int64_t step,
         const py::function& state,
         int64_t keep_last,
         int64_t block_bytes,
         const std::shared_ptr<Group>& group) {
        return save_state(
            saved_state::save, dir, step, state, {.keep_last = keep_last, .block_bytes = block_bytes, .group = group});
      },
      py::arg("dir"),
      py::arg("step"),
      py::arg("state"),
      py::arg("keep_last"),
      py::arg("block_bytes"),
      py::arg("group"));
  m.def(
      "save_async",
      [](const std::string& dir,
         int64_t step,
         const py::function& state,
         int64_t keep_last,
         int64_t block_bytes,
         std::optional<int64_t> max_staged_bytes,
         bool keep_staging_memory,
         const std::shared_ptr<Group>& group) {
        SaveOptions options{.keep_last = keep_last, .block_bytes = block_bytes, .group = group};
        options.max_staged_bytes = max_staged_bytes.value_or(options.max_staged_bytes);
        options.keep_staging_memory = keep_staging_memory;
        return save_state(saved_state::save_async, dir, step, state, options);
      },
      py::arg("dir"),
      py::arg("step"),
      py::arg("state"),
      py::arg("keep_last"),
      py::arg("block_bytes"),
      py::arg("max_staged_bytes"),
      py::arg("keep_staging_memory"),
      py::arg("group"));
  m.def("wait_for_all_saves", &saved_state::wait_for_all, NoGil());
  m.def(
      "load",
      [](const std::string& dir,
         const py::object& target,
         bool with_optimizer,
         c10::Device device,
         bool strict,
         bool random_numbers,
         const std::shared_ptr<Group>& group) {
        return load_state(dir, target, with_optimizer, device, {strict, random_numbers, group});
      },
      py::arg("dir"),
      py::arg("target"),
      py::arg("with_optimizer"),
      py::arg("device"),
      py::arg("strict"),
      py::arg("random_numbers"),
      py::arg("group"));
  m.def(
      "export_safetensors",
      &export_model,
      py::arg("dir"),
      py::arg("target"),
      py::arg("max_shard_bytes"),
      py::arg("name_in_files"),
      py::arg("transposed"),
      py::arg("group"));
  m.def(
      "import_safetensors",
      &import_model,
      py::arg("path"),
      py::arg("target"),
      py::arg("strict"),
      py::arg("name_in_files"),
      py::arg("transposed"),
      py::arg("group"));
}

} // namespace fsdp::python
