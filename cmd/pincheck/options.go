package main

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// options are the flags of all commands.
type options struct {
	sim        bool
	format     string
	output     string
	noHostName bool
	quiet      bool
	verbose    bool
	devices    devices
	library    string
	timeout    time.Duration
	version    bool
	npd        bool
	from       []string
	tickets    bool // the command has findings, which --format ticket needs

	expectations
}

// expectations are the flags of what a check judges by.
type expectations struct {
	failAt     string
	ignore     []string
	expectGPUs int
	expectRate float64
}

// validate checks the flags before anything is loaded. A command that cannot write all formats names
// those that it can.
func (o *options) validate(can ...report.Format) (report.Format, error) {
	if len(can) == 0 {
		can = report.Formats()
	}
	if o.tickets {
		can = append(can, report.Ticket)
	}
	format := report.Format(o.format)
	switch {
	case o.format == referenceFormat:
		return "", usagef("--format reference: only bench %s writes it", referenceBench)
	case !slices.Contains(can, format):
		return "", wrongValue("format", o.format, can)
	}
	if o.timeout < 0 {
		return "", usagef("--timeout %v: must not be negative", o.timeout)
	}
	if !slices.Contains(doctor.Severities(), o.failOn()) {
		return "", wrongValue("fail-on", o.failAt, doctor.Severities())
	}
	if o.expectGPUs < 0 {
		return "", usagef("--expect-gpus %d: must not be negative", o.expectGPUs)
	}
	if !(o.expectRate >= 0 && o.expectRate < 1e6) {
		return "", usagef("--expect-bandwidth %v: want a rate in GB/s", o.expectRate)
	}
	for _, id := range o.ignore {
		if !slices.Contains(checkIDs(), id) {
			return "", usageError{fmt.Errorf("--ignore: %w", unknownID(id))}
		}
	}
	if o.output != "" {
		if err := checkFile(o.output); err != nil {
			return "", outputError{fmt.Errorf("--output: %w", err)}
		}
	}
	if o.library == "" {
		return format, nil
	}
	if o.sim {
		return "", usagef("--library and --sim exclude each other: the simulated GPU has its own library")
	}
	// The dynamic loader looks for a bare name; a path must exist.
	if strings.ContainsRune(o.library, os.PathSeparator) {
		if info, err := os.Stat(o.library); err != nil {
			return "", usagef("--library: %w", err)
		} else if info.IsDir() {
			return "", usagef("--library %s: is a directory, not a library", o.library)
		}
	}
	return format, nil
}

// failOn returns the lowest severity of findings that change the exit code.
func (o *options) failOn() doctor.Severity { return doctor.Severity(o.failAt) }

// devices are the values of --device: numbers, UUIDs, PCI addresses, or "all".
type devices []string

func (d *devices) String() string { return strings.Join(*d, ",") }

func (d *devices) Type() string { return "LIST" }

var (
	uuidPattern = regexp.MustCompile(`(?i)^(GPU|MIG)-[0-9a-f-]*$`)
	pciPattern  = regexp.MustCompile(`(?i)^(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?$`)
)

// Set adds the parts of a list.
func (d *devices) Set(list string) error {
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		n, err := strconv.Atoi(part)
		if part != "all" && (err != nil || n < 0) && !uuidPattern.MatchString(part) && !pciPattern.MatchString(part) {
			return fmt.Errorf("%q is not a GPU: want all, a number, a UUID (GPU-…) or a PCI address (0000:06:00.0)", part)
		}
		*d = append(*d, part)
	}
	return nil
}

