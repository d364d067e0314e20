package doctor

import (
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/verify"
)

// Facts are all that was found and measured.
type Facts struct {
	Simulated bool           `json:"simulated"`
	Host      *hostinfo.Host `json:"host,omitempty"`
	Library   *Library       `json:"library,omitempty"` // absent if none could be opened
	// Requirements are what a GPU needs of the host. They are checked only if
	// no GPU can be used.
	Requirements []Requirement `json:"requirements,omitempty"`
	// Search is how a library was searched for, if none could be used.
	Search  *Search  `json:"search,omitempty"`
	Devices []Device `json:"devices"`
}

// Search is a search for a library that found none.
type Search struct {
	Attempts []Attempt `json:"attempts"`
	Looked   []string  `json:"looked"` // places that were searched
}

// Library is the CUDA runtime library in use. Versions are "13.0".
type Library struct {
	Path             string    `json:"path"`
	Found            string    `json:"found"` // how it was found
	RuntimeVersion   string    `json:"runtime_version"`
	DriverVersion    string    `json:"driver_version"` // the newest CUDA that the driver supports
	Attempts         []Attempt `json:"attempts,omitempty"`
	MissingFunctions []string  `json:"missing_functions,omitempty"`
}

// Attempt is a library that was tried.
type Attempt struct {
	Path           string `json:"path"`
	Found          string `json:"found"`
	RuntimeVersion string `json:"runtime_version,omitempty"` // absent if unknown
	Error          string `json:"error,omitempty"`           // why it was not taken, empty if it was
}

// Device is one GPU, with what was measured on it.
type Device struct {
	Ordinal           int    `json:"device"`
	Name              string `json:"name"`
	UUID              string `json:"uuid"`
	PCIBusID          string `json:"pci_bus_id"`
	ComputeCapability string `json:"compute_capability,omitempty"`
	MemoryTotal       int    `json:"memory_total_bytes,omitempty"`
	MemoryFree        int    `json:"memory_free_bytes,omitempty"`
	NUMANode          *int   `json:"numa_node"` // null if the firmware does not say
	LocalCPUs         string `json:"local_cpus,omitempty"`
	// Link is absent if the host does not show it.
	Link      *Link           `json:"link,omitempty"`
	Verify    *verify.Report  `json:"verify,omitempty"`
	Bandwidth *measure.Result `json:"bandwidth,omitempty"`
	// Errors are those of calls and measurements that failed.
	Errors []string `json:"errors,omitempty"`
}

// Link is the PCI Express link of a device: as it is trained, and its maximum.
type Link struct {
	Speed    float64 `json:"gt_per_s,omitempty"`
	Width    int     `json:"width,omitempty"`
	Rate     float64 `json:"gb_per_s,omitempty"`
	MaxSpeed float64 `json:"max_gt_per_s,omitempty"`
	MaxWidth int     `json:"max_width,omitempty"`
	MaxRate  float64 `json:"max_gb_per_s,omitempty"`
	// Bottleneck is the slowest link further up, if it is slower than this one
	// could be.
	Bottleneck *Upstream `json:"bottleneck,omitempty"`
}

// Upstream is a link between a bridge and the root.
type Upstream struct {
	Address  string  `json:"address"`
	Speed    float64 `json:"gt_per_s"`
	Width    int     `json:"width"`
	Rate     float64 `json:"gb_per_s"`
	MaxSpeed float64 `json:"max_gt_per_s,omitempty"`
	MaxWidth int     `json:"max_width,omitempty"`
}

// PathRate returns what the path from the root to the device can carry as its links are
// trained now, in GB/s each way. 0 is unknown.
func (l *Link) PathRate() float64 {
	if l == nil {
		return 0
	}
	if l.Bottleneck != nil && (l.Rate == 0 || l.Bottleneck.Rate < l.Rate) {
		return l.Bottleneck.Rate
	}
	return l.Rate
}

