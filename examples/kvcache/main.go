// Kvcache is a paged cache of keys and values, as servers of language models have it: blocks of one size, some of which
// are on the device. Those that were used least recently are spilled to pinned memory, and come back when a request
// needs them, many small blocks with one call of package transfer/blocks. Each request appends to its last block. The content of
// all blocks of each request is checked, and at the end that of all blocks.
//
//	go run ./examples/kvcache [-blocks N] [-block-size BYTES] [-requests N] [-request-blocks N] [-share F] [-sim]
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/verify"
)

type options struct {
	blocks, size, requests, requestBlocks int
	share                                 float64
	sim                                   bool
}

func main() {
	var o options
	flag.IntVar(&o.blocks, "blocks", 64<<10, "blocks of the cache")
	flag.IntVar(&o.size, "block-size", 16<<10, "`bytes` of a block")
	flag.IntVar(&o.requests, "requests", 2000, "requests")
	flag.IntVar(&o.requestBlocks, "request-blocks", 64, "blocks that a request needs")
	flag.Float64Var(&o.share, "share", 0.25, "share of the blocks that the device has room for")
	flag.BoolVar(&o.sim, "sim", false, "use a simulated GPU")
	flag.Parse()
	device.Main(func(ctx context.Context) error { return run(ctx, o, os.Stdout) })
}

// slots returns the number of blocks that the device has room for.
func (o *options) slots() int { return int(float64(o.blocks) * o.share) }

func (o *options) validate() error {
	switch {
	case o.blocks < 1 || o.size < 1 || o.requests < 1 || o.requestBlocks < 1:
		return errors.New("-blocks, -block-size, -requests and -request-blocks must be positive")
	case o.blocks > math.MaxInt32 || o.size > math.MaxInt/o.blocks:
		return fmt.Errorf("-blocks %d of %d bytes: at most %d blocks, and %d bytes in all", o.blocks, o.size, math.MaxInt32, math.MaxInt)
	case !(o.share > 0 && o.share <= 1):
		return fmt.Errorf("-share %g: must be above 0, and 1 at most", o.share)
	case o.slots() < o.requestBlocks:
		return fmt.Errorf("-share %g: the device has room for %d blocks, and a request needs %d", o.share, o.slots(), o.requestBlocks)
	}
	return nil
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	if err := o.validate(); err != nil {
		return err
	}
	dev, err := device.First(ctx, o.sim)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Runtime().Close()) }()
	s, err := newServer(ctx, dev, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	fmt.Fprintf(out, "%v: %d blocks of %d bytes, %d of them on the device\n", dev, o.blocks, o.size, o.slots())
	if err := s.fill(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "filled: %d blocks (%d bytes) were spilled\n", s.stats.spilled, s.stats.spilled*o.size)
	s.stats = stats{}
	if err := s.serve(ctx); err != nil {
		return err
	}
	s.report(out)
	if err := s.checkAll(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "the content of all %d blocks is right\n", o.blocks)
	return nil
}

// A server has requests to a cache. Each is of one of several conversations, of which few are asked for often.
type server struct {
	*cache
	o        options
	checker  *verify.Checker // which stands for the model: it writes blocks, and here also checks them
	versions []uint64        // how often each block was written

	hits, returns []time.Duration // of requests whose blocks were all on the device, and of the others
}

func newServer(ctx context.Context, dev *cudart.Device, o options) (*server, error) {
	s := &server{o: o, versions: make([]uint64, o.blocks)}
	if err := s.open(ctx, dev); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *server) open(ctx context.Context, dev *cudart.Device) (err error) {
	if s.checker, err = verify.NewChecker(ctx, dev); err != nil {
		return err
	}
	s.cache, err = newCache(ctx, dev, s.o.blocks, s.o.size, s.o.slots())
	return err
}

func (s *server) Close() error {
	var errs []error
	if s.cache != nil {
		errs = append(errs, s.cache.Close())
	}
	if s.checker != nil {
		errs = append(errs, s.checker.Close())
	}
	return errors.Join(errs...)
}

// seed returns from what the content of a block follows.
func (s *server) seed(b int) uint64 { return uint64(b)<<32 | s.versions[b] }

