package verify

import (
	"context"
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// A StaleResult has the bytes that a program gets which reads the target of an asynchronous
// copy before it synchronizes.
type StaleResult struct {
	// SizeBytes is the size of the copy.
	SizeBytes int `json:"size_bytes"`
	// SampledBytes is the number of bytes that were read before synchronizing, spread over
	// the copy.
	SampledBytes int `json:"sampled_bytes"`
	// StaleBefore is the number of sampled bytes that were old.
	StaleBefore int `json:"stale_before_bytes"`
	// BadAfter is the number of bytes of the copy that were mismatched after synchronizing.
	// It must be 0.
	BadAfter int `json:"bad_after_bytes"`
}

// Shown reports whether old bytes were read. On a busy host, which runs the reader late,
// there may be none.
func (r StaleResult) Shown() bool { return r.StaleBefore > 0 }

// String returns the result in one line.
func (r StaleResult) String() string {
	return fmt.Sprintf("%s from the device: %d of %d bytes read before synchronising were old, %d of all wrong afterwards",
		units.ExactBytes(r.SizeBytes), r.StaleBefore, r.SampledBytes, r.BadAfter)
}

const (
	staleFirstBytes = 32 * mib // takes half a millisecond, long enough to be overtaken
	staleLastBytes  = 256 * mib
	staleSamples    = 256
)

// StaleRead queues a large copy from the device into pinned memory (cudaMemcpyAsync), reads
// some of its bytes at once, synchronizes (cudaStreamSynchronize), and compares all bytes. If
// it reads no old byte, it tries again with a larger buffer, up to 256 MiB. Errors are those
// of ctx (its error and its cause), of CUDA, and of a nil or zero argument.
func StaleRead(ctx context.Context, dev *cudart.Device) (r StaleResult, err error) {
	switch {
	case ctx == nil:
		return r, fmt.Errorf("verify: stale read: %w", errNilContext)
	case dev == nil || dev.Runtime() == nil:
		return r, fmt.Errorf("verify: stale read: %w", errNilDevice)
	}
	for n := staleFirstBytes; n <= staleLastBytes; n *= 2 {
		if r, err = staleRead(ctx, dev, n); err != nil {
			return r, fmt.Errorf("verify: stale read of %s: %w", units.ExactBytes(n), err)
		}
		if r.Shown() || r.BadAfter > 0 {
			break
		}
	}
	return r, nil
}

func staleRead(ctx context.Context, dev *cudart.Device, n int) (r StaleResult, err error) {
	t, err := defaultRunner(dev).newTrip(ctx, pathPinned, n, 1)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, t.release(ctx)) }()
	return t.staleRead(ctx, n)
}

func (t *trip) staleRead(ctx context.Context, n int) (r StaleResult, err error) {
	c := Case{Path: pathPinned, Pattern: patternRandom, SizeBytes: n, Streams: 1}
	want := patternRandom.content(uint64(n))
	if err := t.poison(ctx, c, want); err != nil {
		return r, err
	}
	device := t.targets[0].of(c)
	if err := t.upload(ctx, t.streams[0], device, sourceAt(c), n); err != nil {
		return r, err
	}
	if err := t.synchronize(ctx); err != nil {
		return r, err
	}

	// The old bytes are computed beforehand, so that the reads below, the end
	// of the buffer first, race with nothing but the copy.
	var old [staleSamples]byte
	at := func(i int) int { return n - 1 - i*(n/staleSamples) }
	for i := range old {
		want.poisonAt(atReturn).fill(old[i:i+1], at(i))
	}
	came := t.returned(c)[guardBytes:][:n]
	if err := t.download(ctx, t.streams[0], returnAt(c), device, n); err != nil {
		return r, err
	}
	r = StaleResult{SizeBytes: n, SampledBytes: staleSamples}
	for i, b := range old {
		if came[at(i)] == b {
			r.StaleBefore++
		}
	}
	if err := t.synchronize(ctx); err != nil {
		return r, err
	}
	ok, err := equalAll(ctx, want, came)
	if err == nil && !ok {
		d, _ := diff(came, want, nil)
		r.BadAfter = d.BadBytes
	}
	return r, err
}
