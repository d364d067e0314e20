#!/usr/bin/env bash
# Compiles the kernels in internal/gpukernels/src and examples/gcn/src to PTX, which the package and the
# example embed, so that building this module needs no CUDA toolkit. Run it after a change of a
# .cu file, and commit the PTX and SHA256SUMS, which nothing else writes: a test compares the
# hashes of the sources and of the PTX.
#
#   scripts/ptx.sh          compiles
#   scripts/ptx.sh check    compiles elsewhere, and compares with the PTX in the repository
#
# It uses nvcc, or where there is none libnvrtc through python3: set NVRTC to its path if the
# loader does not find it. Use CUDA 11.8 or older: a driver refuses PTX of a newer CUDA than its
# own, and a test says so. The PTX in the repository is that of libnvrtc 11.8.89 (Debian's packages
# libnvrtc11.2 and libnvrtc-builtins11.8, in non-free of bookworm), byte by byte.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# nvrtc SOURCE PTX compiles with libnvrtc.
nvrtc() {
	python3 - "$@" <<'PYTHON'
import ctypes, os, sys
from ctypes.util import find_library

source, ptx = sys.argv[1:]
lib = ctypes.CDLL(os.environ.get("NVRTC") or find_library("nvrtc") or sys.exit("ptx: neither nvcc nor libnvrtc found"))
program = ctypes.c_void_p()

def check(code):
    if code != 0:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        size = ctypes.c_size_t()
        log = b""
        if program and lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0:
            text = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, text)
            log = text.value
        sys.exit(f"ptx: {source}: {lib.nvrtcGetErrorString(code).decode()}\n{log.decode()}")

text = open(source, "rb").read()
check(lib.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None))
options = [b"--gpu-architecture=compute_75", b"--std=c++14"]
check(lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
size = ctypes.c_size_t()
check(lib.nvrtcGetPTXSize(program, ctypes.byref(size)))
out = ctypes.create_string_buffer(size.value)
check(lib.nvrtcGetPTX(program, out))
open(ptx, "wb").write(out.value)
PYTHON
}

copy=
trap 'rm -rf "$copy"' EXIT
for committed in "$PWD"/{internal/gpukernels,examples/gcn}/src; do
	cd "$committed"
	if [[ ${1:-} == check ]]; then
		copy=$(mktemp -d)
		cp ./*.cu "$copy"
		cd "$copy"
	fi
	for source in *.cu; do
		ptx=${source%.cu}.ptx
		if command -v nvcc >/dev/null; then
			nvcc --ptx --gpu-architecture=compute_75 --std=c++14 -o "$ptx" "$source"
		else
			nvrtc "$source" "$ptx"
		fi
		[[ ! -e $committed/$ptx.gz ]] || gzip -9nc "$ptx" >"$ptx.gz" # which is embedded
		echo "$ptx: $(grep -m1 '^\.version' "$ptx"), $(grep -c '\.entry' "$ptx") kernels"
	done
	LC_ALL=C sha256sum ./*.cu ./*.ptx | sed 's|\./||' | LC_ALL=C sort -k2 >SHA256SUMS
	if [[ -n $copy ]]; then
		diff -r "$committed" .
		rm -r "$copy"
	fi
done
if [[ -n $copy ]]; then
	echo "ptx: the PTX is that of its sources"
fi
