package weights

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer"
)

// A LoadError reports the tensor at which a load failed, and the reason.
type LoadError struct {
	// Tensor is nil if all tensors are complete, and LoadOptions.Progress or the
	// release of pinned memory has failed.
	Tensor  *Tensor
	Devices []*cudart.Device // destinations of the tensor
	// Offset is the position in the tensor's file of the first byte that is not on all of
	// Devices.
	Offset int64
	// Complete has the tensors of which all parts are on their devices, in the order of
	// the files. The contents of the other tensors' memory are undefined.
	Complete []*Tensor
	// Err is the reason: an error of the file or of CUDA, or the context's.
	Err error
}

// Error names the tensor, the file, the offset in it, the devices and the reason.
func (e *LoadError) Error() string {
	switch {
	case e == nil:
		return "<nil>"
	case e.Tensor == nil:
		return fmt.Sprintf("weights: load: %v", e.Err)
	}
	return fmt.Sprintf("weights: load tensor %s of %s: at offset %d, onto %v: %v", quote(e.Tensor.Name), e.Tensor.File.Name(), e.Offset, e.Devices, e.Err)
}

// Unwrap returns Err.
func (e *LoadError) Unwrap() error {
	if e == nil {
		return nil
	}
	return e.Err
}

// A failure is a failure of a queue, or of LoadOptions.Progress.
type failure struct {
	*queue     // nil for Progress
	first  int // index of the first segment that is not complete
	done   int // bytes of it that were copied
	err    error
}

// Error and Unwrap make a failure the cause of a loading's context.
func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// failures returns the failures of the queues, in the order of the segments at which they failed.
func (l *loading) failures() (list []*failure) {
	for _, q := range l.queues {
		if q.failed != nil {
			list = append(list, q.failed)
		}
	}
	slices.SortFunc(list, func(f, g *failure) int { return cmp.Compare(f.segments[f.first].number, g.segments[g.first].number) })
	return list
}

// err returns the error of the load: the failure that ended it, joined with the errors of other
// queues, except for those that the failure caused. The LoadError names the segment that failed first, or
// else the first incomplete one.
func (l *loading) err(reported bool) error {
	var errs []error
	reason := context.Cause(l.ctx)
	at, _ := reason.(*failure)
	switch {
	case at != nil:
		errs = append(errs, at.err)
		if at.queue == nil {
			at = nil
		}
	case !reported:
		errs = append(errs, fmt.Errorf("progress has not returned: %w", bounded.Ended(l.ctx)))
	}
	incomplete := map[*Tensor]bool{}
	for _, f := range l.failures() {
		for t := range f.incomplete() {
			incomplete[t] = true
		}
		if f != at && (len(errs) == 0 || !errors.Is(f.err, reason) || errors.Is(f.err, transfer.ErrUnderWay)) {
			errs = append(errs, f.err)
		}
		at = cmp.Or(at, f)
	}
	for _, q := range l.queues {
		errs = append(errs, q.err)
	}
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(errs) == 0 {
		return nil
	}
	e := &LoadError{Err: errs[0]}
	if len(errs) > 1 {
		e.Err = errors.Join(errs...)
	}
	if at != nil {
		e.Offset, e.Devices = at.offset(), at.devices
		for t := range at.incomplete() {
			e.Tensor, e.Offset = t, max(e.Offset, t.Offset)
			break
		}
	}
	e.Complete = slices.DeleteFunc(l.tensors, func(t *Tensor) bool { return incomplete[t] })
	return e
}

// offset returns the offset in the file of the first byte that was not copied.
func (f *failure) offset() int64 {
	s := &f.segments[f.first]
	return s.Off + int64(s.part().at(min(f.done, s.N-1))) // all bytes may be there although the queue failed
}

// incomplete iterates over the tensors with bytes that were not copied, in the order of the segments.
func (f *failure) incomplete() iter.Seq[*Tensor] {
	return func(yield func(*Tensor) bool) {
		from := f.offset()
		for i := f.first; i < len(f.segments); i++ {
			s := &f.segments[i]
			if i > f.first {
				from = s.Off
			}
			at, _ := slices.BinarySearchFunc(s.file.tensors, from, func(t *Tensor, from int64) int {
				return cmp.Compare(t.Offset+int64(t.Size), from+1)
			})
			for ; at < len(s.file.tensors) && s.file.tensors[at].Offset < s.Off+int64(s.part().end()); at++ {
				if t := s.file.tensors[at]; t.Size > 0 && !yield(t) {
					return
				}
			}
		}
	}
}
