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

// A failure is a read that failed, or a failure of LoadOptions.Progress.
type failure struct {
	*Read     // nil for Progress
	done  int // bytes that were copied, from the first on
	err   error
}

// Error and Unwrap make a failure the cause of a loading's context.
func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// err returns the error of the load: the failure that ended it, joined with the errors of other
// reads, except for those that the failure caused. The LoadError names the read that failed first, or
// else the first incomplete one.
func (l *loading) err(queues []*queue, reported bool) error {
	var errs []error
	reason := context.Cause(l.ctx)
	at, _ := reason.(*failure)
	switch {
	case at != nil:
		errs = append(errs, at.err)
		if at.Read == nil {
			at = nil
		}
	case !reported:
		errs = append(errs, fmt.Errorf("progress has not returned: %w", bounded.Ended(l.ctx)))
	}
	incomplete := map[*Tensor]bool{}
	for _, f := range l.failures {
		if f == nil {
			continue
		}
		for t := range f.incomplete() {
			incomplete[t] = true
		}
		if f != at && (len(errs) == 0 || !errors.Is(f.err, reason) || errors.Is(f.err, transfer.ErrUnderWay)) {
			errs = append(errs, f.err)
		}
		at = cmp.Or(at, f)
	}
	for _, q := range queues {
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
		e.locate(at, l.devices)
	}
	e.Complete = slices.DeleteFunc(l.tensors, func(t *Tensor) bool { return incomplete[t] })
	return e
}

// locate sets the fields that describe where a read failed.
func (e *LoadError) locate(at *failure, devices []*cudart.Device) {
	e.Offset = at.position(min(at.done, at.Size-1))
	for t := range at.incomplete() {
		e.Tensor, e.Offset = t, max(e.Offset, t.Offset)
		break
	}
	for _, d := range at.Devices {
		e.Devices = append(e.Devices, devices[d])
	}
}

// incomplete iterates over the tensors with bytes that were not copied, in order of their offsets.
// A read has no other tensors, only padding between them.
func (r *failure) incomplete() iter.Seq[*Tensor] {
	from := r.position(min(r.done, r.Size-1)) // all bytes may be there although the read failed
	tensors := r.File.tensors
	at, _ := slices.BinarySearchFunc(tensors, from, func(t *Tensor, from int64) int {
		return cmp.Compare(t.Offset+int64(t.Size), from+1)
	})
	return func(yield func(*Tensor) bool) {
		for _, t := range tensors[at:] {
			if t.Offset >= r.Offset+int64(r.part().end()) || t.Size > 0 && !yield(t) {
				return
			}
		}
	}
}
