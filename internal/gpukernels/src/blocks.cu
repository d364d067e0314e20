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
	__device__ __forceinline__ u64 number(u64 i) const { return index ? index[i] : i; }
};

static const int UNROLL = 4; // loads of a thread in flight

// Lists may be in the host's memory, so that reading a number takes as long as reading a block: numbers
// are read while the blocks before are copied.

// copy_rows copies blocks of 32 units or more. A row is what a warp copies at a time: 32 units of a block,
// or fewer at its end. Each warp copies successive rows.
template <class T> static __device__ void copy_rows(side dst, side src, u64 count, u64 units) {
	u64 warp = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32, warps = gridDim.x * (u64)blockDim.x / 32;
	u64 lane = threadIdx.x % 32, rows = (units + 31) / 32, all = count * rows;
	u64 first = all / warps * warp + min(warp, all % warps), end = first + all / warps + (warp < all % warps);
	u64 to = 0, from = 0; // numbers of the blocks of the lane's row, of the next 32
	if (first + lane < end) {
		to = dst.number((first + lane) / rows);
		from = src.number((first + lane) / rows);
	}
	for (u64 i = first; i < end; i += 32) {
		u64 unit = (i + lane) % rows * 32, left = units - min(unit, units);
		u64 to_row = dst.base + to * dst.stride + unit * sizeof(T), from_row = src.base + from * src.stride + unit * sizeof(T);
		if (i + 32 + lane < end) {
			to = dst.number((i + 32 + lane) / rows);
			from = src.number((i + 32 + lane) / rows);
		}
		int n = min(end - i, (u64)32);
		for (int k = 0; k < n; k += UNROLL) {
			T got[UNROLL];
			bool copies[UNROLL];
#pragma unroll
			for (int u = 0; u < UNROLL; u++) {
				const T *row = (const T *)__shfl_sync(~0u, from_row, k + u);
				copies[u] = lane < __shfl_sync(~0u, left, k + u) && k + u < n;
				if (copies[u])
					got[u] = __ldcs(row + lane);
			}
#pragma unroll
			for (int u = 0; u < UNROLL; u++) {
				T *row = (T *)__shfl_sync(~0u, to_row, k + u);
				if (copies[u])
					__stcs(row + lane, got[u]);
			}
		}
	}
}

// copy_units copies smaller blocks, a thread a unit: neighbouring threads have neighbouring units.
template <class T> static __device__ void copy_units(side dst, side src, u64 count, u64 units) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x, all = count * units;
	u64 to[UNROLL], from[UNROLL]; // numbers of the blocks of the next units
#pragma unroll
	for (int k = 0; k < UNROLL; k++)
		if (thread + k * threads < all) {
			to[k] = dst.number((thread + k * threads) / units);
			from[k] = src.number((thread + k * threads) / units);
		}
	for (u64 i = thread; i < all; i += UNROLL * threads) {
		T got[UNROLL];
		T *unit[UNROLL];
#pragma unroll
		for (int k = 0; k < UNROLL; k++) {
			u64 j = i + k * threads;
			if (j < all) {
				unit[k] = (T *)(dst.base + to[k] * dst.stride) + j % units;
				got[k] = __ldcs((const T *)(src.base + from[k] * src.stride) + j % units);
			}
		}
#pragma unroll
		for (int k = 0; k < UNROLL; k++) {
			u64 next = i + (UNROLL + k) * threads;
			if (next < all) {
				to[k] = dst.number(next / units);
				from[k] = src.number(next / units);
			}
		}
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (i + k * threads < all)
				__stcs(unit[k], got[k]);
	}
}

template <class T> static __device__ void copy(side dst, side src, u64 count, u64 size) {
	u64 units = size / sizeof(T); // of a block
	if (units < 32)
		copy_units<T>(dst, src, count, units);
	else
		copy_rows<T>(dst, src, count, units);
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
