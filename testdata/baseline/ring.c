// Copies of pageable memory through a small ring of pinned slots in C: threads
// fill (or drain) one slot together, piece by piece, and the last one queues its
// copy. Downloads leave the ring by non-temporal stores. The same as
// BenchmarkCopies of internal/benchmarks, under its names, and /by= with the number of threads. With
// CPU seconds a GB (getrusage). The pageable memory is in huge pages, or with a second
// argument in pages of 4 KiB, as a Go slice is where transparent huge pages are on request.
//
//	nvcc -x cu -O3 -Xcompiler -mavx2 ring.c -o ring -lpthread && ./ring [samples [plain]]
#include <cuda_runtime_api.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)

enum { SLOTS = 4 };
static const size_t SLOT = 8 << 20, PIECE = 512 << 10, TOTAL = (size_t)2 << 30;

typedef struct {
	int down, threads;
	char *host, *device, *ring;
	cudaStream_t stream;
	cudaEvent_t ended[SLOTS];
	pthread_mutex_t lock;
	size_t opened, next;   // chunks whose slot is ready; piece to claim, of all
	int left[SLOTS];       // pieces of the slot's chunk that are not done
} copy_t;

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(void) {
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static void past_the_caches(char *to, const char *from, size_t n) {
	for (size_t i = 0; i < n; i += 128) {
		__m256i a = _mm256_load_si256((const __m256i *)(from + i)), b = _mm256_load_si256((const __m256i *)(from + i + 32));
		__m256i c = _mm256_load_si256((const __m256i *)(from + i + 64)), d = _mm256_load_si256((const __m256i *)(from + i + 96));
		_mm256_stream_si256((__m256i *)(to + i), a);
		_mm256_stream_si256((__m256i *)(to + i + 32), b);
		_mm256_stream_si256((__m256i *)(to + i + 64), c);
		_mm256_stream_si256((__m256i *)(to + i + 96), d);
	}
	_mm_sfence();
}

// open_more makes chunks available to the workers, with the lock held: of an upload
// when the copy that used the slot before is done, of a download when its own is.
static void open_more(copy_t *c) {
	size_t chunks = TOTAL / SLOT;
	while (c->opened < chunks) {
		size_t k = c->opened, s = k % SLOTS;
		if (c->left[s] > 0) return;
		if (c->down ? cudaEventQuery(c->ended[s]) != cudaSuccess : k >= SLOTS && cudaEventQuery(c->ended[s]) != cudaSuccess) return;
		c->left[s] = SLOT / PIECE;
		c->opened++;
	}
}

static void queue(copy_t *c, size_t k) {
	size_t s = k % SLOTS;
	char *slot = c->ring + s * SLOT;
	if (c->down) CHECK(cudaMemcpyAsync(slot, c->device + k * SLOT, SLOT, cudaMemcpyDeviceToHost, c->stream));
	else CHECK(cudaMemcpyAsync(c->device + k * SLOT, slot, SLOT, cudaMemcpyHostToDevice, c->stream));
	CHECK(cudaEventRecord(c->ended[s], c->stream));
}

static void *work(void *arg) {
	copy_t *c = (copy_t *)arg;
	const size_t chunks = TOTAL / SLOT, per = SLOT / PIECE;
	pthread_mutex_lock(&c->lock);
	while (c->next < chunks * per) {
		if (c->next >= c->opened * per) {
			open_more(c);
			if (c->next >= c->opened * per) { // the copy engine is behind
				pthread_mutex_unlock(&c->lock);
				_mm_pause();
				pthread_mutex_lock(&c->lock);
				continue;
			}
		}
		size_t piece = c->next++, k = piece / per, s = k % SLOTS;
		pthread_mutex_unlock(&c->lock);
		char *slot = c->ring + s * SLOT + piece % per * PIECE, *host = c->host + piece * PIECE;
		if (c->down) past_the_caches(host, slot, PIECE);
		else memcpy(slot, host, PIECE);
		pthread_mutex_lock(&c->lock);
		if (--c->left[s] == 0) {
			size_t again = c->down ? k + SLOTS : k;
			if (again < chunks) {
				c->left[s] = 1; // so that the slot is not opened before its copy is queued
				pthread_mutex_unlock(&c->lock);
				queue(c, again);
				pthread_mutex_lock(&c->lock);
				c->left[s] = 0;
			}
		}
	}
	pthread_mutex_unlock(&c->lock);
	return 0;
}

static void *run(void *arg) {
	copy_t *c = (copy_t *)arg;
	pthread_t all[64];
	c->opened = c->next = 0;
	memset(c->left, 0, sizeof c->left);
	if (c->down)
		for (size_t k = 0; k < SLOTS; k++) queue(c, k);
	for (int i = 0; i < c->threads; i++) pthread_create(&all[i], 0, work, c);
	for (int i = 0; i < c->threads; i++) pthread_join(all[i], 0);
	CHECK(cudaStreamSynchronize(c->stream));
	return 0;
}

static void make(copy_t *c, int down, int huge) {
	memset(c, 0, sizeof *c);
	c->down = down;
	c->host = (char *)mmap(0, TOTAL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	madvise(c->host, TOTAL, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	for (size_t i = 0; i < TOTAL; i += 8) *(size_t *)(c->host + i) = i * 0x9e3779b97f4a7c15u;
	c->ring = (char *)mmap(0, SLOTS * SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(c->ring, 1, SLOTS * SLOT);
	CHECK(cudaHostRegister(c->ring, SLOTS * SLOT, 0));
	CHECK(cudaMalloc((void **)&c->device, TOTAL));
	CHECK(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
	for (int i = 0; i < SLOTS; i++) CHECK(cudaEventCreateWithFlags(&c->ended[i], cudaEventDisableTiming));
	pthread_mutex_init(&c->lock, 0);
}

static void report(const char *name, double seconds, double used, double bytes) {
	printf("%s\t1\t%.0f ns/op\t%.2f GB/s\t%.3f cpu-s/GB\n", name, seconds * 1e9, bytes / seconds / 1e9, used / (bytes / 1e9));
}

int main(int argc, char **argv) {
	int samples = argc > 1 ? atoi(argv[1]) : 5;
	setvbuf(stdout, 0, _IOLBF, 0);
	copy_t up, down;
	make(&up, 0, argc < 3);
	make(&down, 1, argc < 3);
	char name[100];
	for (int k = -1; k < samples; k++) { // the first warms up
		for (int t = 6; t <= 9; t++) {
			up.threads = t;
			double used = cpu(), begin = now();
			run(&up);
			snprintf(name, sizeof name, "BenchmarkCopies/upload/2GiB/by=ring,threads=%d", t);
			if (k >= 0) report(name, now() - begin, cpu() - used, TOTAL);
		}
		for (int t = 3; t <= 5; t++) {
			down.threads = t;
			double used = cpu(), begin = now();
			run(&down);
			snprintf(name, sizeof name, "BenchmarkCopies/download/2GiB/by=ring,threads=%d", t);
			if (k >= 0) report(name, now() - begin, cpu() - used, TOTAL);
		}
		for (int u = 6; u <= 8; u++)
			for (int d = 3; d <= 5; d++) {
				up.threads = u, down.threads = d;
				double used = cpu(), begin = now();
				pthread_t other;
				pthread_create(&other, 0, run, &up);
				run(&down);
				pthread_join(other, 0);
				snprintf(name, sizeof name, "BenchmarkCopies/both-ways/2GiB/by=ring,threads=%d+%d", u, d);
				if (k >= 0) report(name, now() - begin, cpu() - used, 2.0 * TOTAL);
			}
	}
	// The device has what the host had, and what came back is what the device has.
	char *back = (char *)malloc(TOTAL);
	CHECK(cudaMemcpy(back, up.device, TOTAL, cudaMemcpyDeviceToHost));
	if (memcmp(back, up.host, TOTAL) != 0) { fprintf(stderr, "the upload is wrong\n"); return 1; }
	CHECK(cudaMemcpy(down.device, up.host, TOTAL, cudaMemcpyHostToDevice));
	run(&down);
	if (memcmp(down.host, up.host, TOTAL) != 0) { fprintf(stderr, "the download is wrong\n"); return 1; }
	return 0;
}
