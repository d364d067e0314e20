// Weights puts a file, such as a model's weights, into the memory of a GPU at
// the speed of the link, and says how long it took.
//
//	go run ./examples/weights [-check] [-direct] [-sim] FILE
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/transfer"
)

func main() {
	log.SetFlags(0)
	var o options
	flag.BoolVar(&o.check, "check", false, "read the bytes back and compare them with the file")
	flag.BoolVar(&o.direct, "direct", false, "read past the page cache")
	flag.BoolVar(&o.sim, "sim", false, "use a simulated GPU")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: weights [-check] [-direct] [-sim] FILE")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, flag.Arg(0), o, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

type options struct{ check, direct, sim bool }

func run(ctx context.Context, path string, o options, out io.Writer) error {
	var from cudart.Options
	if o.sim {
		sim, err := cudasim.New(cudasim.Config{})
		if err != nil {
			return err
		}
		defer sim.Close()
		from.Source = sim
	}
	rt, err := cudart.Open(from)
	if err != nil {
		return err
	}
	defer rt.Close()
	dev, err := rt.Device(0)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	n := int(info.Size())

	weights, err := dev.Malloc(max(n, 1))
	if err != nil {
		return err
	}
	defer dev.Free(weights)
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err != nil {
		return err
	}
	defer c.Close()

	start := time.Now()
	if _, err := c.With(transfer.Call{DirectIO: o.direct}).UploadFrom(ctx, weights, f, 0, n); err != nil {
		return err
	}
	took := time.Since(start)
	fmt.Fprintf(out, "%s: %d bytes on %v in %v, %.1f GB/s\n", path, n, dev, took.Round(time.Microsecond), float64(n)/took.Seconds()/1e9)
	if !o.check {
		return nil
	}
	want, got := sha256.New(), sha256.New()
	if _, err := io.Copy(want, f); err != nil {
		return err
	}
	if _, err := c.DownloadWriter(ctx, got, weights, n); err != nil {
		return err
	}
	if !bytes.Equal(want.Sum(nil), got.Sum(nil)) {
		return fmt.Errorf("%s: the bytes on %v are not those of the file", path, dev)
	}
	fmt.Fprintf(out, "the same bytes: SHA-256 %x\n", got.Sum(nil))
	return nil
}
