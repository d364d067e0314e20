// Managed memory in C: prefetches both ways, page faults both ways, and explicit pinned
// copies, over eight times a budget. The same as BenchmarkManaged of
// internal/benchmarks, under its names, where "plan" is what a Plan makes of it.
//
//	nvcc -O3 managed.cu -o managed -lpthread && ./managed [GiB [samples]]
//
// It takes at most a quarter of the memory that the card has free. Lines are in the format of Go benchmarks.
#include <cuda_runtime.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)

static const size_t MIB = 1 << 20, CHUNK = 32 * MIB;

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static cudaError_t prefetch(void *p, size_t n, bool to_device, cudaStream_t s) {
#if CUDART_VERSION >= 13000
	cudaMemLocation at = {to_device ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost, 0};
	return cudaMemPrefetchAsync(p, n, at, 0, s);
#else
	return cudaMemPrefetchAsync(p, n, to_device ? 0 : cudaCpuDeviceId, s);
#endif
}

static cudaError_t advise(void *p, size_t n, cudaMemoryAdvise what) {
#if CUDART_VERSION >= 13000
	cudaMemLocation at = {cudaMemLocationTypeHost, 0};
	return cudaMemAdvise(p, n, what, at);
#else
	return cudaMemAdvise(p, n, what, cudaCpuDeviceId);
#endif
}

// sum reads all of it, add writes all of it.
__global__ void sum(const ulonglong2 *p, size_t n, unsigned long long *out) {
	unsigned long long total = 0;
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		total += p[i].x ^ p[i].y;
	if (total == 1)
		*out = total;
}

__global__ void add(ulonglong2 *p, size_t n) {
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		p[i].x++;
}

static unsigned long long *sink;

static void work(void *p, size_t n, bool write, cudaStream_t s) {
	if (write)
		add<<<1024, 256, 0, s>>>((ulonglong2 *)p, n / sizeof(ulonglong2));
	else
		sum<<<1024, 256, 0, s>>>((const ulonglong2 *)p, n / sizeof(ulonglong2), sink);
	CHECK(cudaGetLastError());
}

// touch writes one byte of each page of a part, by one of several threads.
typedef struct { char *p; size_t n; } part_t;

static void *touch_part(void *arg) {
	part_t *part = (part_t *)arg;
	for (size_t i = 0; i < part->n; i += 4096)
		part->p[i] = 1;
	return NULL;
}

static void touch(char *p, size_t n, int threads) {
	pthread_t t[64];
	part_t part[64];
	for (int i = 0; i < threads; i++) {
		part[i] = (part_t){p + n / threads * i, n / threads};
		pthread_create(&t[i], NULL, touch_part, &part[i]);
	}
	for (int i = 0; i < threads; i++)
		pthread_join(t[i], NULL);
}

static void report(const char *what, size_t n, double took) {
	printf("BenchmarkManaged/");
	for (; *what; what++)
		putchar(*what == ' ' ? '-' : *what);
	printf("\t1\t%.0f ns/op\t%.2f GB/s\n", took * 1e9, n / took / 1e9);
}

