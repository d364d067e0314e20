package loader

import (
	"fmt"
	"slices"
)

// A Position is a place between two batches of an epoch: see [Batch.Position]
// and [Options.Start]. As JSON it is, without what is empty,
//
//	{"epoch":2,"batch":3,"done":[5,6],"order":"1000 samples in batches of 32, shuffled with seed 7"}
//
// which later versions of this package can read.
type Position struct {
	// Epoch is the number of the epoch, from 0.
	Epoch int `json:"epoch"`
	// Batch is the number of the first batch that the loop has not got.
	Batch int `json:"batch"`
	// Done are the batches after it that the loop has got, if batches are
	// unordered.
	Done []int `json:"done,omitempty"`
	// Order describes what the numbers stand for: the number of samples, the
	// BatchSize, DropLast, Shuffle and the Seed. A loader refuses a Position of
	// another order, which would skip samples or give some twice.
	Order string `json:"order,omitempty"`
}

// order describes the order of samples that n of them have with these options.
func (o Options) order(n int) string {
	text := fmt.Sprintf("%d samples in batches of %d", n, o.BatchSize)
	if o.DropLast {
		text += ", full ones only"
	}
	if o.Shuffle {
		text += fmt.Sprintf(", shuffled with seed %d", o.Seed)
	}
	return text
}

// check returns why a loader of the given order, with so many batches an epoch,
// cannot start at p.
func (p Position) check(order string, batches int) error {
	inside := p.Batch > 0 || len(p.Done) > 0
	switch {
	case p.Epoch < 0:
		return fmt.Errorf("Options.Start.Epoch is %d: must not be negative", p.Epoch)
	case p.Batch < 0:
		return fmt.Errorf("Options.Start.Batch is %d: must not be negative", p.Batch)
	case p.Order == "" && inside:
		return fmt.Errorf("Options.Start is within an epoch and has no Order: set all of a Position that Batch.Position returned")
	case p.Order != "" && p.Order != order:
		return fmt.Errorf("Options.Start is a position in %s, and this loader has %s: it would skip or repeat samples", p.Order, order)
	}
	last := p.Batch - 1
	if len(p.Done) > 0 {
		last = max(last, slices.Max(p.Done))
	}
	if last >= batches {
		return fmt.Errorf("Options.Start is after batch %d: an epoch has %d", last, batches)
	}
	return nil
}

// tidy returns the same position with Done in order and without batches before
// Batch.
func (p Position) tidy() Position {
	done := slices.Sorted(slices.Values(p.Done))
	t := Position{Epoch: p.Epoch, Batch: p.Batch, Order: p.Order}
	for _, batch := range slices.Compact(done) {
		if batch >= t.Batch {
			t = t.after(batch)
		}
	}
	return t
}

// after returns the position when the loop has got one more batch.
func (p Position) after(batch int) Position {
	done := slices.Clone(p.Done)
	if batch != p.Batch {
		i, _ := slices.BinarySearch(done, batch)
		p.Done = slices.Insert(done, i, batch)
		return p
	}
	next := batch + 1
	for len(done) > 0 && done[0] == next {
		done, next = done[1:], next+1
	}
	if len(done) == 0 {
		done = nil // as in a position that never had any
	}
	p.Batch, p.Done = next, done
	return p
}

// nextEpoch returns the begin of the epoch after that of p.
func (p Position) nextEpoch() Position { return Position{Epoch: p.Epoch + 1, Order: p.Order} }

// has reports whether the loop got a batch before the position.
func (p Position) has(batch int) bool {
	if batch < p.Batch {
		return true
	}
	_, found := slices.BinarySearch(p.Done, batch)
	return found
}
