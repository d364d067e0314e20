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

// A LoadError reports which tensor could not be brought to its place, and why.
type LoadError struct {
	// Tensor is nil where all are complete, and something else has failed:
	// LoadOptions.Progress, or the release of pinned memory.
	Tensor  *Tensor
	Devices []*cudart.Device // that it was to be copied to
	// Offset is of the first byte in the tensor's file that is not on all of them.
	Offset int64
	// Complete are the tensors all of whose parts are on their devices, in the
	// order of the files. The others' memory has bytes of any kind.
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

// A failure is a read of which only the first bytes are done, or one of
// LoadOptions.Progress.
type failure struct {
	*Read // nil for Progress
	done  int
	err   error
}

// Error and Unwrap make a failure the cause of a loading's context.
func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// err is the error of the load: what ended it, with the errors of reads that are not consequences
// of that. It names the read that ended it, or else the first one that is incomplete.
func (l *loading) err(queues []*queue, reported bool) error {
	var errs []error
	reason := context.Cause(l.ctx)
	at, _ := reason.(*failure)
	switch {
	case at != nil:
		errs = append(errs, at.err)
	case !reported:
		errs = append(errs, fmt.Errorf("progress has not returned: %w", bounded.Ended(l.ctx)))
	}
	if at != nil && at.Read == nil {
		at = nil
	}
	incomplete := map[*Tensor]bool{}
	for _, f := range l.failures {
		if f == nil {
			continue
		}
		for t := range f.left() {
			incomplete[t] = true
		}
		if f != at && (len(errs) == 0 || !errors.Is(f.err, reason) || errors.Is(f.err, transfer.ErrUnderWay)) {
			errs = append(errs, f.err)
		}
		at = cmp.Or(at, f)
	}
	for _, q := range queues {
		if q.err != nil {
			errs = append(errs, q.err)
		}
	}
	if len(errs) == 0 {
		return nil
	}
	e := &LoadError{Err: errs[0]}
	if len(errs) > 1 {
		e.Err = errors.Join(errs...)
	}
	if at != nil {
		e.Offset = at.Offset + int64(min(at.done, at.Size-1))
		for t := range at.left() {
			e.Tensor, e.Offset = t, max(e.Offset, t.Offset)
			break
		}
		for _, d := range at.Devices {
			e.Devices = append(e.Devices, l.devices[d])
		}
	}
	e.Complete = slices.DeleteFunc(l.tensors, func(t *Tensor) bool { return incomplete[t] })
	return e
}

// left iterates over the tensors of which bytes were not done, in order. Nothing but padding is
// read along with them.
func (r *failure) left() iter.Seq[*Tensor] {
	from := r.Offset + int64(min(r.done, r.Size-1)) // all bytes may be there although the read failed
	tensors := r.File.tensors
	at, _ := slices.BinarySearchFunc(tensors, from, func(t *Tensor, from int64) int {
		return cmp.Compare(t.Offset+int64(t.Size), from+1)
	})
	return func(yield func(*Tensor) bool) {
		for _, t := range tensors[at:] {
			if t.Offset >= r.Offset+int64(r.Size) || t.Size > 0 && !yield(t) {
				return
			}
		}
	}
}
