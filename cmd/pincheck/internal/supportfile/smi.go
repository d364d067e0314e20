package supportfile

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
)

// notAvailable is nvidia-smi's word for what it does not know.
const notAvailable = "N/A"

// A smiGPU is a GPU of nvidia-smi -q: values by their paths, in the words of the text. Names of XML are translated.
type smiGPU struct {
	values    map[string]string
	processes []nvml.Process
}

const (
	maxValues    = 600 // of a GPU: nvidia-smi prints some 250
	maxProcesses = 200
	maxDepth     = 12
)

func (g *smiGPU) set(path, value string) {
	if value = strings.TrimSpace(value); len(g.values) < maxValues && g.values[path] == "" && len(path)+len(value) < 600 {
		g.values[path] = value
	}
}

// get returns the first of the values that is known. Versions of nvidia-smi have other words.
func (g *smiGPU) get(paths ...string) string {
	for _, p := range paths {
		if v := g.values[p]; v != "" && v != notAvailable && v != "[N/A]" && v != "Not Supported" {
			return v
		}
	}
	return ""
}

// number returns the number that a value begins with: 210 MHz, 16x, 30 C; nil if it has none.
func (g *smiGPU) number(paths ...string) *int {
	v := g.get(paths...)
	n, err := strconv.Atoi(leading.FindString(v))
	if err != nil {
		return nil
	}
	return &n
}

// whole is number, 0 if unknown.
func (g *smiGPU) whole(path string) int {
	if n := g.number(path); n != nil {
		return *n
	}
	return 0
}

var leading = regexp.MustCompile(`^\d{1,9}\b|^\d{1,2}`)

// sum adds the numbers that are known; nil if none is.
func (g *smiGPU) sum(paths ...string) *int {
	var total *int
	for _, p := range paths {
		if n := g.number(p); n != nil {
			if total == nil {
				total = new(int)
			}
			*total += *n
		}
	}
	return total
}

// flag returns true for the words for yes, false for the words for no, and nil for other words.
func (g *smiGPU) flag(paths ...string) *bool {
	v := g.get(paths...)
	yes := slices.Contains([]string{"Enabled", "Yes", "Active"}, v)
	if !yes && !slices.Contains([]string{"Disabled", "No", "Not Active"}, v) {
		return nil
	}
	return &yes
}

// reasons are the names of package nvml for why clocks are reduced, by nvidia-smi's.
var reasons = []struct{ smi, name string }{
	{"Idle", "gpu_idle"}, {"Applications Clocks Setting", "applications_clocks_setting"}, {"SW Power Cap", "sw_power_cap"},
	{"HW Slowdown", "hw_slowdown"}, {"HW Slowdown/HW Thermal Slowdown", "hw_thermal_slowdown"},
	{"HW Slowdown/HW Power Brake Slowdown", "hw_power_brake_slowdown"}, {"Sync Boost", "sync_boost"},
	{"SW Thermal Slowdown", "sw_thermal_slowdown"}, {"Display Clock Setting", "display_clocks_setting"},
}

// computeModes are NVML's numbers.
var computeModes = map[string]int{"Default": 0, "Prohibited": 2, "Exclusive_Process": 3, "E. Process": 3}

// busID returns the PCI address.
func (g *smiGPU) busID() string { return g.get("PCI/Bus Id", "id") }

