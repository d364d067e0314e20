// The loops of BenchmarkCalls of internal/benchmarks in C, printed in the format of Go
// benchmarks under the same names, so that benchstat can set both side by side; those with
// underscores are of cudart's BenchmarkCalls. release-after-copy is what a pool does, by hand: a
// few buffers with an event each, which are used again when the GPU is done with them. A query
// that finds new work done takes longer than one that does not. Copies/upload is a copy of ordinary memory, in one of
// eight places, into pinned memory, its copy to the GPU, and queries until that is done.
//
//	cc -O2 -I$CUDA/include calls.c -L$CUDA/lib64 -lcudart -o calls && ./calls 10
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

#define LOOP(name, n, body) do { \
	CHECK(cudaStreamSynchronize(s)); \
	for (int i = 0; i < (n) / 10; i++) { body; } \
	CHECK(cudaStreamSynchronize(s)); \
	double start = now(); \
	for (int i = 0; i < (n); i++) { body; } \
	double took = now() - start; \
	CHECK(cudaStreamSynchronize(s)); \
	printf("Benchmark%s\t%d\t%.1f ns/op\n", name, (n), took / (n)); \
} while (0)

enum { PLACES = 8, PLACE = 4 << 20, LARGEST = 32 << 10 };

static void small_uploads(cudaStream_t s, void *mem, char *host, char *source) {
	static const struct { const char *name; size_t n; } rows[] = {
		{"Copies/upload/64B/by=query", 64}, {"Copies/upload/4KiB/by=query", 4 << 10},
		{"Copies/upload/16KiB/by=query", 16 << 10}, {"Copies/upload/32KiB/by=query", LARGEST}};
	for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
		size_t n = rows[r].n;
		LOOP(rows[r].name, 20000, memcpy(host, source + (size_t)(i % PLACES) * PLACE, n);
			CHECK(cudaMemcpyAsync(mem, host, n, cudaMemcpyHostToDevice, s)); while (cudaStreamQuery(s) == cudaErrorNotReady) {});
	}
}

int main(int argc, char **argv) {
	int samples = argc > 1 ? atoi(argv[1]) : 5;
	cudaStream_t s;
	cudaEvent_t e;
	void *host, *mem;
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CHECK(cudaEventCreate(&e)); /* Calls/event-record and -query: cudart.Event is timed */
	CHECK(cudaHostAlloc(&host, LARGEST, 0));
	CHECK(cudaMalloc(&mem, LARGEST));
	char *source = (char *)mmap(0, PLACES * PLACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(source, 1, PLACES * PLACE);
	char *page = (char *)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	page[0] = 1;
	CHECK(cudaEventRecord(e, s));
	enum { BUFFERS = 5 };
	cudaEvent_t ends[BUFFERS];
	for (int i = 0; i < BUFFERS; i++) CHECK(cudaEventCreateWithFlags(&ends[i], cudaEventDisableTiming));
	for (int k = 0; k < samples; k++) {
		small_uploads(s, mem, (char *)host, source);
		LOOP("Calls/copy64-issue", 200000, CHECK(cudaMemcpyAsync(mem, host, 64, cudaMemcpyHostToDevice, s)));
		LOOP("Calls/copy64-wait", 50000, CHECK(cudaMemcpyAsync(mem, host, 64, cudaMemcpyHostToDevice, s)); CHECK(cudaStreamSynchronize(s)));
		LOOP("Calls/copy64-wait-cancellable", 50000, CHECK(cudaMemcpyAsync(mem, host, 64, cudaMemcpyHostToDevice, s)); CHECK(cudaStreamSynchronize(s)));
		LOOP("Calls/event-record", 500000, CHECK(cudaEventRecord(e, s)));
		LOOP("Calls/event-query", 500000, (void)cudaEventQuery(e));
		LOOP("Calls/event_record_query", 500000, CHECK(cudaEventRecord(e, s)); (void)cudaEventQuery(e));
		LOOP("Calls/copy64_record_query", 200000, CHECK(cudaMemcpyAsync(mem, host, 64, cudaMemcpyHostToDevice, s)); CHECK(cudaEventRecord(e, s)); (void)cudaEventQuery(e));
		LOOP("Pool/release-after-copy/1MiB", 200000, int b = i % BUFFERS;
			while (cudaEventQuery(ends[b]) == cudaErrorNotReady) {}
			CHECK(cudaMemcpyAsync(mem, (char *)host + 64 * b, 64, cudaMemcpyHostToDevice, s)); CHECK(cudaEventRecord(ends[b], s)));
		LOOP("Calls/stream-query", 500000, (void)cudaStreamQuery(s));
		LOOP("Calls/stream_wait_event", 500000, CHECK(cudaStreamWaitEvent(s, e, 0)));
		LOOP("Calls/register_4KiB", 2000, CHECK(cudaHostRegister(page, 4096, 0)); CHECK(cudaHostUnregister(page)));
	}
	return 0;
}