int main(int argc, char **argv) {
	size_t room, total, n = (argc > 1 ? atoll(argv[1]) : 8) << 30;
	int samples = argc > 2 ? atoi(argv[2]) : 3;
	CHECK(cudaMemGetInfo(&room, &total));
	if (n > room / 4)
		n = room / 4 / (8 * CHUNK) * (8 * CHUNK);
	CHECK(cudaMalloc(&sink, sizeof *sink));
	cudaStream_t s, in, out;
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CHECK(cudaStreamCreateWithFlags(&in, cudaStreamNonBlocking));
	CHECK(cudaStreamCreateWithFlags(&out, cudaStreamNonBlocking));
	size_t budget = n / 8;
	printf("bytes %zu, budget %zu, chunk %zu\n", n, budget, CHUNK);

	for (int sample = 0; sample < samples; sample++) {
		char *m;
		CHECK(cudaMallocManaged((void **)&m, n, cudaMemAttachGlobal));
		double t = now();
		touch(m, n, 1);
		report("first touch by one CPU thread", n, now() - t);
		size_t part = n < 1024 * MIB ? n : 1024 * MIB;
		t = now();
		CHECK(prefetch(m, part, true, s));
		CHECK(cudaStreamSynchronize(s));
		double there = now() - t;
		t = now();
		CHECK(prefetch(m, part, false, s));
		CHECK(cudaStreamSynchronize(s));
		double back = now() - t;
		printf("BenchmarkManaged/prefetch/%zuGiB\t1\t%.0f ns/op\t%.2f GB/s\t%.2f back-GB/s\n", part >> 30, there * 1e9, part / there / 1e9, part / back / 1e9);
		t = now();
		work(m, n, true, s);
		CHECK(cudaStreamSynchronize(s));
		report("faults by the GPU", n, now() - t);
		t = now();
		touch(m, n, 1);
		report("faults by one CPU thread", n, now() - t);
		CHECK(prefetch(m, n, false, s));
		CHECK(cudaStreamSynchronize(s));

		for (int write = 0; write < 2; write++) {
			// Faults: nothing is moved ahead, and what is done with goes back.
			t = now();
			for (size_t off = 0; off < n; off += CHUNK) {
				work(m + off, CHUNK, write, s);
				CHECK(prefetch(m + off, CHUNK, false, s));
			}
			CHECK(cudaStreamSynchronize(s));
			report(write ? "budget, write: faults" : "budget, read: faults", n, now() - t);

			// Prefetches two chunks ahead, on a stream of their own, with advice for reads:
			// what one thread does with streams and events.
			cudaEvent_t ready[4], done[4];
			for (int i = 0; i < 4; i++) {
				CHECK(cudaEventCreateWithFlags(&ready[i], cudaEventDisableTiming));
				CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
			}
			if (!write)
				CHECK(advise(m, n, cudaMemAdviseSetReadMostly));
			t = now();
			size_t chunks = n / CHUNK;
			for (size_t i = 0; i < chunks + 2; i++) {
				if (i < chunks) {
					CHECK(prefetch(m + i * CHUNK, CHUNK, true, in));
					CHECK(cudaEventRecord(ready[i % 4], in));
				}
				if (i < 2)
					continue;
				size_t j = i - 2;
				CHECK(cudaStreamWaitEvent(s, ready[j % 4], 0));
				work(m + j * CHUNK, CHUNK, write, s);
				CHECK(cudaEventRecord(done[j % 4], s));
				if (write) {
					CHECK(cudaStreamWaitEvent(out, done[j % 4], 0));
					CHECK(prefetch(m + j * CHUNK, CHUNK, false, out));
				} else {
					CHECK(cudaEventSynchronize(done[j % 4]));
					CHECK(advise(m + j * CHUNK, CHUNK, cudaMemAdviseUnsetReadMostly)); // drops the copy
				}
			}
			CHECK(cudaStreamSynchronize(s));
			CHECK(cudaStreamSynchronize(out));
			double took = now() - t;
			char name[64];
			snprintf(name, sizeof name, "plan-%s/%zuGiB", write ? "write" : "read", n >> 30);
			report(name, n, took);
			for (int i = 0; i < 4; i++) {
				CHECK(cudaEventDestroy(ready[i]));
				CHECK(cudaEventDestroy(done[i]));
			}
		}
		CHECK(cudaFree(m));

		// Explicit: pinned memory and two buffers on the card.
		char *host, *device[2];
		cudaStream_t both[2] = {in, out};
		CHECK(cudaHostAlloc((void **)&host, n, 0));
		for (int i = 0; i < 2; i++)
			CHECK(cudaMalloc((void **)&device[i], CHUNK));
		for (int write = 0; write < 2; write++) {
			t = now();
			for (size_t i = 0; i * CHUNK < n; i++) {
				CHECK(cudaMemcpyAsync(device[i % 2], host + i * CHUNK, CHUNK, cudaMemcpyHostToDevice, both[i % 2]));
				work(device[i % 2], CHUNK, write, both[i % 2]);
				if (write)
					CHECK(cudaMemcpyAsync(host + i * CHUNK, device[i % 2], CHUNK, cudaMemcpyDeviceToHost, both[i % 2]));
			}
			CHECK(cudaStreamSynchronize(in));
			CHECK(cudaStreamSynchronize(out));
			report(write ? "budget, write: explicit pinned" : "budget, read: explicit pinned", n, now() - t);
		}
		for (int i = 0; i < 2; i++)
			CHECK(cudaFree(device[i]));
		CHECK(cudaFreeHost(host));
	}
	return 0;
}
