package main

import "errors"

// The control: arithmetic on one core, and nothing of the library. Builds that differ in it were measured
// on a host that is not quiet, or one was slowed down on purpose.
func init() {
	register(row{name: "control/arithmetic", unit: "µs", quick: true, twoCores: true, busy: true, prepare: func(*fixture) (*task, error) {
		const doublings, factor, addend = 18, 6364136223846793005, 1442695040888963407
		x := uint64(1)
		op := func() error {
			for range 1 << doublings {
				x = x*factor + addend
			}
			return nil
		}
		return &task{op: op, verify: func() error {
			f, a := uint64(factor), uint64(addend) // of 1, 2, 4 and so on steps
			for range doublings {
				f, a = f*f, f*a+a
			}
			want := x*f + a
			if _ = op(); x != want {
				return errors.New("another result than by doublings")
			}
			return nil
		}}, nil
	}})
}
