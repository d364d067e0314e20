package measure

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Direction is the direction of copies.
type Direction string

// The directions.
const (
	HostToDevice Direction = "host_to_device"
	DeviceToHost Direction = "device_to_host"
)

// Directions returns all directions.
func Directions() []Direction { return []Direction{HostToDevice, DeviceToHost} }

// Plan is what [Bandwidth] does. Zero fields take the values of the quick plan, which
// takes about a quarter of a second on a fast link. Negative values are errors.
type Plan struct {
	// Directions are measured one after the other; none means both.
	Directions []Direction
	// SizeBytes is the size of one copy. 0 means 64 MiB.
	SizeBytes int
	// Copies is the number of copies between the two events of a sample. 0 means
	// 8.
	Copies int
	// Samples is the number of samples of each direction. 0 means 9.
	Samples int
	// WarmUp is the number of copies before the first sample, which are not
	// measured: they make an idle GPU train its link up. 0 means 4.
	WarmUp int
	// Budget is the time after which a direction gets no more samples, but three
	// at least. 0 means half a second.
	Budget time.Duration
}

const (
	defaultSize    = 64 << 20 // larger copies are not faster
	defaultCopies  = 8
	defaultSamples = 9
	defaultWarmUp  = 4
	defaultBudget  = 500 * time.Millisecond
	fewestSamples  = 3
)

// normal checks the plan, and replaces zeros by the values of the quick plan.
func (p Plan) normal() (Plan, error) {
	for _, f := range []struct {
		value *int
		name  string
		quick int
	}{
		{&p.SizeBytes, "size", defaultSize},
		{&p.Copies, "copies", defaultCopies},
		{&p.Samples, "samples", defaultSamples},
		{&p.WarmUp, "warm-up copies", defaultWarmUp},
	} {
		if *f.value < 0 {
			return p, fmt.Errorf("measure: plan: %s %d: must not be negative", f.name, *f.value)
		}
		if *f.value == 0 {
			*f.value = f.quick
		}
	}
	if p.Budget < 0 {
		return p, errors.New("measure: plan: negative budget")
	}
	if p.Budget == 0 {
		p.Budget = defaultBudget
	}
	if len(p.Directions) == 0 {
		p.Directions = Directions()
	}
	for _, d := range p.Directions {
		if !slices.Contains(Directions(), d) {
			return p, fmt.Errorf("measure: plan: unknown direction %q; directions are %q", string(d), Directions())
		}
	}
	return p, nil
}
