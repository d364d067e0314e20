// The kernel that copies many blocks. scripts/ptx.sh compiles this file to blocks.ptx and to cubins, which
// package gpukernels embeds. Divisions cost most of the time to compile it: there are few.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A side of the copies is memory with a block at each multiple of stride, or at those multiples
// that a list has.
struct side {
	u64 base, stride;
	const u32 *index; // null for 0, 1, 2 ...
	__device__ side(const void *base, const u32 *index, u64 stride) : base((u64)base), stride(stride), index(index) {}
	__device__ __forceinline__ u32 number(u32 i) const { return index ? index[i] : i; }
};

// A place is a part of a block, of as many equal parts as every block has.
struct place {
	u32 block, part;
	__device__ __forceinline__ place(u32 block, u32 part) : block(block), part(part) {}
	__device__ __forceinline__ void add(place step, u32 parts) {
		block += step.block;
		part += step.part;
		if (part >= parts) {
			block++;
			part -= parts;
		}
	}
};

// Lists may be in the host's memory, so that reading a number takes as long as reading a block: numbers
// are read while the blocks before are copied.

// A row is 512 bytes that a warp copies at once, or as many of them as are of one block: n from lo on. The side on the
// host begins at a multiple of 16 bytes.
struct row {
	u64 to, from;
	u32 bounds; // lo, and n << 16
};

// straddle returns the 16 bytes from byte at, below 16, of a and b.
static __device__ __forceinline__ uint4 straddle(uint4 a, uint4 b, u32 at) {
	if (at & 8)
		a.x = a.z, a.y = a.w, a.z = b.x, a.w = b.y, b.x = b.z, b.y = b.w;
	if (at & 4)
		a.x = a.y, a.y = a.z, a.z = a.w, a.w = b.x, b.x = b.y;
	u32 bits = at % 4 * 8;
	return make_uint4(__funnelshift_r(a.x, a.y, bits), __funnelshift_r(a.y, a.z, bits), __funnelshift_r(a.z, a.w, bits), __funnelshift_r(a.w, b.x, bits));
}

// copy_rows copies four rows, from that of lane k on, with all loads in flight. at is 16 times the number of the lane.
// Blocks may have any size and address. The rows are read by aligned words of 16 bytes, which may have other bytes
// beside those of the block: no page has only a part of such a word. In shared memory they are shifted. The target is
// written by aligned words too, and by single bytes at the ends of a row, where a word has other bytes.
__device__ __forceinline__ void copy_rows(row rows, int k, int at) {
	const int ROWS = 4;
	__shared__ uint4 shared[1024 / 32][33]; // a row of each warp: 33 words, if its source does not begin at a multiple of 16
	uint4 *words = shared[threadIdx.x / 32];
	uint4 got[ROWS];
	u32 last[ROWS]; // the 33rd word: each of four lanes has a quarter
#pragma unroll
	for (int u = 0; u < ROWS; u++) {
		u64 from = __shfl_sync(~0u, rows.from, k + u);
		u32 bounds = __shfl_sync(~0u, rows.bounds, k + u);
		int n = bounds >> 16, skew = from % 16, begin = (bounds & 0xFFFF) + skew, end = n ? begin + n : 0;
		if (at + 16 > begin && at < end)
			got[u] = __ldcs((const uint4 *)(from - skew + at));
		if (end > 512 && at < 64)
			last[u] = __ldcs((const u32 *)(from - skew + 512 + at / 4));
	}
#pragma unroll
	for (int u = 0; u < ROWS; u++) {
		__syncwarp();
		words[at / 16] = got[u];
		if (at < 64)
			((u32 *)(words + 32))[at / 16] = last[u];
		__syncwarp();
		u64 to = __shfl_sync(~0u, rows.to, k + u);
		u32 bounds = __shfl_sync(~0u, rows.bounds, k + u);
		int skew = __shfl_sync(~0u, (u32)rows.from, k + u) % 16, shift = to % 16;
		int begin = bounds & 0xFFFF, end = begin + (bounds >> 16);
		int head = min(end, (begin + shift + 15 & ~15) - shift), tail = max(head, (end + shift & ~15) - shift); // whole words are between them
		int word = at - shift;
		if (word >= head && word < tail)
			__stcs((uint4 *)(to + word), straddle(words[(word + skew) / 16], words[(word + skew) / 16 + 1], (word + skew) % 16));
		int byte = at / 16 + (at < 256 ? begin : tail - 16);
		if (byte < (at < 256 ? head : end))
			__stcs((u8 *)(to + byte), ((u8 *)words)[byte + skew]);
	}
}