// WithoutLibrary returns the facts after a failure to open a library.
func WithoutLibrary(failed *cudart.OpenError, host *hostinfo.Host) *Facts {
	return &Facts{
		Host:         host,
		Requirements: Require(host, failed),
		Search:       &Search{Attempts: attempts(failed.Attempts), Looked: append([]string{}, failed.Looked...)},
		Devices:      []Device{},
	}
}

// Gather describes the library and the devices of rt. Calls that fail are in the
// device's Errors.
func Gather(rt *cudart.Runtime, devices []*cudart.Device, host *hostinfo.Host) *Facts {
	lib := rt.Library()
	f := &Facts{
		Simulated: lib.Simulated,
		Host:      host,
		Library: &Library{
			Path: lib.Path, Found: lib.Found,
			RuntimeVersion: lib.Runtime.String(), DriverVersion: lib.Driver.String(),
			Attempts: attempts(lib.Attempts), MissingFunctions: lib.Missing,
		},
		Devices: make([]Device, 0, len(devices)),
	}
	for _, d := range devices {
		described := describe(d)
		described.Relink(host)
		f.Devices = append(f.Devices, described)
	}
	if len(devices) == 0 {
		f.Requirements = Require(host, nil)
	}
	return f
}

func attempts(all []cudart.Attempt) []Attempt {
	out := make([]Attempt, 0, len(all))
	for _, a := range all {
		b := Attempt{Path: a.Path, Found: a.Found}
		if a.Runtime != 0 {
			b.RuntimeVersion = a.Runtime.String()
		}
		if a.Err != nil {
			b.Error = a.Err.Error()
		}
		out = append(out, b)
	}
	return out
}

func describe(d *cudart.Device) Device {
	out := Device{Ordinal: d.Ordinal(), Name: d.Name(), UUID: d.UUID(), PCIBusID: d.PCIBusID()}
	var err error
	if out.MemoryFree, out.MemoryTotal, err = d.MemInfo(); err != nil {
		out.Errors = append(out.Errors, err.Error())
	}
	major, errMajor := d.Attribute(cudart.AttrComputeCapabilityMajor)
	minor, errMinor := d.Attribute(cudart.AttrComputeCapabilityMinor)
	if errMajor == nil && errMinor == nil {
		out.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	}
	return out
}

// Relink takes the link from facts about the host. A GPU trains its link down while it is
// idle and up under load, so facts that were read right after measuring count.
func (d *Device) Relink(host *hostinfo.Host) {
	if pci, ok := host.GPU(d.PCIBusID); ok {
		d.NUMANode, d.LocalCPUs = pci.NUMANode, pci.CPUs
		d.Link = newLink(pci)
	}
	if rate := d.Link.PathRate(); d.Bandwidth != nil && rate > 0 {
		for i := range d.Bandwidth.Series {
			share := d.Bandwidth.Series[i].Median / rate
			d.Bandwidth.Series[i].ShareOfLink = &share
		}
	}
}

func newLink(pci hostinfo.PCIDevice) *Link {
	at := pci.Link
	l := &Link{
		Speed: at.CurrentSpeed, Width: at.CurrentWidth, Rate: at.Current(),
		MaxSpeed: at.MaxSpeed, MaxWidth: at.MaxWidth, MaxRate: at.Max(),
	}
	if l.Rate == 0 && l.MaxRate == 0 {
		return nil
	}
	for i, up := range pci.Upstream {
		rate := up.Current()
		// The nearest bridge is the other end of the device's own link.
		if i == 0 && rate == l.Rate || rate == 0 {
			continue
		}
		if rate < max(l.Rate, l.MaxRate) && (l.Bottleneck == nil || rate < l.Bottleneck.Rate) {
			l.Bottleneck = &Upstream{
				Address: up.Address, Speed: up.CurrentSpeed, Width: up.CurrentWidth, Rate: rate,
				MaxSpeed: up.MaxSpeed, MaxWidth: up.MaxWidth,
			}
		}
	}
	return l
}
