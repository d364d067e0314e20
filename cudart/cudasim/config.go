package cudasim

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// Config says what library, driver and devices to simulate. The zero Config is
// CUDA 13.0 with one device.
type Config struct {
	// Version is the runtime to imitate: 11080, 12040, 12080 or 13000. It
	// decides which names are exported, with which signatures, and how many
	// bytes structs have. Zero is 13000.
	Version cudart.Version

	// DriverVersion is what the driver supports; zero is Version. With an
	// older major version than the runtime's, nearly every call fails with
	// cudaErrorInsufficientDriver, as the real library's do.
	DriverVersion cudart.Version

	// NoDriver imitates a machine without a driver: cudaDriverGetVersion gives
	// 0 and nearly every other call fails with cudaErrorInsufficientDriver.
	NoDriver bool

	// Devices are the GPUs; nil is one with every default, and an empty slice
	// none (calls fail with cudaErrorNoDevice).
	Devices []DeviceConfig

	// MaxRegister is the most bytes that one cudaHostRegister call can pin,
	// 0 for no limit. Larger ones fail with cudaErrorMemoryAllocation.
	MaxRegister int
}

// DeviceConfig describes one GPU. Zero fields take the defaults, which are
// those of an H200 on PCIe 5.0 x16.
type DeviceConfig struct {
	Name       string              // "Simulated GPU"
	UUID       [16]byte            // one that tells the ordinal
	PCIBusID   string              // "0000:06:00.0" for device 0, then 07 and so on
	Memory     int                 // bytes of device memory, 16 GiB
	Attributes map[cudart.Attr]int // added to, or in place of, the defaults
	Link       Link
}

// Link is how fast bytes move, by way. Zero ways take the defaults. Copies of
// one way on one device queue behind each other, as they do for a copy engine.
type Link struct {
	HostToDevice, DeviceToHost                 Way // pinned host memory
	PageableHostToDevice, PageableDeviceToHost Way
	OnDevice                                   Way // copies and memset
	Peer                                       Way // device to device
	PrefetchToDevice, PrefetchToHost           Way // managed memory
}

// A Way is one kind of copy: a copy of n bytes takes Latency + n/Rate.
type Way struct {
	Rate    float64 // GB/s, 1e9 bytes a second
	Latency time.Duration
}

// time is how long n bytes take.
func (w Way) time(n int) time.Duration {
	return w.Latency + time.Duration(float64(n)/w.Rate)
}

// defaultLink is what one H200 on PCIe 5.0 x16 measured.
var defaultLink = Link{
	HostToDevice:         Way{55.4, 3650 * time.Nanosecond},
	DeviceToHost:         Way{55.3, 2850 * time.Nanosecond},
	PageableHostToDevice: Way{9.3, 3 * time.Microsecond},
	PageableDeviceToHost: Way{18.0, 7 * time.Microsecond},
	OnDevice:             Way{2000, 2 * time.Microsecond},
	Peer:                 Way{393, 5 * time.Microsecond},
	PrefetchToDevice:     Way{47.3, 10 * time.Microsecond},
	PrefetchToHost:       Way{15.9, 10 * time.Microsecond},
}

// eventTime is what recording an event takes on a stream.
const eventTime = 500 * time.Nanosecond

const (
	defaultVersion = cudart.Version(13000)
	defaultMemory  = 16 << 30
)

// maxAttribute is the last attribute that cudaDeviceGetAttribute answers.
const maxAttribute = 145

