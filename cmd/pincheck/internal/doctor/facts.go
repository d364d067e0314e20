package doctor

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/procmem"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/verify"
)

// Facts is everything that was read and measured. It is plain data: archives contain it as JSON.
type Facts struct {
	Simulated bool           `json:"simulated"`
	Host      *hostinfo.Host `json:"host,omitempty"`
	Library   *Library       `json:"library,omitempty"` // absent if none could be opened
	// Requirements are what a GPU needs of the host. They are checked only if
	// no GPU can be used.
	Requirements []Requirement `json:"requirements,omitempty"`
	// Search is how a library was searched for, if none could be used.
	Search *Search `json:"search,omitempty"`
	// Opening is why CUDA could not be started. Absent if it was.
	Opening *Opening `json:"opening,omitempty"`
	// CUDADevices is how many GPUs CUDA shows, also if only some of them are examined, and
	// those of which it says nothing more. Null if CUDA did not start.
	CUDADevices *int `json:"cuda_devices,omitempty"`
	// DeviceErrors are those of GPUs that CUDA counts, and that could not be described.
	DeviceErrors []string `json:"device_errors,omitempty"`
	// NotChosen are the PCI addresses of GPUs that CUDA shows and --device left out.
	NotChosen []string `json:"not_chosen,omitempty"`
	// NodeErrors are why device nodes could not be opened, by their paths, where that was
	// tried: if CUDA did not start, or shows fewer GPUs than there are nodes.
	NodeErrors map[string]string `json:"node_errors,omitempty"`
	// ExpectedGPUs is how many GPUs there should be, as the user says. 0 is not said.
	ExpectedGPUs int `json:"expected_gpus,omitempty"`
	// ExpectedRate is what pinned copies should reach each way, in GB/s, as the user says.
	// 0 leaves it to what is known of such hardware.
	ExpectedRate float64 `json:"expected_gb_per_s,omitempty"`
	// Probes are calls that were made in processes of their own, as they may hang.
	Probes []Probe `json:"probes,omitempty"`
	// Processes are those that use a GPU and that this user may read.
	Processes []Process `json:"processes,omitempty"`
	// Shared is memory that processes share by package hostmem/shm, the largest first.
	Shared []SharedMemory `json:"shared_memory,omitempty"`
	// NVML is what the management library returned, but what it has of Devices, which is their Health; nil without it.
	NVML    *nvml.Report `json:"nvml,omitempty"`
	Devices []Device     `json:"devices"`
	// Sources are the kinds of texts that these facts were read from, such as dmesg. Empty for facts of a host and
	// of an archive. What the texts do not contain is unknown: see FromTexts.
	Sources []string `json:"sources,omitempty"`
	// Stopped is, in an archive, what ended the run that found this before it was done.
	Stopped string `json:"stopped,omitempty"`
	// Together is what the copies of all devices at once reached: see bench.Together.
	Together *result.Bench `json:"together,omitempty"`
	// PeerPaths are the direct paths between GPUs, each proved by a copy that was read back through the host.
	PeerPaths []PeerPath `json:"peer_paths,omitempty"`
}

// PeerPath is a direct path from the memory of one GPU to that of another.
type PeerPath struct {
	From int `json:"from"` // ordinals
	To   int `json:"to"`
	// ProofBytes is the size of the copy that proves the path, and LostBytes how many of them did not arrive.
	ProofBytes int `json:"proof_bytes"`
	LostBytes  int `json:"lost_bytes"`
	// Error is why nothing is known of the path.
	Error string `json:"error,omitempty"`
}

// Opening is a failure to start CUDA.
type Opening struct {
	Error string `json:"error"`
	// Code is the cudaError_t of the call that failed; 0 if the failure is another one.
	Code int `json:"code,omitempty"`
	// DriverLibrary is the libcuda.so.1 that was found; empty if there is none.
	DriverLibrary string `json:"driver_library,omitempty"`
}

// ProbeState is how a call in a process of its own ended.
type ProbeState string

