// Kernels that fill, check, copy and time memory. scripts/ptx.sh compiles this file to memory.ptx and to
// cubins, which package gpukernels embeds.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Contents are functions from a position to a byte. Each gives the 8 bytes at position 8*i
// as a little-endian word. content.go has the same functions in Go.
enum { HASH, CONSTANT, WALKING_BIT, COUNTER, RANDOM };

// hash32 takes five instructions, so that memory and not arithmetic bounds a check.
static __device__ __forceinline__ u32 hash32(u32 i, u32 seed, u32 high) {
	u32 x = i * 0x9E3779B1u + seed;
	x ^= x >> 15;
	return x * 0x85EBCA77u ^ high;
}

template <int KIND> static __device__ __forceinline__ u64 word(u64 i, u64 seed) {
	if (KIND == HASH) {
		u32 high = (u32)(i >> 31) * 0xC2B2AE3Du + (u32)(seed >> 32);
		u32 a = hash32((u32)(2 * i), (u32)seed, high);
		u32 b = hash32((u32)(2 * i + 1), (u32)seed, high);
		return (u64)b << 32 | a;
	}
	if (KIND == WALKING_BIT)
		return 1ull << (i & 63);
	if (KIND == COUNTER)
		return i * 8;
	if (KIND == RANDOM) { // splitmix64
		u64 z = seed + i * 0x9E3779B97F4A7C15ull;
		z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
		z = (z ^ z >> 27) * 0x94D049BB133111EBull;
		return z ^ z >> 31;
	}
	return seed;
}

// A content has the bytes from a position on: shift bits past the start of word first.
struct content {
	u64 first, seed, mask;
	u32 kind, shift;
	__device__ content(u64 at, u32 kind, u64 seed, u64 mask) : first(at >> 3), seed(seed), mask(mask), kind(kind), shift((at & 7) * 8) {}

	// vectors gives N times 16 bytes, each step vectors after the one before.
	template <int KIND, int N> __device__ __forceinline__ void vectors(ulonglong2 *v, u64 i, u64 step) const {
#pragma unroll
		for (int k = 0; k < N; k++) {
			u64 at = first + 2 * (i + k * step);
			v[k].x = word<KIND>(at, seed) ^ mask;
			v[k].y = word<KIND>(at + 1, seed) ^ mask;
			if (shift != 0) {
				u64 next = word<KIND>(at + 2, seed) ^ mask;
				v[k].x = v[k].x >> shift | v[k].y << (64 - shift);
				v[k].y = v[k].y >> shift | next << (64 - shift);
			}
		}
	}

	template <int N> __device__ __forceinline__ void vectors(ulonglong2 *v, u64 i, u64 step) const {
		switch (kind) {
		case HASH: vectors<HASH, N>(v, i, step); break;
		case WALKING_BIT: vectors<WALKING_BIT, N>(v, i, step); break;
		case COUNTER: vectors<COUNTER, N>(v, i, step); break;
		case RANDOM: vectors<RANDOM, N>(v, i, step); break;
		default: vectors<CONSTANT, N>(v, i, step);
		}
	}

	// byte gives the first byte.
	__device__ __forceinline__ u8 byte() const {
		ulonglong2 v;
		vectors<1>(&v, 0, 0);
		return (u8)v.x;
	}
};

// A range is n bytes at p: some bytes up to an address that is a multiple of 16, vectors of
// 16 bytes, and the rest.
struct range {
	u64 head, vectors, tail;
	__device__ range(const u8 *p, u64 n) {
		head = (0 - (u64)p) & 15;
		head = head < n ? head : n;
		vectors = (n - head) / 16;
		tail = n - head - 16 * vectors;
	}
	// edge gives the offset of byte i of the head + tail bytes outside the vectors.
	__device__ u64 edge(u64 i) const { return i < head ? i : i + 16 * vectors; }
};

static const int UNROLL = 4;

// pinned_fill writes the bytes at positions [at, at+n) of a content to p.
extern "C" __global__ void __launch_bounds__(256) pinned_fill(u8 *p, u64 n, u64 at, u32 kind, u64 seed, u64 mask) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
	range r(p, n);
	ulonglong2 *v = (ulonglong2 *)(p + r.head);
	content c(at + r.head, kind, seed, mask);
	for (u64 j = thread; j < r.vectors; j += threads) {
		ulonglong2 filled;
		c.vectors<1>(&filled, j, 0);
		v[j] = filled;
	}
	for (u64 i = thread; i < r.head + r.tail; i += threads)
		p[r.edge(i)] = content(at + r.edge(i), kind, seed, mask).byte();
}

