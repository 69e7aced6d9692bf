#!/bin/bash
# Everything that can be found wrong without running the code: layers, format, leftovers, and clang-tidy over src/.
# With --quick: without clang-tidy.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

failed=0
run() {
  echo "== $1"
  shift
  "$@" || failed=1
}

tidy() {
  scripts/build.sh tidy clean >/dev/null
  scripts/tidy.py build-tidy
}

run "layers" scripts/check_layers.py
run "format" scripts/format.sh --check
run "leftovers" scripts/check_leftovers.sh
[ "${1:-}" = --quick ] || run "clang-tidy" tidy
exit "$failed"
