package supportfile

import (
	"path"
	"regexp"
	"slices"
	"strings"
)

// reportTitle begins a report of nvidia-bug-report.sh, and separator its sections.
const (
	reportTitle = "Start of NVIDIA bug report log file"
	separator   = "____________________"
)

// A bugReport is a report of nvidia-bug-report.sh. A section begins with a separator, an empty line and a heading: a
// command, or "*** /path" of a file, whose next line is "*** ls: …".
type bugReport struct {
	parsers []parser
	heading bool   // the next line that is not empty is one
	file    string // whose copy follows
	section section
}

// A section is what the lines of a report are of.
type section int

const (
	ignored section = iota
	file
	dmesg   // the kernel's log of this boot
	journal // a copy of it
	command // lspci or nvidia-smi
)

var (
	copyOf = regexp.MustCompile(`^\*\*\* (/\S+)$`)
	kernel = regexp.MustCompile(`^uname: Linux \S+ (\S+) `)
)

// copied are the files of a report that are kept.
var copied = []string{"proc/cpuinfo", "proc/meminfo", "proc/modules", "proc/version", "proc/cmdline", "proc/driver/nvidia/version",
	"proc/driver/nvidia/params", "etc/os-release"}

// isCopied reports whether a file is kept.
func isCopied(name string) bool {
	return slices.Contains(copied, name) || strings.HasPrefix(name, "proc/driver/nvidia/gpus/") ||
		strings.HasPrefix(name, "sys/bus/pci/devices/") && !strings.Contains(name, "edid")
}

func (b *bugReport) line(c *Collection, line string) {
	trimmed := strings.TrimSpace(line)
	switch {
	case strings.HasPrefix(line, separator):
		b.end(c)
		b.heading, b.section = true, ignored
		return
	case b.heading && trimmed != "":
		b.heading = false
		b.begin(trimmed)
	case b.begins(c, trimmed):
		return
	}
	switch b.section {
	case file:
		if !strings.HasPrefix(line, "*** ") {
			c.keep(b.file, line)
		}
	case dmesg:
		c.logLine(line)
	case journal:
		c.logCopy(line)
	case command:
		for _, p := range b.parsers {
			if p.take(c, line) {
				break
			}
		}
	}
}

// begin takes the heading of a section.
func (b *bugReport) begin(heading string) {
	words := strings.Fields(heading)
	switch name := path.Base(words[0]); {
	case copyOf.MatchString(heading):
		b.copyOf(heading)
	case heading == "dmesg:":
		b.section = dmesg
	case name == "lspci" || name == "nvidia-smi" || name == "nvidia-smi.exe":
		b.section = command
	}
}

// begins takes lines inside of a section that begin another one: reports of some versions have several commands and
// files behind one separator.
func (b *bugReport) begins(c *Collection, line string) bool {
	switch m := kernel.FindStringSubmatch(line); {
	case m != nil && b.section == ignored:
		c.keep("proc/sys/kernel/osrelease", m[1]+"\n")
	case copyOf.MatchString(line):
		b.end(c)
		b.copyOf(line)
	case line == "journalctl -b -0:":
		b.section = journal
	case strings.HasPrefix(line, "journalctl -b -"), strings.HasPrefix(line, "/var/log/"):
		b.section = ignored // of earlier boots
	default:
		return false
	}
	return true
}

func (b *bugReport) copyOf(heading string) {
	name := strings.TrimPrefix(path.Clean(copyOf.FindStringSubmatch(heading)[1]), "/")
	b.file, b.section = name, ignored
	if isCopied(name) {
		b.section = file
	}
}

func (b *bugReport) end(c *Collection) {
	for _, p := range b.parsers {
		p.end(c)
	}
}
