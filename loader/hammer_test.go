package loader

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

// inverted is a numbered source whose bytes are all inverted in Read, and
// again in Transform.
type inverted struct{ Source }

func (s inverted) Read(ctx context.Context, i int, sample [][]byte) error {
	defer invert(sample)
	return s.Source.Read(ctx, i, sample)
}

func (s inverted) compute(_ context.Context, _ int, sample [][]byte) error {
	invert(sample)
	return nil
}

func invert(sample [][]byte) {
	for _, field := range sample {
		for i := range field {
			field[i] ^= 0xff
		}
	}
}

// Several loaders with all kinds of options share a device, and each is used by
// several goroutines that keep batches. Every batch is verified.
func TestHammer(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n = 500
	fields := []int{3, 64}
	var loaders sync.WaitGroup
	defer loaders.Wait()
	for _, o := range []Options{
		{BatchSize: 1, Workers: 50, Prefetch: 3},
		{BatchSize: 3, Workers: 100, Unordered: true, Shuffle: true},
		{BatchSize: 16, Workers: 4, MaxTransforms: 1, Shuffle: true, DropLast: true},
		{BatchSize: 64, Workers: 7, MaxTransforms: 3, Unordered: true, Prefetch: 2},
	} {
		loaders.Go(func() {
			src := inverted{numbered(n, fields...)}
			l, err := New(t.Context(), dev, src, o.of(src))
			if !assert.NoError(t, err) {
				return
			}
			for range 3 {
				hammer(t, l, n, fields)
			}
			assert.NoError(t, l.Close())
		})
	}
}

// hammer gives the batches of an epoch to goroutines, which use them later.
func hammer(t *testing.T, l *Loader, n int, fields []int) {
	retained := make(chan *Batch)
	var users sync.WaitGroup
	var mu sync.Mutex
	var seen []int
	for range l.o.Prefetch - 1 { // at least one is the loop's, and one to be filled
		users.Go(func() {
			s, err := l.dev.NewStream(cudart.StreamOptions{})
			if !assert.NoError(t, err) {
				return
			}
			for b := range retained {
				runtime.Gosched()
				mu.Lock()
				seen = append(seen, b.Indices()...)
				mu.Unlock()
				assert.NoError(t, verify(t.Context(), b, s, fields))
				assert.NoError(t, b.Release())
				assert.ErrorIs(t, b.Release(), errReleased)
			}
			assert.NoError(t, s.Close())
		})
	}
	for b, err := range l.Batches(t.Context()) {
		if !assert.NoError(t, err) {
			break
		}
		_ = l.Stats().Bottleneck()
		b.Retain()
		retained <- b
	}
	close(retained)
	users.Wait()
	slices.Sort(seen)
	if l.o.DropLast {
		n -= n % l.o.BatchSize
	}
	assert.Len(t, slices.Compact(seen), n)
}

// verify is requireBatch for goroutines of tests.
func verify(ctx context.Context, b *Batch, s *cudart.Stream, fields []int) error {
	if err := b.Use(s); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	for f, size := range fields {
		got, err := download(s.Device(), b.Field(f), b.Len()*size)
		if err != nil {
			return err
		}
		want := make([]byte, size)
		for at, i := range b.Indices() {
			writeSample(want, i, f)
			if !slices.Equal(want, got[at*size:(at+1)*size]) {
				return fmt.Errorf("%v: sample %d, place %d, field %d: %x, not %x", b, i, at, f, got[at*size:(at+1)*size], want)
			}
		}
	}
	return nil
}

// Loops are left, cancelled, and ended by errors and panics, at any time and in
// any order, on one loader.
func TestHammerEnds(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	random := rand.New(rand.NewPCG(1, 2))
	var bad int // the sample that fails; set between epochs only
	good := numbered(200, 8)
	src := Func(200, []int{8}, func(ctx context.Context, i int, sample [][]byte) error {
		switch {
		case i == bad:
			return fmt.Errorf("sample %d is bad", i)
		case i == -bad:
			panic("very bad")
		case i%50 == 7:
			select { // those that wait see ctx end
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return good.Read(ctx, i, sample)
	})
	for _, unordered := range []bool{false, true} {
		l := newLoaderFor(t, dev, src, Options{BatchSize: 3, Workers: 12, Prefetch: 4, Shuffle: true, Unordered: unordered})
		for range 80 {
			bad = random.IntN(1000) - 500
			stop := random.IntN(100)
			ctx, cancel := context.WithCancel(t.Context())
			went := make(chan struct{})
			go func(timeout time.Duration) {
				defer close(went)
				if timeout < time.Millisecond {
					time.Sleep(timeout)
					cancel()
				}
			}(time.Duration(random.IntN(3000)) * time.Microsecond)
			var retained []*Batch
			func() {
				defer func() {
					if p := recover(); p != nil {
						require.Equal(t, "loop body", p)
					}
				}()
				for b, err := range l.Batches(ctx) {
					if err != nil {
						break
					}
					require.NoError(t, verify(t.Context(), b, s, []int{8}))
					if stop--; stop == 0 {
						break
					}
					if stop == 10 {
						panic("loop body")
					}
					if len(retained) < 2 {
						b.Retain()
						retained = append(retained, b)
					}
				}
			}()
			for _, b := range retained {
				require.NoError(t, b.Release())
			}
			cancel()
			<-went
			require.Zero(t, lent(l))
		}
		bad = 1000
		require.NotEmpty(t, epochOf(t, l, s, 8))
	}
}

// What an epoch allocates is for its batches, and nothing for a sample. Not
// parallel: it counts what the process allocates.
func TestSamplesAllocateNothing(t *testing.T) {
	dev := testgpu.Device(t)
	const n, batch = 100_000, 1000
	for name, src := range map[string]Source{
		"read":      Func(n, []int{4, 1}, func(context.Context, int, [][]byte) error { return nil }),
		"together":  memoryOf(t, n, 4, 1),
		"transform": inverted{Func(n, []int{4, 1}, func(context.Context, int, [][]byte) error { return nil })},
	} {
		for _, workers := range []int{4, 600} { // many samples a claim, and one
			l := newLoaderFor(t, dev, src, Options{BatchSize: batch, Workers: workers, Shuffle: true})
			epoch := func() {
				for _, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
				}
			}
			epoch()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			epoch()
			runtime.ReadMemStats(&after)
			each := float64(after.Mallocs-before.Mallocs) / n
			t.Logf("%s with %d workers: %.4f allocations a sample, %.1f a batch", name, workers, each, each*batch)
			assert.Less(t, each, 0.3)
		}
	}
}
