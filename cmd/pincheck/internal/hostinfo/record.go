package hostinfo

import (
	"bytes"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"testing/fstest"

	"github.com/gopinned/pinned/cmd/pincheck/internal/kernellog"
	"github.com/gopinned/pinned/internal/linux"
)

// Record wraps the root directory of a host and records what is read through it, for an archive
// of pincheck capture or a test. Package hosttext has the form of a recording.
func Record(fsys fs.FS) *Recorder {
	return &Recorder{fsys: fsys}
}

// Recorder is a file system that records what is read. It implements fs.FS, fs.StatFS,
// fs.ReadDirFS and fs.ReadLinkFS.
type Recorder struct {
	fsys fs.FS
	host sync.Map // *fstest.MapFile by name
}

// Host returns what was read so far. Files that were read through a directory that is a
// link, as devices in /sys are, are at the link's target.
func (r *Recorder) Host() fstest.MapFS {
	read, out := fstest.MapFS{}, fstest.MapFS{}
	r.host.Range(func(name, entry any) bool {
		read[name.(string)] = entry.(*fstest.MapFile)
		return true
	})
	for name, entry := range read {
		out[realPath(read, name)] = entry
	}
	// Directories that were listed are there by what is in them.
	for name := range out {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if entry := out[dir]; entry != nil && entry.Mode == listed {
				delete(out, dir)
			}
		}
	}
	return out
}

// realPath returns the path of a file whose directories are no links, as far as these were read.
func realPath(read fstest.MapFS, name string) string {
	followed := 0
	for dir := path.Dir(name); dir != "." && followed < maxLinks; {
		if link, ok := read[dir]; ok && link.Mode&fs.ModeSymlink != 0 {
			name = path.Join(path.Dir(dir), string(link.Data), strings.TrimPrefix(name, dir))
			dir = name // its directories may be links, too
			followed++
		}
		dir = path.Dir(dir)
	}
	return name
}

// maxLinks is the number of links that Linux follows for one path.
const maxLinks = 40

func (r *Recorder) keep(name string, entry *fstest.MapFile) {
	if _, known := r.host.LoadOrStore(name, entry); known && len(entry.Data) > 0 {
		r.host.Store(name, entry)
	}
}

// Open implements fs.FS. It reads all of a file, and records the part that matters.
func (r *Recorder) Open(name string) (fs.File, error) {
	file, err := r.fsys.Open(name)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return file, err
	}
	defer file.Close()
	data, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	r.keep(name, &fstest.MapFile{Mode: 0o444, Data: reduce(name, data)})
	return fstest.MapFS{name: {Mode: 0o444, Data: data}}.Open(name)
}

// Stat implements fs.StatFS.
func (r *Recorder) Stat(name string) (fs.FileInfo, error) {
	info, err := fs.Stat(r.fsys, name)
	if err != nil || info.IsDir() {
		return info, err
	}
	mode := info.Mode() & (fs.ModeDevice | fs.ModeCharDevice | fs.ModePerm)
	entry := &fstest.MapFile{Mode: mode}
	if owner, ok := linux.OwnerOf(info); ok && mode&fs.ModeDevice != 0 {
		entry.Sys = owner
		if major := linux.MajorOf(info); major > 0 {
			entry.Sys = linux.Device{Owner: owner, Major: major}
		}
	}
	r.keep(name, entry)
	return info, nil
}

// ReadDir implements fs.ReadDirFS. It records the names in the directory, for readers that
// count them. Those in /dev are recorded only when they are read: there are many.
func (r *Recorder) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(r.fsys, name)
	if name == "dev" {
		return entries, err
	}
	for _, e := range entries {
		below := path.Join(name, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			_, _ = r.ReadLink(below) // one that cannot be read is an entry all the same
		}
		r.keep(below, &fstest.MapFile{Mode: listed})
	}
	return entries, err
}

// listed is the mode of entries that were not read.
const listed fs.FileMode = 0o444

// ReadLink implements fs.ReadLinkFS. The recorded link is relative, which is what fstest.MapFS follows. If it leads
// to another link, as /usr/local/cuda does, that one is recorded too.
func (r *Recorder) ReadLink(name string) (string, error) {
	target, err := fs.ReadLink(r.fsys, name)
	if err != nil {
		return target, err
	}
	to := target
	for range maxLinks {
		if path.IsAbs(to) {
			to = strings.Repeat("../", strings.Count(name, "/")) + strings.TrimPrefix(path.Clean(to), "/")
		}
		r.keep(name, &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte(to)})
		name = path.Join(path.Dir(name), to)
		if !fs.ValidPath(name) {
			break
		}
		if to, err = fs.ReadLink(r.fsys, name); err != nil {
			break // the end of the chain
		}
	}
	return target, nil
}

