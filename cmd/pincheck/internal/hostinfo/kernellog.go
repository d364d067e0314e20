package hostinfo

import (
	"io/fs"
	"os"
	"strconv"
	"strings"
	"testing/fstest"

	"github.com/gopinned/pinned/cmd/pincheck/internal/kernellog"
	"github.com/gopinned/pinned/internal/linux"
)

// KernelLog is what the kernel's log contains about GPUs.
type KernelLog struct {
	// Shown is that the log could be read.
	Shown bool `json:"shown,omitempty"`
	// Restricted is kernel.dmesg_restrict: only privileged processes may read the log. Nil if unknown.
	Restricted *bool             `json:"restricted,omitempty"`
	Events     []kernellog.Event `json:"events,omitempty"`
}

// IsZero reports whether nothing is known of the log.
func (l KernelLog) IsZero() bool { return !l.Shown && l.Restricted == nil && len(l.Events) == 0 }

// kernelLogFile is the kernel's log. Of this host it has the lines that matter.
const kernelLogFile = "dev/kmsg"

// Root returns the root directory of the host of this process. Its dev/kmsg ends where the log ends now.
func Root() fs.FS { return root{os.DirFS("/").(rootFS)} }

type rootFS interface {
	fs.StatFS
	fs.ReadFileFS
	fs.ReadDirFS
	fs.ReadLinkFS
}

type root struct{ rootFS }

// Open implements fs.FS.
func (r root) Open(name string) (fs.File, error) {
	if name != kernelLogFile {
		return r.rootFS.Open(name)
	}
	text, err := r.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return fstest.MapFS{name: {Mode: 0o444, Data: text}}.Open(name)
}

// ReadFile implements fs.ReadFileFS. Without it fs.ReadFile reads files of /proc, which have no size, one byte at
// first, and for those of /proc/sys that is all.
func (r root) ReadFile(name string) ([]byte, error) {
	if name != kernelLogFile {
		return r.rootFS.ReadFile(name)
	}
	text, err := kernellog.Read()
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return []byte(text), nil
}

func readKernelLog(f files, k Kernel) KernelLog {
	l := KernelLog{}
	if f.isFile(kernelLogFile) { // the device itself has no end
		l.Shown, l.Events = true, kernellog.Parse(f.text(kernelLogFile))
	}
	if n, err := linux.ReadInt(f.fsys, "proc/sys/kernel/dmesg_restrict"); err == nil {
		restricted := n != 0
		l.Restricted = &restricted
	}
	up, _, _ := strings.Cut(f.line("proc/uptime"), " ")
	now, err := strconv.ParseFloat(up, 64)
	if slept, _ := k.Suspended.Finite(); err != nil || slept > 0 { // the log's clock stands still meanwhile
		return l
	}
	for i := range l.Events {
		if at := l.Events[i].Seconds; at != nil && *at <= now {
			age := now - *at
			l.Events[i].Age = &age
		}
	}
	return l
}
