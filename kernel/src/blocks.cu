// The kernel that copies many blocks. scripts/ptx.sh compiles this file to blocks.ptx, which
// package kernel embeds.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A side of the copies is memory with a block at each multiple of stride, or at those multiples
// that a list has.
struct side {
	u64 base, stride;
	const u32 *index; // null for 0, 1, 2 ...
	__device__ side(const void *base, const u32 *index, u64 stride) : base((u64)base), stride(stride), index(index) {}
	__device__ __forceinline__ u64 block(u64 i) const { return base + (index ? index[i] : i) * stride; }
};

static const int UNROLL = 4; // loads of a thread in flight

template <class T> static __device__ void copy(side dst, side src, u64 count, u64 size) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
	u64 units = size / sizeof(T); // of a block
	T got[UNROLL];
	if (units < 32) { // a thread a unit: neighbouring threads have neighbouring units
		for (u64 i = thread; i < count * units; i += UNROLL * threads) {
#pragma unroll
			for (int k = 0; k < UNROLL; k++) {
				u64 j = i + k * threads;
				if (j < count * units)
					got[k] = __ldcs((const T *)src.block(j / units) + j % units);
			}
#pragma unroll
			for (int k = 0; k < UNROLL; k++) {
				u64 j = i + k * threads;
				if (j < count * units)
					__stcs((T *)dst.block(j / units) + j % units, got[k]);
			}
		}
		return;
	}
	// A warp a piece of a block.
	const u64 piece = 32 * UNROLL;
	u64 pieces = (units + piece - 1) / piece;
	for (u64 i = thread / 32; i < count * pieces; i += threads / 32) {
		u64 block = i / pieces, first = i % pieces * piece + threadIdx.x % 32;
		const T *from = (const T *)src.block(block);
		T *to = (T *)dst.block(block);
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (first + 32 * k < units)
				got[k] = __ldcs(from + first + 32 * k);
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (first + 32 * k < units)
				__stcs(to + first + 32 * k, got[k]);
	}
}

// pinned_blocks copies count blocks of size bytes, by 16 bytes where all addresses allow that, else
// by 4 or by one. Block i of either side is at base + index[i] * stride, or without a list at
// base + i * stride. Blocks of dst must not overlap. The threads of a block are a multiple of 32.
extern "C" __global__ void __launch_bounds__(1024)
	pinned_blocks(u8 *dst, const u32 *dst_index, u64 dst_stride, const u8 *src, const u32 *src_index, u64 src_stride, u64 count, u64 size) {
	side to(dst, dst_index, dst_stride), from(src, src_index, src_stride);
	u64 all = (u64)dst | dst_stride | (u64)src | src_stride | size;
	if (all % 16 == 0)
		copy<uint4>(to, from, count, size);
	else if (all % 4 == 0)
		copy<u32>(to, from, count, size);
	else
		copy<u8>(to, from, count, size);
}

// pinned_first_beyond finds the first of count indices that is limit or more. result[0] becomes its
// number, or count if there is none, and result[1] the index, or 0. It is for one block of threads.
extern "C" __global__ void __launch_bounds__(1024)
	pinned_first_beyond(const u32 *index, u64 count, u64 limit, u64 *result) {
	__shared__ u64 first;
	if (threadIdx.x == 0)
		first = count;
	__syncthreads();
	for (u64 i = threadIdx.x; i < count; i += blockDim.x)
		if (index[i] >= limit) {
			atomicMin(&first, i);
			break;
		}
	__syncthreads();
	if (threadIdx.x == 0) {
		result[0] = first;
		result[1] = first < count ? index[first] : 0;
	}
}
