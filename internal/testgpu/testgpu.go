// Package testgpu provides devices for tests: simulated ones, or with PINNED_TEST_GPU=1
// those of the machine. It never takes one for the other. With PINNED_CUDA_API=driver both
// are libcuda's instead of libcudart's.
package testgpu

import (
	"context"
	"os"
	"runtime"
	"testing"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// Env is the environment variable that requests a real GPU if it is 1.
const Env = "PINNED_TEST_GPU"

// Real reports whether tests are to use a real GPU.
func Real() bool { return os.Getenv(Env) == "1" }

// Driver reports whether tests are to use the driver API.
func Driver() bool { return os.Getenv("PINNED_CUDA_API") == "driver" }

// Config returns cfg with the API that tests are to use, unless it names one.
func Config(cfg cudasim.Config) cudasim.Config {
	if Driver() && cfg.API == cudart.AnyAPI && !cfg.NoDriver {
		cfg.API = cudart.DriverAPI
	}
	return cfg
}

// Device opens device 0 of a simulated library, or with [Real] of the machine's library.
// If the machine has none, the test fails. The end of the test closes it, and fails the
// test if anything of a simulated one was not released, or misused.
func Device(tb testing.TB) *cudart.Device {
	tb.Helper()
	return DeviceWith(tb, cudasim.Config{})
}

// DeviceWith is [Device] with the configuration of a simulated one.
func DeviceWith(tb testing.TB, cfg cudasim.Config) *cudart.Device {
	tb.Helper()
	if !Real() {
		_, rt := Sim(tb, cfg)
		return first(tb, rt)
	}
	return first(tb, open(tb, cudart.Options{API: cfg.API}))
}

// Sim opens a simulated library, also with [Real]. The end of the test closes it, and
// fails the test if anything was not released, or misused. One test has two at the most.
func Sim(tb testing.TB, cfg cudasim.Config) (*cudasim.Sim, *cudart.Runtime) {
	tb.Helper()
	if platform := runtime.GOOS + "/" + runtime.GOARCH; platform != "linux/amd64" && platform != "linux/arm64" {
		tb.Skipf("no simulated GPU on %s", platform)
	}
	acquire(tb)
	return cudasim.Start(tb, Config(cfg))
}

// End closes a simulated library, and fails the test if anything was not released, or
// misused.
func End(tb testing.TB, sim *cudasim.Sim) {
	tb.Helper()
	if err := raw.EndSim(sim); err != nil {
		tb.Errorf("%v at the end of the test: %v", sim, err)
	}
}

func open(tb testing.TB, o cudart.Options) *cudart.Runtime {
	tb.Helper()
	rt, err := cudart.Open(context.Background(), o)
	if err != nil {
		tb.Fatalf("open CUDA: %v", err)
	}
	tb.Cleanup(func() {
		if err := rt.Close(); err != nil {
			tb.Errorf("close CUDA: %v", err)
		}
	})
	return rt
}

func first(tb testing.TB, rt *cudart.Runtime) *cudart.Device {
	tb.Helper()
	dev, err := rt.Device(0)
	if err != nil {
		tb.Fatal(err)
	}
	return dev
}
