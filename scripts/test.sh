#!/bin/bash
# test.sh PRESET: runs all tests of a build; the last line counts the test cases.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

dir=$(build_dir "$1")
suppressions=$PWD/scripts/sanitizers
export ASAN_OPTIONS=detect_leaks=1:${ASAN_OPTIONS:-}
export LSAN_OPTIONS="suppressions='$suppressions/leaks.txt':print_suppressions=0:${LSAN_OPTIONS:-}"
export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-}
export TSAN_OPTIONS="suppressions='$suppressions/races.txt':${TSAN_OPTIONS:-}"

# Some tests keep more than one core busy; but most wait now and then, for each other or for a timeout.
jobs=${TEST_JOBS:-$(($(nproc) * 2))}
rm -rf "$dir/results"
ctest --test-dir "$dir" --output-on-failure --parallel "$jobs" --output-junit "$PWD/$dir/results/ctest.xml"
scripts/count_tests.py "$dir/results"
