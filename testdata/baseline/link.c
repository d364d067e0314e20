/* The link as plain C measures it: pinned copies of 2 GiB each way, and both at
   once (four copies each), by events; medians of 16, in the format of Go benchmarks
   under the names of BenchmarkPinned of internal/benchmarks. Build and run:
   gcc -O2 -I/usr/local/cuda/include link.c -o link -L/usr/local/cuda/lib64 -lcudart && ./link */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#define N ((size_t)2 << 30)
#define SAMPLES 16
#define CK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { \
    fprintf(stderr, "%s: %s\n", #call, cudaGetErrorName(e)); exit(1); } } while (0)

static int order(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void show(const char *what, float *ms, double bytes) {
    qsort(ms, SAMPLES, sizeof *ms, order);
    printf("Benchmark%s\t%d\t%.0f ns/op\t%.2f GB/s\t%.2f min-GB/s\t%.2f max-GB/s\n", what, SAMPLES, ms[SAMPLES / 2] * 1e6,
        bytes / ms[SAMPLES / 2] / 1e6, bytes / ms[SAMPLES - 1] / 1e6, bytes / ms[0] / 1e6);
}

int main(void) {
    void *up, *down, *a, *b;
    cudaStream_t s, t;
    cudaEvent_t from, to, joined;
    float ms[SAMPLES];
    CK(cudaHostAlloc(&up, N, 0));
    CK(cudaHostAlloc(&down, N, 0));
    CK(cudaMalloc(&a, N));
    CK(cudaMalloc(&b, N));
    CK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    CK(cudaEventCreate(&from));
    CK(cudaEventCreate(&to));
    CK(cudaEventCreate(&joined));
    for (int i = -2; i < SAMPLES; i++) {
        CK(cudaEventRecord(from, s));
        CK(cudaMemcpyAsync(a, up, N, cudaMemcpyHostToDevice, s));
        CK(cudaEventRecord(to, s));
        CK(cudaEventSynchronize(to));
        if (i >= 0) CK(cudaEventElapsedTime(&ms[i], from, to));
    }
    show("Pinned/upload/2GiB", ms, N);
    for (int i = -2; i < SAMPLES; i++) {
        CK(cudaEventRecord(from, s));
        CK(cudaMemcpyAsync(down, b, N, cudaMemcpyDeviceToHost, s));
        CK(cudaEventRecord(to, s));
        CK(cudaEventSynchronize(to));
        if (i >= 0) CK(cudaEventElapsedTime(&ms[i], from, to));
    }
    show("Pinned/download/2GiB", ms, N);
    for (int i = -2; i < SAMPLES; i++) {
        CK(cudaEventRecord(from, s));
        CK(cudaStreamWaitEvent(t, from, 0));
        for (int k = 0; k < 4; k++) {
            CK(cudaMemcpyAsync(a, up, N, cudaMemcpyHostToDevice, s));
            CK(cudaMemcpyAsync(down, b, N, cudaMemcpyDeviceToHost, t));
        }
        CK(cudaEventRecord(joined, t));
        CK(cudaStreamWaitEvent(s, joined, 0));
        CK(cudaEventRecord(to, s));
        CK(cudaEventSynchronize(to));
        if (i >= 0) {
            CK(cudaEventElapsedTime(&ms[i], from, to));
            ms[i] /= 4;
        }
    }
    show("Pinned/both-ways/2GiB", ms, 2.0 * N);
    return 0;
}
