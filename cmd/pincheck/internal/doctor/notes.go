package doctor

import (
	"fmt"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

const launchBlocking = "CUDA_LAUNCH_BLOCKING"

// blocking reports whether each launch waits for its end.
func (f *Facts) blocking() bool {
	value := f.Host.Env[launchBlocking]
	return value != "" && value != "0"
}

func launchesBlock(f *Facts) []Finding {
	if len(f.Devices) == 0 || !f.blocking() {
		return nil
	}
	return finding(Finding{
		Summary:  "each kernel launch waits for its end (" + launchBlocking + ")",
		Evidence: []string{launchBlocking + "=" + f.Host.Env[launchBlocking]},
	})
}

// Docker makes a /dev/shm of smallShared. A loader for each of manyCPUs passes its batches through it.
const (
	smallShared = 64 << 20
	manyCPUs    = 8
)

func smallDevShm(f *Facts) []Finding {
	if f.Host.Virt.Container == "" || f.Host.CPU.Usable() < manyCPUs {
		return nil
	}
	for _, m := range f.Host.Mounts {
		if size, known := m.Size.Finite(); m.Point == "/dev/shm" && known && size <= smallShared {
			return finding(Finding{
				Summary:  fmt.Sprintf("/dev/shm has %s, beside %s CPUs", units.Bytes(size), units.Number(f.Host.CPU.Usable(), 2)),
				Evidence: []string{fmt.Sprintf("/proc/self/mountinfo: /dev/shm is a tmpfs of %s", units.Bytes(size))},
			})
		}
	}
	return nil
}

func corruptedInfoROM(_ *Facts, d *Device) []Finding {
	if d.Health == nil || !isTrue(d.Health.InfoROMCorrupted) {
		return nil
	}
	return seen(fmt.Sprintf("NVML: GPU %d: the checksum of the InfoROM is wrong", d.Health.Index))
}

// maxRetired is the number of pages that a GPU before Ampere can retire.
const maxRetired = 64

func sparesUsedUp(_ *Facts, d *Device) []Finding {
	h := d.Health
	switch {
	case h == nil:
	case h.BanksWithoutSpares != nil && *h.BanksWithoutSpares > 0:
		return finding(Finding{
			Summary:  units.Things(*h.BanksWithoutSpares, "memory bank has", "memory banks have") + " no spare row left",
			Evidence: []string{fmt.Sprintf("NVML: row remapper histogram of GPU %d: none is %d", h.Index, *h.BanksWithoutSpares)},
		})
	case h.RetiredPages != nil && *h.RetiredPages >= maxRetired:
		return seen(fmt.Sprintf("NVML: GPU %d has %d retired pages, of at most %d", h.Index, *h.RetiredPages, maxRetired))
	}
	return nil
}

// firstWithFault is the first branch whose mappings of 4 GiB and more fault on kernels with pages of 64 KiB.
const firstWithFault = 590

// hugeOf64K is the size of a huge page where a page has 64 KiB.
const hugeOf64K = 512 << 20

func largePagesFault(f *Facts) []Finding {
	if branchOf(f.Host.NVIDIA.DriverVersion) < firstWithFault || !strings.HasPrefix(f.Host.CPU.Model, "arm64") {
		return nil
	}
	if f.Host.Memory.THP.PageSize != hugeOf64K && !strings.Contains(f.Host.Kernel.Release, "64k") {
		return nil
	}
	return seen("Kernel "+f.Host.Kernel.Release+" has pages of 64 KiB", "Driver "+f.Host.NVIDIA.DriverVersion+" (590, 595 and 610 are affected, 580 is not)")
}
