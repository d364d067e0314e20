// Kernels that fill, check, copy and time memory. scripts/ptx.sh compiles this file to
// memory.ptx, which package kernel embeds.

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

template <int KIND> static __device__ __forceinline__ u64 word(u64 i, u64 seed, u64 mask) {
	if (KIND == HASH) {
		u32 high = (u32)(i >> 31) * 0xC2B2AE3Du + (u32)(seed >> 32);
		u32 a = hash32((u32)(2 * i), (u32)seed, high);
		u32 b = hash32((u32)(2 * i + 1), (u32)seed, high);
		return ((u64)b << 32 | a) ^ mask;
	}
	if (KIND == WALKING_BIT)
		return (1ull << (i & 63)) ^ mask;
	if (KIND == COUNTER)
		return (i * 8) ^ mask;
	if (KIND == RANDOM) { // splitmix64
		u64 z = seed + i * 0x9E3779B97F4A7C15ull;
		z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
		z = (z ^ z >> 27) * 0x94D049BB133111EBull;
		return (z ^ z >> 31) ^ mask;
	}
	return seed ^ mask;
}

template <int KIND> static __device__ __forceinline__ u8 byte_at(u64 at, u64 seed, u64 mask) {
	return (u8)(word<KIND>(at >> 3, seed, mask) >> (at & 7) * 8);
}

// vector gives the 16 bytes at a position that is shift bits past the start of word i.
template <int KIND, bool ALIGNED>
static __device__ __forceinline__ ulonglong2 vector(u64 i, u32 shift, u64 seed, u64 mask) {
	ulonglong2 v;
	v.x = word<KIND>(i, seed, mask);
	v.y = word<KIND>(i + 1, seed, mask);
	if (!ALIGNED) {
		u64 next = word<KIND>(i + 2, seed, mask);
		v.x = v.x >> shift | v.y << (64 - shift);
		v.y = v.y >> shift | next << (64 - shift);
	}
	return v;
}

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
};

static const int UNROLL = 4;

template <int KIND, bool ALIGNED>
static __device__ void fill_vectors(ulonglong2 *v, u64 n, u64 at, u64 seed, u64 mask) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
	u64 first = at >> 3;
	u32 shift = (at & 7) * 8;
	for (u64 j = thread; j < n; j += threads)
		v[j] = vector<KIND, ALIGNED>(first + 2 * j, shift, seed, mask);
}

template <int KIND> static __device__ void fill(u8 *p, u64 n, u64 at, u64 seed, u64 mask) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x;
	range r(p, n);
	u64 end = n - r.tail;
	if (thread < r.head)
		p[thread] = byte_at<KIND>(at + thread, seed, mask);
	if (thread < r.tail)
		p[end + thread] = byte_at<KIND>(at + end + thread, seed, mask);
	ulonglong2 *v = (ulonglong2 *)(p + r.head);
	if (((at + r.head) & 7) == 0)
		fill_vectors<KIND, true>(v, r.vectors, at + r.head, seed, mask);
	else
		fill_vectors<KIND, false>(v, r.vectors, at + r.head, seed, mask);
}

// pinned_fill writes the bytes at positions [at, at+n) of a content to p. At least 16
// threads.
extern "C" __global__ void __launch_bounds__(256) pinned_fill(u8 *p, u64 n, u64 at, u32 kind, u64 seed, u64 mask) {
	switch (kind) {
	case HASH: fill<HASH>(p, n, at, seed, mask); break;
	case WALKING_BIT: fill<WALKING_BIT>(p, n, at, seed, mask); break;
	case COUNTER: fill<COUNTER>(p, n, at, seed, mask); break;
	case RANDOM: fill<RANDOM>(p, n, at, seed, mask); break;
	default: fill<CONSTANT>(p, n, at, seed, mask);
	}
}

