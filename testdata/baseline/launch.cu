// What BenchmarkKernel/launch of internal/benchmarks and package kernel's BenchmarkLaunch do, in C++ with nothing
// above CUDA's runtime, printed in the format of Go benchmarks under their names: nanoseconds for the caller, the
// median of rounds of 256 launches on an idle stream.
//
//	nvcc -O2 -o launch launch.cu && ./launch 5
//
// With cudaLaunchKernel, as <<<>>> compiles to, and for the same code from PTX with
// cuLaunchKernel: nvcc -O2 -DDRIVER -o launch launch.cu -lcuda && ./launch 5 user.ptx
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>
#ifdef DRIVER
#include <cuda.h>
#endif

#define CHECK(x)                                                           \
	do {                                                                   \
		int code_ = (int)(x);                                              \
		if (code_ != 0) {                                                  \
			fprintf(stderr, "%s: error %d\n", #x, code_);                  \
			exit(1);                                                       \
		}                                                                  \
	} while (0)

static __global__ void saxpy(float *y, const float *x, float a, unsigned n) {
	unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		y[i] += a * x[i];
}

static double now() {
	return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename F> static double median(int rounds, int batch, cudaStream_t s, bool wait, F launch) {
	std::vector<double> times;
	for (int round = 0; round < rounds; round++) {
		CHECK(cudaStreamSynchronize(s));
		double began = now();
		for (int i = 0; i < batch; i++) {
			launch();
			if (wait)
				CHECK(cudaStreamSynchronize(s));
		}
		times.push_back((now() - began) / batch);
	}
	std::sort(times.begin(), times.end());
	return times[times.size() / 2];
}

int main(int argc, char **argv) {
	int count = argc > 1 ? atoi(argv[1]) : 5;
	const int rounds = 400, batch = 256;
	float *p;
	cudaStream_t s;
	CHECK(cudaMalloc(&p, 64));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	auto report = [&](const char *name, bool wait, auto launch) {
		launch();
		for (int i = 0; i < count; i++)
			printf("Benchmark%s %d %.1f ns/op\n", name, rounds * batch, median(rounds, batch, s, wait, launch));
	};
	auto runtime = [&] {
		saxpy<<<1, 16, 0, s>>>(p, p, 0.0f, 16u);
		CHECK(cudaGetLastError());
	};
	report("Kernel/launch", false, runtime);
	report("Launch/saxpy_and_synchronize", true, runtime);
	cudaLaunchConfig_t config = {};
	config.gridDim = dim3(1);
	config.blockDim = dim3(16);
	config.stream = s;
	report("Launch/saxpy/cudaLaunchKernelEx", false, [&] { CHECK(cudaLaunchKernelEx(&config, saxpy, p, (const float *)p, 0.0f, 16u)); });
#ifdef DRIVER
	if (argc > 2) {
		std::ifstream file(argv[2]);
		std::stringstream text;
		text << file.rdbuf();
		CUmodule module;
		CUfunction function;
		CHECK(cuModuleLoadData(&module, text.str().c_str()));
		CHECK(cuModuleGetFunction(&function, module, "saxpy"));
		float a = 0;
		unsigned n = 16;
		void *args[] = {&p, &p, &a, &n};
		report("Launch/saxpy/cuLaunchKernel", false, [&] { CHECK(cuLaunchKernel(function, 1, 1, 1, 16, 1, 1, 0, s, args, nullptr)); });
	}
#endif
	CHECK(cudaStreamSynchronize(s));
	return 0;
}
