// What hostmem does, in C with nothing above it, printed in the format of Go
// benchmarks under the names of BenchmarkPin of internal/benchmarks, and /by= with the
// number of threads, so that benchstat can set both side by side.
//
//	cc -O2 -pthread -I$CUDA/include pin.c -L$CUDA/lib64 -lcudart -o pin && ./pin 5
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)

#define HUGE ((size_t)2 << 20)
#define ITEM ((size_t)16 << 20)
#define GiB ((size_t)1 << 30)

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

// map gives n bytes at a multiple of 2 MiB, huge pages advised.
static char *map(size_t n) {
	size_t whole = n + HUGE;
	char *p = mmap(0, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *q = (char *)(((size_t)p + HUGE - 1) & ~(HUGE - 1));
	size_t kept = (n + 4095) & ~(size_t)4095;
	if (q > p) munmap(p, q - p);
	munmap(q + kept, p + whole - q - kept);
	madvise(q, kept, MADV_HUGEPAGE);
	return q;
}

struct work { char *base; size_t n; atomic_size_t next; };

static void *touch(void *arg) {
	struct work *w = arg;
	for (;;) {
		size_t off = atomic_fetch_add(&w->next, ITEM);
		if (off >= w->n) return 0;
		size_t end = off + ITEM < w->n ? off + ITEM : w->n;
		size_t whole = w->n & ~(HUGE - 1); // the tail behind it has small pages
		for (; off < end; off += off < whole ? HUGE : 4096) *(volatile char *)(w->base + off) = 0;
	}
}

static void populate(char *p, size_t n, int threads) {
	struct work w = {p, n, 0};
	pthread_t t[64];
	for (int i = 0; i < threads; i++) pthread_create(&t[i], 0, touch, &w);
	for (int i = 0; i < threads; i++) pthread_join(t[i], 0);
}

static void line(const char *name, double ns, size_t bytes) {
	printf("Benchmark%s\t1\t%.0f ns/op\t%.2f GB/s\n", name, ns, bytes / ns);
	fflush(stdout);
}

static void pin_line(const char *name, double pin, double unpin, size_t bytes) {
	printf("Benchmark%s\t1\t%.0f ns/op\t%.2f GB/s\t%.0f unpin-ns\n", name, pin, bytes / pin, unpin);
	fflush(stdout);
}

static void forks(const char *name) {
	double start = now();
	pid_t child = fork();
	if (!child) _exit(0);
	waitpid(child, 0, 0);
	line(name, now() - start, 0);
}

int main(int argc, char **argv) {
	int samples = argc > 1 ? atoi(argv[1]) : 5;
	int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), half = cores > 8 ? 8 : cores;
	CHECK(cudaFree(0));
	char *p = map(24 * GiB); // memory of virtual machines can grow as it is first touched
	populate(p, 24 * GiB, half);
	munmap(p, 24 * GiB);
	for (int k = 0; k < samples; k++) {
		for (size_t n = GiB + 1; n <= 4 * GiB + 1; n += 3 * GiB) {
			char name[96];
			for (int threads = 1; threads <= cores; threads *= 2) {
				double start = now();
				p = map(n);
				populate(p, n, threads);
				double populated = now() - start;
				CHECK(cudaHostRegister(p, n, cudaHostRegisterPortable));
				double took = now() - start;
				snprintf(name, sizeof name, "Populate/%zuGiB+1/by=threads=%d", n >> 30, threads);
				line(name, populated, n);
				start = now();
				CHECK(cudaHostUnregister(p));
				munmap(p, (n + 4095) & ~(size_t)4095);
				snprintf(name, sizeof name, "Pin/%zuGiB+1/by=threads=%d", n >> 30, threads);
				pin_line(name, took, now() - start, n);
			}
			void *h;
			double start = now();
			CHECK(cudaHostAlloc(&h, n, 0));
			snprintf(name, sizeof name, "HostAlloc/%zuGiB+1", n >> 30);
			line(name, now() - start, n);
			CHECK(cudaFreeHost(h));
		}
		size_t small[] = {64 << 10, 1 << 20};
		for (int i = 0; i < 2; i++) {
			enum { N = 200 };
			double pin = 0, unpin = 0;
			size_t n = small[i];
			for (int j = 0; j < N; j++) {
				double start = now();
				p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
				for (size_t off = 0; off < n; off += 4096) *(volatile char *)(p + off) = 0;
				CHECK(cudaHostRegister(p, n, cudaHostRegisterPortable));
				double mid = now();
				CHECK(cudaHostUnregister(p));
				munmap(p, n);
				pin += mid - start, unpin += now() - mid;
			}
			pin_line(i ? "Pin/1MiB" : "Pin/64KiB", pin / N, unpin / N, n);
		}
	}
	p = map(GiB);
	populate(p, GiB, half);
	CHECK(cudaHostRegister(p, GiB, 0));
	forks("Fork/1GiB/default");
	madvise(p, GiB, MADV_DONTFORK);
	for (int k = 0; k < samples; k++) forks("Fork/1GiB");
	CHECK(cudaHostUnregister(p));
	return 0;
}
