// One source in host memory onto several GPUs in C, each of which gets all of it: threads fill
// the slots of a small pinned ring together, piece by piece, and the last one queues the slot's
// copies. "each" queues every slot to every GPU. "shares", where all GPUs can access each other's
// memory, queues it to one of them in turn, which passes it on to the others (cudaMemcpyPeerAsync).
// Then an upload of its own memory to each GPU at once. The same as fanout (GB/s are of
// the source) and upload (the sum) of BenchmarkGPUs of internal/benchmarks, printed in the format of
// Go benchmarks under the same names, and /by= with what it was done with: medians, with the slowest and the fastest sample, after one to warm up. CPU seconds
// are those of the process (getrusage), with threads that spin for a free slot. Every copy is
// checked on every GPU: each word tells its source and its place.
//
//	nvcc -O2 -Xcompiler -pthread fanout.c -o fanout && ./fanout
//
// or cc -O2 -pthread -I$CUDA/include fanout.c -L$CUDA/lib64 -lcudart -o fanout. The options:
//
//	-s SAMPLES  5 if left out
//	-t LIST     numbers of threads, for all GPUs together: 12,16,24
//	-d GPUS     the first so many of those that are visible: all
//	-r SLOTS    of 8 MiB, of the ring, for each GPU: 4
//	-m MIB      the size of a source: 2048
//	-p          its pages are of 4 KiB, not huge ones
//	-f FOLDER   the source is a file in the page cache, read by pread: made there, and removed
//
// It ends by itself after 300 seconds, and with status 1 after an error or wrong bytes.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) check(#x, (x))
#define MUST(x) do { if (!(x)) { fprintf(stderr, "%s: %s (%d)\n", #x, strerror(errno), errno); _exit(1); } } while (0)

#define MiB ((size_t)1 << 20)
#define HUGE (2 * MiB)
#define SLOT (8 * MiB)
#define PIECE (MiB / 2)
enum { GPUS = 16, RING = 16, THREADS = 256, COUNTS = 16, SAMPLES = 99, SECONDS = 300 };

static int gpus, ring = 4, samples = 5, plain;
static size_t size = 2048 * MiB;
static const char *folder;

// A source is memory, or the file fd where there is none.
struct source { char *mem; int fd; uint64_t number; };

// A slot's turn is 2 * k while chunk number k of those that use it is filled, and 2 * k + 1 from
// when its copies were queued until some thread sees that the slot is free again.
struct slot {
	char *host;
	cudaEvent_t copied[GPUS];
	atomic_size_t turn;
	atomic_int left;   // pieces that are not filled yet
	atomic_flag asked; // by one thread at a time whether it is free
};

static struct source sources[GPUS];
static struct slot slots[GPUS * RING];
static struct gpu {
	char *mem, *back; // back is pinned, for what is checked
	cudaStream_t up, to[GPUS];
} gpu[GPUS];

// A job is the copy of one source onto some GPUs, by way of its slots.
struct job {
	struct source *from;
	struct slot *slots;
	size_t ring; // a multiple of gpus
	int first, gpus, shares;
	atomic_size_t next; // piece
};

// _exit, here and in MUST, for other threads may be in CUDA.
static void check(const char *call, cudaError_t code) {
	if (code == cudaSuccess) return;
	fprintf(stderr, "%s: %s (%d)\n", call, cudaGetErrorName(code), (int)code);
	_exit(1);
}

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