// nvml returns the GPU as NVML has it.
func (g *smiGPU) nvml() nvml.GPU {
	const volatile, aggregate = "ECC Errors/Volatile/", "ECC Errors/Aggregate/"
	out := nvml.GPU{
		Name: g.get("Product Name"), UUID: g.get("GPU UUID"), PCIBusID: g.busID(),
		MemoryErrors: nvml.MemoryErrors{
			ECC:               g.flag("ECC Mode/Current"),
			CorrectedVolatile: g.corrected(volatile), UncorrectedVolatile: g.uncorrected(volatile),
			CorrectedAggregate: g.corrected(aggregate), UncorrectedAggregate: g.uncorrected(aggregate),
			RetiredPages: g.sum("Retired Pages/Single Bit ECC", "Retired Pages/Double Bit ECC"),
			RemappedRows: g.sum("Remapped Rows/Correctable Error", "Remapped Rows/Uncorrectable Error"),
			RemapPending: g.flag("Remapped Rows/Pending", "Retired Pages/Pending Page Blacklist", "Retired Pages/Pending"),
			RemapFailed:  g.flag("Remapped Rows/Remapping Failure Occurred"),
		},
		Clocks: nvml.Clocks{
			SMClock: g.whole("Clocks/SM"), SMClockMax: g.whole("Max Clocks/SM"),
			MemoryClock: g.whole("Clocks/Memory"), MemoryClockMax: g.whole("Max Clocks/Memory"),
			Temperature: g.whole("Temperature/GPU Current Temp"), Utilization: g.number("Utilization/Gpu", "Utilization/GPU"),
		},
		Persistence: g.flag("Persistence Mode"), MIG: g.flag("MIG Mode/Current"),
		Link: nvml.Link{
			PCIeGeneration: g.number(linkInfo + "PCIe Generation/Current"), PCIeGenerationMax: g.number(linkInfo + "PCIe Generation/Max"),
			PCIeWidth: g.number(linkInfo + "Link Width/Current"), PCIeWidthMax: g.number(linkInfo + "Link Width/Max"),
			PCIeReplays: g.number("PCI/Replays Since Reset"),
		},
		Processes: g.processes,
	}
	for _, r := range reasons {
		if g.get("Clocks Throttle Reasons/"+r.smi, "Clocks Event Reasons/"+r.smi) == "Active" {
			out.Throttle = append(out.Throttle, r.name)
		}
	}
	if mode, ok := computeModes[g.get("Compute Mode")]; ok {
		out.ComputeMode = &mode
	}
	if v := g.values["Product Name"]; strings.Contains(v, lostWords) || strings.Contains(g.busID(), lostWords) {
		out.Error = lostWords
	}
	return out
}

func (g *smiGPU) corrected(kind string) *int {
	return g.sum(kind+"SRAM Correctable", kind+"DRAM Correctable", kind+"Single Bit/Total")
}

func (g *smiGPU) uncorrected(kind string) *int {
	return g.sum(kind+"SRAM Uncorrectable", kind+"SRAM Uncorrectable Parity", kind+"SRAM Uncorrectable SEC-DED", kind+"DRAM Uncorrectable", kind+"Double Bit/Total")
}

const linkInfo = "PCI/GPU Link Info/"

// rates are the speeds of generations of PCI Express, as /sys has them.
var rates = []string{"2.5", "5.0", "8.0", "16.0", "32.0", "64.0"}

// put adds to a tree what the kernel and its module have of the GPU.
func (g *smiGPU) put(put func(name, text string)) {
	dir := deviceDir(g.busID())
	if dir == "" {
		return
	}
	address := dir[strings.LastIndexByte(dir, '/')+1:]
	put("proc/driver/nvidia/gpus/"+address+"/information", fmt.Sprintf("Model: \t\t %s\nGPU UUID: \t %s\nDevice Minor: \t %s\n",
		g.get("Product Name"), g.get("GPU UUID"), g.get("Minor Number")))
	put(dir+"/vendor", "0x10de\n")
	put(dir+"/class", "0x030000\n")
	if id := strings.TrimPrefix(g.get("PCI/Device Id"), "0x"); len(id) == len("26B110DE") { // without 0x in XML
		put(dir+"/device", "0x"+strings.ToLower(id[:4])+"\n")
	}
	for _, kind := range []struct{ file, of string }{{"current", "Current"}, {"max", "Max"}} {
		if n := g.number(linkInfo + "PCIe Generation/" + kind.of); n != nil && *n >= 1 && *n <= len(rates) {
			put(dir+"/"+kind.file+"_link_speed", rates[*n-1]+" GT/s PCIe\n")
		}
		if n := g.number(linkInfo + "Link Width/" + kind.of); n != nil {
			put(dir+"/"+kind.file+"_link_width", strconv.Itoa(*n)+"\n")
		}
	}
}

// addGPU adds a GPU, unless it is known already or there are too many.
func (c *Collection) addGPU(g *smiGPU) {
	known := slices.ContainsFunc(c.smi, func(o *smiGPU) bool { return strings.EqualFold(o.busID(), g.busID()) })
	if g.busID() != "" && !known && len(c.smi) < maxGPUs {
		c.smi = append(c.smi, g)
	}
}

// What nvidia-smi prints instead of a GPU, or of all.
const (
	lostWords     = "GPU is lost"
	mismatchWords = "Driver/library version mismatch"
)

var lostGPU = regexp.MustCompile(`^Unable to determine the device handle for (?:GPU|gpu)\s?\d*:?\s*([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]): (.{1,100})`)

