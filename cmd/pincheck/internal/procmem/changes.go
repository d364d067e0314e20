package procmem

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Changes counts the blocks of pinned memory that appear in a process and vanish from it, from look to look. It
// knows them by the names of their mappings, as [Read] does: memory of cudaHostAlloc, and buffers of
// this module. Other memory of cudaHostRegister does not show, and neither does a block that comes and goes between two looks.
type Changes struct {
	Appeared, Vanished Blocks

	root  fs.FS
	pid   int
	looks int
	known map[string][]extent // by inode
}

// Blocks are blocks of pinned memory. Blocks of this module that adjoin count as one.
type Blocks struct {
	Count int
	Bytes int
}

// An extent is a range of addresses.
type extent struct{ start, end uintptr }

// NewChanges returns the changes of a process below root, which is [os.DirFS] of "/".
func NewChanges(root fs.FS, pid int) *Changes { return &Changes{root: root, pid: pid} }

// Look counts what has changed since the look before. It reads the process's list of mappings, which
// holds it up for no longer than a call of mmap would wait. An error wraps fs.ErrNotExist if the process has ended.
func (c *Changes) Look() error {
	now, err := pinnedExtents(c.root, c.pid)
	if err != nil {
		return fmt.Errorf("memory of process %d: %w", c.pid, err)
	}
	if c.looks > 0 {
		for inode, extents := range now {
			c.Appeared.add(extents, c.known[inode])
		}
		for inode, extents := range c.known {
			c.Vanished.add(extents, now[inode])
		}
	}
	c.known = now
	c.looks++
	return nil
}

// add adds what of some extents is in no other.
func (b *Blocks) add(extents, others []extent) {
	count := func(start, end uintptr) {
		if start < end {
			b.Count++
			b.Bytes += int(end - start)
		}
	}
	for _, e := range extents {
		for len(others) > 0 && others[0].end <= e.start {
			others = others[1:]
		}
		start := e.start
		for _, o := range others {
			if o.start >= e.end {
				break
			}
			count(start, o.start)
			start = max(start, o.end)
		}
		count(start, e.end)
	}
}

// pinnedExtents returns the pinned memory of a process by the inodes of its mappings, in the order of the addresses. Each mapping of /dev/zero has an
// inode of its own, by which one that takes another's place is seen; buffers of this module have none.
func pinnedExtents(root fs.FS, pid int) (map[string][]extent, error) {
	if _, err := alive(root, pid); err != nil {
		return nil, err
	}
	b, err := fs.ReadFile(root, fmt.Sprintf("proc/%d/maps", pid))
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, errPermission(err)
	case err != nil && ended(root, pid), len(b) == 0:
		return nil, fmt.Errorf("it has ended: %w", fs.ErrNotExist)
	case err != nil:
		return nil, err
	}
	text := string(b)
	driver := strings.Contains(text, "/dev/nvidia") || strings.Contains(text, "/libcuda.so")
	extents := make(map[string][]extent)
	for line := range strings.Lines(text) {
		if !strings.Contains(line, bufferMapping) && !(driver && strings.Contains(line, hostAllocMapping)) {
			continue
		}
		maps, err := linux.ParseMaps(line)
		if err != nil {
			return nil, err
		}
		inode := strings.Fields(line)[4]
		for _, m := range maps {
			list := extents[inode]
			if last := len(list) - 1; last >= 0 && list[last].end == m.Start { // one block, whose parts have other flags
				list[last].end = m.End
				continue
			}
			extents[inode] = append(list, extent{m.Start, m.End})
		}
	}
	return extents, nil
}
