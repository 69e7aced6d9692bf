#!/bin/bash
# Formats all C++ sources in place. With --check: names those that would change, and fails if there are any.
set -euo pipefail
cd "$(dirname "$0")/.."

folders=()
for folder in include src tests tools bench examples python docs; do
  [ -d "$folder" ] && folders+=("$folder")
done
mapfile -d '' sources < <(find "${folders[@]}" \( -name '*.h' -o -name '*.cpp' \) -print0)

if [ "${1:-}" != --check ]; then
  clang-format -i "${sources[@]}"
  exit
fi
changed=0
for source in "${sources[@]}"; do
  if ! clang-format "$source" | cmp -s - "$source"; then
    echo "$source is not formatted: make format"
    changed=1
  fi
done
exit "$changed"