static int ascending(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void start(pthread_t *t, void *(*f)(void *), void *arg) { MUST((errno = pthread_create(t, NULL, f, arg)) == 0); }
static void join(pthread_t t) { MUST((errno = pthread_join(t, NULL)) == 0); }

// word is never 0, which is what the GPUs have before a copy.
static uint64_t word(const struct source *s, size_t offset) {
	return ((s->number << 40) + offset / 8) * 0x9e3779b97f4a7c15;
}

static void get(const struct source *s, char *to, size_t offset, size_t n) {
	if (s->mem) {
		memcpy(to, s->mem + offset, n);
		return;
	}
	for (size_t done = 0; done < n;) {
		ssize_t k = pread(s->fd, to + done, n - done, (off_t)(offset + done));
		if (k == 0) errno = ENODATA;
		MUST(k > 0);
		done += (size_t)k;
	}
}

// goes says whether a slot of a job is copied to this GPU from the host.
static int goes(const struct job *j, size_t slot, int g) { return !j->shares || g == j->first + (int)(slot % (size_t)j->gpus); }

static int is_free(const struct job *j, size_t slot) {
	for (int g = j->first; g < j->first + j->gpus; g++) {
		if (!goes(j, slot, g)) continue;
		cudaError_t code = cudaEventQuery(j->slots[slot].copied[g]);
		if (code == cudaErrorNotReady) return 0;
		check("cudaEventQuery(copied)", code);
	}
	return 1;
}

static void await(const struct job *j, size_t slot, size_t turn) {
	struct slot *s = &j->slots[slot];
	for (size_t at; (at = atomic_load(&s->turn)) != turn;) {
		if (at == turn - 1 && !atomic_flag_test_and_set(&s->asked)) {
			if (atomic_load(&s->turn) == turn - 1 && is_free(j, slot)) atomic_store(&s->turn, turn);
			atomic_flag_clear(&s->asked);
			continue;
		}
#if defined(__x86_64__)
		__builtin_ia32_pause();
#endif
	}
}

static void queue(const struct job *j, size_t slot, size_t offset) {
	struct slot *s = &j->slots[slot];
	for (int g = j->first; g < j->first + j->gpus; g++) {
		if (!goes(j, slot, g)) continue;
		CHECK(cudaSetDevice(g));
		CHECK(cudaMemcpyAsync(gpu[g].mem + offset, s->host, SLOT, cudaMemcpyHostToDevice, gpu[g].up));
		CHECK(cudaEventRecord(s->copied[g], gpu[g].up));
		for (int h = j->first; j->shares && h < j->first + j->gpus; h++) {
			if (h == g) continue;
			CHECK(cudaStreamWaitEvent(gpu[g].to[h], s->copied[g], 0));
			CHECK(cudaMemcpyPeerAsync(gpu[h].mem + offset, h, gpu[g].mem + offset, g, SLOT, gpu[g].to[h]));
		}
	}
}

static void help(struct job *j) {
	const size_t pieces = SLOT / PIECE;
	for (;;) {
		size_t piece = atomic_fetch_add(&j->next, 1), chunk = piece / pieces, slot = chunk % j->ring;
		if (chunk >= size / SLOT) return;
		struct slot *s = &j->slots[slot];
		await(j, slot, chunk / j->ring * 2);
		get(j->from, s->host + piece % pieces * PIECE, piece * PIECE, PIECE);
		if (atomic_fetch_sub(&s->left, 1) > 1) continue;
		queue(j, slot, chunk * SLOT);
		atomic_store(&s->left, (int)pieces);
		atomic_fetch_add(&s->turn, 1);
	}
}

// The crew are threads that stay for all samples of a line; an equal part of them is at each job.
static struct {
	struct job job[GPUS];
	int jobs, stop;
	pthread_barrier_t gate;
} crew;

static void pass_gate(void) {
	int code = pthread_barrier_wait(&crew.gate);
	MUST(code == PTHREAD_BARRIER_SERIAL_THREAD || (errno = code) == 0);
}

static void *serve(void *number) {
	for (;;) {
		pass_gate();
		if (crew.stop) return NULL;
		help(&crew.job[(intptr_t)number % crew.jobs]);
		pass_gate();
	}
}

static void prepare(void) {
	for (int i = 0; i < crew.jobs; i++) {
		struct job *j = &crew.job[i];
		atomic_store(&j->next, 0);
		for (size_t k = 0; k < j->ring; k++) {
			atomic_store(&j->slots[k].turn, 0);
			atomic_store(&j->slots[k].left, (int)(SLOT / PIECE));
		}
	}
	for (int g = 0; g < gpus; g++) {
		CHECK(cudaSetDevice(g));
		CHECK(cudaMemset(gpu[g].mem, 0, size));
		CHECK(cudaDeviceSynchronize());
	}
}

static void copy(void) {
	pass_gate();
	pass_gate();
	for (int g = 0; g < gpus; g++) {
		CHECK(cudaSetDevice(g));
		CHECK(cudaStreamSynchronize(gpu[g].up));
		for (int h = 0; h < gpus; h++) CHECK(cudaStreamSynchronize(gpu[g].to[h]));
	}
}

// compare begins at the end, where a copy would still be under way. It makes the source's words
// again, for its bytes could be wrong too.
static void *compare(void *number) {
	int g = (int)(intptr_t)number;
	const struct source *s = &sources[crew.jobs == 1 ? 0 : g];
	CHECK(cudaSetDevice(g));
	memset(gpu[g].back, 0, SLOT);
	for (size_t offset = size; offset > 0;) {
		offset -= SLOT;
		CHECK(cudaMemcpy(gpu[g].back, gpu[g].mem + offset, SLOT, cudaMemcpyDeviceToHost));
		const uint64_t *got = (const uint64_t *)gpu[g].back;
		for (size_t i = 0; i < SLOT; i += 8) {
			if (got[i / 8] == word(s, offset + i)) continue;
			fprintf(stderr, "GPU %d: wrong bytes at %zu: %016llx, not %016llx\n", g, offset + i,
				(unsigned long long)got[i / 8], (unsigned long long)word(s, offset + i));
			_exit(1);
		}
	}
	return NULL;
}

static void measure(const char *name, int threads) {
	double took[SAMPLES], used = 0, bytes = (double)size * crew.jobs;
	pthread_t all[THREADS], checks[GPUS];
	crew.stop = 0;
	MUST((errno = pthread_barrier_init(&crew.gate, NULL, (unsigned)threads + 1)) == 0);
	for (intptr_t i = 0; i < threads; i++) start(&all[i], serve, (void *)i);
	for (int k = -1; k < samples; k++) { // the first warms up
		prepare();
		double before = cpu(), begin = now();
		copy();
		double end = now(), after = cpu();
		if (k >= 0) took[k] = end - begin, used += after - before;
		for (intptr_t g = 0; g < gpus; g++) start(&checks[g], compare, (void *)g);
		for (int g = 0; g < gpus; g++) join(checks[g]);
	}
	crew.stop = 1;
	pass_gate();
	for (int i = 0; i < threads; i++) join(all[i]);
	MUST((errno = pthread_barrier_destroy(&crew.gate)) == 0);
	qsort(took, (size_t)samples, sizeof *took, ascending);
	double median = took[samples / 2];
	printf("Benchmark%s,ring=%d,threads=%d%s\t%d\t%.0f ns/op\t%.2f GB/s\t%.2f min-GB/s\t%.2f max-GB/s\t%.3f cpu-s/GB\n", name, ring,
		threads, plain ? ",plain" : "", samples, median * 1e9, bytes / median / 1e9, bytes / took[samples - 1] / 1e9,
		bytes / took[0] / 1e9, used / samples / (bytes / 1e9));
}

// size_name is how Go's benchmarks write it.
static const char *size_name(void) {
	static char text[32];
	int whole = size % (1024 * MiB) == 0;
	snprintf(text, sizeof text, "%zu%s", size / MiB / (whole ? 1024 : 1), whole ? "GiB" : "MiB");
	return text;
}

static void measure_fanout(int shares, int threads) {
	char name[100];
	crew.jobs = 1;
	crew.job[0] = (struct job){.from = &sources[0], .slots = slots, .ring = (size_t)(ring * gpus), .gpus = gpus, .shares = shares};
	snprintf(name, sizeof name, "GPUs/%d/fanout%s/%s/by=%s", gpus, folder ? "-file" : "", size_name(), shares ? "shares" : "each");
	measure(name, threads);
}

static void measure_own(int threads) {
	char name[100];
	if (threads < gpus) {
		fprintf(stderr, "%d threads are too few for %d uploads at once: left out\n", threads, gpus);
		return;
	}
	crew.jobs = gpus;
	for (int g = 0; g < gpus; g++)
		crew.job[g] = (struct job){.from = &sources[g], .slots = slots + g * ring, .ring = (size_t)ring, .first = g, .gpus = 1};
	snprintf(name, sizeof name, "GPUs/%d/upload/%s/by=own", gpus, size_name());
	measure(name, threads);
}

static char *map(size_t n, int huge) {
	char *p = mmap(0, n + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(p != MAP_FAILED);
	p = (char *)(((uintptr_t)p + HUGE - 1) & ~(HUGE - 1));
	if (madvise(p, n, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) != 0) perror("madvise"); // a kernel without huge pages
	return p;
}

static struct { struct source *to; atomic_size_t next; } fill;

static void *fill_chunks(void *unused) {
	(void)unused;
	uint64_t *chunk = malloc(SLOT);
	MUST(chunk != NULL);
	for (size_t offset; (offset = atomic_fetch_add(&fill.next, SLOT)) < size;) {
		for (size_t i = 0; i < SLOT; i += 8) chunk[i / 8] = word(fill.to, offset + i);
		if (fill.to->mem) memcpy(fill.to->mem + offset, chunk, SLOT);
		for (size_t done = 0; !fill.to->mem && done < SLOT;) {
			ssize_t k = pwrite(fill.to->fd, (char *)chunk + done, SLOT - done, (off_t)(offset + done));
			MUST(k > 0);
			done += (size_t)k;
		}
	}
	free(chunk);
	return NULL;
}

static void make_source(struct source *s, uint64_t number) {
	pthread_t all[8];
	s->number = number;
	if (folder) {
		char path[4096];
		if (snprintf(path, sizeof path, "%s/pinned-baseline-XXXXXX", folder) >= (int)sizeof path) {
			fprintf(stderr, "the folder's name is too long\n");
			_exit(2);
		}
		MUST((s->fd = mkstemp(path)) >= 0);
		MUST(unlink(path) == 0);
	} else s->mem = map(size, !plain);
	fill.to = s;
	atomic_store(&fill.next, 0);
	for (int i = 0; i < 8; i++) start(&all[i], fill_chunks, NULL);
	for (int i = 0; i < 8; i++) join(all[i]);
	if (folder) MUST(fsync(s->fd) == 0); // so that nothing is written while copies are measured
}

static void make_gpus(void) {
	size_t all = (size_t)(ring * gpus), n = all * SLOT;
	char *host = map(n, 1);
	memset(host, 1, n);
	CHECK(cudaHostRegister(host, n, cudaHostRegisterPortable));
	for (size_t i = 0; i < all; i++) {
		slots[i].host = host + i * SLOT;
		atomic_flag_clear(&slots[i].asked);
	}
	for (int g = 0; g < gpus; g++) {
		CHECK(cudaSetDevice(g));
		CHECK(cudaMalloc((void **)&gpu[g].mem, size));
		CHECK(cudaHostAlloc((void **)&gpu[g].back, SLOT, cudaHostAllocPortable));
		CHECK(cudaStreamCreateWithFlags(&gpu[g].up, cudaStreamNonBlocking));
		for (int h = 0; h < gpus; h++) CHECK(cudaStreamCreateWithFlags(&gpu[g].to[h], cudaStreamNonBlocking));
		for (size_t i = 0; i < all; i++) CHECK(cudaEventCreateWithFlags(&slots[i].copied[g], cudaEventDisableTiming));
	}
}

// make_peers says whether all GPUs can access each other's memory, and enables it then.
static int make_peers(void) {
	for (int g = 0; g < gpus; g++)
		for (int h = 0; h < gpus; h++) {
			int can = 1;
			if (h != g) CHECK(cudaDeviceCanAccessPeer(&can, g, h));
			if (can) continue;
			fprintf(stderr, "GPU %d cannot access the memory of GPU %d: shares are left out\n", g, h);
			return 0;
		}
	for (int g = 0; g < gpus; g++) {
		CHECK(cudaSetDevice(g));
		for (int h = 0; h < gpus; h++)
			if (h != g) CHECK(cudaDeviceEnablePeerAccess(h, 0));
	}
	return gpus > 1;
}

static void late(int unused) {
	(void)unused;
	static const char text[] = "not done in time\n";
	if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(3);
	_exit(1);
}

static void usage(const char *program) {
	fprintf(stderr, "usage: %s [-s SAMPLES, 1 to %d] [-t THREADS,THREADS..., each 1 to %d] [-d GPUS, 1 to %d] [-r SLOTS, 1 to %d]\n"
		"\t[-m MIB, a multiple of 8] [-p | -f FOLDER]\n", program, SAMPLES, THREADS, GPUS, RING);
	exit(2);
}

// number is a whole argument, or one item of a list if *text may go on.
static int number(const char **text, int list, int most, const char *program) {
	char *end;
	errno = 0;
	long n = strtol(*text, &end, 10);
	if (end == *text || errno || n < 1 || n > most || (*end && !(list && *end == ',' && end[1]))) usage(program);
	*text = *end ? end + 1 : end;
	return (int)n;
}

int main(int argc, char **argv) {
	int counts[COUNTS] = {12, 16, 24}, lines = 3, wanted = GPUS;
	for (int option; (option = getopt(argc, argv, "s:t:d:r:m:pf:")) != -1;) {
		const char *text = optarg;
		switch (option) {
		case 's': samples = number(&text, 0, SAMPLES, argv[0]); break;
		case 'd': wanted = number(&text, 0, GPUS, argv[0]); break;
		case 'r': ring = number(&text, 0, RING, argv[0]); break;
		case 'm': size = (size_t)number(&text, 0, 1 << 20, argv[0]) * MiB; break;
		case 'p': plain = 1; break;
		case 'f': folder = optarg; break;
		case 't':
			for (lines = 0; lines == 0 || *text; lines++) {
				if (lines == COUNTS) usage(argv[0]);
				counts[lines] = number(&text, 1, THREADS, argv[0]);
			}
			break;
		default: usage(argv[0]);
		}
	}
	if (optind < argc || size % SLOT || (plain && folder)) usage(argv[0]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	MUST(signal(SIGALRM, late) != SIG_ERR);
	alarm(SECONDS);

	CHECK(cudaGetDeviceCount(&gpus));
	if (gpus > wanted) gpus = wanted;
	make_gpus();
	int peers = make_peers();
	for (int i = 0; i < (folder ? 1 : gpus); i++) make_source(&sources[i], (uint64_t)i + 1);
	for (int i = 0; i < lines; i++) measure_fanout(0, counts[i]);
	for (int i = 0; peers && i < lines; i++) measure_fanout(1, counts[i]);
	if (size % (2 * SLOT) == 0) size /= 2; // to each GPU its own half of a source
	for (int i = 0; !folder && i < lines; i++) measure_own(counts[i]);
	return 0;
}
