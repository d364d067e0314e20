package doctor

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
)

// Each host has one finding with this cause: with the file and the value that show it, and the remedy. Not has what
// would be wrong there.
func TestCausesOfHosts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		host, id  string
		certainty Certainty
		says      []string
		not       []string
	}{
		{"driver-not-installed", "no_kernel_module", Likely, []string{"not installed", "/lib/modules", "driver 525 or later"}, []string{"dkms autoinstall"}},
		{"pascal-with-590", "gpu_too_old_for_driver", Certain, []string{"libcuda.so.590.48.01", "Pascal", "580 (the last one for Pascal)"}, []string{"580 or later"}},
		{"pascal-with-580", "no_kernel_module", Likely, []string{"nvidia.ko.zst is installed for this kernel", "modprobe nvidia"}, []string{"not installed"}},
		{"blackwell-with-550", "gpu_too_old_for_driver", Certain, []string{"Blackwell", "570 or later, with the open kernel module"}, nil},
		{"window-without-address", "no_kernel_module", Likely, []string{"0000:01:00.0/resource: BAR 1 has no address", "Above 4G Decoding"}, nil},
		{"override-left", "no_kernel_module", Certain, []string{"0000:01:00.0/driver_override is vfio-pci", "driverctl unset-override 0000:01:00.0"}, nil},
		{"module-of-kernel-before", "no_kernel_module", Likely, []string{"6.8.0-31-generic", "osrelease is 6.8.0-45-generic", "dkms autoinstall -k 6.8.0-45-generic"}, nil},
		{"dkms-without-headers", "no_kernel_module", Likely, []string{"/var/lib/dkms/nvidia/580.95.05 has no build", "headers"}, nil},
		{"module-blocked", "no_kernel_module", Likely, []string{"/etc/modprobe.d/bumblebee.conf: blacklist nvidia"}, nil},
		{"blackwell-closed-module", "gpu_too_old_for_driver", Certain, []string{"closed kernel module 580.95.05", "packages with '-open'"}, nil},
		{"not-initialized-asleep", "gpu_not_initialized", Likely, []string{"power_state is D3cold", "power/control"}, nil},
		{"firmware-of-another-version", "gpu_not_initialized", Likely, []string{"/lib/firmware/nvidia has 580.105.08, and the module is 580.95.05"}, nil},
		{"not-initialized-vgpu", "gpu_not_initialized", Likely, []string{"/etc/nvidia/gridd.conf", "vGPU"}, nil},
		{"not-initialized", "gpu_not_initialized", Likely, []string{"BAR 1 has 32 GiB and an address"}, []string{"BAR 1 has no address"}},
		{"unavailable-and-idle", "gpus_unavailable", Likely, []string{"no process has a GPU", "waits for a reset"}, []string{"nvidia-smi -r"}},
		{"unavailable-until-reset", "gpus_unavailable", Certain, []string{"recovery action reset", "nvidia-smi -r"}, nil},
		{"unavailable-in-container", "gpus_unavailable", Possible, []string{"does not show processes outside"}, []string{"nvidia-smi -r"}},
		{"exclusive-and-busy", "gpus_unavailable", Possible, []string{"nvidia-smi -c DEFAULT"}, nil},
		{"stub-library", "stub_library", Certain, []string{"/usr/local/cuda/lib64/stubs is the toolkit's stub", "Remove /usr/local/cuda/lib64/stubs from LD_LIBRARY_PATH"}, nil},
		{"stub-in-cache", "stub_library", Likely, []string{"lib/stubs is the toolkit's stub", "ldconfig"}, nil},
		{"laptop-on-battery", "slow_link", Likely, []string{"power_supply", "Connect the power supply", "policy is powersave"}, []string{"riser"}},
		{"laptop-at-gen1", "slow_link", Possible, []string{"soldered", "powerprofilesctl"}, []string{"riser"}},
		{"link-held-to-gen1", "slow_link", Certain, []string{"0000:00:01.1/config: Link Control 2 has a target of 2.5 GT/s", "setpci -s 0000:00:01.1 CAP_EXP+30.w=4:f"}, []string{"riser"}},
		{"gen1-fallback", "slow_link", Certain, []string{"riser"}, nil},
		{"gpu-full-of-page-cache", "gpu_full", Likely, []string{"/proc/meminfo", "the rest is page cache", "drop_caches"}, nil},
		{"gpu-full", "gpu_full", Certain, []string{"Process 4711"}, []string{"page cache"}},
		{"pin-refused-wsl", "pin_refused", Likely, []string{"under WSL", ".wslconfig"}, nil},
		{"pin-refused-movable", "pin_refused", Likely, []string{"/proc/zoneinfo", "movablecore="}, nil},
		{"pin-refused-sme", "pin_refused", Possible, []string{"mem_encrypt=on"}, nil},
		{"pin-refused", "pin_refused", Certain, nil, []string{"mem_encrypt", "zoneinfo", "WSL"}},
		{"balloon", "leaked_pins", Possible, []string{"virtio_balloon", "virsh dommemstat"}, nil},
		{"leaked-pins", "leaked_pins", Likely, []string{"not pin more than 2 GiB"}, []string{"balloon"}},
		{"data-limit", "address_space_limit", Certain, []string{"Max data size is 4294967296", "ulimit -d unlimited"}, nil},
		{"hpet", "slow_small_copies", Likely, []string{"current_clocksource is hpet", "echo tsc"}, nil},
		{"shared-memory-left", "little_headroom", Likely, []string{"Shmem is 57.2 GiB", "ls -lS /dev/shm"}, nil},
		{"colab-variable-lost", "driver_library_off_path", Likely, []string{"/usr/lib64-nvidia"}, []string{"--gpus"}},
		{"kepler-with-cuda-13", "driver_too_old", Certain, []string{"Kepler", "CUDA 11.4"}, []string{"Update the driver"}},
		{"driver-too-old", "driver_too_old", Certain, []string{"Update the driver"}, nil},
		{"exclusive-under-mps", "compute_mode_exclusive", Likely, []string{"812 (nvidia-cuda-mps-server)", "CUDA_MPS_PIPE_DIRECTORY"}, []string{"-c DEFAULT"}},
		{"slow-pinning-throttled", "slow_pinning", Likely, []string{"quota of 4.0 was used up in 3000 of 4000 periods (cpu.stat)"}, []string{"PYTORCH_ALLOC_CONF"}},
		{"strict-overcommit-at-start", "strict_overcommit", Certain, []string{"vm.overcommit_memory is 2"}, nil},
	} {
		t.Run(c.host, func(t *testing.T) {
			t.Parallel()
			loaded, err := hosttest.LoadCase(filepath.Join("../../../../testdata/hosts", c.host+".txtar"))
			require.NoError(t, err)
			_, found := Evaluate(factsOfCase(t, loaded))
			i := slices.IndexFunc(found, func(one Finding) bool { return one.ID == c.id })
			require.GreaterOrEqual(t, i, 0, "%v", found)
			one := found[i]
			text := strings.Join(append(slices.Clone(one.Evidence), one.Summary, one.Cause, one.Remedy, one.Settle), "\n")
			for _, word := range c.says {
				assert.Contains(t, text, word)
			}
			for _, word := range c.not {
				assert.NotContains(t, text, word)
			}
			assert.Equal(t, c.certainty, one.Certainty)
		})
	}
}