// The states of probes.
const (
	ProbeOK      ProbeState = "ok"
	ProbeFailed  ProbeState = "failed"  // it returned an error
	ProbeHung    ProbeState = "hung"    // it had not returned at its time limit
	ProbeCrashed ProbeState = "crashed" // its process died of a fault
	ProbeKilled  ProbeState = "killed"  // its process was killed from outside
	// ProbeNotStarted is that its process could not be started: no call was made.
	ProbeNotStarted ProbeState = "not_started"
	// ProbeUnfinished is that it had not returned when the run ended, before its time limit.
	ProbeUnfinished ProbeState = "unfinished"
)

// Ended reports whether a probe came to its end, with success or an error.
func (s ProbeState) Ended() bool { return s == "" || s == ProbeOK || s == ProbeFailed }

// Stage is what a probe does.
type Stage string

// The stages of probes, in their order.
const (
	StageOpen       Stage = "open"        // loads libcudart, and counts the GPUs
	StageMemory     Stage = "memory"      // makes a context, and reads how much memory is free
	StageRoundTrips Stage = "round_trips" // proves the bytes
	StageWaiting    Stage = "waiting"     // for other GPUs: it calls nothing
	StageCopies     Stage = "copies"      // measures
	StageTogether   Stage = "together"    // copies with all GPUs at once
	StageNVML       Stage = "nvml"        // reads the management library
)

// Probe is work that was done in a process of its own, because its calls may hang or crash.
type Probe struct {
	Name   string     `json:"name"`             // what was tried: cuda, nvml, gpu 0, all gpus
	Device *int       `json:"device,omitempty"` // the GPU that was examined; nil for none and for several
	Stage  Stage      `json:"stage,omitempty"`  // that was reached last
	After  string     `json:"after,omitempty"`  // in this stage: the last piece of work that ended
	Call   string     `json:"call"`             // the C function that was reached last, cuInit; empty if not known
	State  ProbeState `json:"state"`
	Detail string     `json:"detail,omitempty"` // the error, the signal, the time limit
	// Seconds is the time from its start to its end, or until it was given up.
	Seconds float64 `json:"took_s"`
}

// Process is a process that uses a GPU. Sizes are in bytes.
type Process struct {
	PID        int                 `json:"pid"`
	Name       string              `json:"name"`
	Frameworks []procmem.Framework `json:"frameworks"` // the most specific first
	Pinned     int                 `json:"pinned_bytes"`
	// Rounded is in blocks whose sizes are powers of two, if that looks like rounding;
	// RoundedBlocks are how many these are.
	Rounded       int `json:"rounded_bytes,omitempty"`
	RoundedBlocks int `json:"rounded_blocks,omitempty"`
	Mappings      int `json:"mappings,omitempty"` // lines of /proc/PID/maps
	// Cgroup is the outermost of its control groups that has a limit of memory below the
	// host's memory, and MemoryLimit that limit. Empty without one, and where it does not
	// show.
	Cgroup      string `json:"cgroup,omitempty"`
	MemoryLimit int    `json:"memory_limit_bytes,omitempty"`
	// Weights are files of model weights that the process has mapped.
	Weights []WeightFile `json:"weights,omitempty"`
}

// WeightFile is a mapped file of model weights: safetensors, GGUF and the like.
type WeightFile struct {
	Path     string `json:"path"`
	Size     int    `json:"size_bytes"`               // of the mapping
	Resident int    `json:"resident_bytes,omitempty"` // of it; 0 is unknown
}

// Search is a search for a library that found none.
type Search struct {
	Attempts []Attempt `json:"attempts"`
	Searched []string  `json:"looked"` // locations that were searched
}

// Library is the CUDA library in use. Versions are "13.0".
type Library struct {
	API              string    `json:"api,omitempty"` // "driver" if it is libcuda; libcudarts have none
	Path             string    `json:"path"`
	Found            string    `json:"found"` // how it was found
	RuntimeVersion   string    `json:"runtime_version"`
	DriverVersion    string    `json:"driver_version"` // the newest CUDA that the driver supports
	Attempts         []Attempt `json:"attempts,omitempty"`
	MissingFunctions []string  `json:"missing_functions,omitempty"`
	Notes            []string  `json:"notes,omitempty"` // of cudart: handlers of signals that would end this process
}

// driverAPI is Library.API of libcuda.
const driverAPI = "driver"

