#!/usr/bin/env bash
# Runs the tests with several versions of torch, each in a fresh environment:
#
#     tools/test_with_torch.sh                       the versions that the package is tested with
#     tools/test_with_torch.sh 2.10.0 -- -k orders   this version, and these arguments for pytest
#
# pip chooses the wheels. On Linux these are wheels for CUDA, 5 GB each, which also run on the CPU;
# set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL for others. TMPDIR says where the environments go; each
# is deleted after its tests.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions+=("$1")
    shift
done
[ $# -eq 0 ] || shift
if [ ${#versions[@]} -eq 0 ]; then
    read -ra versions <<< "$(sed -nE 's/^TESTED_TORCH = \((.*)\)$/\1/p' resode_kernels/info.py | tr -d '",')"
fi

failed=()
for version in "${versions[@]}"; do
    environment=$(mktemp -d)
    echo "=== torch $version in $environment"
    if python3 -m venv "$environment" \
        && "$environment/bin/pip" install -q "torch==$version.*" '.[test]' \
        && (cd / && "$environment/bin/python" -m resode_kernels info) \
        && "$environment/bin/pytest" -p no:cacheprovider -n auto --dist loadgroup "$@"; then
        echo "=== torch $version: passed"
    else
        failed+=("$version")
        echo "=== torch $version: failed"
    fi
    rm -rf "$environment"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with torch ${failed[*]}" >&2; exit 1; }
