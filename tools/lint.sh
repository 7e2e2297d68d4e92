#!/usr/bin/env bash
# Checks the style and the types of the Python files and the format of the C++ and CUDA files.
# Changes no file. Needs the package and the tools of its extra: pip install -e '.[lint]'
set -euo pipefail
cd "$(dirname "$0")/.."

# Other versions of a tool find other mistakes and format otherwise.
for tool in ruff mypy clang-format; do
    version=$("$tool" --version | sed -E 's/^[^0-9]*([0-9.]*[0-9]).*/\1/')
    if ! grep -Fq "\"$tool==$version\"" pyproject.toml; then
        echo "pyproject.toml asks for another $tool than $version: pip install -e '.[lint]'" >&2
        exit 1
    fi
    # mypy is not among the hooks.
    if [ "$tool" != mypy ] && ! grep -Fq "rev: v$version " .pre-commit-config.yaml; then
        echo ".pre-commit-config.yaml asks for another $tool than pyproject.toml, $version" >&2
        exit 1
    fi
done

failed=0
check() {
    echo "$*"
    "$@" || failed=1
}
check ruff check .
check ruff format --check .
check find csrc tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) \
    -exec clang-format --dry-run -Werror {} +
check mypy
exit $failed
