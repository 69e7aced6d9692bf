#!/bin/bash
# build.sh PRESET [target...]: configures the preset (once for each torch) and builds.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

preset=$1
shift
dir=$(build_dir "$preset")
python=$(torch_python) || die "There is no torch yet: make setup"

# The Python package is built where it can be tested. (The sanitizers' run time would have to be in the interpreter.)
build_python=OFF
if [ "$preset" = release ] && has_python_headers "$python" && "$python" -c 'import pytest' 2>/dev/null; then
  build_python=ON
fi

key="$python $(torch_version "$python") $build_python ${CMAKE_ARGS:-}"

# What CMake found out about one torch does not hold for another.
if [ "$(cat "$dir/configured-for" 2>/dev/null || true)" != "$key" ]; then
  rm -rf "$dir/CMakeCache.txt" "$dir/CMakeFiles"
  mkdir -p "$dir"
  echo "Configuring $dir for torch $(torch_version "$python")"
  cmake --preset "$preset" -DFSDP_PYTHON="$python" -DFSDP_BUILD_PYTHON=$build_python ${CMAKE_ARGS:-} >"$dir/configure.log" 2>&1 ||
    { cat "$dir/configure.log" >&2; die "CMake could not configure $dir: see above"; }
  echo "$key" >"$dir/configured-for"
fi

# A compiler that reads LibTorch's headers takes up to 1.5 GB.
cores=$(nproc)
by_memory=$(awk '/MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
jobs=$((by_memory < 1 ? 1 : by_memory < cores ? by_memory : cores))
cmake --build "$dir" --parallel "$jobs" ${@:+--target "$@"}
