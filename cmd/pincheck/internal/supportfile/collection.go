// Package supportfile reads what people send when they ask for help: reports of nvidia-bug-report.sh, and what
// nvidia-smi -q, dmesg, journalctl -k and lspci -vv print. It puts them into a tree of the files of a host, so that
// package hostinfo reads them as a host's, and into a report of NVML.
//
// A file is recognised by its lines, and may contain several of these texts. What is not in them is not in the tree.
package supportfile

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing/fstest"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/kernellog"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/internal/linux"
)

// The kinds of texts.
const (
	BugReport = "nvidia-bug-report"
	SMI       = "nvidia-smi -q"
	SMIXML    = "nvidia-smi -q -x"
	LSPCI     = "lspci"
	Log       = "kernel log"
)

// Known are the forms that are read, in words for errors and helps.
const Known = "nvidia-bug-report.log(.gz), nvidia-smi -q (-x), dmesg, journalctl -k, lspci -vv"

// The limits of what is kept, whatever the size of a text.
const (
	maxGPUs    = 128
	maxDevices = 2_000     // of the PCI bus
	maxFile    = 256 << 10 // bytes of a file of the tree
	maxFiles   = 500       // of a bug report
)

// A Collection has what texts contain. The zero value is ready.
type Collection struct {
	// Cut is that a text ended before its end.
	Cut bool
	// Mismatch is nvidia-smi's complaint that its library and the kernel module have different versions, or "".
	Mismatch string

	files   fstest.MapFS
	kinds   []string
	smi     []*smiGPU
	driver  string // nvidia-smi's
	lost    []nvml.GPU
	devices []*pciDevice
	log     strings.Builder
	copies  strings.Builder // lines of the log in other sections
	limit   int             // replaces maxText in tests; 0 does not
}

// Kinds returns the kinds of texts that were found, sorted.
func (c *Collection) Kinds() []string { return slices.Sorted(slices.Values(c.kinds)) }

func (c *Collection) found(kind string) {
	if !slices.Contains(c.kinds, kind) {
		c.kinds = append(c.kinds, kind)
	}
}

// keep adds lines to a file of the tree.
func (c *Collection) keep(name string, text string) {
	if c.files == nil {
		c.files = fstest.MapFS{}
	}
	file := c.files[name]
	if file == nil {
		if len(c.files) >= maxFiles || !fs.ValidPath(name) || len(name) > 200 {
			return
		}
		file = &fstest.MapFile{Mode: 0o444}
		c.files[name] = file
	}
	if len(file.Data)+len(text) <= maxFile {
		file.Data = append(file.Data, text...)
	}
}

// logLine adds a line to the kernel's log.
func (c *Collection) logLine(line string) {
	if kernellog.Matters(line) && c.log.Len()+len(line) <= maxFile {
		c.log.WriteString(strings.TrimRight(line, "\r\n") + "\n")
	}
}

// logCopy adds a line of another section, whose messages may be in the log, too.
func (c *Collection) logCopy(line string) {
	if kernellog.Matters(line) && strings.Contains(line, moduleName) && c.copies.Len()+len(line) <= maxFile {
		c.copies.WriteString(strings.TrimRight(line, "\r\n") + "\n")
	}
}

// moduleName begins messages of NVIDIA's kernel module.
const moduleName = "NVRM"

// kernelLog returns the log, and what copies have beyond it.
func (c *Collection) kernelLog() string {
	messages := map[string]bool{}
	log := c.log.String()
	for line := range strings.Lines(log) {
		_, message, _ := strings.Cut(line, moduleName)
		messages[message] = true
	}
	for line := range strings.Lines(c.copies.String()) {
		if _, message, _ := strings.Cut(line, moduleName); !messages[message] {
			log += line
		}
	}
	return log
}

// Files returns the tree.
func (c *Collection) Files() fs.FS {
	tree := fstest.MapFS{}
	for name, file := range c.files {
		tree[name] = file
	}
	put := func(name, text string) {
		if tree[name] == nil && text != "" && fs.ValidPath(name) {
			tree[name] = &fstest.MapFile{Mode: 0o444, Data: []byte(text)}
		}
	}
	put("dev/kmsg", c.kernelLog())
	for _, d := range c.devices {
		d.put(c.devices, tree)
	}
	for _, g := range c.smi {
		g.put(put)
	}
	for name, file := range c.files { // copies of files of a device, whose directory is a link
		parts := strings.SplitAfterN(name, "/", 6)
		if link := tree[strings.TrimSuffix(strings.Join(parts[:min(len(parts), 5)], ""), "/")]; len(parts) == 6 && link != nil && link.Mode&fs.ModeSymlink != 0 {
			delete(tree, name)
			tree[strings.TrimPrefix(string(link.Data), "../../../../")+"/"+parts[5]] = file
		}
	}
	if c.driver != "" && c.driver != notAvailable {
		put("sys/module/nvidia/version", c.driver+"\n")
	}
	// The archive's own tree has an index: an fstest.MapFS looks at each of its entries to find that one is missing.
	return (&capture.Archive{Host: tree}).Files()
}

// NVML returns what nvidia-smi printed as NVML would, or nil.
func (c *Collection) NVML() *nvml.Report {
	if len(c.smi) == 0 && len(c.lost) == 0 {
		return nil
	}
	r := &nvml.Report{Library: "nvidia-smi", Driver: c.driver}
	for _, g := range c.smi {
		n := g.nvml()
		n.Index = len(r.GPUs)
		r.GPUs = append(r.GPUs, n)
	}
	for _, g := range c.lost {
		g.Index = len(r.GPUs)
		r.GPUs = append(r.GPUs, g)
	}
	r.Count = len(r.GPUs)
	return r
}

// deviceDir returns the directory of a PCI device in /sys, or "" for what is no address.
func deviceDir(address string) string {
	a, err := linux.ParsePCIAddress(address)
	if err != nil {
		return ""
	}
	return path.Join(linux.PCIDevices, a.String())
}

// A parser takes the lines of one form. take returns whether a line is of its form; end is called at the end of a
// section or text.
type parser interface {
	take(c *Collection, line string) bool
	end(c *Collection)
}

// text gives each line of a text to the parsers. In a report of nvidia-bug-report.sh its headings decide.
type text struct {
	c       *Collection
	report  *bugReport
	parsers []parser
}

func (t *text) line(line []byte) error {
	if bytes.IndexByte(line, 0) >= 0 {
		if t.report == nil {
			return fmt.Errorf("it is not a text: it has a zero byte. Convert UTF-16 with: iconv -f UTF-16 -t UTF-8")
		}
		return nil // a binary file in a report
	}
	s := strings.ToValidUTF8(string(line), "?")
	if t.report == nil && strings.HasPrefix(s, reportTitle) {
		t.report = &bugReport{parsers: t.parsers}
		t.c.found(BugReport)
	}
	if t.report != nil {
		t.report.line(t.c, s)
		return nil
	}
	for _, p := range t.parsers {
		if p.take(t.c, s) {
			break
		}
	}
	return nil
}

// A logParser takes lines of the kernel's log.
type logParser struct{ lines kernellog.Parser }

func (p *logParser) take(c *Collection, line string) bool {
	if complaint(c, line) {
		return true
	}
	isLog := p.lines.Line(line)
	if isLog || kernellog.Matters(line) && strings.HasPrefix(line, "-- ") {
		c.logLine(line)
	}
	if isLog {
		c.found(Log)
	}
	return isLog
}

func (p *logParser) end(*Collection) {}
