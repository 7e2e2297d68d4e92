#!/usr/bin/env bash
# Runs tests of the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer. The kernels'
# workspace gets poisoned red zones between its buffers, so that an overrun inside it is found too.
#
#     tests/sanitize.sh                     all kernel tests
#     tests/sanitize.sh tests/api/test_ops.py   these
#     tests/sanitize.sh fuzz 1000000 0      random calls of the kernels (tests/fuzz): how many, seed
#
# Before tests, some random calls are made as well.
#
# Needs GCC (or CXX=clang++ with its runtime) and the test extra of an installed resode_kernels.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export CXX=${CXX:-g++} RESODE_CPP=1 RESODE_CUDA=0
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
# From a copy: objects of this build must not get into the checkout's.
mkdir "$work/source"
cp -r "$root"/{csrc,resode_kernels,tools,setup.py,pyproject.toml,README.md,LICENSE} "$work/source"
RESODE_CXXFLAGS=$flags python -m pip install -q --no-deps --target "$work" "$work/source"

objects=("$work"/source/build/kernels*/kernels_*.o)
builds=()
for object in "${objects[@]}"; do
    name=$(basename "$object" .o)
    name=${name#kernels_}
    builds+=("-DRESODE_WITH_${name^^}")
done
# shellcheck disable=SC2086
$CXX -std=c++20 -Wall -Wextra -Wno-psabi -fopenmp $flags "${builds[@]}" "$root/tests/fuzz/fuzz.cpp" \
    "${objects[@]}" -o "$work/fuzz"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
if [ "${1:-}" = fuzz ]; then
    shift
    "$work/fuzz" "$@"
    exit
fi
"$work/fuzz" 1000

cd "$root"
[ $# -gt 0 ] || set -- tests/kernels/test_{accuracy,properties,repeatable,conv}.py
LD_PRELOAD="$($CXX -print-file-name=libasan.so) $($CXX -print-file-name=libubsan.so)" \
    PYTHONPATH=$work pytest -p no:cacheprovider "$@"