// DriverAlone reports whether libcuda is called instead of a libcudart.
func (l *Library) DriverAlone() bool { return l != nil && l.API == driverAPI }

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
	DeviceMemory
	NUMANode  *int   `json:"numa_node"` // null if the firmware does not say
	LocalCPUs string `json:"local_cpus,omitempty"`
	// Link is absent if the host does not show it.
	Link      *Link          `json:"link,omitempty"`
	Verify    *verify.Report `json:"verify,omitempty"`
	Bandwidth *result.Bench  `json:"bandwidth,omitempty"`
	Beside
	// Attributes are those of CUDA that decide how host memory behaves; absent if they
	// could not be had.
	Attributes *Attributes `json:"attributes,omitempty"`
	// Health is what NVML reports; absent without NVML.
	Health *nvml.GPU `json:"health,omitempty"`
	// Errors are those of calls and measurements that failed.
	Errors []string `json:"errors,omitempty"`
}

// DeviceMemory is the memory of a GPU.
type DeviceMemory struct {
	MemoryTotal int `json:"memory_total_bytes,omitempty"`
	MemoryFree  int `json:"memory_free_bytes,omitempty"`
}

// Beside is what was measured beside the bandwidth of a GPU.
type Beside struct {
	// Slower is the slowest one of several measurements of the bandwidth, nil for one, and Repeats
	// are all of them.
	Slower  *result.Bench `json:"bandwidth_slower,omitempty"`
	Repeats *Repeats      `json:"bandwidth_repeats,omitempty"`
	// OtherCPUs is how many CPUs other programs kept busy while the bandwidth was measured, of
	// two measurements the fewer; nil if that is not known.
	OtherCPUs *float64 `json:"other_cpus,omitempty"`
	// Trials are short measurements beside the bandwidth: see bench.Trials.
	Trials *result.Bench `json:"trials,omitempty"`
}

// Attributes are properties of a device (cudaDeviceGetAttribute).
type Attributes struct {
	Integrated              bool `json:"integrated"`
	ComputeMode             int  `json:"compute_mode"` // 0 default, 2 prohibited, 3 one process only
	HostRegisterSupported   bool `json:"host_register_supported"`
	UsesHostPageTables      bool `json:"uses_host_page_tables"` // registering locks no page then
	PageableMemoryAccess    bool `json:"pageable_memory_access"`
	ManagedMemory           bool `json:"managed_memory"`
	ConcurrentManagedAccess bool `json:"concurrent_managed_access"`
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

// Now returns what the link is trained to.
func (l *Link) Now() hostinfo.PCIe { return hostinfo.PCIe{Speed: l.Speed, Width: l.Width} }

// Best returns what the device can train to.
func (l *Link) Best() hostinfo.PCIe { return hostinfo.PCIe{Speed: l.MaxSpeed, Width: l.MaxWidth} }

// Now returns what the link is trained to.
func (u *Upstream) Now() hostinfo.PCIe { return hostinfo.PCIe{Speed: u.Speed, Width: u.Width} }

// Best returns what the link can train to.
func (u *Upstream) Best() hostinfo.PCIe { return hostinfo.PCIe{Speed: u.MaxSpeed, Width: u.MaxWidth} }

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
		Opening:      newOpening(failed),
		Requirements: Require(host, failed),
		Search:       &Search{Attempts: attempts(failed.Attempts), Searched: append([]string{}, failed.Searched...)},
		Devices:      []Device{},
	}
}

func newOpening(failed *cudart.OpenError) *Opening {
	o := &Opening{Error: failed.Err.Error(), DriverLibrary: failed.Driver.LibPath}
	if code := cudart.Code(0); errors.As(failed.Err, &code) {
		o.Code = int(code)
	}
	return o
}

