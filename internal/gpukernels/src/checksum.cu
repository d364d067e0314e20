// The kernel that computes checksums. scripts/ptx.sh compiles this file to checksum.ptx and to cubins, which
// package gpukernels embeds.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

// A span is size bytes at an address.
struct span {
	u64 address, size;
};

// CRC-32C computes with polynomials over two elements, modulo one of degree 32: bit 31 of a word is x^0.
static const u32 POLYNOMIAL = 0x82F63B78u; // also x^32
static const u32 X = 1u << 30;

static __device__ constexpr u32 times(u32 a, u32 b) {
	u32 product = 0;
#pragma unroll 1
	for (int i = 0; i < 32; i++) {
		product ^= b & (0 - (a >> 31));
		a <<= 1;
		b = b >> 1 ^ (POLYNOMIAL & (0 - (b & 1)));
	}
	return product;
}

// power gives x to the power of 2^i.
static __device__ constexpr u32 power(int i) {
	u32 p = X;
	for (; i > 0; i--)
		p = times(p, p);
	return p;
}

// The powers of 2^7 to 2^14: 16 bytes, 32, and so on.
static __device__ const u32 POWERS[] = {power(7), power(8), power(9), power(10), power(11), power(12), power(13), power(14)};

static const int THREADS = 256, ROW_LOG = 12; // a row is 2^12 bytes: 16 of each thread
static const int UNROLL = 4;                  // rows in flight

// The table has the products of each byte of a word and x to the power of a row's bits.
typedef u32 table[4][256];

static __device__ __forceinline__ u32 behind(const table &t, u32 sum) {
	return t[0][sum & 255] ^ t[1][sum >> 8 & 255] ^ t[2][sum >> 16 & 255] ^ t[3][sum >> 24];
}

static __device__ __forceinline__ void add(const table &t, uint4 &sum, uint4 next) {
	sum.x = behind(t, sum.x) ^ next.x;
	sum.y = behind(t, sum.y) ^ next.y;
	sum.z = behind(t, sum.z) ^ next.z;
	sum.w = behind(t, sum.w) ^ next.w;
}

// A range is 16 bytes at a time from an address before the first byte on, or at it, with zeros where no byte of the
// span is.
struct range {
	u64 start, end; // addresses
	s64 vectors;
	__device__ explicit range(span s) : start(s.address), end(s.address + s.size), vectors((s64)((end + 15) / 16 - start / 16)) {}
	__device__ __forceinline__ const uint4 *at(s64 i) const { return (const uint4 *)(start & ~15ull) + i; }
	__device__ __noinline__ uint4 edge(s64 i) const {
		u64 low = 0, high = 0;
#pragma unroll 1
		for (u64 p = max((u64)at(i), start); p < min((u64)(at(i) + 1), end); p++)
			(p & 8 ? high : low) |= (u64) * (const u8 *)p << 8 * (p & 7);
		return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
	}
};

// joined gives in lane 0 the sum of the sums of a warp's first lanes, as many as powers have bits. Each is behind the
// next by the first power.
static __device__ __forceinline__ u32 joined(u32 sum, const u32 *powers, int steps) {
#pragma unroll 1
	for (int k = 0; k < steps; k++) {
		u32 next = __shfl_down_sync(~0u, sum, 1 << k);
		sum = times(sum, powers[k]) ^ next;
	}
	return sum;
}

// pinned_crc32c writes the CRC-32C of each of count spans, a block of 256 threads each.
extern "C" __global__ void __launch_bounds__(256) pinned_crc32c(const span *spans, u64 count, u32 *sums) {
	__shared__ table row;
	__shared__ u32 warps[THREADS / 32];
	u32 thread = threadIdx.x;
	constexpr u32 distance = power(ROW_LOG + 3);
#pragma unroll 1
	for (int k = 0; k < 4; k++)
		row[k][thread] = times(thread << 8 * k, distance);
	__syncthreads();
	for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
		range r(spans[i]);
		s64 rows = (r.vectors + THREADS - 1) / THREADS, at = r.vectors - rows * THREADS + thread; // zeros come first
		uint4 sum = make_uint4(0, 0, 0, 0);
		for (s64 k = 0; k < rows;) {
			if (k > 0 && k + UNROLL < rows) {
				uint4 got[UNROLL];
#pragma unroll
				for (int u = 0; u < UNROLL; u++)
					got[u] = __ldcs(r.at(at + u * THREADS));
#pragma unroll
				for (int u = 0; u < UNROLL; u++)
					add(row, sum, got[u]);
				k += UNROLL;
				at += UNROLL * THREADS;
			} else {
				bool inside = at > 0 && at < r.vectors - 1;
				add(row, sum, inside ? __ldcs(r.at(at)) : at < 0 ? make_uint4(0, 0, 0, 0) : r.edge(at));
				k++;
				at += THREADS;
			}
		}
		u32 all = times(sum.x, POLYNOMIAL) ^ sum.y;
		all = times(all, POLYNOMIAL) ^ sum.z;
		all = times(all, POLYNOMIAL) ^ sum.w;
		all = joined(times(all, POLYNOMIAL), POWERS, 5); // a warp, by 16 bytes
		if (thread % 32 == 0)
			warps[thread / 32] = all;
		__syncthreads();
		if (thread < 32) {
			all = joined(thread < THREADS / 32 ? warps[thread] : 0, POWERS + 5, 3); // by 512 bytes
			if (thread == 0) {
#pragma unroll 1
				for (u64 zeros = (0 - r.end) % 16 * 8; zeros > 0; zeros--) // behind the bytes: divided by x
					all = all >> 31 ? (all ^ POLYNOMIAL) << 1 | 1 : all << 1;
				constexpr u32 byte = power(3);
				u32 before = ~0u, p = byte;
#pragma unroll 1
				for (u64 n = r.end - r.start; n > 0; n >>= 1, p = times(p, p))
					if (n & 1)
						before = times(before, p);
				sums[i] = ~(all ^ before);
			}
		}
		__syncthreads();
	}
}
