// What BenchmarkCopies, BenchmarkPinned and BenchmarkFiles of internal/benchmarks do, in C with
// nothing above it, printed in the format of Go benchmarks under the same names, and /by= with what
// it was done with: medians, after one round to warm up.
//
//	cc -O2 -pthread -I$CUDA/include transfer.c -L$CUDA/lib64 -lcudart -o transfer && ./transfer [SAMPLES [GROUP...]]
//
// Groups are pageable, fresh, pinned, scattered and files; without any all are measured.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) do { cudaError_t code_ = (x); if (code_ != cudaSuccess) { \
	fprintf(stderr, "%s: %s\n", #x, cudaGetErrorName(code_)); exit(1); } } while (0)
#define MUST(x) do { if (!(x)) { fprintf(stderr, "%s: %s\n", #x, strerror(errno)); exit(1); } } while (0)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define HUGE ((size_t)2 << 20)
#define CHUNK ((size_t)4 << 20)
#define GiB ((size_t)1 << 30)
enum { LANES = 16, SAMPLES = 99 };

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

// MEDIAN times body, with before and after untimed, and prints a line.
#define MEDIAN(samples, bytes, before, body, after, ...) do { \
	double took_[SAMPLES]; \
	for (int k_ = -1; k_ < (samples); k_++) { \
		before; \
		double start_ = now(); \
		body; \
		double end_ = now(); \
		after; \
		if (k_ >= 0) took_[k_] = end_ - start_; \
	} \
	qsort(took_, (samples), sizeof *took_, ascending); \
	printf("Benchmark"); \
	printf(__VA_ARGS__); \
	printf("\t%d\t%.0f ns/op\t%.2f GB/s\n", (samples), took_[(samples) / 2], (bytes) / took_[(samples) / 2]); \
	fflush(stdout); \
} while (0)

// A lane is what a thread copies with: a stream and two slots of the pinned ring.
static struct lane { cudaStream_t stream; cudaEvent_t done[2]; char *slot[2]; } lanes[LANES];

static void make_lanes(void) {
	for (int i = 0; i < LANES; i++) {
		CHECK(cudaStreamCreateWithFlags(&lanes[i].stream, cudaStreamNonBlocking));
		for (int s = 0; s < 2; s++) {
			CHECK(cudaEventCreateWithFlags(&lanes[i].done[s], cudaEventDisableTiming));
			CHECK(cudaHostAlloc((void **)&lanes[i].slot[s], CHUNK, 0));
		}
	}
}

// A job is one copy by way of the ring. Its host side is a file if fd is not 0.
struct job {
	char *dev, *host;
	size_t n;
	int fd, populate;
	atomic_size_t next;
};

static size_t piece(struct job *j, size_t off) { return off + CHUNK < j->n ? CHUNK : j->n - off; }

static void file_io(struct job *j, char *slot, size_t off, int write) {
	for (size_t done = 0, n = piece(j, off); done < n;) {
		ssize_t k = write ? pwrite(j->fd, slot + done, n - done, off + done) : pread(j->fd, slot + done, n - done, off + done);
		MUST(k > 0);
		done += k;
	}
}

static void up(struct job *j, struct lane *l) {
	for (int s = 0;; s ^= 1) {
		size_t off = atomic_fetch_add(&j->next, CHUNK);
		if (off >= j->n) break;
		CHECK(cudaEventSynchronize(l->done[s]));
		if (j->fd) file_io(j, l->slot[s], off, 0);
		else memcpy(l->slot[s], j->host + off, piece(j, off));
		CHECK(cudaMemcpyAsync(j->dev + off, l->slot[s], piece(j, off), cudaMemcpyHostToDevice, l->stream));
		CHECK(cudaEventRecord(l->done[s], l->stream));
	}
	CHECK(cudaStreamSynchronize(l->stream));
}

static void drain(struct job *j, char *slot, size_t off) {
	if (j->fd) {
		file_io(j, slot, off, 1);
		return;
	}
	if (j->populate) MUST(madvise(j->host + off, piece(j, off), MADV_POPULATE_WRITE) == 0);
	memcpy(j->host + off, slot, piece(j, off));
}

