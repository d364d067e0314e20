package pages

import "unsafe"

// Backing is the kind of pages of a region. Each kind counts in other figures of the kernel.
type Backing int

const (
	// Ordinary pages: anonymous memory, and shared memory, which a memfd and files
	// of a tmpfs are too. While they are resident the kernel does not report them as
	// available.
	Ordinary Backing = iota
	// PageCache pages belong to a file on a disk or the network. The kernel reports them as
	// available, resident or not, and also when they are pinned.
	PageCache
	// Reserved pages are hugetlb pages, which the administrator has reserved. The kernel
	// never reports them as available.
	Reserved
)

// FileSystem describes the file system of a file, by statfs.
type FileSystem struct {
	Page   int  // bytes of hugetlbfs's pages, 0 for all other file systems
	Memory bool // it keeps its files in memory only, as tmpfs does
}

// Backing returns the kind of pages of a shared mapping of the file.
func (f FileSystem) Backing() Backing {
	switch {
	case f.Page > 0:
		return Reserved
	case f.Memory:
		return Ordinary
	}
	return PageCache
}

// Backing returns the kind of pages of the region.
func (r *Region) Backing() Backing { return r.backing }

// samples is the number of pages that are examined instead of all.
const samples = 64

// sample returns the addresses of up to n pages, evenly spread over the region.
func (r *Region) sample(n int) []unsafe.Pointer {
	skip := int(uintptr(r.base) & uintptr(r.sys.Page-1)) // external memory starts anywhere
	first := unsafe.Add(r.base, -skip)
	pages := (skip + r.mapped + r.sys.Page - 1) / r.sys.Page
	list := make([]unsafe.Pointer, min(max(n, 1), pages))
	for i := range list {
		list[i] = unsafe.Add(first, i*pages/len(list)*r.sys.Page)
	}
	return list
}

// InUse estimates the bytes of the region that are in use already, so that the
// kernel does not report them as available any more: pages of ordinary memory that
// are resident. It examines some pages only (/proc/self/pagemap, mincore). Pages that cannot
// be examined count as not in use.
func (r *Region) InUse() int {
	if !r.life.Begin() {
		return 0
	}
	defer r.life.End()
	switch {
	case r.backing == PageCache:
		return 0
	case r.backing == Reserved:
		return r.mapped
	}
	list := r.sample(samples)
	count := r.sys.Calls.Private
	if r.external != nil && r.external.Shared {
		count = r.residentPages
	}
	n, err := count(list)
	if err != nil {
		return 0
	}
	return int(int64(r.mapped) * int64(n) / int64(len(list)))
}

// residentPages counts the pages that are resident, for this process or another.
func (r *Region) residentPages(list []unsafe.Pointer) (n int, err error) {
	vec := make([]byte, 1)
	for _, page := range list {
		if err := r.sys.Calls.Resident(page, r.sys.Page, vec); err != nil {
			return 0, err
		}
		n += int(vec[0] & 1)
	}
	return n, nil
}