// found is what a thread found to be wrong.
struct found {
	u64 bad, first;
	__device__ found() : bad(0), first(~0ull) {}
	__device__ void wrong(u64 at) {
		bad++;
		first = at < first ? at : first;
	}
	__device__ void bytes(u64 difference, u64 at) {
#pragma unroll 1
		for (int i = 0; i < 8; i++)
			if (difference >> 8 * i & 255)
				wrong(at + i);
	}
	__device__ void compare(ulonglong2 got, ulonglong2 want, u64 at) {
		if ((got.x ^ want.x) | (got.y ^ want.y)) {
			bytes(got.x ^ want.x, at);
			bytes(got.y ^ want.y, at + 8);
		}
	}
};

template <int KIND, bool ALIGNED>
static __device__ void check_vectors(found &f, const ulonglong2 *v, u64 n, u64 from, u64 at, u64 seed, u64 mask) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
	u64 first = at >> 3;
	u32 shift = (at & 7) * 8;
	u64 j = thread;
	for (; j + (UNROLL - 1) * threads < n; j += UNROLL * threads) {
		ulonglong2 got[UNROLL];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			got[k] = v[j + k * threads];
#pragma unroll
		for (int k = 0; k < UNROLL; k++) {
			u64 i = j + k * threads;
			f.compare(got[k], vector<KIND, ALIGNED>(first + 2 * i, shift, seed, mask), from + 16 * i);
		}
	}
	for (; j < n; j += threads)
		f.compare(v[j], vector<KIND, ALIGNED>(first + 2 * j, shift, seed, mask), from + 16 * j);
}

template <int KIND> static __device__ void check(const u8 *p, u64 n, u64 at, u64 seed, u64 mask, u64 *result) {
	u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x;
	found f;
	range r(p, n);
	u64 end = n - r.tail;
	if (thread < r.head && p[thread] != byte_at<KIND>(at + thread, seed, mask))
		f.wrong(thread);
	if (thread < r.tail && p[end + thread] != byte_at<KIND>(at + end + thread, seed, mask))
		f.wrong(end + thread);
	const ulonglong2 *v = (const ulonglong2 *)(p + r.head);
	if (((at + r.head) & 7) == 0)
		check_vectors<KIND, true>(f, v, r.vectors, r.head, at + r.head, seed, mask);
	else
		check_vectors<KIND, false>(f, v, r.vectors, r.head, at + r.head, seed, mask);
	if (f.bad) {
		atomicAdd(result, f.bad);
		atomicMin(result + 1, f.first);
	}
}

// pinned_check compares n bytes at p with the bytes at positions [at, at+n) of a content. It
// adds the number of wrong bytes to result[0], and lowers result[1] to the offset from p of
// the first. At least 16 threads.
extern "C" __global__ void __launch_bounds__(256)
	pinned_check(const u8 *p, u64 n, u64 at, u32 kind, u64 seed, u64 mask, u64 *result) {
	switch (kind) {
	case HASH: check<HASH>(p, n, at, seed, mask, result); break;
	case WALKING_BIT: check<WALKING_BIT>(p, n, at, seed, mask, result); break;
	case COUNTER: check<COUNTER>(p, n, at, seed, mask, result); break;
	case RANDOM: check<RANDOM>(p, n, at, seed, mask, result); break;
	default: check<CONSTANT>(p, n, at, seed, mask, result);
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
	u64 end = n - r.tail;
	if (thread < r.head)
		dst[thread] = src[thread];
	if (thread < r.tail)
		dst[end + thread] = src[end + thread];
	uint4 *to = (uint4 *)(dst + r.head);
	const uint4 *from = (const uint4 *)(src + r.head);
	u64 j = thread;
	for (; j + (UNROLL - 1) * threads < r.vectors; j += UNROLL * threads) {
		uint4 got[UNROLL];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			got[k] = from[j + k * threads];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			to[j + k * threads] = got[k];
	}
	for (; j < r.vectors; j += threads)
		to[j] = from[j];
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
