#include "bindings.h"

PYBIND11_MODULE(_C, m) {
  namespace python = fsdp::python;
  m.doc() = "The C++ library as the Python package sees it. Not for users.";
  m.attr("__version__") = FSDP_VERSION;
  python::bind_error(m);
  python::bind_group(m);
  python::bind_mesh(m);
  python::bind_gather_extension(m);
  python::bind_policy(m);
  python::bind_fully_shard(m);
  python::bind_front_end(m);
  python::bind_plain_shard(m);
  python::bind_module_state(m);
  python::bind_summon(m);
  python::bind_comm_hook(m);
  python::bind_describe(m);
  python::bind_clip_grad_norm(m);
  python::bind_trace(m);
  python::bind_held(m);
  python::bind_saved_checkpoint(m);
  python::bind_saved_state(m);
}
