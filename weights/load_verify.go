package weights

import (
	"errors"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// passed has the checksums of a file, and those of its bytes that a load has read.
type passed struct {
	*checksums
	*sums
}

// readChecksums reads the checksums of the files.
func (l *loading) readChecksums() error {
	l.passed = map[*File]*passed{}
	for _, f := range l.files {
		c, err := f.checksums()
		if err != nil {
			return err
		}
		l.passed[f] = &passed{c, newSums(c.blocks)}
	}
	return nil
}

// openSummers opens a summer on each device. The CPU computes the checksums if there is a device without one.
func (l *loading) openSummers() error {
	for _, dev := range l.devices {
		c, err := takeSummer(l.caller, dev)
		if err != nil {
			l.closeSummers(false) // nothing was launched
			return bounded.Ended(l.caller)
		}
		l.summers = append(l.summers, c)
	}
	return nil
}

func (l *loading) closeSummers(failed bool) {
	for _, c := range l.summers {
		_ = c.keep(l.caller, failed) // memory was only read; the next load or save tries again
	}
	l.summers = nil
}

// sumOnDevices adds the checksums of what is on the devices now. Columns are apart in the file: their blocks are read
// once more.
func (l *loading) sumOnDevices() error {
	var sums []func() error
	for d, c := range l.summers {
		sums = append(sums, func() error {
			var list summing
			for _, t := range l.placed {
				if t.device == d && t.Row == 0 {
					list.add(l.passed[t.Tensor.File].sums, t.Tensor.Offset+int64(t.From), t.Size, cudart.DevPtr(t.to))
				}
			}
			_, err := list.run(l.ctx, c)
			return err
		})
	}
	if err := atOnce(sums); err != nil {
		return &LoadError{Err: err, Complete: l.tensors}
	}
	return nil
}

// inspect adds the bytes of an upload from off on to the checksums. Columns are apart in the file: their blocks are
// read once more.
func (q *queue) inspect(l *loading, off int, mem []byte) {
	for end := off + len(mem); off < end; {
		i, within := q.find(off)
		s := &q.segments[i]
		from := s.at + within // behind zeros, if there are some
		if from >= end {
			return
		}
		n := min(s.at+s.N, end) - from
		if s.Row == 0 {
			l.passed[s.file].add(s.Off+int64(within), mem[from-(end-len(mem)):][:n])
		}
		off = from + n
	}
}

// compareChecksums compares the blocks that have bytes of the load, if that was asked for.
func (l *loading) compareChecksums() error {
	if l.passed == nil {
		return nil
	}
	if err := l.sumOnDevices(); err != nil {
		return err
	}
	wrong := map[*File][]*ChecksumError{}
	var list []error
	blocks := l.blocks()
	for _, f := range l.files {
		errs, err := l.compareFile(f, blocks[f])
		if err != nil {
			return &LoadError{Err: err, Complete: l.tensors}
		}
		for _, e := range errs {
			list = append(list, e)
		}
		wrong[f] = append(wrong[f], errs...)
	}
	if len(list) == 0 {
		return nil
	}
	e := &LoadError{Err: errors.Join(list...)}
	for _, t := range l.tensors {
		i := slices.IndexFunc(wrong[t.File], func(e *ChecksumError) bool { return e.Tensor == t.Name })
		switch {
		case i < 0:
			e.Complete = append(e.Complete, t)
		case e.Tensor == nil:
			e.Tensor, e.Offset = t, wrong[t.File][i].Offset
		}
	}
	for _, p := range l.placed {
		if dev := l.devices[p.device]; p.Tensor == e.Tensor && !slices.Contains(e.Devices, dev) {
			e.Devices = append(e.Devices, dev)
		}
	}
	return e
}

// blocks returns the blocks of each file that have bytes of the load.
func (l *loading) blocks() map[*File][]int {
	list := map[*File][]int{}
	for _, t := range l.placed {
		p, end := l.passed[t.Tensor.File], t.Tensor.Offset+int64(t.end())
		for i := p.within(t.Tensor.Offset + int64(t.From)); i < len(p.sums.blocks) && p.sums.blocks[i].off < end; i++ {
			list[t.Tensor.File] = append(list[t.Tensor.File], i)
		}
	}
	return list
}

// compareFile compares blocks of a file, and returns an error for each wrong one.
func (l *loading) compareFile(f *File, blocks []int) (wrong []*ChecksumError, err error) {
	p := l.passed[f]
	slices.Sort(blocks)
	again := slices.DeleteFunc(slices.Compact(blocks), func(i int) bool { // those that were right on the devices, or in pinned memory, are
		got, complete := p.of(i)
		return complete && len(got) == 1 && got[0] == p.checksums.sums[i]
	})
	bad, err := f.wrongBlocks(l.caller, p.checksums, again)
	if err != nil {
		return nil, err
	}
	if len(bad) == maxChecksumErrors { // others were not read
		again = bad
	}
	for _, i := range again {
		got, complete := p.of(i)
		counts := l.summers != nil || complete && len(got) == 1 // or else bytes were read again
		inCopy := counts && slices.ContainsFunc(got, func(sum uint32) bool { return sum != p.checksums.sums[i] })
		if inFile := slices.Contains(bad, i); inFile || inCopy {
			e := f.wrongBlock(p.checksums, i)
			e.InCopy = !inFile
			wrong = append(wrong, e)
		}
	}
	return wrong, nil
}
