//go:build linux

// Feed is the data loader of PyTorch processes: it reads samples with package loader, in many
// goroutines and without CUDA, into memory that each of them maps, and tells it where its batches are.
//
//	go run ./examples/feed -listen @feed -consumers 2 &
//	torchrun --nproc-per-node 2 examples/pytorch/feed.py @feed --device cuda
//
// Each consumer is a process that has a shard of the data: examples/pytorch/feed.py is the side of
// Python, which needs PyTorch alone. A batch is tensors on the shared memory, without a copy, until it is
// released. Order, seed and positions are those of package loader: a consumer that begins at the position
// of another goes on with the next batch.
//
// # Protocol
//
// Version 2, over one Unix socket (SOCK_SEQPACKET): a message is a packet of at most 64 KiB, but for those
// about batches, of which a packet has several if the consumer is busy. Numbers are little-endian.
//
//	consumer                                  feeder
//	hello {"protocol":2,"rank":0,"world":2,
//	       "start":{…}}                   →
//	                                      ←   welcome {"protocol":2,"ring":…,"batch_size":…,"fields":[…], …}
//	                                          with the descriptor of the ring (SCM_RIGHTS);
//	                                          or {"protocol":2,"error":"…"}, and the end
//	                                      ←   batch: number, samples, where its fields are in the ring,
//	                                          the position after it
//	release of one or several batches     →
//	bye                                   →
//	                                      ←   error, and the end
//
// protocol.go has each message with its bytes. Both sides check the length and the content of all that
// they receive; what is wrong ends the connection with the reason. Any side may close the socket at any
// time, or die: the other one learns it from the kernel, and a consumer that ended without bye is an
// error of the feeder.
//
// The ring is a memfd, sealed against a change of its size, so that no side can take mapped memory from
// the other. It has room for (prefetch + 1) batches. A batch that is sent is the consumer's until its
// release; when all are, the feeder waits.
//
// The processes need no common PID, IPC or user namespace. An address "@name" is in the abstract
// namespace of the network namespace, for processes of one user, and leaves nothing behind. Any
// other is a file, for those who may open it: share its directory between containers. The file of a
// feeder that was killed stays until the next one replaces it.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gopinned/pinned/loader"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "feed:", err)
		os.Exit(1)
	}
}

// run is main with its arguments. It returns when the consumers are served, or ctx ends.
func run(ctx context.Context, args []string, out io.Writer) error {
	var (
		o                                 loader.Options
		address                           string
		samples, width, epochs, consumers int
		wait                              time.Duration
	)
	flags := flag.NewFlagSet("feed", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&address, "listen", "@pinned-feed", "`address`: @name, or the path of a socket file")
	flags.IntVar(&consumers, "consumers", 0, "end after this number of consumers; 0: when interrupted")
	flags.IntVar(&samples, "samples", 100_000, "samples of the data")
	flags.IntVar(&width, "width", 1024, "numbers of a sample")
	flags.DurationVar(&wait, "wait", 0, "time that a sample takes to read, and normalise it; 0: it is in memory")
	flags.IntVar(&epochs, "epochs", 2, "times to go through the data")
	flags.IntVar(&o.BatchSize, "batch", 256, "samples of a batch")
	flags.IntVar(&o.Workers, "workers", 0, "goroutines that read, for each consumer; 0: as many as processors, and 1024 with -wait")
	flags.IntVar(&o.Prefetch, "prefetch", 0, "batches ahead of each consumer; 0: 64 MiB")
	flags.BoolVar(&o.Shuffle, "shuffle", true, "random order, another one in each epoch")
	flags.Uint64Var(&o.Seed, "seed", 0, "of the random order")
	flags.BoolVar(&o.DropLast, "drop-last", false, "leave out a last batch that is not full")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for name, n := range map[string]int{"samples": samples, "width": width, "epochs": epochs} {
		if n < 1 {
			return fmt.Errorf("-%s is %d: must be positive", name, n)
		}
	}
	if o.BatchSize < 1 || min(consumers, o.Workers, o.Prefetch) < 0 || wait < 0 {
		return errors.New("-batch must be positive, and -consumers, -wait, -workers and -prefetch not negative")
	}
	if maxBytes := 1 << 40; width > maxBytes/8 || samples > maxBytes/(4*width+8) {
		return fmt.Errorf("%d samples of %d numbers: more than 1 TiB", samples, width)
	}
	var data dataset = slow{vectors{samples, width}, wait}
	if wait == 0 {
		var err error
		if data, err = newInMemory(vectors{samples, width}); err != nil {
			return err
		}
	} else {
		o.Workers, o.Transform = cmp.Or(o.Workers, 1024), normalise
	}
	listener, err := listen(address)
	if err != nil {
		return err
	}
	f := &feeder{data: data, o: o, epochs: epochs, log: log.New(out, "feed: ", 0)}
	f.log.Printf("listens on %s", address)
	return f.run(ctx, listener, consumers)
}
