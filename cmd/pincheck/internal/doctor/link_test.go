package doctor

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

// An expectation that a link cannot meet is refused with its rate; where no link is known it stands.
func TestExpectationsAboveTheLink(t *testing.T) {
	t.Parallel()
	f := well(t)
	apart(f) // four GPUs at PCIe 5.0 x16
	refused, unknown := f.Refused(100)
	assert.Equal(t, []string{"PCIe 5.0 x16, the link of GPUs 0, 1, 2, 3, carries 63.0 GB/s each way at most"}, refused)
	assert.Empty(t, unknown)
	for _, rate := range []float64{1, 55, 63} {
		refused, _ = f.Refused(rate)
		assert.Empty(t, refused, rate)
	}

	f.Host.GPUs[1].Link.MaxSpeed = 16
	f.Host.GPUs[2].Upstream = append(f.Host.GPUs[2].Upstream, hostinfo.Link{Address: "0000:00:0f.0", MaxSpeed: 16, MaxWidth: 16}) // a switch above
	f.Host.GPUs[3].Link = hostinfo.Link{}
	for i := range f.Devices { // nothing is measured yet
		f.Devices[i].Bandwidth = nil
	}
	refused, unknown = f.Refused(50)
	assert.Equal(t, []string{"PCIe 4.0 x16, the link of GPUs 1, 2, carries 31.5 GB/s each way at most"}, refused)
	assert.Equal(t, []int{3}, unknown)

	for name, change := range map[string]func(*Facts){
		"coherent":               func(f *Facts) { f.Devices[0].Name = "NVIDIA GH200 480GB" },
		"the host's page tables": func(f *Facts) { f.Devices[0].Attributes = &Attributes{UsesHostPageTables: true} },
		"part of the chip":       func(f *Facts) { f.Devices[0].Attributes = &Attributes{Integrated: true} },
		"a link of 2.5 GT/s":     func(f *Facts) { f.Host.GPUs[0].Link.MaxSpeed = 2.5 },
		"copies were faster":     func(f *Facts) { f.Host.GPUs[0].Link.MaxSpeed = 8 },
		"no host":                func(f *Facts) { f.Host = nil },
	} {
		f := well(t)
		change(f)
		refused, unknown = f.Refused(500)
		assert.Empty(t, refused, name)
		assert.Equal(t, []int{0}, unknown, name)
	}
}