// choose leaves the named GPUs among the facts, or all of them if none is named.
func (d devices) choose(f *doctor.Facts) error {
	all := f.Devices
	if len(d) == 0 || len(all) == 0 || slices.Contains(d, "all") {
		return nil
	}
	var chosen []doctor.Device
	isChosen := func(ordinal int) bool {
		return slices.ContainsFunc(chosen, func(c doctor.Device) bool { return c.Ordinal == ordinal })
	}
	for _, name := range d {
		var match []doctor.Device
		for _, dev := range all {
			if names(name, &dev) {
				match = append(match, dev)
			}
		}
		switch {
		case len(match) == 0:
			return usagef("--device %s: no such GPU. This process sees %s", name, seen(all))
		case len(match) > 1:
			return usagef("--device %s: fits %d GPUs: give more of the UUID", name, len(match))
		case !isChosen(match[0].Ordinal):
			chosen = append(chosen, match[0])
		}
	}
	for _, dev := range all {
		if !isChosen(dev.Ordinal) {
			f.NotChosen = append(f.NotChosen, dev.PCIBusID)
		}
	}
	f.Devices = chosen
	return nil
}

// names reports whether a name is that of a device. A UUID may be shortened, as in
// CUDA_VISIBLE_DEVICES.
func names(name string, d *doctor.Device) bool {
	if n, err := strconv.Atoi(name); err == nil {
		return n == d.Ordinal
	}
	if pci := pciAddress(name); pci != "" {
		return pci == pciAddress(d.PCIBusID)
	}
	return len(d.UUID) >= len(name) && strings.EqualFold(d.UUID[:len(name)], name)
}

// pciAddress returns an address in one form: domains are of 4 or 8 digits, or left out.
func pciAddress(s string) string {
	m := pciPattern.FindStringSubmatch(s)
	if m == nil {
		return ""
	}
	domain, _ := strconv.ParseUint("0"+m[1], 16, 64)
	function := m[4]
	if function == "" {
		function = "0"
	}
	return strings.ToLower(fmt.Sprintf("%x:%s:%s.%s", domain, m[2], m[3], function))
}

func seen(all []doctor.Device) string {
	if len(all) == 1 {
		return fmt.Sprintf("only GPU 0 (%s, PCI %s)", all[0].UUID, all[0].PCIBusID)
	}
	return fmt.Sprintf("GPUs 0 to %d", len(all)-1)
}

const largestSize = 1 << 40 // of a copy: more than any GPU has

// sizeUnits are the units of sizes, as powers of two.
var sizeUnits = map[string]int{"": 0, "B": 0, "K": 10, "KiB": 10, "M": 20, "MiB": 20, "G": 30, "GiB": 30, "T": 40, "TiB": 40}

// parseSize parses a size in bytes with a binary unit: 64K, 1MiB, 4G.
func parseSize(s string) (int, error) {
	number := strings.TrimRight(s, "KMGTiBkmgtb")
	unit := s[len(number):]
	n, err := strconv.ParseUint(number, 10, 63)
	if errors.Is(err, strconv.ErrRange) {
		n, err = largestSize+1, nil
	}
	if err != nil {
		return 0, fmt.Errorf("%q is not a size: want a whole number with K, M or G (powers of 1024), such as 64K, 1MiB or 4G", s)
	}
	shift, known := sizeUnits[unit]
	if !known {
		return 0, fmt.Errorf("%q: unknown unit %q: want B, K, M, G, T, KiB, MiB, GiB or TiB (powers of 1024)", s, unit)
	}
	switch {
	case n == 0:
		return 0, fmt.Errorf("%q: must be at least 1 byte", s)
	case n > largestSize>>shift:
		return 0, fmt.Errorf("%q: must be at most 1 TiB", s)
	}
	return int(n) << shift, nil
}

// sizes are the values of --sizes in bytes, ascending and without duplicates.
type sizes []int

func (s *sizes) String() string { return strings.Trim(fmt.Sprint([]int(*s)), "[]") }

func (s *sizes) Type() string { return "LIST" }

// Set adds the parts of a list.
func (s *sizes) Set(list string) error {
	for part := range strings.SplitSeq(list, ",") {
		n, err := parseSize(strings.TrimSpace(part))
		if err != nil {
			return err
		}
		*s = append(*s, n)
	}
	slices.Sort(*s)
	*s = slices.Compact(*s)
	return nil
}
