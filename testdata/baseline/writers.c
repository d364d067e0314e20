// Writes host memory to a new file of /dev/shm with 8 and 16 threads: into a mapping with huge pages (MADV_COLLAPSE) and
// non-temporal or plain copies, into one with small pages (MADV_POPULATE_WRITE), and by pwrite. The argument is the size in MiB.
//
//	cc -O2 -pthread writers.c -o writers && ./writers 2048
#define _GNU_SOURCE
#include <fcntl.h>
#include <immintrin.h>
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
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
static const size_t HUGE = 2 << 20;
static char *file, *host;
static size_t size, range;
static int nt, how, fd;
static atomic_size_t next;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static double cpu(void) { struct rusage r; getrusage(0, &r); return r.ru_utime.tv_sec + r.ru_stime.tv_sec + 1e-6 * (r.ru_utime.tv_usec + r.ru_stime.tv_usec); }
__attribute__((target("avx2"))) static void ntcopy(char *to, const char *from, size_t n) {
	for (size_t i = 0; i < n; i += 64) {
		__m256i a = _mm256_loadu_si256((const __m256i *)(from + i)), b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
		_mm256_stream_si256((__m256i *)(to + i), a);
		_mm256_stream_si256((__m256i *)(to + i + 32), b);
	}
	_mm_sfence();
}
static void *work(void *x) {
	(void)x;
	for (;;) {
		size_t at = atomic_fetch_add(&next, range);
		if (at >= size) return 0;
		size_t n = at + range < size ? range : size - at;
		if (how == 2) {
			for (size_t k = 0; k < n;) { ssize_t w = pwrite(fd, host + at + k, n - k, at + k); if (w <= 0) { perror("pwrite"); exit(1); } k += w; }
			continue;
		}
		if (how == 0) {
			for (size_t k = 0; k < n; k += HUGE) madvise(file + at + k, 4096, MADV_POPULATE_WRITE);
			if (madvise(file + at, n, MADV_COLLAPSE)) { perror("collapse"); exit(1); }
		} else if (how == 1) madvise(file + at, n, MADV_POPULATE_WRITE);
		if (nt) ntcopy(file + at, host + at, n); else memcpy(file + at, host + at, n);
	}
}
int main(int argc, char **argv) {
	size = (size_t)atol(argv[1]) << 20;
	host = mmap(0, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	host = (char *)(((uintptr_t)host + HUGE - 1) & ~(HUGE - 1));
	madvise(host, size, MADV_HUGEPAGE);
	for (size_t i = 0; i < size; i += 8) *(uint64_t *)(host + i) = i * 0x9E3779B97F4A7C15ull;
	const char *hows[] = {"collapse", "populate", "pwrite"};
	int threads[] = {8, 16};
	for (how = 0; how < 3; how++) for (int t = 0; t < 2; t++) for (nt = how == 0 ? 1 : 0; nt >= 0; nt--) for (range = 8 << 20; range <= 8 << 20; range *= 4) {
		if (how && t) continue;
		for (int rep = 0; rep < 2; rep++) {
		fd = open("/dev/shm/writers.bin", O_RDWR | O_CREAT | O_TRUNC, 0600);
		if (ftruncate(fd, size)) return 1;
		double began = now(), used = cpu();
		char *base = mmap(0, size + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		file = (char *)(((uintptr_t)base + HUGE - 1) & ~(HUGE - 1));
		mmap(file, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
		atomic_store(&next, 0);
		pthread_t id[16];
		for (int i = 0; i < threads[t]; i++) pthread_create(&id[i], 0, work, 0);
		for (int i = 0; i < threads[t]; i++) pthread_join(id[i], 0);
		double took = now() - began;
		munmap(base, size + HUGE);
		double all = now() - began;
		printf("C writers %s %s threads=%d range=%zu KiB: %.1f GB/s, with munmap %.1f, %.3f cpu-s/GB\n", hows[how], nt ? "nt" : "plain", threads[t], range >> 10, size / took / 1e9, size / all / 1e9, (cpu() - used) / (size / 1e9));
		fflush(stdout);
		close(fd);
		unlink("/dev/shm/writers.bin");
		}
	}
	return 0;
}