// Lstat implements fs.ReadLinkFS.
func (r *Recorder) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(r.fsys, name) }

// partial names the files of which only some lines are kept, by what the
// lines contain. A path counts before a file's bare name.
var partial = map[string][]string{
	"proc/cpuinfo":        {"processor\t", "model name\t", "physical id\t", "core id\t", "CPU implementer\t", "CPU part\t"},
	"proc/self/status":    {"Cpus_allowed_list:", "Mems_allowed_list:", "Uid:", "Gid:", "Groups:", "CapEff:"},
	"proc/self/mountinfo": {" - "},
	"proc/zoneinfo":       {"Node ", "managed "},
	"cpu.stat":            {"nr_periods ", "nr_throttled "},
	"proc/vmstat":         {"compact_stall ", "compact_fail ", "thp_fault_alloc ", "thp_fault_fallback "},
	"proc/modules":        {"nvidia", "nouveau", "nova_core", "nvgpu", "mlx5_ib"},
	"proc/devices":        {"nvidia"},

	"proc/driver/nvidia/params": {"ExcludedGpus:", "GpuBlacklist:"},
	"proc/self/limits":          {"Limit", "Max locked memory", "Max address space", "Max open files", "Max data size", "Max processes"},
	"arcstats":                  {"size ", "c_min "},
	"meminfo": {"MemTotal:", "MemFree:", "MemAvailable:", "Active(file):", "Inactive(file):", "Swap", "HugePages_", "Huge",
		"Commit", "Buffers:", "Cached:", "AnonPages:", "Slab:", "KernelStack:", "PageTables:", "Percpu:", "VmallocUsed:", "Unaccepted:", "Balloon:", "Shmem:", "CmaTotal:", "CmaFree:"},
	"memory.stat": {"active_file "},
}

func reduce(name string, data []byte) []byte {
	switch {
	case strings.Contains(name, "efi/efivars/SecureBoot") && len(data) >= 5: // attributes, and one byte
		return []byte{'0', '0', '0', '0', '0' + data[4]&1, '\n'}
	case path.Base(name) == "config" && strings.HasPrefix(name, "sys/"):
		return textConfig([]byte(binaryConfig(string(data)))) // that of a recording, too
	case name == "proc/cmdline":
		var words []string
		for word := range strings.FieldsSeq(string(data)) {
			if n, _, _ := strings.Cut(word, "="); slices.Contains(kernelParameters, n) {
				words = append(words, word)
			}
		}
		return []byte(strings.Join(words, " ") + "\n")
	case name == kernelLogFile:
		return []byte(kernellog.Reduce(string(data)))
	case name == "etc/nvidia/gridd.conf": // it names hosts
		if parseAssignments(string(data))["ServerAddress"] == "" {
			return []byte("ServerAddress=\n")
		}
		return []byte("ServerAddress=set\n")
	case path.Base(path.Dir(name)) == path.Base(modprobeDir): // it may name what it likes
		var out []byte
		for line := range strings.Lines(string(data)) {
			if strings.Contains(line, assignGPUs) || slices.Contains(blockers, strings.Join(strings.Fields(line), " ")) {
				out = append(out, line...)
			}
		}
		return out
	case strings.HasSuffix(name, "attr/current"), strings.Contains(name, "device-tree/"), strings.Contains(name, "devicetree/"):
		return bytes.ReplaceAll(data, []byte{0}, []byte("\n"))
	}
	if bytes.IndexByte(data, 0) >= 0 { // libc.so.6: its banner is all that is read
		var out []byte
		for line := range bytes.FieldsFuncSeq(data, func(c rune) bool { return c == 0 || c == '\n' }) {
			if bytes.Contains(line, []byte("GNU C Library (")) {
				out = append(append(out, line...), '\n')
			}
		}
		return out
	}
	words := partial[name]
	if words == nil {
		words = partial[path.Base(name)]
	}
	if words == nil {
		return data
	}
	var out []byte
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) == 1 || len(fields) > 1 && path.Base(name) == "meminfo" && !strings.Contains(line, ":") {
			out = append(out, line...) // damaged, and so for readers of the recording
			continue
		}
		for _, w := range words {
			if strings.Contains(line, w) {
				out = append(out, line...)
				break
			}
		}
		if name == "proc/cpuinfo" && strings.HasPrefix(line, "flags") && slices.Contains(strings.Fields(line), "hypervisor") {
			out = append(out, "flags\t\t: hypervisor"...)
			for _, flag := range confidentialFlags {
				if slices.Contains(strings.Fields(line), flag) {
					out = append(out, " "+flag...)
				}
			}
			out = append(out, '\n')
		}
	}
	return out
}
