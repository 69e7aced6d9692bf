# Shared by the scripts beside this file.

PYTHON=${PYTHON:-}
TORCH=${TORCH:-$(sed -n 's/^TORCH ?= *//p' Makefile)}

die() {
  echo "$@" >&2
  exit 1
}

# The Python whose torch is used, as an absolute path. Links are kept: they are how a virtual environment knows itself.
torch_python() {
  local python
  python=$(command -v "${PYTHON:-$PWD/.venv/bin/python}") || return 1
  [ "${python#/}" != "$python" ] && echo "$python" || echo "$PWD/$python"
}

# Its torch's version, without importing it, which would take seconds.
torch_version() {
  "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null
}

# Whether a Python has the headers that an extension module is compiled with.
has_python_headers() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

build_dir() {
  [ "$1" = release ] && echo build || echo "build-$1"
}
