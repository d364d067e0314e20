package cudasim

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// Config describes the library, the driver, the host and the devices to
// simulate. The zero Config is CUDA 13.0 with one device, on a host that refuses
// nothing.
type Config struct {
	// API is what the library exports: RuntimeAPI, which is the default, for libcudart,
	// or DriverAPI for libcuda.
	API cudart.API

	// Version is the runtime to imitate: 11080, 12040, 12080 or 13000. It
	// decides which names are exported, their signatures, and the sizes of
	// structs. 0 is 13000.
	Version cudart.Version

	// DriverVersion is the newest CUDA version that the driver supports; 0 is
	// Version. With an older major version than the runtime's, nearly every
	// call fails with cudaErrorInsufficientDriver, as in the real library.
	DriverVersion cudart.Version

	// NoDriver imitates a machine without a driver: cudaDriverGetVersion
	// returns version 0 and nearly every other call fails with
	// cudaErrorInsufficientDriver.
	NoDriver bool

	// Devices are the GPUs. Nil is one GPU with every default; an empty slice
	// is none, and calls fail with cudaErrorNoDevice.
	Devices []DeviceConfig

	// NoPeerAccess lists pairs of device ordinals. The devices of a pair cannot
	// access each other's memory; all others can.
	NoPeerAccess [][2]int

	// LostPeerCopies lists pairs of device ordinals, from and to. Copies that go directly
	// from the memory of the first device to that of the second succeed, and their bytes do
	// not arrive, as where an IOMMU or PCI Express's access control (ACS) redirects them. A
	// pair in both orders loses the copies of both directions. Copies that are staged
	// through the host arrive.
	LostPeerCopies [][2]int

	// Kernels are Go functions that devices run instead of kernels, by the names that the
	// kernels have in PTX. Those of package kernel, and of its Memory, are there already; a
	// function takes the place of one with its name. PTX loads if it has a kernel for which
	// there is a function.
	Kernels map[string]KernelFunc

	// QueueDepth is the number of operations that a stream holds until they are
	// done. A call that enqueues one more blocks until there is room. 0 is 1024,
	// which is about what real drivers have; negative is no limit.
	QueueDepth int

	// ReuseHandles gives a new stream the handle of the stream that was destroyed
	// last, as real drivers mostly do, also while the old stream's work goes on.
	// Without it no handle is used twice, so that each use of a destroyed stream
	// is a [Misuse] of the kind "stale handle".
	ReuseHandles bool

	// NoRegister makes every cudaHostRegister fail with cudaErrorNotSupported
	// (801), as hosts with confidential computing do although the attribute
	// HostRegisterSupported is 1. cudaHostAlloc works.
	NoRegister bool

	// MaxRegister is the largest registration in bytes, 0 for no limit. A larger
	// one fails with cudaErrorMemoryAllocation.
	MaxRegister int

	// MaxRegistrations is the largest number of registrations at a time, 0 for
	// no limit. One more fails with cudaErrorMemoryAllocation.
	MaxRegistrations int

	// MaxPinned is the number of bytes that cudaHostAlloc and cudaHostRegister can
	// pin together, 0 for no limit. Beyond it both fail with
	// cudaErrorMemoryAllocation, as in WSL, whatever memory the host has.
	MaxPinned int

	// StagedUploads lets copies from host memory that is not pinned return when CUDA has
	// read their source, in the order of the stream, and the bytes arrive later, as
	// CUDA's do. Without it such copies return when they are complete.
	StagedUploads bool

	// EventResolution is the step of cudaEventElapsedTime, 0 for none: times are multiples
	// of it, rounded down.
	EventResolution time.Duration

	// LeakAbove imitates Linux 6.11 to 6.13, where it would be 2 GiB: a
	// registration or cudaHostAlloc of more bytes fails with cudaErrorInvalidValue,
	// and its memory stays pinned (see [Sim.LeakedBytes]). 0 is a kernel without that
	// defect.
	LeakAbove int

	// HostMemory is the number of bytes that cudaHostAlloc and cudaHostRegister
	// can pin together, 0 for no limit. Leaked bytes count. Beyond it
	// cudaHostAlloc fails with cudaErrorMemoryAllocation, and cudaHostRegister
	// with cudaErrorInvalidValue, as on a host that is short of memory.
	HostMemory int
}

// DeviceConfig describes one GPU. Zero fields take the defaults, which are
// those of an H200 on PCIe 5.0 x16.
type DeviceConfig struct {
	Name       string              // "Simulated GPU"
	UUID       [16]byte            // its last byte is the ordinal
	PCIBusID   string              // "0000:06:00.0" for device 0, then 07 and so on
	Memory     int                 // bytes of device memory, 16 GiB
	Attributes map[cudart.Attr]int // replace single defaults
	Link       Link                // speed of copies

	// LinkShare returns the share of Link's rates that copy n between this device and the host
	// reaches, counted from 1 in the order of the calls: another user of the link takes the
	// rest. A share that is not above 0 and below 1 counts as 1, and so does a nil function.
	// LinkShare must not use the Sim.
	LinkShare func(n int) float64
}

// Link is the speed of each kind of copy. Zero fields take the defaults. Copies
// of one direction on one device wait for each other, as on a copy engine.
type Link struct {
	HostToDevice, DeviceToHost                 Speed // pinned host memory
	PageableHostToDevice, PageableDeviceToHost Speed // host memory that is not pinned
	OnDevice                                   Speed // copies within a device, and memset
	Peer                                       Speed // between devices with peer access
	PrefetchToDevice, PrefetchToHost           Speed // managed memory
	FaultToDevice                              Speed // managed memory, moved by page faults of the device
}

