// What BenchmarkLoader/memory of internal/benchmarks does, in C with nothing above it: threads copy
// samples of 4 KiB into pinned batches, each batch goes to the GPU (cudaMemcpyAsync) with an
// event after it, and is filled again when that has been reached. Printed in the format of Go
// benchmarks under the same names, and /by= with the number of threads: medians of so many
// epochs, after one to warm up; an op is a sample. CPU seconds are those of the process
// (getrusage), with threads that spin for a free batch.
//
//	cc -O2 -pthread -I$CUDA/include loader.c -L$CUDA/lib64 -lcudart -o loader && ./loader [EPOCHS [huge]]
//
// With -DPAST -mavx2 samples are written past the caches, as the library writes them in
// batches of up to 1 MiB. EPOCHS is 1 to 99,
// 5 if left out. The data set is 4 GiB, in pages of the size that the kernel chooses, as Go's
// memory is; "huge" asks for huge ones (MADV_HUGEPAGE). It ends by itself after 300 seconds.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)
#define MUST(x) do { if (!(x)) { fprintf(stderr, "%s: %s\n", #x, strerror(errno)); exit(1); } } while (0)

#define SAMPLE ((size_t)4 << 10)
#define SAMPLES ((size_t)1 << 20)
#define RING ((size_t)64 << 20) // of pinned memory
#define HUGE ((size_t)2 << 20)
enum { CLAIM = 8, SLOTS = 64, THREADS = 16, EPOCHS = 99 };

