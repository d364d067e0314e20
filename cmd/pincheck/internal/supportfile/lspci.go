package supportfile

import (
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing/fstest"

	"github.com/gopinned/pinned/internal/linux"
)

// A pciDevice is a device as lspci -v, -vv or -xxx shows it.
type pciDevice struct {
	address        linux.PCIAddress
	vendor, device string // 0x10de; empty if the text has only names
	class          string
	driver, node   string
	secondary      string // bus behind a bridge
	link           map[string]string
	bars           [6]string // lines of the file resource
	config         []byte
}

// 01:00.0 VGA compatible controller [0300]: NVIDIA Corporation GA102 [10de:2204] (rev a1)
var (
	deviceLine = regexp.MustCompile(`^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7]) ("?[A-Za-z0-9][^:]{0,80}): (.{1,300})`)
	classID    = regexp.MustCompile(`\[([0-9a-f]{4})\]`)
	deviceIDs  = regexp.MustCompile(`\[([0-9a-f]{4}):([0-9a-f]{4})\]`)
	linkValue  = regexp.MustCompile(`Speed ([0-9.]+)GT/s.*?Width x(\d+)`)
	secondary  = regexp.MustCompile(`secondary=([0-9a-f]{2})`)
	region     = regexp.MustCompile(`^Region ([0-5]): Memory at ([0-9a-f]{4,16}|<[a-z]+>)`)
	hexLine    = regexp.MustCompile(`^([0-9a-f]{2,3}):((?: [0-9a-f]{2}){16})\s*$`)
)

// classes are the names of lspci for classes that matter. Others are of no interest.
var classes = []struct{ name, class string }{
	{"VGA compatible controller", "0x030000"}, {"3D controller", "0x030200"}, {"Display controller", "0x038000"},
	{"PCI bridge", "0x060400"},
}

// An lspciParser takes the output of lspci.
type lspciParser struct{ at *pciDevice }

func (p *lspciParser) take(c *Collection, line string) bool {
	if m := deviceLine.FindStringSubmatch(line); m != nil {
		p.begin(c, m)
		return true
	}
	if p.at == nil {
		return false
	}
	trimmed := strings.TrimSpace(line)
	if m := hexLine.FindStringSubmatch(trimmed); m != nil {
		p.at.hex(m)
		return true
	}
	if trimmed == "" || line[0] != ' ' && line[0] != '\t' {
		p.at = nil
		return trimmed == ""
	}
	p.at.property(trimmed)
	return true
}

func (p *lspciParser) end(*Collection) { p.at = nil }

func (p *lspciParser) begin(c *Collection, m []string) {
	p.at = &pciDevice{link: map[string]string{}} // of what is not kept, too
	domain := m[1]
	if domain == "" {
		domain = "0000"
	}
	address, err := linux.ParsePCIAddress(domain + ":" + m[2] + ":" + m[3] + "." + m[4])
	if err != nil || len(c.devices) >= maxDevices {
		return
	}
	if i := slices.IndexFunc(c.devices, func(d *pciDevice) bool { return d.address == address }); i >= 0 {
		p.at = c.devices[i] // the same list twice: with and without details
	}
	d := p.at
	d.address = address
	d.identify(m[5], m[6])
	if d.class == "" {
		return
	}
	c.found(LSPCI)
	if !slices.Contains(c.devices, d) {
		c.devices = append(c.devices, d)
	}
}

// identify takes class and names of a device.
func (d *pciDevice) identify(class, name string) {
	for _, k := range classes {
		if strings.HasPrefix(class, k.name) {
			d.class = k.class
		}
	}
	if m := classID.FindStringSubmatch(class); m != nil && (strings.HasPrefix(m[1], "03") || m[1] == "0604") {
		d.class = "0x" + m[1] + "00"
	}
	if m := deviceIDs.FindStringSubmatch(name); m != nil {
		d.vendor, d.device = "0x"+m[1], "0x"+m[2]
	} else if strings.HasPrefix(name, "NVIDIA Corporation") {
		d.vendor = "0x10de"
	}
	if strings.Contains(name, "(rev ff)") {
		d.config = []byte("\xff\xff\xff\xff")
	}
}

