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
		{"not-initialized-vgpu", "gpu_not_initialized", Likely, []string{"/etc/nvidia/gridd.conf", "vGPU"}, nil},
		{"not-initialized", "gpu_not_initialized", Possible, []string{"BAR 1 has 32 GiB and an address"}, []string{"BAR 1 has no address"}},
		{"unavailable-and-idle", "gpus_unavailable", Likely, []string{"no process has a GPU", "waits for a reset"}, []string{"nvidia-smi -r"}},
		{"unavailable-until-reset", "gpus_unavailable", Certain, []string{"recovery action reset", "nvidia-smi -r"}, nil},
		{"unavailable-in-container", "gpus_unavailable", Possible, []string{"does not show processes outside"}, []string{"nvidia-smi -r"}},
		{"exclusive-and-busy", "gpus_unavailable", Possible, []string{"nvidia-smi -c DEFAULT"}, nil},
		{"stub-library", "stub_library", Certain, []string{"/usr/local/cuda/lib64/stubs is the toolkit's stub", "Remove /usr/local/cuda/lib64/stubs from LD_LIBRARY_PATH"}, nil},
		{"stub-in-cache", "stub_library", Likely, []string{"lib/stubs is the toolkit's stub", "ldconfig"}, nil},
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
