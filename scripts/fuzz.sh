#!/bin/bash
# fuzz.sh SECONDS: gives what reads checkpoints bytes that nobody would write, under the address and undefined-behaviour
# sanitizers. What it finds stays in build-fuzz/, with the inputs that led somewhere new.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

seconds=$1
dir=build-fuzz
mkdir -p "$dir/found" "$dir/inputs"
torch=$("$(torch_python)" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')

# Of these alone: the whole library, built once more, would take a quarter of an hour.
sources=(src/base/{error,format,log,env}.cpp src/layout/*.cpp
  src/checkpoint/{checkpoint_index,covers,crc32c,dtype_names,file,index_json,json_fields,piece_reader}.cpp
  src/checkpoint/{safetensors_file,safetensors_header,safetensors_sax,system_error,value_json}.cpp
  tests/fuzz/checkpoint_fuzz.cpp)
{
  echo "builddir = $dir"
  echo "sanitizers = -fsanitize=address,undefined -fno-sanitize-recover=undefined"
  echo "rule compile"
  echo "  command = clang++ -std=c++20 -O1 -g -fsanitize=fuzzer-no-link \$sanitizers -Iinclude -Isrc -isystem $torch/include -MD -MF \$out.d -c \$in -o \$out"
  echo "  depfile = \$out.d"
  echo "rule link"
  echo "  command = clang++ -fsanitize=fuzzer \$sanitizers \$in -L$torch/lib -Wl,-rpath,$torch/lib -ltorch -ltorch_cpu -lc10 -o \$out"
  for source in "${sources[@]}"; do
    echo "build $dir/$source.o: compile $source"
  done
  echo "build $dir/checkpoint_fuzz: link $(printf " $dir/%s.o" "${sources[@]}")"
} >"$dir/build.ninja"
ninja -f "$dir/build.ninja" --quiet "$dir/checkpoint_fuzz"

echo "Fuzzing for $seconds s"
before=$(find "$dir/inputs" -type f | wc -l)
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=0 # LibTorch's own allocations stay until the end
if ! "$dir/checkpoint_fuzz" "$dir/inputs" tests/fuzz/corpus -max_total_time="$seconds" -max_len=4096 -rss_limit_mb=2048 \
  -malloc_limit_mb=256 -timeout=30 -artifact_prefix="$dir/found/" -print_funcs=0 -verbosity=0 >"$dir/log" 2>&1; then
  cat "$dir/log" >&2
  die "What was found is in $dir/found: $dir/checkpoint_fuzz FILE shows it again"
fi
echo "Nothing found; $(($(find "$dir/inputs" -type f | wc -l) - before)) inputs led somewhere new"
