#!/bin/bash
# Installs the Python package beside the torch that it is built against.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

python=$(torch_python)
"$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
"$python" -m libfsdp info