// Take adds what an examination found of a GPU to what is known of it. Of two measurements of
// the bandwidth the slower one is kept as such.
func (d *Device) Take(found *Device) {
	d.Errors = append(d.Errors, found.Errors...)
	if found.MemoryTotal > 0 && d.MemoryTotal == 0 {
		d.MemoryTotal, d.MemoryFree = found.MemoryTotal, found.MemoryFree
	}
	if found.Verify != nil {
		d.Verify = found.Verify
	}
	if n := found.OtherCPUs; n != nil && (d.OtherCPUs == nil || *n < *d.OtherCPUs) {
		d.OtherCPUs = n // copies that were slow on an idle host, too, are not slow for others
	}
	if found.Bandwidth == nil {
		return
	}
	if d.Bandwidth == nil {
		d.Bandwidth, d.Trials = found.Bandwidth, found.Trials
		return
	}
	d.Repeats = d.Repeats.add(d.Bandwidth, found.Bandwidth)
	slower := found.Bandwidth
	if found.Slowest() >= d.Slowest() && len(found.copies()) >= len(d.copies()) {
		slower, d.Bandwidth = d.Bandwidth, found.Bandwidth
		if found.Trials != nil {
			d.Trials = found.Trials
		}
	}
	if before := (&Device{Bandwidth: d.Slower}); d.Slower == nil || (&Device{Bandwidth: slower}).Slowest() < before.Slowest() {
		d.Slower = slower
	}
}

// SetHost sets the host. It is the only way by which what was read of a host comes to GPUs: their
// links, as they are now unless they are known already, and what is missing if there is none. The
// host gets what the facts know of its device nodes.
func (f *Facts) SetHost(h *hostinfo.Host) {
	f.Host = h
	for i := range h.NVIDIA.Nodes {
		n := &h.NVIDIA.Nodes[i]
		n.OpenError = f.NodeErrors[n.Path]
	}
	for i := range f.Devices {
		if d := &f.Devices[i]; d.Link == nil { // else it is as it was under load
			d.Relink(h)
		}
	}
	if f.CUDADevices != nil && *f.CUDADevices == 0 && f.Requirements == nil {
		f.Requirements = Require(h, nil)
	}
}

// maxDevices is how many GPUs a host of an archive may have: each is compared with each.
const maxDevices = 128

// FromCapture returns the facts of a host of which an archive was made, and text is the JSON
// of those that were not read from its files. It may be hostile, or empty.
func FromCapture(host *hostinfo.Host, text []byte) (*Facts, error) {
	f := &Facts{}
	if len(text) > 0 {
		if err := json.Unmarshal(text, f); err != nil {
			return nil, fmt.Errorf("doctor: facts.json: %w", err)
		}
	}
	n := max(len(f.Devices), len(f.Probes), len(host.GPUs))
	if f.NVML != nil {
		n = max(n, len(f.NVML.GPUs))
	}
	if n > maxDevices {
		return nil, fmt.Errorf("doctor: %d GPUs, or processes that examined them: more than %d", n, maxDevices)
	}
	if f.Devices == nil {
		f.Devices = []Device{}
	}
	f.SetHost(host)
	f.replaceAdvice()
	return f, nil
}

// replaceAdvice puts the advice and the expectations of this build instead of those of an archive, which has
// facts alone: what pincheck says to do it says itself.
func (f *Facts) replaceAdvice() {
	// All that can be missing is missing: the remedies that this host would be given.
	own := Require(f.Host, &cudart.OpenError{Err: cudart.ErrNoLibrary})
	requirements := []Requirement{}
	for _, r := range f.Requirements {
		o, known := first(own, func(o Requirement) bool { return o.ID == r.ID })
		if !known {
			continue
		}
		o.State, o.Detail = r.State, r.Detail
		switch {
		case r.State == Missing:
			o.Remedy = cmp.Or(o.Remedy, o.remedy(f.Host, ""))
		case r.State != Present:
			o.State = Uncertain
			fallthrough
		default:
			o.Remedy = ""
		}
		requirements = append(requirements, o)
	}
	if f.Requirements != nil {
		f.Requirements = requirements
	}
	for _, p := range f.Processes {
		for i, framework := range p.Frameworks {
			p.Frameworks[i] = procmem.Known(framework.Name)
			p.Frameworks[i].Set = framework.Set
		}
	}
	benches := []*result.Bench{f.Together}
	for _, d := range f.Devices {
		benches = append(append(benches, d.measurements()...), d.Bandwidth, d.Slower, d.Trials)
	}
	for _, b := range benches {
		for i := 0; b != nil && i < len(b.Series); i++ {
			b.Series[i].Expected = nil
		}
	}
}