static double seconds(clockid_t clock) {
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(void) {
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int ascending(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static char *map(size_t n, int huge) {
	char *p = mmap(0, n + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(p != MAP_FAILED);
	p = (char *)(((uintptr_t)p + HUGE - 1) & ~(HUGE - 1));
	if (huge) MUST(madvise(p, n, MADV_HUGEPAGE) == 0);
	return p;
}

// A slot is room for one batch.
struct slot {
	char *host, *dev;
	cudaEvent_t copied;
	atomic_size_t turn; // of the batches that use it, one after another: filled in turn, copied at turn + 1
	atomic_int left;    // claims that are not filled yet
};

#ifdef PAST
#include <immintrin.h>
static void put(void *to, const void *from) {
	__m256i *d = to;
	for (const __m256i *s = from; s < (const __m256i *)from + SAMPLE / 32; s += 2, d += 2) {
		__m256i a = _mm256_loadu_si256(s), b = _mm256_loadu_si256(s + 1);
		_mm256_stream_si256(d, a);
		_mm256_stream_si256(d + 1, b);
	}
	_mm_sfence();
}
#else
static void put(void *to, const void *from) { memcpy(to, from, SAMPLE); }
#endif

// An epoch is copied by all threads.
static struct {
	size_t batch, slots, threads; // samples of a batch
	const uint32_t *order;
	atomic_size_t next; // claim
} e;
static struct slot slots[SLOTS];
static cudaStream_t stream;
static char *data, *ring, *mem;

// A slot's turn is 2 * k while batch number k of those that use it is filled, and
// 2 * k + 1 from when its copy was queued until some thread sees that it is done.
static void await(struct slot *s, size_t turn) {
	for (size_t at; (at = atomic_load_explicit(&s->turn, memory_order_acquire)) != turn;) {
		if (at == turn - 1 && cudaEventQuery(s->copied) == cudaSuccess) {
			atomic_compare_exchange_strong(&s->turn, &at, turn);
			continue;
		}
#if defined(__x86_64__)
		__builtin_ia32_pause();
#endif
	}
}

static void *work(void *unused) {
	(void)unused;
	size_t claims = e.batch / CLAIM;
	for (;;) {
		size_t claim = atomic_fetch_add(&e.next, 1), b = claim / claims, first = claim % claims * CLAIM;
		if (b >= SAMPLES / e.batch) return NULL;
		struct slot *s = &slots[b % e.slots];
		await(s, b / e.slots * 2);
		for (size_t i = first; i < first + CLAIM; i++)
			put(s->host + i * SAMPLE, data + e.order[b * e.batch + i] * SAMPLE);
		if (atomic_fetch_sub(&s->left, 1) > 1) continue;
		CHECK(cudaMemcpyAsync(s->dev, s->host, e.batch * SAMPLE, cudaMemcpyHostToDevice, stream));
		CHECK(cudaEventRecord(s->copied, stream));
		atomic_store(&s->left, (int)claims);
		atomic_fetch_add_explicit(&s->turn, 1, memory_order_release);
	}
}

static void epoch(void) {
	pthread_t threads[THREADS];
	e.next = 0;
	for (size_t i = 0; i < e.slots; i++) {
		slots[i].turn = 0;
		slots[i].left = (int)(e.batch / CLAIM);
	}
	for (size_t i = 0; i < e.threads; i++) MUST((errno = pthread_create(&threads[i], NULL, work, NULL)) == 0);
	for (size_t i = 0; i < e.threads; i++) MUST((errno = pthread_join(threads[i], NULL)) == 0);
	CHECK(cudaStreamSynchronize(stream));
}

// verify compares what the last batches left on the device.
static void verify(void) {
	char *got = malloc(e.batch * SAMPLE);
	MUST(got != NULL);
	for (size_t b = SAMPLES / e.batch - e.slots; b < SAMPLES / e.batch; b++) {
		CHECK(cudaMemcpy(got, slots[b % e.slots].dev, e.batch * SAMPLE, cudaMemcpyDeviceToHost));
		for (size_t i = 0; i < e.batch; i++) {
			if (memcmp(got + i * SAMPLE, data + e.order[b * e.batch + i] * SAMPLE, SAMPLE) == 0) continue;
			fprintf(stderr, "batch %zu, sample %zu: wrong bytes\n", b, i);
			exit(1);
		}
	}
	free(got);
}

static void measure(const char *name, const uint32_t *order, size_t batch, size_t threads, int epochs) {
	double took[EPOCHS], used = 0;
	e.order = order, e.batch = batch, e.threads = threads;
	e.slots = RING / (batch * SAMPLE) < SLOTS ? RING / (batch * SAMPLE) : SLOTS;
	for (size_t i = 0; i < e.slots; i++) {
		slots[i].host = ring + i * batch * SAMPLE;
		slots[i].dev = mem + i * batch * SAMPLE;
	}
	for (int k = -1; k < epochs; k++) {
		double start = seconds(CLOCK_MONOTONIC), before = cpu();
		epoch();
		if (k < 0) continue;
		took[k] = seconds(CLOCK_MONOTONIC) - start;
		used += cpu() - before;
	}
	verify();
	qsort(took, epochs, sizeof *took, ascending);
	double median = took[epochs / 2];
	printf("BenchmarkLoader/memory/%s/%zu/by=threads=%zu\t%zu\t%.1f ns/op\t%.3f GB/s\t%.4f cpu-s/GB\t%.0f samples/s\n", name, batch, threads,
		SAMPLES, median / SAMPLES * 1e9, SAMPLES * SAMPLE / median / 1e9, used / epochs / (SAMPLES * SAMPLE * 1e-9), SAMPLES / median);
	fflush(stdout);
}

static void *populate(void *part) {
	char *p = data + (size_t)(intptr_t)part * (SAMPLES * SAMPLE / THREADS);
	for (size_t i = 0; i < SAMPLES * SAMPLE / THREADS; i += 8) *(uint64_t *)(p + i) = (uint64_t)(uintptr_t)(p + i) * 0x9e3779b97f4a7c15;
	return NULL;
}

int main(int argc, char **argv) {
	int epochs = argc > 1 ? atoi(argv[1]) : 5, huge = argc > 2 && strcmp(argv[2], "huge") == 0;
	if (epochs < 1 || epochs > EPOCHS || argc > 3 || (argc > 2 && !huge)) {
		fprintf(stderr, "usage: %s [EPOCHS, 1 to %d [huge]]\n", argv[0], EPOCHS);
		return 2;
	}
	alarm(300);
	data = map(SAMPLES * SAMPLE, huge);
	pthread_t threads[THREADS];
	for (intptr_t i = 0; i < THREADS; i++) MUST((errno = pthread_create(&threads[i], NULL, populate, (void *)i)) == 0);
	for (int i = 0; i < THREADS; i++) MUST((errno = pthread_join(threads[i], NULL)) == 0);
	ring = map(RING, 1);
	memset(ring, 1, RING);
	CHECK(cudaHostRegister(ring, RING, 0));
	CHECK(cudaMalloc((void **)&mem, RING));
	CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	for (int i = 0; i < SLOTS; i++) CHECK(cudaEventCreateWithFlags(&slots[i].copied, cudaEventDisableTiming));

	uint32_t *ordered = malloc(SAMPLES * sizeof *ordered), *shuffled = calloc(SAMPLES, sizeof *shuffled);
	MUST(ordered != NULL && shuffled != NULL);
	uint64_t random = 1;
	for (size_t i = 0; i < SAMPLES; i++) {
		random = random * 6364136223846793005 + 1442695040888963407;
		size_t j = (random >> 33) % (i + 1);
		ordered[i] = i;
		shuffled[i] = shuffled[j];
		shuffled[j] = i;
	}
	const size_t batches[] = {16, 256, 4096}, counts[] = {8, 12, 16};
	for (int b = 0; b < 3; b++)
		for (int t = 0; t < 3; t++) {
			measure("shuffled", shuffled, batches[b], counts[t], epochs);
			measure("ordered", ordered, batches[b], counts[t], epochs);
		}
	return 0;
}
