#!/bin/bash
# Finds what should not stay in a source: notes of work to do, and paths that exist on one machine only.
set -euo pipefail
cd "$(dirname "$0")/.."

patterns='\b(TODO|FIXME|XXX|HACK)\b|(^|[^[:alnum:]_.])/(work|root|home)/|\b(issue|pull request) #?[0-9]+'
! grep -rnIE "$patterns" . \
  --exclude-dir=.git --exclude-dir=.venv --exclude-dir='build*' --exclude-dir=__pycache__ --exclude="$(basename "$0")"