// WithoutAnswer returns the facts after opening a library hung, or ended its process, or had not
// come to its end when the run did.
func WithoutAnswer(p Probe, host *hostinfo.Host) *Facts {
	f := &Facts{Host: host, Probes: []Probe{p}, Devices: []Device{}}
	if p.State != ProbeUnfinished && p.State != ProbeNotStarted { // which are no failures of CUDA
		f.Opening = &Opening{Error: p.what() + ": " + p.Detail}
	}
	return f
}

// Gather describes the library and all devices of rt, without a context on any of them. What the
// host shows of them comes with SetHost.
func Gather(rt *cudart.Runtime) *Facts {
	lib := rt.Library()
	count := rt.DeviceCount()
	f := &Facts{
		Simulated: lib.Simulated,
		Library: &Library{
			API:  map[bool]string{true: driverAPI}[lib.API == cudart.DriverAPI],
			Path: lib.Path, Found: lib.Found,
			RuntimeVersion: lib.Runtime.String(), DriverVersion: lib.Driver.String(),
			Attempts: attempts(lib.Attempts), MissingFunctions: lib.Missing, Notes: lib.Notes,
		},
		CUDADevices: &count,
		Devices:     make([]Device, 0, count),
	}
	for i := range count {
		d, err := rt.Device(i)
		if err != nil {
			f.DeviceErrors = append(f.DeviceErrors, err.Error())
			continue
		}
		f.Devices = append(f.Devices, Describe(d))
	}
	return f
}

// FromHost returns the facts that need no CUDA: the host, and its GPUs as the kernel shows
// them.
func FromHost(host *hostinfo.Host) *Facts {
	f := &Facts{Devices: []Device{}}
	for _, pci := range host.GPUs {
		if pci.Driver != "nvidia" || !own(host, pci) {
			continue
		}
		d := Device{Ordinal: len(f.Devices), PCIBusID: pci.Address}
		for _, b := range host.NVIDIA.Boards {
			if same, ok := host.GPU(b.Address); ok && same.Address == pci.Address {
				d.Name, d.UUID = b.Model, b.UUID
			}
		}
		f.Devices = append(f.Devices, d)
	}
	f.SetHost(host)
	if len(f.Devices) == 0 {
		f.Requirements = Require(host, nil)
	}
	return f
}

