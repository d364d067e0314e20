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
// Position is the begin of the first epoch.
// Positions can be compared with ==. As JSON one is, without what is empty,
//
//	{"epoch":2,"batch":3,"done":"5-7,9","order":"1000 samples in batches of 32, shuffled with seed 7"}
//
// which later versions of this package can read.
type Position struct {
	// Epoch is the number of the epoch, from 0.
	Epoch int `json:"epoch"`
	// Batch is the number of the first batch that the loop has not got.
	Batch int `json:"batch"`
	// Done has the numbers of the batches after it that the loop has got, if batches are
	// unordered: "5-7,9".
	Done string `json:"done,omitempty"`
	// Order describes what the numbers stand for: the number of samples, the
	// BatchSize, DropLast, Shuffle and the Seed. A loader refuses a Position of
	// another order, which would skip samples or give some twice.
	Order string `json:"order,omitempty"`
}

// IsZero reports whether p is the zero Position, as encoding/json asks for omitzero.
func (p Position) IsZero() bool { return p == Position{} }

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

// resolve returns the epoch with which a loader of the given order, with so many batches an
// epoch, starts at p, and the batches of it that are done, or why it cannot. At the end of an
// epoch that is the next one.
func (p Position) resolve(order string, batches int) (epoch int, done batchSet, err error) {
	switch {
	case p.Epoch < 0:
		return 0, nil, fmt.Errorf("Options.Start.Epoch is %d: must not be negative", p.Epoch)
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

// A batchSet has numbers of batches: ranges in their order, none of which touches another one.
type batchSet []batchRange

// A batchRange is the batches from one number on, up to another, without that.
type batchRange struct{ from, to int }

// parseBatches returns all batches before first, and those of a list such as "5-7,9".
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

// String returns the set without the batches before the first one that it lacks: "5-7,9".
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

// end returns the number after the last one.
func (b batchSet) end() int {
	if len(b) == 0 {
		return 0
	}
	return b[len(b)-1].to
}

// next returns the first batch that the set lacks, from n on.
func (b batchSet) next(n int) int {
	if i := b.after(n); i > 0 {
		return max(n, b[i-1].to)
	}
	return n
}

// after returns which range is the first one that begins after n.
func (b batchSet) after(n int) int {
	i, _ := slices.BinarySearchFunc(b, n+1, func(r batchRange, n int) int { return cmp.Compare(r.from, n) })
	return i
}

// with returns the set with a batch that it lacks. It may change b.
func (b batchSet) with(n int) batchSet {
	i := b.after(n)
	touchesLast, touchesNext := i > 0 && b[i-1].to == n, i < len(b) && b[i].from == n+1
	switch {
	case touchesLast && touchesNext:
		b[i-1].to = b[i].to
		return slices.Delete(b, i, i+1)
	case touchesLast:
		b[i-1].to = n + 1
	case touchesNext:
		b[i].from = n
	default:
		b = slices.Insert(b, i, batchRange{n, n + 1})
	}
	return b
}
