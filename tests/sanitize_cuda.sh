#!/usr/bin/env bash
# Runs tests of the emulated CUDA kernels under a sanitizer:
#
#     tests/sanitize_cuda.sh thread  [pytest's arguments]    data races between a kernel's threads
#     tests/sanitize_cuda.sh address [pytest's arguments]    accesses out of bounds, undefined ones
#
# Without arguments: all tests of the kernels.
#
# Needs GCC (or CXX=clang++ with its runtime) and the test extra of an installed resode_kernels.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
sanitizer=${1:?thread or address}
shift
export CXX=${CXX:-g++}
library() { "$CXX" -print-file-name="lib$1.so"; }

run=()
case $sanitizer in
    thread)
        flags="-fsanitize=thread"
        preload=$(library tsan)
        # What is not instrumented synchronizes in ways that are not seen.
        export TSAN_OPTIONS="ignore_noninstrumented_modules=1 ${TSAN_OPTIONS:-}"
        # ThreadSanitizer does not know every layout of a process's memory.
        setarch -R true 2>/dev/null && run=(setarch -R)
        ;;
    address)
        flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
        preload="$(library asan) $(library ubsan)"
        export ASAN_OPTIONS="detect_leaks=0 ${ASAN_OPTIONS:-}" UBSAN_OPTIONS=print_stacktrace=1
        ;;
    *)
        echo "unknown sanitizer '$sanitizer': thread or address" >&2
        exit 2
        ;;
esac

cd "$root"
[ $# -gt 0 ] || set -- -n auto -k cuda tests/kernels/test_{fused,cuda}.py tests/kernels/test_layerwise_*.py
export RESODE_EMULATION_FLAGS="-O1 -fno-omit-frame-pointer $flags ${RESODE_EMULATION_FLAGS:-}"
LD_PRELOAD=$preload OMP_NUM_THREADS=1 \
    "${run[@]}" python -m pytest -p no:cacheprovider --capture=sys "$@"
