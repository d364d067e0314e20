#!/usr/bin/env bash
# Compiles the kernels in internal/gpukernels/src and examples/gcn/src to PTX, and those of the package also to
# cubins. The package and the example embed them, so that building this module needs no CUDA toolkit. Run it
# after a change of a .cu file, and commit the PTX, the cubins, SHA256SUMS and CUBINS, which nothing else
# writes: tests compare the hashes of sources, PTX and cubins.
#
#   scripts/ptx.sh          compiles
#   scripts/ptx.sh cubins   compiles the PTX that is in the repository to the cubins that are missing
#   scripts/ptx.sh check    compiles elsewhere, and compares with the PTX in the repository
#
# It uses nvcc, or where there is none libnvrtc through python3: set NVRTC to its path if the
# loader does not find it. Use CUDA 11.8 or older: a driver refuses PTX of a newer CUDA than its
# own, and a test says so. The PTX in the repository is that of libnvrtc 11.8.89 (Debian's packages
# libnvrtc11.2 and libnvrtc-builtins11.8, in non-free of bookworm), byte by byte.
#
# PTXAS names the programs that compile PTX to cubins, by default "ptxas". Each architecture is compiled by the
# first that knows it, and a cubin of a program is loaded by drivers of its CUDA or later: 11.8 (Debian's
# nvidia-cuda-toolkit) for those up to sm_90, 12.8 or later for the others. Where none knows an architecture,
# its cubin stays if the PTX is the same, and is removed if not: run "cubins" where there is a ptxas for it.
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

# cubins compiles the PTX of the current directory to cubins for the architectures that users have. PTX serves
# the others. CUBINS has a line for each: the hashes of the cubin and of its PTX, its name, and the compiler.
cubins() {
	local kernels arch cubin from line compiler
	touch CUBINS
	for kernels in blocks checksum memory parts; do
		from=$(sha256sum <"$kernels.ptx")
		for arch in 75 80 86 89 90 100 120; do
			cubin=$kernels.sm_$arch.cubin
			line=$(grep " ${from%% *} $cubin " CUBINS || true)
			[[ -z $line ]] || continue
			rm -f "$cubin.gz"
			sed -i "/ $cubin /d" CUBINS
			for compiler in ${PTXAS:-ptxas}; do
				if "$compiler" --gpu-name="sm_$arch" --output-file="$cubin" "$kernels.ptx" 2>/dev/null; then
					line="$(sha256sum <"$cubin" | cut -d' ' -f1) ${from%% *} $cubin $("$compiler" --version | grep -o 'V[0-9.]*$')"
					echo "$line" >>CUBINS
					gzip -9nc "$cubin" >"$cubin.gz" # which is embedded
					rm "$cubin"
					break
				fi
			done
			[[ -e $cubin.gz ]] || echo "ptx: $cubin: no ptxas knows it: it is missing" >&2
		done
	done
	LC_ALL=C sort -k3 -o CUBINS CUBINS
}

if [[ ${1:-} == cubins ]]; then
	cd internal/gpukernels/src
	cubins
	exit
fi

copy=
trap 'rm -rf "$copy"' EXIT
for committed in "$PWD"/{internal/gpukernels,examples/gcn}/src; do
	cd "$committed"
	if [[ ${1:-} == check ]]; then
		copy=$(mktemp -d)
		cp ./*.cu "$copy"
		cp ./CUBINS ./*.cubin.gz "$copy" 2>/dev/null || true # a test compares their hashes
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
	[[ -n $copy || ! -e CUBINS ]] || cubins
	LC_ALL=C sha256sum ./*.cu ./*.ptx | sed 's|\./||' | LC_ALL=C sort -k2 >SHA256SUMS
	if [[ -n $copy ]]; then
		diff -r "$committed" .
		rm -r "$copy"
	fi
done
if [[ -n $copy ]]; then
	echo "ptx: the PTX is that of its sources"
fi