// copy_large copies large blocks. Each warp copies successive rows. Those of longer blocks begin at lines of 128 bytes
// on the host's side, so that no line crosses the link twice.
static __device__ void copy_large(side dst, side src, u32 count, u64 size, bool to_host) {
	side host = to_host ? dst : src;
	u32 line = size >= 1024 ? 128 : 16;
	u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32, lane = threadIdx.x % 32;
	u32 parts = (size + ((host.base | host.stride) % line ? line - 1 : 0) + 511) / 512; // rows of a block
	u64 all = (u64)count * parts, each = all / warps;
	u32 more = all - each * warps, left = each + (warp < more); // rows of the warp
	u64 first = each * warp + min(warp, more) + lane, block = first / parts;
	place at(block, first - block * parts), step(32 / parts, 32 % parts); // the lane's row, of the next 32
	u32 to = 0, from = 0; // numbers of its block
	if (lane < left) {
		to = dst.number(at.block);
		from = src.number(at.block);
	}
	for (; left > 0; left -= min(left, 32)) {
		row r;
		r.to = dst.base + to * dst.stride;
		r.from = src.base + from * src.stride;
		u64 begin = at.part * 512ull;
		u32 skew = (to_host ? r.to : r.from) % line;
		r.to += begin - skew;
		r.from += begin - skew;
		u32 lo = begin ? 0 : skew, n = lane < left ? min(size + skew - min(begin, size + skew), 512ull) - lo : 0;
		r.bounds = lo | n << 16;
		at.add(step, parts);
		if (32 + lane < left) {
			to = dst.number(at.block);
			from = src.number(at.block);
		}
#pragma unroll 1
		for (u32 k = 0; k < min(left, 32); k += 4)
			copy_rows(r, k, 16 * lane);
	}
}

static __device__ __forceinline__ uint4 load(u64 from, u32 unit) {
	uint4 got;
	if (unit == 16)
		got = __ldcs((const uint4 *)from);
	else if (unit == 8)
		*(uint2 *)&got = __ldcs((const uint2 *)from);
	else if (unit == 4)
		got.x = __ldcs((const u32 *)from);
	else
		got.x = __ldcs((const u8 *)from);
	return got;
}

static __device__ __forceinline__ void store(u64 to, uint4 got, u32 unit) {
	if (unit == 16)
		__stcs((uint4 *)to, got);
	else if (unit == 8)
		__stcs((uint2 *)to, *(uint2 *)&got);
	else if (unit == 4)
		__stcs((u32 *)to, got.x);
	else
		__stcs((u8 *)to, (u8)got.x);
}

// copy_small copies smaller blocks. A thread copies a unit: neighbouring threads have neighbouring units.
static __device__ void copy_small(side dst, side src, u32 count, u32 size, u32 unit) {
	const int UNROLL = 4; // units of a thread in flight
	u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x, units = size / unit;
	place at(thread / units, thread % units), step(threads / units, threads % units);
	u32 to[UNROLL], from[UNROLL]; // numbers of the blocks of the next units
	u32 offset[UNROLL], n = 0;    // in the block; how many there are
#pragma unroll
	for (int k = 0; k < UNROLL; k++, at.add(step, units))
		if (at.block < count) {
			to[k] = dst.number(at.block);
			from[k] = src.number(at.block);
			offset[k] = at.part * unit;
			n++;
		}
	while (n > 0) {
		uint4 got[UNROLL];
		u64 target[UNROLL];
		u32 copies = n;
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (k < copies) {
				target[k] = dst.base + to[k] * dst.stride + offset[k];
				got[k] = load(src.base + from[k] * src.stride + offset[k], unit);
			}
		n = 0;
#pragma unroll
		for (int k = 0; k < UNROLL; k++, at.add(step, units))
			if (at.block < count) {
				to[k] = dst.number(at.block);
				from[k] = src.number(at.block);
				offset[k] = at.part * unit;
				n++;
			}
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (k < copies)
				store(target[k], got[k], unit);
	}
}

// pinned_blocks copies count blocks of size bytes. Block i of either side is at base + index[i] * stride, or without a
// list at base + i * stride. Blocks of dst must not overlap. The threads of a block are a multiple of 32.
// to_host is not 0 if dst is on the other side of the link, and 0 if src is.
extern "C" __global__ void __launch_bounds__(1024) pinned_blocks(u8 *dst, const u32 *dst_index, u64 dst_stride,
	const u8 *src, const u32 *src_index, u64 src_stride, u32 count, u64 size, u32 to_host) {
	side to(dst, dst_index, dst_stride), from(src, src_index, src_stride);
	u64 all = (u64)dst | dst_stride | (u64)src | src_stride | size;
	u32 unit = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 1;
	u32 least = unit == 1 ? 64 : unit == 4 ? 128 : 512; // of a large block (H200, 2026-11-29)
	if (size < least)
		copy_small(to, from, count, size, unit);
	else
		copy_large(to, from, count, size, to_host);
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