static void down(struct job *j, struct lane *l) {
	size_t last = j->n; // being copied into the other slot
	for (int s = 0;; s ^= 1) {
		size_t off = atomic_fetch_add(&j->next, CHUNK);
		if (off < j->n) {
			CHECK(cudaMemcpyAsync(l->slot[s], j->dev + off, piece(j, off), cudaMemcpyDeviceToHost, l->stream));
			CHECK(cudaEventRecord(l->done[s], l->stream));
		}
		if (last < j->n) {
			CHECK(cudaEventSynchronize(l->done[s ^ 1]));
			drain(j, l->slot[s ^ 1], last);
		}
		if (off >= j->n) return;
		last = off;
	}
}

typedef void way(struct job *, struct lane *);
struct worker { way *way; struct job *job; struct lane *lane; };

static void *work(void *arg) {
	struct worker *w = arg;
	w->way(w->job, w->lane);
	return 0;
}

// staged runs two jobs (or one, where the second is null), half of the threads each.
static void staged(way *a, struct job *one, way *b, struct job *two, int threads) {
	struct worker w[LANES];
	pthread_t t[LANES];
	one->next = 0;
	if (two) two->next = 0;
	for (int i = 0; i < threads; i++) {
		int second = two && i % 2;
		w[i] = (struct worker){second ? b : a, second ? two : one, &lanes[i]};
		pthread_create(&t[i], 0, work, &w[i]);
	}
	for (int i = 0; i < threads; i++) pthread_join(t[i], 0);
}

#define EACH_THREADS for (int threads = 8; threads <= LANES; threads += 4)

static char *map(size_t n) {
	char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(p != MAP_FAILED);
	return p;
}

// map_huge gives n bytes, whole huge pages, at a multiple of 2 MiB.
static char *map_huge(size_t n) {
	char *p = map(n + HUGE), *q = (char *)(((size_t)p + HUGE - 1) & ~(HUGE - 1));
	if (q > p) munmap(p, q - p);
	munmap(q + n, p + HUGE - q);
	madvise(q, n, MADV_HUGEPAGE);
	return q;
}

static void *touch(void *arg) {
	struct job *j = arg;
	for (size_t off; (off = atomic_fetch_add(&j->next, CHUNK)) < j->n;)
		for (size_t at = off; at < off + piece(j, off); at += 4096) *(size_t *)(j->host + at) = at * 0x9e3779b97f4a7c15u;
	return 0;
}

static char *touched(size_t n) {
	struct job j = {.host = map_huge(n), .n = n};
	pthread_t t[8];
	for (int i = 0; i < 8; i++) pthread_create(&t[i], 0, touch, &j);
	for (int i = 0; i < 8; i++) pthread_join(t[i], 0);
	return j.host;
}

static void pageable(char *dev, int samples) {
	size_t n = 2 * GiB;
	struct job in = {.dev = dev, .host = touched(n), .n = n}, out = {.dev = dev, .host = map_huge(n), .n = n};
	char *other;
	CHECK(cudaMalloc((void **)&other, n));
	memset(out.host, 1, n);
	MEDIAN(samples, n, , CHECK(cudaMemcpy(dev, in.host, n, cudaMemcpyHostToDevice)), , "Copies/upload/2GiB/by=cudaMemcpy");
	EACH_THREADS MEDIAN(samples, n, , staged(up, &in, 0, 0, threads), , "Copies/upload/2GiB/by=threads=%d", threads);
	MEDIAN(samples, n, , CHECK(cudaMemcpy(out.host, dev, n, cudaMemcpyDeviceToHost)), , "Copies/download/2GiB/by=cudaMemcpy");
	memset(out.host, 1, n);
	EACH_THREADS MEDIAN(samples, n, , staged(down, &out, 0, 0, threads), , "Copies/download/2GiB/by=threads=%d", threads);
	if (memcmp(in.host, out.host, n)) {
		fprintf(stderr, "what came back is not what was sent\n");
		exit(1);
	}
	in.dev = other;
	EACH_THREADS MEDIAN(samples, 2 * n, , staged(up, &in, down, &out, threads), , "Copies/both-ways/2GiB/by=threads=%d", threads);
	CHECK(cudaFree(other));
	munmap(in.host, n);
	munmap(out.host, n);
}