// own reports whether a GPU is one of this process. A container or a job may show all GPUs of the host on the
// PCI bus, and has the nodes of its own: which these are takes /proc/driver/nvidia/gpus. Of a job that chooses
// some GPUs by numbers it is not known which.
func own(host *hostinfo.Host, pci hostinfo.PCIDevice) bool {
	if host.Env["SLURM_JOB_GPUS"] != "" || host.Env["SLURM_JOB_ID"] != "" && host.Env[visibleDevices] != "" {
		return max(len(host.GPUs), len(host.NVIDIA.Boards)) == 1
	}
	nodes := 0
	for _, n := range host.NVIDIA.Nodes {
		if hostinfo.IsGPUNode(n.Path) {
			nodes++
		}
	}
	if nodes == 0 {
		return true // they are made when they are first used, or this process watches and has none
	}
	for _, b := range host.NVIDIA.Boards {
		if same, ok := host.GPU(b.Address); ok && same.Address == pci.Address {
			return nodes >= len(host.GPUs) || b.Minor != "" && host.NVIDIA.HasNode("/dev/nvidia"+b.Minor)
		}
	}
	return len(host.NVIDIA.Boards) == 0 && nodes >= len(host.GPUs)
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

// Describe returns what CUDA says of a device, without making a context.
func Describe(d *cudart.Device) Device {
	out := Device{Ordinal: d.Ordinal(), Name: d.Name(), UUID: d.UUID(), PCIBusID: d.PCIBusID()}
	major, errMajor := d.Attribute(cudart.AttrComputeCapabilityMajor)
	minor, errMinor := d.Attribute(cudart.AttrComputeCapabilityMinor)
	if errMajor == nil && errMinor == nil {
		out.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	}
	out.Attributes = attributes(d)
	return out
}

// attributes returns nil if the library does not have all of them.
func attributes(d *cudart.Device) *Attributes {
	var out Attributes
	for _, a := range []struct {
		attr cudart.Attr
		to   *bool
	}{
		{cudart.AttrIntegrated, &out.Integrated},
		{cudart.AttrHostRegisterSupported, &out.HostRegisterSupported},
		{cudart.AttrPageableMemoryAccessUsesHostPageTables, &out.UsesHostPageTables},
		{cudart.AttrPageableMemoryAccess, &out.PageableMemoryAccess},
		{cudart.AttrManagedMemory, &out.ManagedMemory},
		{cudart.AttrConcurrentManagedAccess, &out.ConcurrentManagedAccess},
	} {
		value, err := d.Attribute(a.attr)
		if err != nil {
			return nil
		}
		*a.to = value != 0
	}
	mode, err := d.Attribute(cudart.AttrComputeMode)
	if err != nil {
		return nil
	}
	out.ComputeMode = mode
	return &out
}

// ReadMemory reads how much memory the device has, and how much is free. The call makes a
// context, which takes some hundred MiB and half a second.
func (d *Device) ReadMemory(dev *cudart.Device) {
	var err error
	if d.MemoryFree, d.MemoryTotal, err = dev.MemInfo(); err != nil {
		d.Errors = append(d.Errors, err.Error())
	}
}

// SetHealth takes what NVML returned.
func (f *Facts) SetHealth(r *nvml.Report) {
	f.NVML = r
	of := func(d *Device, g *nvml.GPU) bool { return hostinfo.SamePCI(g.PCIBusID, d.PCIBusID) }
	for i := range f.Devices {
		d := &f.Devices[i]
		for j := range r.GPUs {
			if of(d, &r.GPUs[j]) {
				g := r.GPUs[j]
				d.Health = &g
			}
		}
	}
	r.GPUs = slices.DeleteFunc(r.GPUs, func(g nvml.GPU) bool {
		return slices.ContainsFunc(f.Devices, func(d Device) bool { return of(&d, &g) })
	})
}

// SetClocks takes the clocks, why they are reduced, and the counters of the link from what
// NVML returned under load or right after it. The rest stays: processes, for one, would be
// those that measured.
func (f *Facts) SetClocks(r *nvml.Report) {
	for i := range f.Devices {
		h := f.Devices[i].Health
		for _, now := range r.GPUs {
			if h != nil && hostinfo.SamePCI(now.PCIBusID, f.Devices[i].PCIBusID) {
				h.Throttle, h.PCIeReplays, h.Temperature = now.Throttle, now.PCIeReplays, now.Temperature
				h.SMClock, h.MemoryClock = now.SMClock, now.MemoryClock
			}
		}
	}
}

// managed returns what NVML has of the host's GPUs, in its order, also of those that CUDA does not show.
func (f *Facts) managed() (gpus []*nvml.GPU) {
	for i := range f.Devices {
		if g := f.Devices[i].Health; g != nil {
			gpus = append(gpus, g)
		}
	}
	if f.NVML != nil {
		for i := range f.NVML.GPUs {
			gpus = append(gpus, &f.NVML.GPUs[i])
		}
	}
	slices.SortStableFunc(gpus, func(a, b *nvml.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return gpus
}

// Relink takes the link from facts about the host. A GPU trains its link down while it is
// idle and up under load, so facts that were read right after measuring count.
func (d *Device) Relink(host *hostinfo.Host) {
	if pci, ok := host.GPU(d.PCIBusID); ok {
		d.NUMANode, d.LocalCPUs = pci.NUMANode, pci.CPUs
		d.Link = newLink(pci)
	}
	if rate := d.LinkRate(); d.Bandwidth != nil && rate > 0 {
		for i := range d.Bandwidth.Series {
			share := d.Bandwidth.Series[i].Median / rate
			d.Bandwidth.Series[i].ShareOfLink = &share
		}
	}
}

func newLink(pci hostinfo.PCIDevice) *Link {
	at := pci.Link
	l := &Link{
		Speed: at.CurrentSpeed, Width: at.CurrentWidth, Rate: at.Now().Rate(),
		MaxSpeed: at.MaxSpeed, MaxWidth: at.MaxWidth, MaxRate: at.Best().Rate(),
	}
	if l.Rate == 0 && l.MaxRate == 0 {
		return nil
	}
	for i, up := range pci.Upstream {
		rate := up.Now().Rate()
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
