#!/bin/sh
# Prints the Makefile's targets with their descriptions, and its variables with their defaults.
cd "$(dirname "$0")/.."
echo "Targets:"
sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12
echo "Variables:"
sed -n 's/^\([A-Z]*\) ?= *\(.*\)/  \1=\2/p' Makefile
echo "PYTHON=/path/to/python uses that Python's torch instead of .venv; TORCH is the version that .venv gets."