static void fresh(char *dev, int samples) {
	struct job j = {.dev = dev, .n = GiB};
	EACH_THREADS {
		MEDIAN(samples, GiB, , j.host = map_huge(GiB); staged(down, &j, 0, 0, threads), munmap(j.host, GiB), "Copies/new/1GiB/by=threads=%d", threads);
		MEDIAN(samples, GiB, , j.host = map(GiB); staged(down, &j, 0, 0, threads), munmap(j.host, GiB), "Copies/untouched/1GiB/by=threads=%d", threads);
	}
}

static void create(struct job *j, const char *path) {
	if (j->fd) {
		close(j->fd);
		unlink(path);
	}
	MUST((j->fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600)) > 0);
}

// by_mapping writes a new file through a mapping of it, which takes no lock of the file's.
static void by_mapping(struct job *file, int threads) {
	struct job j = {.dev = file->dev, .n = file->n, .populate = 1};
	MUST(ftruncate(file->fd, j.n) == 0);
	j.host = mmap(0, j.n, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
	MUST(j.host != MAP_FAILED);
	staged(down, &j, 0, 0, threads);
	munmap(j.host, j.n);
}

static void upload_mapping(struct job *file) {
	char *p = mmap(0, file->n, PROT_READ, MAP_SHARED, file->fd, 0);
	MUST(p != MAP_FAILED);
	CHECK(cudaMemcpy(file->dev, p, file->n, cudaMemcpyHostToDevice));
	munmap(p, file->n);
}

// files are as large as the page cache is sure to hold. New ones only where they stay in memory.
static void files(char *dev, const char *folder, const char *kind, int write, int samples) {
	struct statvfs room;
	char path[256];
	struct job j = {.dev = dev, .n = 2 * GiB};
	if (statvfs(folder, &room) || room.f_bavail * room.f_frsize < 3 * GiB) {
		fprintf(stderr, "no 3 GiB of room in %s: left out\n", folder);
		return;
	}
	snprintf(path, sizeof path, "%s/pinned-baseline-%d", folder, (int)getpid());
	create(&j, path);
	if (!write) staged(down, &j, 0, 0, 4);
	else EACH_THREADS {
		MEDIAN(samples, j.n, create(&j, path), staged(down, &j, 0, 0, threads), , "Files/%s/download-new/2GiB/by=threads=%d", kind, threads);
		MEDIAN(samples, j.n, create(&j, path), by_mapping(&j, threads), , "Files/%s/download-new/2GiB/by=mmap,threads=%d", kind, threads);
		MEDIAN(samples, j.n, , staged(down, &j, 0, 0, threads), , "Files/%s/download/2GiB/by=threads=%d", kind, threads);
	}
	EACH_THREADS MEDIAN(samples, j.n, , staged(up, &j, 0, 0, threads), , "Files/%s/upload/2GiB/by=threads=%d", kind, threads);
	MEDIAN(samples, j.n, , upload_mapping(&j), , "Files/%s/upload/2GiB/by=mmap", kind);
	close(j.fd);
	unlink(path);
}

static void both_ways(char *dev, int samples) {
	size_t n = 2 * GiB;
	char *in, *out, *other;
	CHECK(cudaMalloc((void **)&other, n));
	CHECK(cudaHostAlloc((void **)&in, n, 0));
	CHECK(cudaHostAlloc((void **)&out, n, 0));
	MEDIAN(samples, 2 * n, ,
		CHECK(cudaMemcpyAsync(dev, in, n, cudaMemcpyHostToDevice, lanes[0].stream));
		CHECK(cudaMemcpyAsync(out, other, n, cudaMemcpyDeviceToHost, lanes[1].stream));
		CHECK(cudaStreamSynchronize(lanes[0].stream));
		CHECK(cudaStreamSynchronize(lanes[1].stream)), , "Pinned/both-ways/2GiB");
	CHECK(cudaFreeHost(in));
	CHECK(cudaFreeHost(out));
	CHECK(cudaFree(other));
}

// Scattered copies: every thread makes its share of them, one by one or in one batch.
enum { COPIES = 10000, SIZE = 4096 };
static void *dsts[COPIES];
static const void *srcs[COPIES];
static size_t sizes[COPIES];
struct share { int first, n; struct lane *lane; };

static void *single(void *arg) {
	struct share *s = arg;
	for (int i = s->first; i < s->first + s->n; i++)
		CHECK(cudaMemcpyAsync(dsts[i], srcs[i], SIZE, cudaMemcpyHostToDevice, s->lane->stream));
	CHECK(cudaStreamSynchronize(s->lane->stream));
	return 0;
}

#if CUDART_VERSION >= 12080
static void *batch(void *arg) {
	struct share *s = arg;
	struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream};
	size_t from = 0;
	// void pointers, for the versions differ in what is const.
	CHECK(cudaMemcpyBatchAsync((void *)(dsts + s->first), (void *)(srcs + s->first), sizes + s->first, s->n, &attributes, &from, 1,
#if CUDART_VERSION < 13000
		&(size_t){0},
#endif
		s->lane->stream));
	CHECK(cudaStreamSynchronize(s->lane->stream));
	return 0;
}
#endif

