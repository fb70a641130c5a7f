#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the type stubs of the installed native modules into FOLDER (default: where they are committed),
# by the interpreter that PYTHON names (default: python).
set -eu
cd "$(dirname "$0")/.."
for module in _transport _tensors; do
  "${PYTHON:-python}" -m nanobind.stubgen -q -m "tensorferry.$module" -p transport/bindings/stub_patterns.txt \
    -o "${1:-src/tensorferry}/$module.pyi"
done
