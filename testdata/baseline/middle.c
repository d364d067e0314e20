// Uploads of 64 KiB to 16 MiB of pageable memory in C, each with a wait for its end: threads that
// spin for the next one copy pieces into pinned memory, and one queues neighbours that are there
// (cudaMemcpyAsync). They write plainly (memcpy), past the caches (non-temporal stores), or
// plainly and then push each line out of the core's own caches (CLDEMOTE, which CPUs without
// it ignore). Beside it cudaMemcpy and a wait. Medians of 41 in µs, for sources in one of eight
// places, so that the caches hold the small ones, and in one of 37.
//
//	cc -O2 -mavx2 -pthread -I$CUDA/include middle.c -L$CUDA/lib64 -lcudart -o middle && ./middle
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)

enum { SAMPLES = 41, PIECES = 256 };
static const size_t TOTAL = (size_t)1 << 30, RING = 16 << 20;

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

enum how { PLAIN, PAST, DEMOTE, WAYS };
static const char *names[] = {"plain", "past the caches", "demoted"};

static void put(enum how how, char *to, const char *from, size_t n) {
	if (how == PLAIN) {
		memcpy(to, from, n);
		return;
	}
	for (size_t i = 0; i < n; i += 64) {
		__m256i a = _mm256_loadu_si256((const __m256i *)(from + i)), b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
		if (how == PAST) {
			_mm256_stream_si256((__m256i *)(to + i), a);
			_mm256_stream_si256((__m256i *)(to + i + 32), b);
		} else {
			_mm256_store_si256((__m256i *)(to + i), a);
			_mm256_store_si256((__m256i *)(to + i + 32), b);
			__asm__ volatile("cldemote %0" : : "m"(to[i]));
		}
	}
	if (how == PAST) _mm_sfence();
}

static cudaStream_t stream;
static char *ring, *device, *source;

// The upload that runs.
static struct {
	const char *from;
	size_t n, piece, queued; // pieces that are queued, of the thread that is queueing
	enum how how;
	atomic_size_t next;      // piece to claim
	atomic_int there[PIECES];
	atomic_flag queueing;
	atomic_int turn, left;   // of the other threads
} up;

// queue_some queues the pieces that are there, if no other thread is at it.
static void queue_some(void) {
	size_t pieces = up.n / up.piece;
	while (up.queued < pieces && atomic_load(&up.there[up.queued]) && !atomic_flag_test_and_set(&up.queueing)) {
		size_t first = up.queued, end = first;
		while (end < pieces && atomic_load(&up.there[end])) end++;
		if (end > first) {
			size_t at = first * up.piece;
			CHECK(cudaMemcpyAsync(device + at, ring + at, (end - first) * up.piece, cudaMemcpyHostToDevice, stream));
			up.queued = end;
		}
		atomic_flag_clear(&up.queueing);
	}
}

static void copy_pieces(void) {
	for (size_t i; (i = atomic_fetch_add(&up.next, 1)) < up.n / up.piece;) {
		put(up.how, ring + i * up.piece, up.from + i * up.piece, up.piece);
		atomic_store(&up.there[i], 1);
		queue_some();
	}
}

static void *work(void *unused) {
	(void)unused;
	for (int seen = 0;;) {
		int turn;
		while ((turn = atomic_load(&up.turn)) == seen) _mm_pause();
		if (turn < 0) return NULL;
		seen = turn;
		copy_pieces();
		atomic_fetch_sub(&up.left, 1);
	}
}

static void upload(int threads) {
	for (size_t i = 0; i < up.n / up.piece; i++) atomic_store(&up.there[i], 0);
	up.queued = 0;
	atomic_store(&up.next, 0);
	atomic_store(&up.left, threads - 1);
	atomic_fetch_add(&up.turn, 1);
	copy_pieces();
	while (atomic_load(&up.left) > 0) _mm_pause();
	queue_some();
	CHECK(cudaStreamSynchronize(stream));
}

static int ascending(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

// median of uploads by so many threads, or by cudaMemcpy with none.
static double median(int threads, int places) {
	double took[SAMPLES];
	for (int k = 0; k < SAMPLES; k++) {
		up.from = source + (size_t)(k * 7 % places) * ((TOTAL - up.n) / places / 4096 * 4096);
		double begin = now();
		if (threads > 0) {
			upload(threads);
		} else {
			CHECK(cudaMemcpy(device, up.from, up.n, cudaMemcpyHostToDevice));
			CHECK(cudaStreamSynchronize(0));
		}
		took[k] = (now() - begin) * 1e6;
	}
	qsort(took, SAMPLES, sizeof *took, ascending);
	return took[SAMPLES / 2];
}

static void verify(void) {
	char *back = malloc(up.n);
	CHECK(cudaMemcpy(back, device, up.n, cudaMemcpyDeviceToHost));
	if (memcmp(back, up.from, up.n) != 0) {
		fprintf(stderr, "the upload is wrong\n");
		exit(1);
	}
	CHECK(cudaMemset(device, 0, up.n));
	CHECK(cudaDeviceSynchronize());
	free(back);
}

static char *map(size_t n) {
	char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	madvise(p, n, MADV_HUGEPAGE);
	for (size_t i = 0; i < n; i += 8) *(size_t *)(p + i) = i * 0x9e3779b97f4a7c15u;
	return p;
}

int main(void) {
	alarm(120);
	setvbuf(stdout, 0, _IOLBF, 0);
	ring = map(RING), source = map(TOTAL);
	CHECK(cudaHostRegister(ring, RING, 0));
	CHECK(cudaMalloc((void **)&device, RING));
	CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	static const int threads[] = {1, 4, 8}, places[] = {8, 37};
	for (int p = 0; p < 2; p++)
		for (int t = 0; t < 3; t++) {
			pthread_t all[8];
			atomic_store(&up.turn, 0);
			for (int i = 1; i < threads[t]; i++) pthread_create(&all[i], 0, work, 0);
			for (up.n = 64 << 10; up.n <= RING; up.n *= up.n < 1 << 20 ? 2 : 4) {
				if (t == 0) printf("%d places\t%zu KiB\tcudaMemcpy and wait\t%.1f µs\n", places[p], up.n >> 10, median(0, places[p]));
				for (up.how = 0; up.how < WAYS; up.how++)
					for (up.piece = 64 << 10; up.piece <= 512 << 10 && up.piece * (threads[t] > 1 ? 2 : 1) <= up.n; up.piece *= 2) {
						printf("%d places\t%zu KiB\tthreads=%d\t%s, pieces of %zu KiB\t%.1f µs\n", places[p], up.n >> 10, threads[t],
							names[up.how], up.piece >> 10, median(threads[t], places[p]));
						verify();
					}
			}
			atomic_store(&up.turn, -1);
			for (int i = 1; i < threads[t]; i++) pthread_join(all[i], 0);
		}
	return 0;
}
