//go:build linux && !android && (amd64 || arm64)

package nvml

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/gopinned/pinned/internal/findlib"
)

// libnvidiaML describes the library to the search.
var libnvidiaML = findlib.Library{Name: "libnvidia-ml", Sonames: []string{"libnvidia-ml.so.1"}, Driver: true}

// Read loads the library (the path, or the one that is found if that is empty), and reads
// all GPUs (nvmlInit_v2, nvmlDeviceGet…). Before each C function calling gets its name, and
// the report so far, of whole GPUs; nil before these are counted. It must not change that.
// The error wraps [ErrNoLibrary] or is an [*Error] of nvmlInit_v2 or nvmlDeviceGetCount_v2.
func Read(path string, calling func(function string, report *Report)) (*Report, error) {
	l, err := load(path)
	if err != nil {
		return nil, err
	}
	l.calling, l.out = calling, new(results)
	return l.read()
}

// A library is one that is loaded.
type library struct {
	path    string
	symbol  func(name string) uintptr // 0 if there is none
	calling func(string, *Report)     // nil for none
	report  *Report                   // so far
	out     *results
}

// results are what C writes. They are in the heap, where nothing moves.
type results struct {
	numbers [4]uint64
	text    [256]byte
	list    [maxProcesses * processSize]byte
}

const (
	processSize  = 24 // of nvmlProcessInfo_t: pid, memory, GPU instance, compute instance
	maxProcesses = 128
	busIDAt      = 36 // in nvmlPciInfo_t, which has 68 bytes
)

