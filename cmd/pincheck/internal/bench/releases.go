package bench

import (
	"errors"
	"slices"
)

// releases are to be run in the opposite order.
type releases []func() error

// run runs all, also after an error of one.
func (r *releases) run() error {
	var errs []error
	for _, release := range slices.Backward(*r) {
		errs = append(errs, release())
	}
	*r = nil
	return errors.Join(errs...)
}
