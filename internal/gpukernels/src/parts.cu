// The kernel that copies parts of any size. scripts/ptx.sh compiles this file to parts.ptx and to cubins, which
// package gpukernels embeds.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A part is size bytes at src, which go to dst: offsets from the bases of the kernel.
struct part {
	u64 dst, src, size;
};

static const int UNROLL = 4; // loads of a thread in flight

// A warp copies n units.
template <class T> static __device__ __forceinline__ void copy(u64 dst, u64 src, u64 n, u32 lane) {
	T *to = (T *)dst;
	const T *from = (const T *)src;
	T got[UNROLL];
	for (u64 first = lane; first < n; first += 32 * UNROLL) {
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (first + 32 * k < n)
				got[k] = __ldcs(from + first + 32 * k);
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (first + 32 * k < n)
				__stcs(to + first + 32 * k, got[k]);
	}
}

// pinned_parts copies count parts, a warp each. It copies 16 bytes at a time between the first and the
// last such unit of dst, if src and dst are as far from a multiple of 16, and single bytes otherwise and
// outside of these. Parts must not overlap in dst. The threads of a block are a multiple of 32.
extern "C" __global__ void __launch_bounds__(1024) pinned_parts(u8 *dst, const u8 *src, const part *parts, u64 count) {
	u32 lane = threadIdx.x % 32;
	u64 warps = gridDim.x * (u64)(blockDim.x / 32);
	u64 i = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32;
	part next = {};
	if (i < count)
		next = parts[i];
	for (; i < count; i += warps) {
		u64 to = (u64)dst + next.dst, from = (u64)src + next.src, n = next.size;
		if (i + warps < count)
			next = parts[i + warps]; // the list may be in the host's memory: it is read while this part is copied
		if ((to ^ from) % 16 != 0) {
			copy<u8>(to, from, n, lane);
			continue;
		}
		u64 head = -to % 16;
		if (head > n)
			head = n;
		u64 units = (n - head) / 16, done = head + 16 * units;
		if (lane < head)
			((u8 *)to)[lane] = ((const u8 *)from)[lane];
		copy<uint4>(to + head, from + head, units, lane);
		if (lane < n - done)
			((u8 *)to)[done + lane] = ((const u8 *)from)[done + lane];
	}
}