// hostCase returns the facts of a host of the corpus.
func hostCase(t *testing.T, dir, name string) *Facts {
	t.Helper()
	loaded, err := hosttest.LoadCase(filepath.Join("../../../../testdata", dir, name+".txtar"))
	require.NoError(t, err)
	return factsOfCase(t, loaded)
}

// A job on the other half of a divided socket loses nothing while its copies reach their rate.
func TestDividedSocketsAreNoTroubleAtFullRate(t *testing.T) {
	t.Parallel()
	f := hostCase(t, "hosts", "healthy-snc")
	severity := func() Severity {
		found := remoteCPUs(f, &f.Devices[0])
		require.Len(t, found, 1)
		return found[0].Severity
	}
	assert.Equal(t, Note, severity())
	for i := range f.Devices[0].Bandwidth.Series {
		s := &f.Devices[0].Bandwidth.Series[i]
		s.Median, s.Min, s.Max = s.Median/2, s.Min/2, s.Max/2
	}
	assert.Empty(t, severity(), "the page's: copies are slow")
	f.Devices[0].Bandwidth, f.Host.CPU.Allowed = nil, "32-63"
	assert.Equal(t, Note, severity(), "the nodes are of one socket")
	f.Host.CPU.Allowed = "96-127"
	assert.Empty(t, severity(), "they are of another one")
}

// Copies of a GPU that is part of the processor are no shares of the link that it shows, which is a placeholder.
func TestPlaceholderLinksHaveNoShares(t *testing.T) {
	t.Parallel()
	f := hostCase(t, "threads", "healthy-dgx-spark")
	d := &f.Devices[0]
	require.Positive(t, d.Link.PathRate())
	d.Relink(f.Host)
	assert.Zero(t, d.LinkRate())
	for _, s := range d.copies() {
		assert.Nil(t, s.ShareOfLink)
	}
	f = hostCase(t, "hosts", "healthy-rtx4090-desktop")
	assert.InDelta(t, f.Devices[0].Link.PathRate(), f.Devices[0].LinkRate(), 1e-9)
	f.Devices[0].Link.Rate /= 16
	assert.InDelta(t, f.Devices[0].Link.MaxRate, f.Devices[0].LinkRate(), 1e-9, "it slept again when it was read")
}
