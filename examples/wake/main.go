// Wake keeps a model in pinned memory that outlives the process which had it on the GPU: sleep copies it from the GPU into
// shared memory, and wake copies it onto the GPU again, in any process, at any time until it is removed.
//
//	go run ./examples/wake [-sim] sleep NAME FILE  # load a file onto the GPU, and put it to sleep as NAME
//	go run ./examples/wake [-sim] wake NAME        # copy it onto the GPU, and compare
//	go run ./examples/wake list                    # what is asleep: age, size, who uses it
//	go run ./examples/wake remove NAME
//
// The memory is a file in -dir, /dev/shm by default; in a pod, a directory of a volume in memory that several containers
// mount. A process that wakes a model copies at once: the memory is registered meanwhile, from the end on.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/shm"
	"github.com/gopinned/pinned/transfer"
)

func main() {
	sim := flag.Bool("sim", false, "use a simulated GPU")
	dir := flag.String("dir", shm.DefaultDir, "directory of the memory: a tmpfs or a hugetlbfs")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: wake [-sim] [-dir DIR] sleep NAME FILE | wake NAME | list | remove NAME\n\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	log.SetPrefix("wake: ")
	device.Main(func(ctx context.Context) error { return run(ctx, os.Stdout, *sim, shm.Options{Dir: *dir}, flag.Args()) })
}

func run(ctx context.Context, out io.Writer, sim bool, o shm.Options, args []string) error {
	switch command := append(args, "")[0]; {
	case command == "list" && len(args) == 1:
		return list(out, o.Dir)
	case command == "remove" && len(args) == 2:
		return shm.Remove(args[1], o)
	case command == "sleep" && len(args) == 3, command == "wake" && len(args) == 2:
	default:
		return errors.New("want sleep NAME FILE, wake NAME, list, or remove NAME (see -h)")
	}
	dev, err := device.First(ctx, sim)
	if err != nil {
		return err
	}
	copier, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err == nil {
		g := gpu{dev, copier, out}
		if args[0] == "sleep" {
			err = g.sleep(ctx, args[1], args[2], o)
		} else {
			err = g.wake(ctx, args[1], o)
		}
		err = errors.Join(err, copier.Close())
	}
	return errors.Join(err, dev.Runtime().Close())
}

// A gpu is where models are awake.
type gpu struct {
	dev    *cudart.Device
	copier *transfer.Copier
	out    io.Writer
}

// sleep loads a file onto the GPU, as a server does that serves the model, and then copies it into shared memory.
func (g gpu) sleep(ctx context.Context, name, path string, o shm.Options) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	n := int(info.Size())
	model, err := g.dev.Alloc(n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	if _, err := g.copier.UploadFrom(ctx, model.Ptr(), file, 0, n); err != nil {
		return err
	}

	memory, err := g.memory(ctx, name, n, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	if _, err := memory.Register(ctx, g.dev, hostmem.RegisterOptions{}); err != nil {
		return err
	}
	if err := memory.Begin(); err != nil {
		return err
	}
	start := time.Now()
	if err := g.copier.Download(ctx, memory.Bytes(), model.Ptr()); err != nil {
		return err // the content stays incomplete
	}
	g.report("asleep", n, time.Since(start))
	return memory.Complete(label(filepath.Base(path), memory.Bytes()))
}

// memory opens the memory of a name if it has the size, or creates it.
func (g gpu) memory(ctx context.Context, name string, n int, o shm.Options) (*shm.Memory, error) {
	memory, err := shm.Open(ctx, name, o)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		o.Keep, o.Device = true, g.dev
		return shm.Create(ctx, name, n, o)
	case err == nil && memory.Len() != n:
		return nil, errors.Join(fmt.Errorf("%v is not of %d bytes: remove it, or choose another name", memory, n), memory.Close())
	}
	return memory, err
}

// wake copies what is asleep onto the GPU.
func (g gpu) wake(ctx context.Context, name string, o shm.Options) (err error) {
	o.ReadOnly = true
	memory, err := shm.Open(ctx, name, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	content, err := memory.Content()
	if err != nil {
		return err
	}
	if !content.Complete {
		return fmt.Errorf("%v: its content is not complete: process %d is putting it to sleep, or was killed", memory, content.Writer)
	}
	model, err := g.dev.Alloc(memory.Len())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()

	start := time.Now()
	_, err = memory.Register(ctx, g.dev, hostmem.RegisterOptions{Background: true})
	if err != nil && !errors.Is(err, errors.ErrUnsupported) { // where memory cannot be registered, it is staged
		return err
	}
	if err := g.copier.Upload(ctx, model.Ptr(), memory.Bytes()); err != nil {
		return err
	}
	g.report("awake", memory.Len(), time.Since(start))

	back := make([]byte, memory.Len())
	if err := g.copier.Download(ctx, back, model.Ptr()); err != nil {
		return err
	}
	after, err := memory.Content()
	switch {
	case err != nil:
		return err
	case after.Generation != content.Generation:
		return fmt.Errorf("%v was put to sleep again meanwhile: wake it again", memory)
	case label(labelled(content.Label), back) != content.Label:
		return fmt.Errorf("the bytes on the GPU are not those of %s", content.Label)
	}
	fmt.Fprintf(g.out, "%s on %v: compared, equal\n", content.Label, g.dev)
	return nil
}

func (g gpu) report(what string, n int, took time.Duration) {
	fmt.Fprintf(g.out, "%s: %d bytes in %.3f s, %.1f GB/s\n", what, n, took.Seconds(), float64(n)/took.Seconds()/1e9)
}

// label names a model with the checksum of its bytes, and labelled returns the name in it.
func label(name string, mem []byte) string {
	return fmt.Sprintf("%08x %.150s", crc32.Checksum(mem, crc32.MakeTable(crc32.Castagnoli)), name)
}

func labelled(label string) string { return label[min(9, len(label)):] }

func list(out io.Writer, dir string) error {
	all, err := shm.List(dir)
	if err != nil {
		return err
	}
	for _, m := range all {
		state := "incomplete"
		if m.Content.Complete {
			state = m.Content.Label
		}
		fmt.Fprintf(out, "%s: %d bytes, %v old, last used %v ago, by processes %v: %s\n", m.Path, m.Len,
			time.Since(m.Created).Round(time.Second), time.Since(m.Used).Round(time.Second), m.Users, state)
	}
	return nil
}
