#!/usr/bin/env bash
# Installs from a source distribution and runs some of its tests, in a folder of their own:
#
#     python -m build --sdist && tools/test_sdist.sh dist/resode_kernels-*.tar.gz
set -euo pipefail
archive=$(realpath "${1:?a source distribution}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tar -xf "$archive" -C "$folder" --strip-components 1
cd "$folder"
pip install '.[test]'
pytest -p no:cacheprovider tests/api/test_orders.py tests/build tests/kernels/test_memory.py
