#!/bin/bash
# Makes sure that everything a build needs is there: system packages, and torch in .venv unless PYTHON names a Python that has
# it. Repeats nothing. With --tools clang-format ...: only these, which are packages of the same names. With --fuzzer: only
# what scripts/fuzz.sh needs.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

# command or header -> Debian package
missing_commands() {
  local pair
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
  done
}

missing_headers() {
  local pair
  for pair in "$@"; do
    printf '#if !__has_include(<%s>)\n%s\n#endif\n' "${pair%%:*}" "${pair##*:}"
  done | { g++ -E -P -x c++ - 2>/dev/null || printf '%s\n' "${@##*:}"; }
}

missing_venv() {
  [ -n "$PYTHON" ] || [ -x .venv/bin/pip ] || python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

missing_python_headers() {
  [ -n "$PYTHON" ] || has_python_headers python3 || echo python3-dev
}

missing_required() {
  missing_commands cmake:cmake ninja:ninja-build g++:g++
  missing_headers gtest/gtest.h:libgtest-dev nlohmann/json.hpp:nlohmann-json3-dev
  missing_venv
  missing_python_headers
}

# Builds work without these: slower, or without the Gloo backend.
missing_optional() {
  missing_commands ccache:ccache
  missing_headers gloo/context.h:libgloo-dev
}

install_packages() {
  echo "Installing $* with apt-get"
  export DEBIAN_FRONTEND=noninteractive
  local log
  log=$(mktemp)
  if ! { apt-get update && apt-get install -y --no-install-recommends "$@"; } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "apt-get could not install $*: see above"
  fi
  rm -f "$log"
}

# ensure_packages "required" "optional"
ensure_packages() {
  local required optional
  required=$(echo $1)
  optional=$(echo $2)
  [ -n "$required$optional" ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install_packages $required $optional
  elif [ -n "$required" ]; then
    die "missing packages. Run:  sudo apt-get install -y $(echo $required $optional)"
  else
    echo "Going on without $optional (optional: sudo apt-get install -y $optional)"
  fi
}

has_nvidia_gpu() {
  [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1
}

# Without a GPU the CPU build is asked for first; where pip's configuration offers none, the ordinary one serves too.
install_torch() {
  echo "Installing torch $TORCH into .venv"
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  if [[ $TORCH != *+* ]] && ! has_nvidia_gpu && "${pip[@]}" "torch==$TORCH+cpu" 2>/dev/null; then
    return
  fi
  "${pip[@]}" "torch==$TORCH" || die "pip could not install torch==$TORCH. Set TORCH to a version that pip can find, or PYTHON to a Python that has torch."
}

# The NCCL backend is compiled with CUDA headers, of which torch brings all but these.
install_cuda_headers() {
  local cuda package
  cuda=$(.venv/bin/python -c 'import re, importlib.util as u; root = u.find_spec("torch").submodule_search_locations[0]
print(*re.findall(r"^cuda.*= .(\d+\.\d+)", open(root + "/version.py").read(), re.M))')
  [ -n "$cuda" ] || return 0
  [ "${cuda%%.*}" -ge 13 ] && package="nvidia-cuda-crt==$cuda.*" || package="nvidia-cuda-nvcc-cu12==$cuda.*"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$package" ||
    echo "Going on without $package: the NCCL backend needs it, or a CUDA toolkit"
}

ensure_torch() {
  if [ -n "$PYTHON" ]; then
    torch_version "$PYTHON" >/dev/null || die "PYTHON=$PYTHON has no torch. Install it there, or leave PYTHON unset to have it in .venv."
    return
  fi
  local stamp=.venv/torch-$TORCH
  [ -e "$stamp" ] && return
  [ -x .venv/bin/pip ] || python3 -m venv .venv
  install_torch
  install_cuda_headers
  rm -f .venv/torch-*
  touch "$stamp"
}

# What the Python package is built and tested with; numpy for torch.distributed.checkpoint, safetensors for files of others.
ensure_python_tools() {
  local python missing
  python=$(torch_python)
  missing=$("$python" -c 'import importlib.util as u
print(*[package for module, package in [("pytest", "pytest"), ("scikit_build_core", "scikit-build-core"), ("numpy", "numpy"), ("safetensors", "safetensors")] if not u.find_spec(module)])')
  [ -n "$missing" ] || return 0
  if [ -n "$PYTHON" ]; then # its owner decides what goes into it
    echo "Going on without the Python package. For it, run:  $PYTHON -m pip install $missing"
  else
    "$python" -m pip install --quiet --disable-pip-version-check $missing ||
      die "pip could not install $missing: the Python package needs them"
  fi
}

ensure_fuzzer() {
  ensure_packages "$(missing_commands clang++:clang)" ""
  local runtime
  runtime=$(clang++ -print-file-name="libclang_rt.fuzzer-$(uname -m).a")
  [ -e "$runtime" ] || ensure_packages "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev" ""
}

# What some tests compare with, and are skipped without. Tried once.
offer_transformers() {
  local python stamp=.venv/transformers-tried
  python=$(torch_python)
  [ -z "$PYTHON" ] && [ ! -e "$stamp" ] || return 0
  "$python" -m pip install --quiet --disable-pip-version-check transformers ||
    echo "Going on without transformers, with which some tests compare."
  touch "$stamp"
}

if [ "${1:-}" = --fuzzer ]; then
  ensure_fuzzer
elif [ "${1:-}" = --tools ]; then
  shift
  ensure_packages "$(for tool in "$@"; do missing_commands "$tool:$tool"; done)" ""
else
  ensure_packages "$(missing_required)" "$(missing_optional)"
  ensure_torch
  ensure_python_tools
  offer_transformers
fi