// defaultAttributes are an H200's. Attributes that are not here are 0.
var defaultAttributes = map[cudart.Attr]int{
	1:                                    1024,      // threads a block
	8:                                    49152,     // shared memory a block
	10:                                   32,        // warp size
	13:                                   1_980_000, // clock, kHz
	cudart.AttrMultiProcessorCount:       132,
	cudart.AttrCanMapHostMemory:          1,
	cudart.AttrConcurrentKernels:         1,
	cudart.AttrECCEnabled:                1,
	36:                                   3_201_000,  // memory clock, kHz
	37:                                   6144,       // memory bus width, bits
	38:                                   62_914_560, // L2 cache
	39:                                   2048,       // threads a multiprocessor
	cudart.AttrAsyncEngineCount:          3,
	cudart.AttrUnifiedAddressing:         1,
	cudart.AttrComputeCapabilityMajor:    9,
	cudart.AttrStreamPrioritiesSupported: 1,
	cudart.AttrManagedMemory:             1,
	cudart.AttrConcurrentManagedAccess:   1,
	90:                                   1, // compute preemption
	cudart.AttrCanUseHostPointerForRegisteredMem: 1,
	cudart.AttrHostRegisterSupported:             1,
	cudart.AttrHostRegisterReadOnlySupported:     1,
	cudart.AttrMemoryPoolsSupported:              1,
}

// withDefaults fills the zero fields, or says what is wrong with the rest.
func (c Config) withDefaults() (Config, error) {
	if c.Version == 0 {
		c.Version = defaultVersion
	}
	switch c.Version {
	case 11080, 12040, 12080, 13000:
	default:
		return c, fmt.Errorf("cudasim: Config.Version %d: want 11080, 12040, 12080 or 13000", int(c.Version))
	}
	if c.DriverVersion == 0 {
		c.DriverVersion = c.Version
	}
	if c.NoDriver {
		c.DriverVersion = 0
	}
	if c.DriverVersion < 0 || c.MaxRegister < 0 {
		return c, errors.New("cudasim: Config: DriverVersion and MaxRegister cannot be negative")
	}
	if c.Devices == nil {
		c.Devices = make([]DeviceConfig, 1)
	}
	devices := make([]DeviceConfig, len(c.Devices))
	for i, d := range c.Devices {
		var err error
		if devices[i], err = d.withDefaults(i); err != nil {
			return c, fmt.Errorf("cudasim: Config.Devices[%d]: %w", i, err)
		}
	}
	c.Devices = devices
	return c, nil
}

func (d DeviceConfig) withDefaults(ordinal int) (DeviceConfig, error) {
	if d.Name == "" {
		d.Name = "Simulated GPU"
	}
	if d.UUID == ([16]byte{}) {
		copy(d.UUID[:], "simulated-gpu")
		d.UUID[15] = byte(ordinal)
	}
	if d.PCIBusID == "" {
		d.PCIBusID = fmt.Sprintf("0000:%02x:00.0", 6+ordinal)
	}
	pci, err := linux.ParsePCIAddress(d.PCIBusID)
	if err != nil {
		return d, fmt.Errorf("PCIBusID: %w", err)
	}
	switch {
	case d.Memory == 0:
		d.Memory = defaultMemory
	case d.Memory < 0:
		return d, errors.New("memory is negative")
	}
	attributes := maps.Clone(defaultAttributes)
	attributes[cudart.AttrPCIDomain] = int(pci.Domain)
	attributes[cudart.AttrPCIBus] = int(pci.Bus)
	attributes[cudart.AttrPCIDevice] = int(pci.Device)
	maps.Copy(attributes, d.Attributes)
	d.Attributes = attributes
	for _, w := range []struct{ way, def *Way }{
		{&d.Link.HostToDevice, &defaultLink.HostToDevice},
		{&d.Link.DeviceToHost, &defaultLink.DeviceToHost},
		{&d.Link.PageableHostToDevice, &defaultLink.PageableHostToDevice},
		{&d.Link.PageableDeviceToHost, &defaultLink.PageableDeviceToHost},
		{&d.Link.OnDevice, &defaultLink.OnDevice},
		{&d.Link.Peer, &defaultLink.Peer},
		{&d.Link.PrefetchToDevice, &defaultLink.PrefetchToDevice},
		{&d.Link.PrefetchToHost, &defaultLink.PrefetchToHost},
	} {
		if *w.way == (Way{}) {
			*w.way = *w.def
		}
		if w.way.Rate <= 0 || w.way.Latency < 0 {
			return d, fmt.Errorf("link: a way needs a rate above 0 and a latency of 0 or more, not %+v", *w.way)
		}
	}
	return d, nil
}
