package hostmem

import (
	"context"
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/raw"
)

// HugePages is the kind of pages that a buffer is made of. 0 uses transparent huge pages where they
// fit, from 2 MiB on: they pin about twice as fast, and copy at the same speed.
type HugePages int

const (
	// HugePagesNever keeps to base pages, for hosts whose kernel stalls while
	// it makes huge ones.
	HugePagesNever HugePages = iota + 1
	// HugeTLB takes pages of 2 MiB that the administrator reserved. Where the reserve has
	// too few, pages are chosen as with 0, with a note in [Info]. Such a
	// buffer reserves its size rounded up to the larger page.
	HugeTLB
	// HugeTLB1G takes reserved pages of 1 GiB, where there are too few as HugeTLB does.
	HugeTLB1G
)

// Options shape a buffer. The zero value suits programs that copy by the methods of Buffer. If
// cudaHostAlloc allocates the buffer (see [Method]), only Align, Label and Workers apply, and
// Info.Notes lists other options that are set.
type Options struct {
	// Align of the first byte in bytes, a power of two of any size. 0 means a page,
	// or 2 MiB for buffers of that size or more that are not [HostAllocated].
	Align int
	// HugePages chooses the pages.
	HugePages HugePages
	// Chunk makes every registration at most that many bytes, a multiple of 2 MiB, each registered
	// as soon as its pages are resident. If the driver refuses that many registrations, Alloc makes
	// fewer and larger ones, and adds a note. Registering chunks of 64 MiB in parallel is a fifth
	// faster than one large registration (RATIONALE.md), but copies that do not use Buffer's
	// methods must stay within one span. 0 means one registration if possible.
	Chunk int
	// Node chooses the NUMA node. The zero value is the device's own.
	Node Node
	// Label is shown by Outstanding and in messages.
	Label string
	// Workers is the number of goroutines that make pages resident, or clear them, 1024 at
	// most; 0 adapts to the host.
	Workers int
	// Fork lets forked children have the memory too (no MADV_DONTFORK). It makes every
	// fork of the process slower.
	Fork bool
	// Dump includes the memory in core dumps (no MADV_DONTDUMP).
	Dump bool
}

// hugetlb returns the sizes of reserved pages to try.
func (h HugePages) hugetlb() []int {
	switch h {
	case HugeTLB:
		return []int{2 << 20}
	case HugeTLB1G:
		return []int{1 << 30, 2 << 20}
	}
	return nil
}

const chunkUnit = 2 << 20

func init() {
	raw.CheckBuffer = func(options any) (pageSize int, err error) {
		o := options.(Options)
		return append(o.HugePages.hugetlb(), 0)[0], o.check()
	}
}

// check returns an error that names the option which is out of range, nil if none is.
func (o Options) check() error {
	switch {
	case o.Align < 0 || o.Align&(o.Align-1) != 0:
		return fmt.Errorf("Options.Align of %d bytes: must be a power of two", o.Align)
	case o.Chunk < 0 || o.Chunk%chunkUnit != 0:
		return fmt.Errorf("Options.Chunk of %d bytes: must be a multiple of 2 MiB", o.Chunk)
	case o.HugePages < 0 || o.HugePages > HugeTLB1G:
		return fmt.Errorf("Options.HugePages of %d: no such value", o.HugePages)
	case o.Node < AnyNode || o.Node > maxNodes:
		return errors.New("Options.Node: Linux numbers nodes from 0 to 1023")
	case o.Workers < 0 || o.Workers > maxWorkers:
		return fmt.Errorf("Options.Workers of %d: must be from 0 to %d", o.Workers, maxWorkers)
	}
	return nil
}

const maxWorkers = 1024

// pages returns how to map memory for a device, with a note if its NUMA node is not
// known.
func (o Options) pages(ctx context.Context, dev *cudart.Device) (how pages.Options, note string) {
	how = pages.Options{
		Align: o.Align, NoHuge: o.HugePages == HugePagesNever, Hugetlb: o.HugePages.hugetlb(),
		Fork: o.Fork, Dump: o.Dump, System: pages.SystemOf(ctx),
	}
	how.Node, how.NodeSet, note = o.Node.choose(ctx, dev, how.System)
	return how, note
}
