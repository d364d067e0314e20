package loader

import "slices"

// A Position is a place between two batches of an epoch. It can be stored as
// JSON, and given as Options.Start to a loader of the same source, BatchSize,
// Shuffle, Seed and DropLast, which then goes on with just what is left.
type Position struct {
	Epoch int `json:"epoch"`
	Batch int `json:"batch"` // all before it were given
	// Batches behind it that were given too, where they are unordered.
	Done []int `json:"done,omitempty"`
}

// tidy is the same position with Done in order, and free of what Batch says.
func (p Position) tidy() Position {
	done := slices.Sorted(slices.Values(p.Done))
	t := Position{Epoch: p.Epoch, Batch: p.Batch}
	for _, batch := range slices.Compact(done) {
		if batch >= t.Batch {
			t = t.after(batch)
		}
	}
	return t
}

// after is the position when one more batch was given.
func (p Position) after(batch int) Position {
	done := slices.Clone(p.Done)
	if batch != p.Batch {
		i, _ := slices.BinarySearch(done, batch)
		return Position{Epoch: p.Epoch, Batch: p.Batch, Done: slices.Insert(done, i, batch)}
	}
	next := batch + 1
	for len(done) > 0 && done[0] == next {
		done, next = done[1:], next+1
	}
	if len(done) == 0 {
		done = nil // as in a position that never had any
	}
	return Position{Epoch: p.Epoch, Batch: next, Done: done}
}

// has tells whether a batch was given before the position.
func (p Position) has(batch int) bool {
	if batch < p.Batch {
		return true
	}
	_, found := slices.BinarySearch(p.Done, batch)
	return found
}

// last is the batch behind all that were given.
func (p Position) last() int {
	if n := len(p.Done); n > 0 {
		return p.Done[n-1] + 1
	}
	return p.Batch
}
