package measure

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Direction is the way that bytes travel.
type Direction string

// The directions.
const (
	HostToDevice Direction = "host_to_device"
	DeviceToHost Direction = "device_to_host"
)

// Directions returns all directions.
func Directions() []Direction { return []Direction{HostToDevice, DeviceToHost} }

// Plan says what [Bandwidth] does. Zero fields take the values of the quick
// plan, which needs about a quarter of a second on a fast link.
type Plan struct {
	// Directions are measured one after the other; none means both.
	Directions []Direction
	// SizeBytes is the size of one copy.
	SizeBytes int
	// Copies is how many copies lie between the two events of a sample.
	Copies int
	// Samples is how many samples each direction gets.
	Samples int
	// WarmUp is how many copies go before the first sample. They wake a link
	// that was trained down, and none of them is counted.
	WarmUp int
	// Budget ends a direction's samples early on a slow link, though never
	// below three of them.
	Budget time.Duration
}

const (
	defaultSize    = 64 << 20 // far on the flat part of the curve
	defaultCopies  = 8
	defaultSamples = 9
	defaultWarmUp  = 4
	defaultBudget  = 500 * time.Millisecond
	fewestSamples  = 3
)

// normal fills in the quick plan and checks what was given.
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
