// Kernels for small neural networks on matrices of float32 in row-major order.
// scripts/ptx.sh compiles this file to network.ptx, which the program embeds.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u64 this_thread() { return blockIdx.x * (u64)blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 all_threads() { return gridDim.x * (u64)blockDim.x; }

// pinned_edges_add adds for each edge e row from[e] of src, times weight[e], to row to[e]
// of dst. Without weights the factor is 1.
extern "C" __global__ void __launch_bounds__(256)
	pinned_edges_add(float *dst, const float *src, const u32 *from, const u32 *to, const float *weight, u64 edges, u32 width) {
	u32 lane = threadIdx.x & 31;
	for (u64 e = this_thread() / 32; e < edges; e += all_threads() / 32) {
		const float *x = src + (u64)from[e] * width;
		float *y = dst + (u64)to[e] * width;
		float w = weight ? weight[e] : 1.0f;
		for (u32 c = lane; c < width; c += 32)
			atomicAdd(y + c, w * x[c]);
	}
}

// pinned_relu sets dst to src, and to 0 where src is negative. Both may be the same.
extern "C" __global__ void __launch_bounds__(256) pinned_relu(float *dst, const float *src, u64 n) {
	for (u64 i = this_thread(); i < n; i += all_threads()) {
		float x = src[i];
		dst[i] = x < 0.0f ? 0.0f : x; // keeps NaN
	}
}

// pinned_relu_gradient sets dst to gradient where the output of pinned_relu is positive, and
// to 0 elsewhere. dst may be gradient.
extern "C" __global__ void __launch_bounds__(256)
	pinned_relu_gradient(float *dst, const float *gradient, const float *output, u64 n) {
	for (u64 i = this_thread(); i < n; i += all_threads())
		dst[i] = output[i] > 0.0f ? gradient[i] : 0.0f;
}

// pinned_cross_entropy adds scale times the cross-entropy of the softmax of each row and its
// label to loss, and sets gradient to the gradient of that by logits. Rows whose label is
// not a class count nothing. gradient may be logits, or null.
extern "C" __global__ void __launch_bounds__(256)
	pinned_cross_entropy(float *gradient, const float *logits, const u32 *label, double *loss, u64 rows, u32 classes, float scale) {
	u32 lane = threadIdx.x & 31;
	double sum = 0;
	for (u64 r = this_thread() / 32; r < rows; r += all_threads() / 32) {
		const float *x = logits + r * classes;
		u32 want = label[r];
		float largest = __int_as_float(0xff800000);
		for (u32 c = lane; c < classes; c += 32)
			largest = fmaxf(largest, x[c]);
		for (int d = 16; d; d /= 2)
			largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
		float total = 0;
		for (u32 c = lane; c < classes; c += 32)
			total += expf(x[c] - largest);
		for (int d = 16; d; d /= 2)
			total += __shfl_xor_sync(~0u, total, d);
		float mine = want < classes ? x[want] : 0;
		__syncwarp(); // x may be gradient
		for (u32 c = lane; gradient && c < classes; c += 32) {
			float p = expf(x[c] - largest) / total;
			gradient[r * classes + c] = want < classes ? (p - (c == want ? 1.0f : 0.0f)) * scale : 0.0f;
		}
		if (want < classes)
			sum += (double)logf(total) + largest - mine;
	}
	if (lane == 0 && sum != 0)
		atomicAdd(loss, sum * scale);
}

// pinned_sgd is a step of stochastic gradient descent: weight -= rate * gradient.
extern "C" __global__ void __launch_bounds__(256) pinned_sgd(float *weight, const float *gradient, float rate, u64 n) {
	for (u64 i = this_thread(); i < n; i += all_threads())
		weight[i] -= rate * gradient[i];
}

// pinned_scale multiplies x by factor.
extern "C" __global__ void __launch_bounds__(256) pinned_scale(float *x, float factor, u64 n) {
	for (u64 i = this_thread(); i < n; i += all_threads())
		x[i] *= factor;
}

// A block computes a tile of TILE x TILE elements, 4 x 4 a thread, STEP products at a time.
static const int TILE = 64, STEP = 16, THREADS = 256;

// load brings a tile of an operand into shared memory: element [k][i] is column k0+k of row
// i0+i. A transposed operand has k as its row in memory. stride is the length of its rows.
template <bool TRANSPOSED>
static __device__ __forceinline__ void load(float (*tile)[TILE + 4], const float *m, u64 stride, u64 i0, u64 rows, u64 k0, u64 k1) {
#pragma unroll
	for (int n = 0; n < TILE * STEP / THREADS; n++) {
		int e = threadIdx.x + n * THREADS;
		int i = TRANSPOSED ? e % TILE : e / STEP, k = TRANSPOSED ? e / TILE : e % STEP;
		bool inside = i0 + i < rows && k0 + k < k1;
		u64 at = TRANSPOSED ? (k0 + k) * stride + i0 + i : (i0 + i) * stride + k0 + k;
		tile[k][i] = inside ? m[at] : 0.0f;
	}
}

template <bool TA, bool TB>
static __device__ void multiply(float *c, const float *a, const float *b, u64 m, u64 n, u64 k, float alpha, float beta) {
	__shared__ __align__(16) float as[STEP][TILE + 4];
	__shared__ __align__(16) float bs[STEP][TILE + 4];
	u64 row = (u64)blockIdx.x * TILE, column = (u64)blockIdx.y * TILE;
	u64 share = (k + gridDim.z - 1) / gridDim.z;
	share = (share + STEP - 1) / STEP * STEP;
	u64 k0 = blockIdx.z * share, k1 = k0 + share < k ? k0 + share : k;
	int ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
	float sum[4][4] = {};
	for (; k0 < k1; k0 += STEP) {
		load<TA>(as, a, TA ? m : k, row, m, k0, k1);
		load<!TB>(bs, b, TB ? k : n, column, n, k0, k1);
		__syncthreads();
#pragma unroll
		for (int p = 0; p < STEP; p++) {
			float4 x = *(const float4 *)&as[p][ty], y = *(const float4 *)&bs[p][tx];
			float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
			for (int i = 0; i < 4; i++)
#pragma unroll
				for (int j = 0; j < 4; j++)
					sum[i][j] = fmaf(xs[i], ys[j], sum[i][j]);
		}
		__syncthreads();
	}
#pragma unroll
	for (int i = 0; i < 4; i++)
#pragma unroll
		for (int j = 0; j < 4; j++) {
			if (row + ty + i >= m || column + tx + j >= n)
				continue;
			float *to = c + (row + ty + i) * n + column + tx + j;
			if (gridDim.z > 1)
				atomicAdd(to, alpha * sum[i][j]);
			else
				*to = alpha * sum[i][j] + (beta == 0.0f ? 0.0f : beta * *to);
		}
}

// pinned_multiply_XY computes c = alpha * A * B + beta * c, where c is m x n and k the inner
// dimension. A is a (n) or its transpose (t), and B is b or its transpose. Blocks are tiles of
// c: x down, y across. With several blocks in z each adds its share of k to c, and beta is
// not applied.
#define MULTIPLY(NAME, TA, TB)                                                                                              \
	extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
		NAME(float *c, const float *a, const float *b, u64 m, u64 n, u64 k, float alpha, float beta) {                     \
		multiply<TA, TB>(c, a, b, m, n, k, alpha, beta);                                                                   \
	}
MULTIPLY(pinned_multiply_nn, false, false)
MULTIPLY(pinned_multiply_nt, false, true)
MULTIPLY(pinned_multiply_tn, true, false)
MULTIPLY(pinned_multiply_tt, true, true)
