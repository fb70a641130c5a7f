#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the type stub of the installed native module to FILE (default: the committed one),
# by the interpreter that PYTHON names (default: python).
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m nanobind.stubgen -q -m tensorferry._transport -p transport/bindings/stub_patterns.txt \
  -o "${1:-src/tensorferry/_transport.pyi}"
