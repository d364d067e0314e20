package lifetime

import (
	"context"
	"errors"
	"slices"
)

// Undo releases what was made for a caller who does not get it, whether ctx has ended or
// not. It tries twice, as nobody else can: CUDA reports each error of other work once.
func Undo(ctx context.Context, release func(context.Context) error) error {
	ctx = context.WithoutCancel(ctx)
	if release(ctx) == nil {
		return nil
	}
	return release(ctx)
}

// A Stack holds the functions that release what was made, in the order of making.
type Stack []func(context.Context) error

// Push adds a function.
func (s *Stack) Push(release func(context.Context) error) { *s = append(*s, release) }

// PushClose adds a function that takes no context.
func (s *Stack) PushClose(release func() error) {
	s.Push(func(context.Context) error { return release() })
}

// Run empties the stack and calls its functions, the last one first. An error of one does not
// keep the others from being called.
func (s *Stack) Run(ctx context.Context) error {
	var errs []error
	for _, release := range slices.Backward(*s) {
		errs = append(errs, release(ctx))
	}
	*s = nil
	return errors.Join(errs...)
}
