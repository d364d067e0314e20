package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/gopinned/pinned/hostmem/shm"
	"github.com/gopinned/pinned/weights"
)

// A request is a line that another process writes, such as examples/pytorch/save.py: it wants memory to put tensors
// into, or has put them there and wants them saved.
type request struct {
	Allocate   int               `json:"allocate"` // bytes of memory, in the place of what there was before
	Path       string            `json:"path"`
	Tensors    []placed          `json:"tensors"`
	Metadata   map[string]string `json:"metadata"`
	ShardBytes int               `json:"shard_bytes"`
	DirectIO   bool              `json:"direct"`
	DropCache  bool              `json:"drop_cache"`
}

// placed is a tensor in the memory.
type placed struct {
	Name   string        `json:"name"`
	DType  weights.DType `json:"dtype"`
	Shape  []int         `json:"shape"`
	Offset int           `json:"offset"`
	Bytes  int           `json:"bytes"`
}

// An answer is the line that follows a request.
type answer struct {
	Memory  string  `json:"memory,omitempty"` // a path that opens the memory while this process lives
	Saved   int     `json:"saved,omitempty"`  // bytes of tensors that are on storage
	Seconds float64 `json:"seconds,omitempty"`
	Error   string  `json:"error,omitempty"`
}

// serve answers requests, one after another, until in ends, or ctx. The memory is anonymous: nothing of it is left when
// all processes that have it open have ended, however they end.
func serve(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	var s saver
	defer func() { err = errors.Join(err, s.close()) }()
	requests, ended := make(chan request), make(chan error, 1)
	go func() {
		for d := json.NewDecoder(in); ; {
			var r request
			if err := d.Decode(&r); err != nil {
				ended <- err
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		select {
		case r := <-requests:
			a, err := s.answer(ctx, r)
			if err != nil {
				a.Error = err.Error()
			}
			if err := json.NewEncoder(out).Encode(a); err != nil {
				return fmt.Errorf("write an answer: %w", err)
			}
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read a request: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A saver has the memory that it shares with the process that asks.
type saver struct {
	memory *shm.Memory
	file   *os.File
}

func (s *saver) answer(ctx context.Context, r request) (a answer, err error) {
	start := time.Now()
	if r.Allocate != 0 {
		a.Memory, err = s.allocate(ctx, r.Allocate)
	} else {
		a.Saved, err = s.save(ctx, r)
	}
	a.Seconds = time.Since(start).Seconds()
	return a, err
}

func (s *saver) allocate(ctx context.Context, n int) (path string, err error) {
	if err := s.close(); err != nil {
		return "", err
	}
	if s.memory, err = shm.Create(ctx, "", n, shm.Options{}); err != nil {
		return "", err
	}
	if s.file, err = s.memory.File(); err != nil {
		return "", err
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.file.Fd()), nil
}

func (s *saver) save(ctx context.Context, r request) (total int, err error) {
	if s.memory == nil {
		return 0, errors.New("save: no memory was allocated")
	}
	tensors := make([]weights.SavedTensor, len(r.Tensors))
	b := s.memory.Bytes()
	for i, t := range r.Tensors {
		if t.Offset < 0 || t.Bytes < 0 || t.Offset > len(b) || t.Bytes > len(b)-t.Offset {
			return 0, fmt.Errorf("save: tensor %q: its %d bytes at %d are not within the %d bytes of the memory", t.Name, t.Bytes, t.Offset, len(b))
		}
		tensors[i] = weights.SavedTensor{Name: t.Name, DType: t.DType, Shape: t.Shape, Host: b[t.Offset:][:t.Bytes:t.Bytes]}
		total += t.Bytes
	}
	saving, err := weights.Save(ctx, r.Path, tensors, weights.SaveOptions{
		Metadata: r.Metadata, ShardBytes: r.ShardBytes, DirectIO: r.DirectIO, DropCache: r.DropCache,
	})
	if err != nil {
		return 0, err
	}
	return total, saving.Wait(ctx)
}

func (s *saver) close() (err error) {
	if s.file != nil {
		err = s.file.Close()
	}
	if s.memory != nil {
		err = errors.Join(err, s.memory.Close())
	}
	s.file, s.memory = nil, nil
	return err
}