// property takes a line below a device.
func (d *pciDevice) property(line string) {
	name, value, _ := strings.Cut(line, ":")
	value = strings.TrimSpace(value)
	switch {
	case name == "LnkCap" || name == "LnkSta":
		if m := linkValue.FindStringSubmatch(value); m != nil {
			kind := map[string]string{"LnkCap": "max", "LnkSta": "current"}[name]
			d.link[kind+"_link_speed"], d.link[kind+"_link_width"] = m[1]+" GT/s PCIe", m[2]
		}
	case name == "Kernel driver in use":
		d.driver = value
	case name == "NUMA node":
		d.node = value
	case name == "Bus":
		if m := secondary.FindStringSubmatch(value); m != nil {
			d.secondary = m[1]
		}
	case strings.HasPrefix(line, "!!! Unknown header type 7f"):
		d.config = []byte("\xff\xff\xff\xff")
	case strings.HasPrefix(name, "Region "):
		d.bar(line)
	}
}

// bar takes a window of a device, in the form of the file resource. What was given no address has zeros there.
func (d *pciDevice) bar(line string) {
	m := region.FindStringSubmatch(line)
	if m == nil {
		return
	}
	start := "0000000000000000"
	if m[2][0] != '<' {
		start = strings.Repeat("0", 16-len(m[2])) + m[2]
	}
	d.bars[m[1][0]-'0'] = fmt.Sprintf("0x%s 0x%s 0x0000000000040200", start, start)
}

// hex takes a line of the configuration space.
func (d *pciDevice) hex(m []string) {
	bytes, err := hex.DecodeString(strings.ReplaceAll(m[2], " ", ""))
	if err != nil || strings.TrimLeft(m[1], "0") != "" {
		return // only the first line matters
	}
	d.config = bytes
	if bytes[0] != 0xff || bytes[1] != 0xff {
		d.vendor, d.device = fmt.Sprintf("0x%02x%02x", bytes[1], bytes[0]), fmt.Sprintf("0x%02x%02x", bytes[3], bytes[2])
		d.class = fmt.Sprintf("0x%02x%02x%02x", bytes[11], bytes[10], bytes[9])
	}
}

// parent returns the bridge above a device, or nil.
func (d *pciDevice) parent(all []*pciDevice) *pciDevice {
	bus := fmt.Sprintf("%02x", d.address.Bus)
	for _, b := range all {
		if b.secondary == bus && b.address.Domain == d.address.Domain && b != d && bus != "00" {
			return b
		}
	}
	return nil
}

// maxBridges are more bridges above each other than hosts have.
const maxBridges = 16

// put adds the directory of a device to the tree, below those of the bridges above it.
func (d *pciDevice) put(all []*pciDevice, tree fstest.MapFS) {
	real := d.address.String()
	for i, b := 0, d.parent(all); b != nil && i < maxBridges; i, b = i+1, b.parent(all) {
		real = path.Join(b.address.String(), real)
	}
	real = path.Join("sys/devices", fmt.Sprintf("pci%04x:%02x", d.address.Domain, 0), real)
	link := path.Join(linux.PCIDevices, d.address.String())
	tree[link] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte("../../../../" + real)}
	put := func(name, text string) {
		if text != "" {
			tree[path.Join(real, name)] = &fstest.MapFile{Mode: 0o444, Data: []byte(text + "\n")}
		}
	}
	put("vendor", d.vendor)
	put("device", d.device)
	put("class", d.class)
	put("numa_node", d.node)
	put("config", string(d.config))
	for name, value := range d.link {
		put(name, value)
	}
	if d.bars[0] != "" && d.bars[1] != "" {
		put("resource", d.bars[0]+"\n"+d.bars[1])
	}
	if d.driver != "" && fs.ValidPath(d.driver) && !strings.Contains(d.driver, "/") {
		tree[path.Join(real, "driver")] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte("../drivers/" + d.driver)}
	}
}