// complaint takes a line in which nvidia-smi says what is wrong.
func complaint(c *Collection, line string) bool {
	if strings.HasPrefix(line, "Failed to initialize NVML: "+mismatchWords) {
		c.mismatch = strings.TrimSpace(line)
		c.found(SMI)
		return true
	}
	m := lostGPU.FindStringSubmatch(line)
	if m == nil {
		return false
	}
	if len(c.lost) < maxGPUs {
		c.lost = append(c.lost, nvml.GPU{PCIBusID: m[1], Error: strings.TrimSpace(m[2])})
	}
	c.found(SMI)
	return true
}

// A smiParser takes the text of nvidia-smi -q: names and values, nested by indentation.
type smiParser struct {
	on  bool
	gpu *smiGPU
	// at is the path of names, with their indentation.
	at []struct {
		indent int
		name   string
	}
}

const smiTitle = "==NVSMI LOG=="

var gpuHeading = regexp.MustCompile(`^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$`)

func (p *smiParser) take(c *Collection, line string) bool {
	line = strings.TrimRight(line, " \r\n")
	if strings.Contains(line, smiTitle) {
		p.end(c)
		p.on = true
		c.found(SMI)
		return true
	}
	if !p.on || line == "" {
		return p.on
	}
	if m := gpuHeading.FindStringSubmatch(line); m != nil {
		p.next(c)
		p.gpu = &smiGPU{values: map[string]string{"id": m[1]}}
		return true
	}
	indent := len(line) - len(strings.TrimLeft(line, " "))
	name, value, isValue := strings.Cut(line, " : ")
	name = strings.TrimSpace(name)
	if indent == 0 {
		if !isValue {
			p.end(c) // something else follows
			return false
		}
		if name == "Driver Version" {
			c.driver = strings.TrimSpace(value)
		}
		return true
	}
	p.nested(indent, name, value, isValue)
	return true
}

// nested takes a line of a GPU.
func (p *smiParser) nested(indent int, name, value string, isValue bool) {
	for len(p.at) > 0 && p.at[len(p.at)-1].indent >= indent {
		p.at = p.at[:len(p.at)-1]
	}
	if p.gpu == nil || len(p.at) >= maxDepth {
		return
	}
	path := ""
	for _, a := range p.at {
		path += a.name + "/"
	}
	p.at = append(p.at, struct {
		indent int
		name   string
	}{indent, canonical(name)})
	if isValue {
		p.gpu.set(path+canonical(name), value)
		p.gpu.process(name, value)
	}
}

// canonical returns one of the words that versions have for a name.
func canonical(name string) string {
	if rest, ok := strings.CutPrefix(name, "Ecc "); ok {
		return "ECC " + rest
	}
	return name
}

// process takes a line about a process: that of its number begins it.
func (g *smiGPU) process(name, value string) {
	n, err := strconv.Atoi(leading.FindString(strings.TrimSpace(value)))
	switch {
	case err != nil:
	case name == "Process ID" && len(g.processes) < maxProcesses:
		g.processes = append(g.processes, nvml.Process{PID: n})
	case name == "Used GPU Memory" && len(g.processes) > 0:
		g.processes[len(g.processes)-1].Memory = n << 20
	}
}

// next ends a GPU.
func (p *smiParser) next(c *Collection) {
	if p.gpu != nil {
		c.addGPU(p.gpu)
	}
	p.gpu, p.at = nil, nil
}

func (p *smiParser) end(c *Collection) {
	p.next(c)
	p.on = false
}

// A xmlParser takes the document of nvidia-smi -q -x, which it collects.
type xmlParser struct {
	on   bool
	text strings.Builder
}

const (
	xmlBegin = "<nvidia_smi_log"
	xmlEnd   = "</nvidia_smi_log>"
	maxXML   = 4 << 20 // bytes: one of 16 GPUs has 300 KB
)

func (p *xmlParser) take(c *Collection, line string) bool {
	if !p.on && strings.Contains(line, xmlBegin) {
		p.on = true
		c.found(SMIXML)
	}
	if !p.on {
		return false
	}
	if p.text.Len()+len(line) <= maxXML {
		p.text.WriteString(line)
	}
	if strings.Contains(line, xmlEnd) {
		p.end(c)
	}
	return true
}

func (p *xmlParser) end(c *Collection) {
	if !p.on {
		return
	}
	if readXML(c, p.text.String()) != nil {
		c.cut = true // what came before is read
	}
	p.on = false
	p.text.Reset()
}