// found is what a thread found to be wrong.
struct found {
	u64 bad, first;
	__device__ found() : bad(0), first(~0ull) {}
	// word adds the bytes that are not 0 in a difference of the 8 bytes from offset at on.
	__device__ __forceinline__ void word(u64 difference, u64 at) {
		const u64 low = 0x7F7F7F7F7F7F7F7Full;
		u64 wrong = (((difference & low) + low) | difference) & ~low; // the highest bit of each wrong byte
		if (wrong) {
			bad += __popcll(wrong);
			first = min(first, at + (__ffsll(wrong) - 1) / 8);
		}
	}
};

// pinned_check compares n bytes at p with the bytes at positions [at, at+n) of a content. It
// adds the number of wrong bytes to result[0], and lowers result[1] to the offset from p of
// the first.
extern "C" __global__ void __launch_bounds__(256, 4)
	pinned_check(const u8 *p, u64 n, u64 at, u32 kind, u64 seed, u64 mask, u64 *result) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
	found f;
	range r(p, n);
	const ulonglong2 *v = (const ulonglong2 *)(p + r.head);
	content c(at + r.head, kind, seed, mask);
	for (u64 j = thread; j < r.vectors; j += UNROLL * threads) {
		ulonglong2 got[UNROLL], want[UNROLL];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (j + k * threads < r.vectors)
				got[k] = v[j + k * threads];
		c.vectors<UNROLL>(want, j, threads);
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (j + k * threads < r.vectors) {
				u64 i = r.head + 16 * (j + k * threads);
				f.word(got[k].x ^ want[k].x, i);
				f.word(got[k].y ^ want[k].y, i + 8);
			}
	}
	for (u64 i = thread; i < r.head + r.tail; i += threads)
		if (p[r.edge(i)] != content(at + r.edge(i), kind, seed, mask).byte())
			f.word(1, r.edge(i));
	if (f.bad) {
		atomicAdd(result, f.bad);
		atomicMin(result + 1, f.first);
	}
}

// pinned_copy copies n bytes by loads and stores of the multiprocessors: 16 bytes each where
// both addresses allow that, else one.
extern "C" __global__ void __launch_bounds__(512) pinned_copy(u8 *dst, const u8 *src, u64 n) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
	if (((u64)dst ^ (u64)src) & 15) {
		for (u64 i = thread; i < n; i += threads)
			dst[i] = src[i];
		return;
	}
	range r(dst, n);
	for (u64 i = thread; i < r.head + r.tail; i += threads)
		dst[r.edge(i)] = src[r.edge(i)];
	uint4 *to = (uint4 *)(dst + r.head);
	const uint4 *from = (const uint4 *)(src + r.head);
	for (u64 j = thread; j < r.vectors; j += UNROLL * threads) {
		uint4 got[UNROLL];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (j + k * threads < r.vectors)
				got[k] = from[j + k * threads];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			if (j + k * threads < r.vectors)
				to[j + k * threads] = got[k];
	}
}

// pinned_chase follows a chain of indices: next = chain[next], one load after the other. It
// is for one thread. result[0] is where it ends, result[1] the clock cycles that it took.
extern "C" __global__ void pinned_chase(const u64 *chain, u64 start, u64 steps, u64 *result) {
	const volatile u64 *at = chain;
	u64 next = start;
	long long began = clock64();
	for (u64 i = 0; i < steps; i++)
		next = at[next];
	result[0] = next; // needs the last load, so the clock below is read after it
	__threadfence();
	result[1] = (u64)(clock64() - began);
}

static __device__ __forceinline__ u64 nanoseconds() {
	u64 t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

// pinned_busy runs for a number of nanoseconds by the device's timer, and ends after max_cycles
// clock cycles of a multiprocessor in any case.
extern "C" __global__ void pinned_busy(u64 ns, u64 max_cycles) {
	u64 began = nanoseconds();
	long long cycles = clock64();
	while (nanoseconds() - began < ns && (u64)(clock64() - cycles) < max_cycles)
		__nanosleep(100);
}
