package loader

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A Position is a place between two batches: see [Batch.Position] and [Options.Start]. The zero
// Position is the beginning of the first epoch. Positions can be compared with ==. The JSON of a
// Position omits an empty done and order:
//
//	{"epoch":2,"batch":3,"done":"5-7,9","order":"1000 samples in batches of 32, shuffled with seed 7"}
//
// which later versions of this package can read.
type Position struct {
	// Epoch is the number of the epoch, from 0.
	Epoch int `json:"epoch"`
	// Batch is the number of the first batch that was not delivered, from 0 to the number of
	// batches of an epoch.
	Batch int `json:"batch"`
	// Done has the numbers of delivered batches after Batch, in ascending order: "5-7,9". It is
	// empty if batches are ordered.
	Done string `json:"done,omitempty"`
	// Order describes the order of the samples: their number, BatchSize, DropLast, Shuffle
	// and Seed, and the windows of Shards that are shuffled. A loader refuses a Position of another order,
	// with which it would skip or repeat samples.
	Order string `json:"order,omitempty"`
}

// order describes the order of n samples with these options.
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

// resolve returns the epoch of p and its batches that are done, for a loader of the given order and
// number of batches. If all batches are done, it returns the next epoch. It returns an error for
// a position that is not in the order, or not within an epoch.
func (p Position) resolve(order string, batches int) (epoch int, done batchSet, err error) {
	switch {
	case p.Epoch < 0:
		return 0, nil, fmt.Errorf("Options.Start.Epoch is %d: must not be negative", p.Epoch)
	case p.Epoch == math.MaxInt:
		return 0, nil, fmt.Errorf("Options.Start.Epoch is %d: no epoch can follow it", p.Epoch)
	case p.Batch < 0:
		return 0, nil, fmt.Errorf("Options.Start.Batch is %d: must not be negative", p.Batch)
	case p.Order == "" && (p.Batch > 0 || p.Done != ""):
		return 0, nil, errors.New("Options.Start is within an epoch and has no Order: set all of a Position that Batch.Position returned")
	case p.Order != "" && p.Order != order:
		return 0, nil, fmt.Errorf("Options.Start is a position in %s, and this loader has %s: it would skip or repeat samples", p.Order, order)
	}
	if done, err = parseBatches(p.Batch, p.Done); err != nil {
		return 0, nil, fmt.Errorf("Options.Start.Done is %q: %w", p.Done, err)
	}
	switch last := done.end() - 1; {
	case last >= batches:
		return 0, nil, fmt.Errorf("Options.Start is after batch %d: an epoch has %d", last, batches)
	case len(done) > 0 && done.next(0) == batches:
		return p.Epoch + 1, nil, nil
	}
	return p.Epoch, done, nil
}

// A batchSet is a set of batch numbers: ranges in ascending order that do not touch each other.
type batchSet []batchRange

// A batchRange has the numbers from from to to-1.
type batchRange struct{ from, to int }

// parseBatches returns the batches before first, and the batches of a list such as "5-7,9".
func parseBatches(first int, list string) (batchSet, error) {
	var b batchSet
	if first > 0 {
		b = batchSet{{0, first}}
	}
	if list == "" {
		return b, nil
	}
	for item := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		x, err := strconv.Atoi(from)
		y, err2 := strconv.Atoi(to)
		if err != nil || err2 != nil || x <= b.end() || y < x || y == math.MaxInt {
			return nil, fmt.Errorf("%q: must be a number, or a range of numbers, greater than those before", item)
		}
		b = append(b, batchRange{x, y + 1})
	}
	return b, nil
}

// String returns the set without its first range if that begins at 0: "5-7,9".
func (b batchSet) String() string {
	var items []string
	for _, r := range b {
		switch {
		case r.from == 0:
		case r.to == r.from+1:
			items = append(items, strconv.Itoa(r.from))
		default:
			items = append(items, fmt.Sprintf("%d-%d", r.from, r.to-1))
		}
	}
	return strings.Join(items, ",")
}

// end returns the number after the last batch.
func (b batchSet) end() int {
	if len(b) == 0 {
		return 0
	}
	return b[len(b)-1].to
}

// next returns the first batch from n on that is not in the set.
func (b batchSet) next(n int) int {
	if i := b.after(n); i > 0 {
		return max(n, b[i-1].to)
	}
	return n
}

// after returns the index of the first range that begins after n.
func (b batchSet) after(n int) int {
	i, _ := slices.BinarySearchFunc(b, n+1, func(r batchRange, n int) int { return cmp.Compare(r.from, n) })
	return i
}

// with returns the set with a batch n that is not in it. It may change b.
func (b batchSet) with(n int) batchSet {
	if last := len(b) - 1; last >= 0 && b[last].to == n {
		b[last].to++
		return b
	}
	i := b.after(n)
	b = slices.Insert(b, i, batchRange{n, n + 1})
	if i+1 < len(b) && b[i+1].from == n+1 {
		b[i].to = b[i+1].to
		b = slices.Delete(b, i+1, i+2)
	}
	if i > 0 && b[i-1].to == n {
		b[i-1].to = b[i].to
		b = slices.Delete(b, i, i+1)
	}
	return b
}