// xmlNames are the names of the text for paths of the document: the parts of a path are translated one by one.
var xmlNames = map[string]string{
	"product_name": "Product Name", "uuid": "GPU UUID", "minor_number": "Minor Number", "persistence_mode": "Persistence Mode",
	"mig_mode": "MIG Mode", "current_mig": "Current", "pci": "PCI", "pci_device_id": "Device Id", "pci_bus_id": "Bus Id",
	"pci_gpu_link_info": "GPU Link Info", "pcie_gen": "PCIe Generation", "max_link_gen": "Max", "current_link_gen": "Current",
	"link_widths": "Link Width", "max_link_width": "Max", "current_link_width": "Current", "replay_counter": "Replays Since Reset",
	"clocks_throttle_reasons": "Clocks Throttle Reasons", "clocks_event_reasons": "Clocks Event Reasons",
	"compute_mode": "Compute Mode", "utilization": "Utilization", "gpu_util": "Gpu", "ecc_mode": "ECC Mode", "current_ecc": "Current",
	"ecc_errors": "ECC Errors", "volatile": "Volatile", "aggregate": "Aggregate", "sram_correctable": "SRAM Correctable",
	"sram_uncorrectable": "SRAM Uncorrectable", "sram_uncorrectable_parity": "SRAM Uncorrectable Parity",
	"sram_uncorrectable_secded": "SRAM Uncorrectable SEC-DED", "dram_correctable": "DRAM Correctable", "dram_uncorrectable": "DRAM Uncorrectable",
	"single_bit": "Single Bit", "double_bit": "Double Bit", "total": "Total", "retired_pages": "Retired Pages",
	"multiple_single_bit_retirement": "Single Bit ECC", "double_bit_retirement": "Double Bit ECC", "retired_count": "",
	"pending_blacklist": "Pending Page Blacklist", "pending_retirement": "Pending", "remapped_rows": "Remapped Rows",
	"remapped_row_corr": "Correctable Error", "remapped_row_unc": "Uncorrectable Error", "remapped_row_pending": "Pending",
	"remapped_row_failure": "Remapping Failure Occurred", "temperature": "Temperature", "gpu_temp": "GPU Current Temp",
	"clocks": "Clocks", "max_clocks": "Max Clocks", "sm_clock": "SM", "mem_clock": "Memory",
	"pid": "Process ID", "used_memory": "Used GPU Memory",
	"idle": "Idle", "gpu_idle": "Idle", "applications_clocks_setting": "Applications Clocks Setting", "sw_power_cap": "SW Power Cap",
	"hw_slowdown": "HW Slowdown", "hw_thermal_slowdown": "HW Slowdown/HW Thermal Slowdown",
	"hw_power_brake_slowdown": "HW Slowdown/HW Power Brake Slowdown", "sync_boost": "Sync Boost", "sw_thermal_slowdown": "SW Thermal Slowdown",
	"display_clocks_setting": "Display Clock Setting",
}

// xmlName translates a name of the document. Those of reasons have a prefix.
func xmlName(name string) string {
	for _, prefix := range []string{"clocks_throttle_reason_", "clocks_event_reason_"} {
		name = strings.TrimPrefix(name, prefix)
	}
	if known, ok := xmlNames[name]; ok {
		return known
	}
	return name
}

// readXML reads the document. It has no entities, and no element is read whole.
func readXML(c *Collection, text string) error {
	d := xml.NewDecoder(strings.NewReader(text))
	d.CharsetReader = func(_ string, r io.Reader) (io.Reader, error) { return r, nil }
	var gpu *smiGPU
	var at []string
	defer func() {
		if gpu != nil {
			c.addGPU(gpu)
		}
	}()
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch t := token.(type) {
		case xml.StartElement:
			if len(at) >= maxDepth {
				return errors.New("nested too deep")
			}
			at = append(at, t.Name.Local)
			if t.Name.Local == "gpu" && len(at) == 2 {
				gpu = &smiGPU{values: map[string]string{}}
				for _, a := range t.Attr {
					gpu.set(a.Name.Local, a.Value)
				}
			}
		case xml.EndElement:
			at = at[:len(at)-1]
			if len(at) == 1 && gpu != nil {
				c.addGPU(gpu)
				gpu = nil
			}
		case xml.CharData:
			c.xmlValue(gpu, at, strings.TrimSpace(string(t)))
		}
	}
}

// xmlValue takes the text of an element.
func (c *Collection) xmlValue(gpu *smiGPU, at []string, value string) {
	switch {
	case value == "" || len(at) < 2:
	case gpu == nil && at[len(at)-1] == "driver_version":
		c.driver = value
	case gpu != nil && len(at) > 2:
		var path []string
		for _, name := range at[2:] {
			if known := xmlName(name); known != "" {
				path = append(path, known)
			}
		}
		gpu.set(strings.Join(path, "/"), value)
		gpu.process(path[len(path)-1], value)
	}
}
