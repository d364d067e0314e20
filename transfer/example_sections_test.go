//go:build linux && !android && (amd64 || arm64)

package transfer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"strings"
	"sync"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// copier returns a copier for a simulated device, and n bytes of the device's memory.
func copier(n int, o transfer.Options) (c *transfer.Copier, mem cudart.DevPtr, closeAll func()) {
	dev, closeDevice := device()
	c, err := transfer.NewCopier(context.Background(), dev, o)
	if err != nil {
		log.Fatal(err)
	}
	if mem, err = dev.Malloc(n); err != nil {
		log.Fatal(err)
	}
	return c, mem, func() {
		if err := errors.Join(c.Close(), dev.Free(mem)); err != nil {
			log.Fatal(err)
		}
		closeDevice()
	}
}

// Copies on a stream come after its earlier work and before its later work.
func Example_ordering() {
	ctx := context.Background()
	c, mem, closeAll := copier(16, transfer.Options{})
	defer closeAll()
	s, err := c.Device().NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	ordered := c.With(transfer.Call{Stream: s})
	if err := s.Memset(mem, 'x', 16); err != nil { // or a kernel
		log.Fatal(err)
	}
	if err := ordered.Upload(ctx, mem+4, []byte("data")); err != nil { // does not wait for s
		log.Fatal(err)
	}
	result := make([]byte, 16)
	if err := ordered.Download(ctx, result, mem); err != nil { // waits for s
		log.Fatal(err)
	}
	fmt.Printf("%s\n", result)
	// Output: xxxxdataxxxxxxxx
}

// An error says how many bytes arrived before it.
func Example_errorsAndCancellation() {
	c, mem, closeAll := copier(1000, transfer.Options{})
	defer closeAll()

	n, err := c.UploadReader(context.Background(), mem, strings.NewReader("a file that was cut off"), 1000)
	fmt.Println(n, errors.Is(err, io.ErrUnexpectedEOF))

	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("the job was preempted"))
	err = c.Upload(ctx, mem, make([]byte, 1000))
	fmt.Println(err, errors.Is(err, context.Canceled), errors.Is(err, transfer.ErrUnderWay))
	// Output:
	// 23 true
	// transfer: upload 1000 bytes: context canceled: the job was preempted true false
}

// Progress runs on a goroutine of its own. If it panics, the copy fails.
func Example_callbacks() {
	c, mem, closeAll := copier(1<<20, transfer.Options{})
	defer closeAll()

	last := 0
	v := c.With(transfer.Call{Progress: func(done, total int) { last = 100 * done / total }})
	source := io.LimitReader(zeros{}, 1<<20) // any io.Reader, which may block
	if _, err := v.UploadReader(context.Background(), mem, source, 1<<20); err != nil {
		log.Fatal(err)
	}
	fmt.Println(last, "%")
	// Output: 100 %
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// A program that needs its cores for other work bounds those of a copy.
func Example_cores() {
	c, mem, closeAll := copier(1<<20, transfer.Options{Workers: 2})
	defer closeAll()
	if err := c.Upload(context.Background(), mem, make([]byte, 1<<20)); err != nil {
		log.Fatal(err)
	}
	fmt.Println(c.Stats().Copies, "copy by up to 2 goroutines")
	// Output: 1 copy by up to 2 goroutines
}

// Copies at once share the ring, and use both directions of the link.
func Example_concurrency() {
	ctx := context.Background()
	c, mem, closeAll := copier(2<<20, transfer.Options{})
	defer closeAll()
	var group sync.WaitGroup
	group.Go(func() {
		if err := c.Upload(ctx, mem, make([]byte, 1<<20)); err != nil {
			log.Print(err)
		}
	})
	group.Go(func() {
		if err := c.Download(ctx, make([]byte, 1<<20), mem+1<<20); err != nil {
			log.Print(err)
		}
	})
	group.Wait()
	fmt.Println(c.Stats().StagedBytes == 2<<20, c.Stats().Failures)
	// Output: true 0
}

// Device memory is a source and a target of io.Copy.
func ExampleCopier_NewReader() {
	ctx := context.Background()
	c, mem, closeAll := copier(100, transfer.Options{})
	defer closeAll()
	if _, err := io.Copy(c.NewWriter(ctx, mem, 100), strings.NewReader("to the device and back")); err != nil {
		log.Fatal(err)
	}
	var back bytes.Buffer
	if _, err := io.Copy(&back, c.NewReader(ctx, mem, 22)); err != nil {
		log.Fatal(err)
	}
	fmt.Println(back.String())
	// Output: to the device and back
}