// write writes the next version of a block, on the device.
func (s *server) write(b int) error {
	p, err := s.cache.write(b)
	if err != nil {
		return err
	}
	s.versions[b]++
	return s.checker.Fill(s.stream, p, s.size, s.seed(b), 0)
}

// conversation returns the blocks of a conversation. They were made one after the other, and lie anywhere on the
// device by now.
func (s *server) conversation(i int) []int {
	var all []int
	for b := i * s.o.requestBlocks; b < min((i+1)*s.o.requestBlocks, s.o.blocks); b++ {
		all = append(all, b)
	}
	return all
}

func (s *server) conversations() int { return (s.o.blocks + s.o.requestBlocks - 1) / s.o.requestBlocks }

// fill makes all blocks, which spills those of the first conversations.
func (s *server) fill(ctx context.Context) error {
	for i := range s.conversations() {
		wanted := s.conversation(i)
		if _, err := s.get(ctx, wanted); err != nil {
			return err
		}
		for _, b := range wanted {
			if err := s.write(b); err != nil {
				return err
			}
		}
	}
	return s.stream.Synchronize(ctx)
}

// serve does the requests.
func (s *server) serve(ctx context.Context) error {
	r := rand.New(rand.NewPCG(1, 2))
	popular := rand.NewZipf(r, 1.1, 1, uint64(s.conversations()-1))
	for i := range s.o.requests {
		wanted := s.conversation(int(popular.Uint64()))
		began := time.Now()
		restored, err := s.get(ctx, wanted)
		if err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		if took := time.Since(began); restored == 0 {
			s.hits = append(s.hits, took)
		} else {
			s.returns = append(s.returns, took)
		}
		// Here a server launches the kernels of its model, which read the blocks, and append to the last one.
		if err := errors.Join(s.write(wanted[len(wanted)-1]), s.check(ctx, wanted)); err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
	}
	return nil
}

// check compares blocks on the device with what they are to have.
func (s *server) check(ctx context.Context, blocks []int) error {
	for _, b := range blocks {
		p, err := s.ptr(b)
		if err != nil {
			return err
		}
		if err := s.checker.Check(s.stream, p, s.size, s.seed(b), 0); err != nil {
			return err
		}
	}
	bad, _, err := s.checker.Result(ctx, s.stream)
	if err == nil && bad > 0 {
		err = fmt.Errorf("of blocks %d to %d on the device %d bytes are wrong", blocks[0], blocks[len(blocks)-1], bad)
	}
	return err
}

// checkAll compares all blocks, wherever they are.
func (s *server) checkAll(ctx context.Context) error {
	want := make([]byte, s.size)
	for b := range s.blocks {
		if s.blocks[b].slot != nil {
			if err := s.check(ctx, []int{b}); err != nil {
				return err
			}
			continue
		}
		verify.Fill(want, s.seed(b), 0)
		if !bytes.Equal(want, s.spilled(b)) {
			return fmt.Errorf("block %d in pinned memory is wrong", b)
		}
	}
	return nil
}

func (s *server) report(out io.Writer) {
	fmt.Fprintf(out, "%d requests of %d blocks: all on the device for %d, %s\n", s.o.requests, s.o.requestBlocks, len(s.hits), latency(s.hits))
	total := time.Duration(0)
	for _, took := range s.returns {
		total += took
	}
	fmt.Fprintf(out, "hit in pinned memory: %d, %s\n", len(s.returns), latency(s.returns))
	moved := (s.stats.restored + s.stats.spilled) * s.size
	fmt.Fprintf(out, "%d bytes (%d blocks) came back, %d bytes (%d blocks) were spilled: %.1f GB/s while requests waited\n",
		s.stats.restored*s.size, s.stats.restored, s.stats.spilled*s.size, s.stats.spilled, float64(moved)/max(total.Seconds(), 1e-9)/1e9)
}

// latency is the median and the 99th percentile, in words.
func latency(of []time.Duration) string {
	if len(of) == 0 {
		return "none"
	}
	sorted := slices.Sorted(slices.Values(of))
	return fmt.Sprintf("median %v, p99 %v", sorted[len(sorted)/2], sorted[(len(sorted)*99+99)/100-1])
}