func load(path string) (*library, error) {
	host := findlib.This()
	paths := []string{path}
	if path == "" {
		paths = nil
		found, _ := host.Find(libnvidiaML)
		for _, c := range found {
			paths = append(paths, c.Path)
		}
	}
	errs := []error{ErrNoLibrary}
	for _, p := range paths {
		handle, err := open(host, p)
		if err == nil {
			return &library{path: p, symbol: func(name string) uintptr {
				address, _ := purego.Dlsym(handle, name) // 0 with an error
				return address
			}}, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// open loads a library. It is never unloaded: NVML has threads of its own.
func open(host findlib.Host, path string) (handle uintptr, err error) {
	if err := host.Check(path); err != nil { // dlopen ends the process on a file that is cut off
		return 0, err
	}
	runtime.LockOSThread() // dlerror belongs to the thread
	defer runtime.UnlockOSThread()
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// call calls a function. Newer versions of some have other names: the first that the
// library has is called.
func (l *library) call(names []string, args ...uintptr) (code int) {
	for _, name := range names {
		if address := l.symbol(name); address != 0 {
			if l.calling != nil {
				l.calling(name, l.report)
			}
			r, _, _ := purego.SyscallN(address, args...)
			return int(int32(r))
		}
	}
	return missing
}

// number returns the address of result i, zeroed.
func (l *library) number(i int) uintptr {
	l.out.numbers[i] = 0
	return uintptr(unsafe.Pointer(&l.out.numbers[i]))
}

// uint32 returns result i of a function that writes an unsigned int, or an enum.
func (l *library) uint32(i int) int { return int(*(*uint32)(unsafe.Pointer(&l.out.numbers[i]))) }

func (l *library) text() uintptr {
	clear(l.out.text[:])
	return uintptr(unsafe.Pointer(&l.out.text[0]))
}

// cString returns the text that C wrote at an offset.
func (l *library) cString(at int) string {
	b := l.out.text[at:]
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// A device is a GPU's handle.
type device struct {
	*library
	handle uintptr
}

// get returns the unsigned int that a function writes, nil if it fails. The function takes
// the arguments before the address of that.
func (d device) get(name string, before ...uintptr) *int {
	args := append([]uintptr{d.handle}, before...)
	if d.call([]string{name}, append(args, d.number(0))...) != success {
		return nil
	}
	n := d.uint32(0)
	return &n
}

// value is get of a number that is not 0 where it is known.
func (d device) value(name string, before ...uintptr) int {
	if n := d.get(name, before...); n != nil {
		return *n
	}
	return 0
}

func (d device) string(name string) string {
	if d.call([]string{name}, d.handle, d.text(), uintptr(len(d.out.text))) != success {
		return ""
	}
	return d.cString(0)
}

func (l *library) read() (*Report, error) {
	initName := []string{"nvmlInit_v2", "nvmlInit"}
	if code := l.call(initName); code != success {
		return nil, &Error{initName[0], code}
	}
	defer l.call([]string{"nvmlShutdown"})
	r := &Report{Library: l.path, GPUs: []GPU{}}
	for name, to := range map[string]*string{"nvmlSystemGetDriverVersion": &r.Driver, "nvmlSystemGetNVMLVersion": &r.Version} {
		if l.call([]string{name}, l.text(), 80) == success {
			*to = l.cString(0)
		}
	}
	// nvmlConfComputeSystemState_t: environment, ccFeature, devToolsMode
	l.number(1)
	if l.call([]string{"nvmlSystemGetConfComputeState"}, l.number(0)) == success {
		on := l.out.numbers[0]>>32 != 0
		r.ConfidentialComputing = &on
	}
	countName := []string{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"}
	if code := l.call(countName, l.number(0)); code != success {
		return nil, &Error{countName[0], code}
	}
	r.Count, l.report = l.uint32(0), r
	for i := range r.Count {
		r.GPUs = append(r.GPUs, l.gpu(i))
	}
	return r, nil
}

// gpu reads a GPU. One that is lost fails in the first call.
func (l *library) gpu(i int) GPU {
	g := GPU{Index: i}
	handleName := []string{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"}
	if code := l.call(handleName, uintptr(i), l.number(0)); code != success {
		g.Error = (&Error{handleName[0], code}).Error()
		return g
	}
	d := device{l, uintptr(l.out.numbers[0])}
	g.Name, g.UUID = d.string("nvmlDeviceGetName"), d.string("nvmlDeviceGetUUID")
	const pci = "nvmlDeviceGetPciInfo_v3"
	switch code := d.call([]string{pci}, d.handle, d.text()); code {
	case success:
		g.PCIBusID = d.cString(busIDAt)
	case missing:
	default:
		g.Error = (&Error{pci, code}).Error()
		return g
	}
	d.memory(&g)
	g.Wear = d.wear()
	d.clocks(&g)
	d.modes(&g)
	d.link(&g)
	g.Processes = d.processes()
	return g
}

// The arguments of nvmlDeviceGetTotalEccErrors.
const (
	corrected, uncorrected = 0, 1
	volatile, aggregate    = 0, 1
)

func (d device) memory(g *GPU) {
	g.ECC = boolOf(d.get2("nvmlDeviceGetEccMode"))
	errs := func(kind, counter uintptr) *int {
		if d.call([]string{"nvmlDeviceGetTotalEccErrors"}, d.handle, kind, counter, d.number(0)) != success {
			return nil
		}
		n := int(min(d.out.numbers[0], math.MaxInt))
		return &n
	}
	g.CorrectedVolatile, g.UncorrectedVolatile = errs(corrected, volatile), errs(uncorrected, volatile)
	g.CorrectedAggregate, g.UncorrectedAggregate = errs(corrected, aggregate), errs(uncorrected, aggregate)
	for cause := range uintptr(2) { // several single-bit errors, and a double-bit error
		// Without room for the addresses it returns how many there are.
		switch d.call([]string{"nvmlDeviceGetRetiredPages"}, d.handle, cause, d.number(0), 0) {
		case success, insufficientSize:
			n := d.uint32(0)
			if g.RetiredPages != nil {
				n += *g.RetiredPages
			}
			g.RetiredPages = &n
		}
	}
	g.RemapPending = boolOf(d.get("nvmlDeviceGetRetiredPagesPendingStatus")) // of GPUs before Ampere
	if d.call([]string{"nvmlDeviceGetRemappedRows"}, d.handle, d.number(0), d.number(1), d.number(2), d.number(3)) == success {
		rows, pending, failed := d.uint32(0)+d.uint32(1), d.uint32(2) != 0, d.uint32(3) != 0
		pending = pending || g.RemapPending != nil && *g.RemapPending
		g.RemappedRows, g.RemapPending, g.RemapFailed = &rows, &pending, &failed
	}
}

// fieldRecovery is NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, and the others are offsets in an nvmlFieldValue_t of 40 bytes.
const (
	fieldRecovery = 230
	fieldResultAt = 28
	fieldValueAt  = 32
)

func (d device) wear() (w Wear) {
	switch d.call([]string{"nvmlDeviceValidateInforom"}, d.handle) {
	case success:
		w.InfoROMCorrupted = new(bool)
	case corruptedInfoROM:
		corrupted := true
		w.InfoROMCorrupted = &corrupted
	}
	// nvmlRowRemapperHistogramValues_t: banks with all spare rows, with many, some, few and none
	if d.call([]string{"nvmlDeviceGetRowRemapperHistogram"}, d.handle, d.text()) == success {
		none := int(binary.NativeEndian.Uint32(d.out.text[16:]))
		w.BanksWithoutSpares = &none
	}
	field := d.text()
	binary.NativeEndian.PutUint32(d.out.text[:], fieldRecovery)
	if d.call([]string{"nvmlDeviceGetFieldValues"}, d.handle, 1, field) == success && binary.NativeEndian.Uint32(d.out.text[fieldResultAt:]) == success {
		if n := int(binary.NativeEndian.Uint32(d.out.text[fieldValueAt:])); n < len(recoveries) {
			w.Recovery = recoveries[n]
		}
	}
	return w
}

// get2 is get of a function that writes a current value and a pending one.
func (d device) get2(name string) *int {
	if d.call([]string{name}, d.handle, d.number(0), d.number(1)) != success {
		return nil
	}
	n := d.uint32(0)
	return &n
}

// The clocks, and the sensor of nvmlDeviceGetTemperature.
const (
	clockSM, clockMemory = 1, 2
	sensorGPU            = 0
)

func (d device) clocks(g *GPU) {
	g.SMClock, g.SMClockMax = d.value("nvmlDeviceGetClockInfo", clockSM), d.value("nvmlDeviceGetMaxClockInfo", clockSM)
	g.MemoryClock, g.MemoryClockMax = d.value("nvmlDeviceGetClockInfo", clockMemory), d.value("nvmlDeviceGetMaxClockInfo", clockMemory)
	g.Temperature = d.value("nvmlDeviceGetTemperature", sensorGPU)
	g.Utilization = d.get("nvmlDeviceGetUtilizationRates") // {gpu, memory}
	reasons := []string{"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"}
	if d.call(reasons, d.handle, d.number(0)) == success {
		g.Throttle = throttle(d.out.numbers[0])
	}
}

func (d device) modes(g *GPU) {
	g.Persistence = boolOf(d.get("nvmlDeviceGetPersistenceMode"))
	g.ComputeMode = d.get("nvmlDeviceGetComputeMode")
	g.MIG = boolOf(d.get2("nvmlDeviceGetMigMode"))
	limit := d.get("nvmlDeviceGetMaxMigDeviceCount")
	if g.MIG == nil || !*g.MIG || limit == nil {
		return
	}
	instances := 0
	for i := range *limit {
		if d.call([]string{"nvmlDeviceGetMigDeviceHandleByIndex"}, d.handle, uintptr(i), d.number(0)) == success {
			instances++
		}
	}
	g.MIGInstances = &instances
}

func (d device) link(g *GPU) {
	g.PCIeGeneration, g.PCIeWidth = d.get("nvmlDeviceGetCurrPcieLinkGeneration"), d.get("nvmlDeviceGetCurrPcieLinkWidth")
	g.PCIeGenerationMax, g.PCIeWidthMax = d.get("nvmlDeviceGetMaxPcieLinkGeneration"), d.get("nvmlDeviceGetMaxPcieLinkWidth")
	g.PCIeReplays = d.get("nvmlDeviceGetPcieReplayCounter")
}

// processes returns the first maxProcesses. Versions before _v2 have another struct, and
// drivers that have no other (before 465) are left out.
func (d device) processes() []Process {
	clear(d.out.list[:])
	count := d.number(0)
	d.out.numbers[0] = maxProcesses
	names := []string{"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"}
	if d.call(names, d.handle, count, uintptr(unsafe.Pointer(&d.out.list[0]))) != success {
		return nil
	}
	var out []Process
	for i := range min(d.uint32(0), maxProcesses) {
		entry := d.out.list[i*processSize:]
		p := Process{PID: int(binary.NativeEndian.Uint32(entry))}
		if memory := binary.NativeEndian.Uint64(entry[8:]); memory <= math.MaxInt64 { // else not available
			p.Memory = int(memory)
		}
		out = append(out, p)
	}
	return out
}

func boolOf(n *int) *bool {
	if n == nil {
		return nil
	}
	is := *n != 0
	return &is
}

// recoveries are those of nvmlDeviceGpuRecoveryAction_t.
var recoveries = []string{"none", "reset", "reboot", "drain_p2p", "drain_and_reset"}

// throttleReasons are the bits of nvmlClocksEventReasons, in the words of nvidia-smi.
var throttleReasons = []struct {
	bit  uint64
	name string
}{
	{0x1, "gpu_idle"}, {0x2, "applications_clocks_setting"}, {0x4, "sw_power_cap"}, {0x8, "hw_slowdown"},
	{0x10, "sync_boost"}, {0x20, "sw_thermal_slowdown"}, {0x40, "hw_thermal_slowdown"},
	{0x80, "hw_power_brake_slowdown"}, {0x100, "display_clocks_setting"},
}

func throttle(bits uint64) []string {
	var out []string
	for _, r := range throttleReasons {
		if bits&r.bit != 0 {
			out = append(out, r.name)
		}
	}
	return out
}