static void share(void *(*copy)(void *), int streams) {
	struct share s[LANES];
	pthread_t t[LANES];
	for (int i = 0; i < streams; i++) {
		s[i] = (struct share){COPIES / streams * i, COPIES / streams, &lanes[i]};
		pthread_create(&t[i], 0, copy, &s[i]);
	}
	for (int i = 0; i < streams; i++) pthread_join(t[i], 0);
}

// shuffle gives COPIES of twice as many places, in a random order.
static void shuffle(int *places) {
	for (int i = 0; i < 2 * COPIES; i++) places[i] = i;
	for (int i = 2 * COPIES - 1; i > 0; i--) {
		int k = rand() % (i + 1), was = places[i];
		places[i] = places[k], places[k] = was;
	}
}

static void scattered(char *dev, int samples) {
	static int from[2 * COPIES], to[2 * COPIES];
	char *host;
	CHECK(cudaHostAlloc((void **)&host, 2 * COPIES * SIZE, 0));
	shuffle(from);
	shuffle(to);
	for (int i = 0; i < COPIES; i++) dsts[i] = dev + (size_t)to[i] * SIZE, srcs[i] = host + (size_t)from[i] * SIZE, sizes[i] = SIZE;
	for (int streams = 1; streams <= 4; streams += 3) {
		MEDIAN(samples, COPIES * SIZE, , share(single, streams), , "Copies/scattered-upload/10000x4KiB/by=single,streams=%d", streams);
#if CUDART_VERSION >= 12080
		MEDIAN(samples, COPIES * SIZE, , share(batch, streams), , "Copies/scattered-upload/10000x4KiB/by=batch=%d,streams=%d", COPIES / streams, streams);
#endif
	}
	CHECK(cudaFreeHost(host));
}

static int wanted(const char *group, int argc, char **argv) {
	for (int i = 2; i < argc; i++)
		if (strcmp(argv[i], group) == 0) return 1;
	return argc <= 2;
}

int main(int argc, char **argv) {
	int samples = argc > 1 ? atoi(argv[1]) : 5;
	if (samples < 1 || samples > SAMPLES / 4) samples = 5;
	int fewer = (samples + 1) / 2; // of what is slow
	char *dev;
	CHECK(cudaMalloc((void **)&dev, 4 * GiB));
	make_lanes();
	if (argc <= 2) munmap(touched(24 * GiB), 24 * GiB); // memory of virtual machines can grow as it is first touched
	if (wanted("pageable", argc, argv)) pageable(dev, samples);
	if (wanted("fresh", argc, argv)) fresh(dev, samples);
	if (wanted("pinned", argc, argv)) both_ways(dev, samples);
	if (wanted("scattered", argc, argv)) scattered(dev, 4 * samples);
	if (wanted("files", argc, argv)) {
		files(dev, "/dev/shm", "shm", 1, fewer);
		files(dev, "/tmp", "cached", 0, fewer);
	}
	return 0;
}