// A Speed is the rate and the latency of one kind of copy: n bytes take Latency + n/Rate.
type Speed struct {
	Rate    float64 // GB/s, 1 GB = 1e9 bytes
	Latency time.Duration
}

// time is the duration of a copy of n bytes.
func (w Speed) time(n int) time.Duration {
	return w.Latency + time.Duration(float64(n)/w.Rate)
}

// defaultLink was measured on one H200 on PCIe 5.0 x16.
var defaultLink = Link{
	HostToDevice:         Speed{55.4, 3650 * time.Nanosecond},
	DeviceToHost:         Speed{55.3, 2850 * time.Nanosecond},
	PageableHostToDevice: Speed{9.3, 3 * time.Microsecond},
	PageableDeviceToHost: Speed{18.0, 7 * time.Microsecond},
	OnDevice:             Speed{2000, 2 * time.Microsecond},
	Peer:                 Speed{393, 5 * time.Microsecond},
	PrefetchToDevice:     Speed{47.3, 10 * time.Microsecond},
	PrefetchToHost:       Speed{15.9, 10 * time.Microsecond},
	FaultToDevice:        Speed{13.0, 20 * time.Microsecond},
}

// eventTime is the duration of cudaEventRecord on a stream.
const eventTime = 500 * time.Nanosecond

const (
	defaultVersion = cudart.Version(13000)
	defaultMemory  = 16 << 30
	defaultDepth   = 1024
)

// maxAttribute is the last attribute that cudaDeviceGetAttribute accepts.
const maxAttribute = 145

// defaultAttributes are an H200's. Attributes that are not here are 0.
var defaultAttributes = map[cudart.Attr]int{
	attrBlockThreads:                     1024,
	attrBlockShared:                      49152,
	10:                                   32, // warp size
	attrClock:                            1_980_000,
	cudart.AttrMultiProcessorCount:       132,
	cudart.AttrCanMapHostMemory:          1,
	cudart.AttrConcurrentKernels:         1,
	cudart.AttrECCEnabled:                1,
	36:                                   3_201_000,  // memory clock, kHz
	37:                                   6144,       // memory bus width, bits
	38:                                   62_914_560, // L2 cache
	attrSharedAllowed:                    232_448,
	39:                                   2048, // threads a multiprocessor
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

// withDefaults fills the zero fields and checks the others.
func (c Config) withDefaults() (Config, error) {
	switch {
	case c.API == cudart.AnyAPI:
		c.API = cudart.RuntimeAPI
	case c.API != cudart.RuntimeAPI && c.API != cudart.DriverAPI:
		return c, fmt.Errorf("cudasim: Config.API %d: want RuntimeAPI or DriverAPI", int(c.API))
	case c.API == cudart.DriverAPI && c.NoDriver:
		return c, errors.New("cudasim: Config.NoDriver: libcuda is the driver")
	}
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
	if err := c.checkNumbers(); err != nil {
		return c, err
	}
	if c.QueueDepth == 0 {
		c.QueueDepth = defaultDepth
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
	return c, errors.Join(c.checkOrdinals("NoPeerAccess", c.NoPeerAccess), c.checkOrdinals("LostPeerCopies", c.LostPeerCopies))
}

func (c Config) checkNumbers() error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"DriverVersion", int(c.DriverVersion)}, {"MaxRegister", c.MaxRegister}, {"MaxRegistrations", c.MaxRegistrations},
		{"MaxPinned", c.MaxPinned}, {"LeakAbove", c.LeakAbove}, {"HostMemory", c.HostMemory}, {"EventResolution", int(c.EventResolution)},
	} {
		if f.value < 0 {
			return fmt.Errorf("cudasim: Config.%s %d: cannot be negative", f.name, f.value)
		}
	}
	if c.DriverVersion > math.MaxInt32 { // an int of C
		return fmt.Errorf("cudasim: Config.DriverVersion %d: at most %d", c.DriverVersion, math.MaxInt32)
	}
	return nil
}

// checkOrdinals checks pairs of devices.
func (c Config) checkOrdinals(field string, pairs [][2]int) error {
	for _, pair := range pairs {
		if min(pair[0], pair[1]) < 0 || max(pair[0], pair[1]) >= len(c.Devices) {
			return fmt.Errorf("cudasim: Config.%s %v: there are %d devices", field, pair, len(c.Devices))
		}
	}
	return nil
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
	for _, w := range []struct{ speed, def *Speed }{
		{&d.Link.HostToDevice, &defaultLink.HostToDevice},
		{&d.Link.DeviceToHost, &defaultLink.DeviceToHost},
		{&d.Link.PageableHostToDevice, &defaultLink.PageableHostToDevice},
		{&d.Link.PageableDeviceToHost, &defaultLink.PageableDeviceToHost},
		{&d.Link.OnDevice, &defaultLink.OnDevice},
		{&d.Link.Peer, &defaultLink.Peer},
		{&d.Link.PrefetchToDevice, &defaultLink.PrefetchToDevice},
		{&d.Link.PrefetchToHost, &defaultLink.PrefetchToHost},
		{&d.Link.FaultToDevice, &defaultLink.FaultToDevice},
	} {
		if *w.speed == (Speed{}) {
			*w.speed = *w.def
		}
		if !(w.speed.Rate > 0) || w.speed.Latency < 0 {
			return d, fmt.Errorf("link: a copy needs a rate above 0 and a latency of 0 or more, not %+v", *w.speed)
		}
	}
	return d, nil
}
