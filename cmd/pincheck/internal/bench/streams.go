// A part of the experiment overlap: a copy that is cut into pieces, each with work after it, on one stream and on
// several.
//
//   - piped_rate: the bytes of all copies by the time from the first copy to the end of all copies and work,
//     by events of the device. The work after all pieces takes about as long as the copy to the device alone.

package bench

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// pipedRate is the name of the series.
const pipedRate = "piped_rate"

// Keys of its labels.
const (
	streamsKey = "streams"
	piecesKey  = "pieces"
)

// maxPieces is the number of pieces of a copy that is cut.
const maxPieces = 16

// piecesText is a value of piecesKey.
func piecesText(pieces int) string {
	if pieces == 1 {
		return "uncut"
	}
	return strconv.Itoa(pieces) + "_pieces"
}

var streamCounts = []int{1, 2, 4, 8}

// A pipeline copies pieces and works on each, on several streams in turn.
type pipeline struct {
	copyFixture
	streams []*cudart.Stream
	load    load
}

func (p *pipeline) open(ctx context.Context) (err error) {
	if err = p.copyFixture.open(ctx); err != nil {
		return err
	}
	p.streams = make([]*cudart.Stream, streamCounts[len(streamCounts)-1])
	for i := range p.streams {
		if p.streams[i], err = p.resources.stream(); err != nil {
			return err
		}
	}
	p.load, err = p.newLoad(ctx)
	return err
}

// piped copies n bytes in pieces, in the order of the streams, with the work of all pieces divided among them.
func (p *pipeline) piped(ctx context.Context, direction string, n, pieces, streams int) error {
	for i := range pieces {
		s, from, to := p.streams[i%streams], n*i/pieces, n*(i+1)/pieces
		if err := p.source.CopyToDevice(ctx, s, p.in+cudart.DevPtr(from), from, to-from); err != nil {
			return err
		}
		for range maxPieces / pieces {
			if err := p.load.queue(s); err != nil {
				return err
			}
		}
		if direction == result.Both {
			if err := p.target.CopyFromDevice(ctx, s, p.out+cudart.DevPtr(from), from, to-from); err != nil {
				return err
			}
		}
	}
	return nil
}

// time is the time of piped on the device. All streams begin together.
func (p *pipeline) time(ctx context.Context, direction string, n, pieces, streams int) (time.Duration, error) {
	first, others := p.streams[0], p.streams[1:streams]
	if err := p.span.Begin(first); err != nil {
		return 0, err
	}
	for _, s := range others {
		if err := s.WaitPoint(first.Point()); err != nil {
			return 0, err
		}
	}
	if err := p.piped(ctx, direction, n, pieces, streams); err != nil {
		return 0, err
	}
	for _, s := range others {
		if err := first.WaitPoint(s.Point()); err != nil {
			return 0, err
		}
	}
	return p.span.End(ctx, first)
}

// sized is the case of some pieces on some streams.
func (p *pipeline) sized(direction string, n, pieces, streams int) measure.Case {
	c := &copyCase{copyFixture: &p.copyFixture, direction: direction, memory: inPinned, n: n}
	var watch measure.Stopwatch
	return c.caseOf(measure.Case{
		Series: result.Series{
			Name: pipedRate, Unit: result.GBPerSecond, Better: result.Higher,
			Labels: append(c.labels(), labelled(piecesKey, piecesText(pieces), streamsKey, strconv.Itoa(streams))...),
		},
		Budget: 100 * time.Millisecond, CPU: watch.CPU,
		Sample: func(ctx context.Context) (float64, error) {
			if !p.load.fitted() {
				alone, err := p.span.Time(ctx, p.up, func() error { return p.copy(ctx, result.HostToDevice, n) })
				if err == nil {
					err = p.load.fit(ctx, p.span, p.streams[0], alone/maxPieces)
				}
				if err != nil {
					return 0, err
				}
			}
			watch.Start()
			took, err := p.time(ctx, direction, n, pieces, streams)
			watch.Stop()
			return float64(n*len(directionsOf(direction))) / float64(took.Nanoseconds()), err
		},
	})
}

// pipedGroup measures pinned memory, in the largest size.
func pipedGroup(env measure.Env, dev *cudart.Device, now clock) measure.Group {
	n := slices.Max(sizesOr(env, []int{16 << 20}, []int{64 << 20}))
	p := &pipeline{copyFixture: copyFixture{resources: resources{dev: dev, now: now}, kind: registered, n: n}}
	var cases []measure.Case
	for _, direction := range []string{result.HostToDevice, result.Both} {
		cases = append(cases, p.sized(direction, n, 1, 1))
		for _, streams := range streamCounts {
			cases = append(cases, p.sized(direction, n, maxPieces, streams))
		}
	}
	g := p.group("copies on several streams", cases)
	g.Open = p.open
	return g
}

// piped compares copies in pieces on several streams with an uncut one.
func (a *answers) piped() {
	of := func(direction string, pieces, streams int) *result.Series {
		return a.largest(pipedRate, result.Direction, direction, piecesKey, piecesText(pieces), streamsKey, strconv.Itoa(streams))
	}
	t := result.Table{Title: "with work", Columns: []string{"uncut"}}
	for i, streams := range streamCounts {
		name := strconv.Itoa(streams)
		if i == 0 {
			name += " stream"
		}
		t.Columns = append(t.Columns, name)
	}
	for _, direction := range []string{result.HostToDevice, result.Both} {
		cells := []*result.Quantity{of(direction, 1, 1).Quantity()}
		for _, streams := range streamCounts {
			cells = append(cells, of(direction, maxPieces, streams).Quantity())
		}
		t.Add(directionText(direction), "", cells...)
	}
	whole := of(result.HostToDevice, 1, 1)
	best, count := of(result.HostToDevice, maxPieces, 1), 1
	for _, streams := range streamCounts[1:] {
		if s := of(result.HostToDevice, maxPieces, streams); s != nil && best != nil && s.Median > 1.05*best.Median {
			best, count = s, streams
		}
	}
	if whole != nil && best != nil && whole.Median > 0 {
		on := "in pieces on " + units.Things(count, "stream", "streams")
		a.faster("Beside work, a copy is %[2]s as fast %[1]s as %[3]s.", named{on, best}, named{"uncut", whole})
	}
	a.table(t)
}
