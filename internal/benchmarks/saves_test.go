//go:build linux

package benchmarks

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/weights"
)

// BenchmarkSaves is safetensors of one GPU, or of host memory, to files that are not there yet. Tensors begin at
// multiples of 512 bytes of device memory, as allocators of frameworks place them. Rows named returned are timed until the
// tensors may change again, others until the file is on storage.
func BenchmarkSaves(b *testing.B) { bench(b, "Saves") }

var _ = func() bool {
	plain, checked := weights.SaveOptions{NoChecksums: true}, weights.SaveOptions{}
	direct, directChecked := weights.SaveOptions{NoChecksums: true, DirectIO: true}, weights.SaveOptions{DirectIO: true}
	for _, n := range []int{512 * mib, 2 * gib} {
		size := sizeName(n)
		add("Saves",
			row{name: "shm/through/" + size, cpu: true, quick: n < gib, prepare: save{folder: shm, n: n, options: plain}.prepare},
			row{name: "shm/checked/" + size, cpu: true, prepare: save{folder: shm, n: n, options: checked}.prepare},
			row{name: "shm/snapshot/" + size, cpu: true, prepare: save{folder: shm, n: n, options: plain, snapshot: true}.prepare},
			row{name: "shm/snapshot-returned/" + size, cpu: true, prepare: save{folder: shm, n: n, options: plain, snapshot: true, returned: true}.prepare},
			row{name: "shm/host-memory/" + size, cpu: true, prepare: save{folder: shm, n: n, options: plain, host: true}.prepare},
			row{name: "shm/host-memory-checked/" + size, cpu: true, prepare: save{folder: shm, n: n, options: checked, host: true}.prepare})
	}
	add("GPUs", row{name: "2/save/2GiB", gpus: 2, cpu: true, prepare: save{folder: shm, n: 2 * gib, gpus: 2, options: plain}.prepare})
	return add("Saves",
		row{name: "disk/direct/512MiB", cpu: true, prepare: save{folder: cached, n: 512 * mib, options: direct}.prepare},
		row{name: "disk/direct-checked/512MiB", cpu: true, prepare: save{folder: cached, n: 512 * mib, options: directChecked}.prepare},
		row{name: "shm/20000-tensors/through", cpu: true, prepare: save{folder: shm, n: 65 * mib, small: true, options: plain}.prepare},
		row{name: "shm/20000-tensors/checked", cpu: true, prepare: save{folder: shm, n: 65 * mib, small: true, options: checked}.prepare},
		row{name: "shm/20000-tensors/snapshot", cpu: true, prepare: save{folder: shm, n: 65 * mib, small: true, options: checked, snapshot: true}.prepare})
}()

// A save is what a row saves, and how.
type save struct {
	folder                          string
	n                               int // bytes of tensors
	gpus                            int // that have them in turn; 0 is one
	small, host, snapshot, returned bool
	options                         weights.SaveOptions
}

func (s save) prepare(f *fixture) task {
	n := f.size(s.n)
	n -= min(8*mib, n/2) // for the alignment of tensors
	gpus := max(s.gpus, 1)
	memory := make([]weights.Memory, gpus)
	for i := range memory {
		memory[i].Device, memory[i].Ptr = f.memory(i, 0)
	}
	var tensors []weights.SavedTensor
	var places []int
	at := 0
	for left, i := n, 0; left > 0; i++ {
		size := layers(i, n, left)[0]
		if s.small {
			size = min(3000+i%3, left)
		}
		t := weights.SavedTensor{Name: fmt.Sprintf("layers.%d", i), DType: weights.U8, Shape: []int{size}}
		if s.host {
			t.Host = f.source()[at:][:size]
		} else {
			t.Memory = memory[i%gpus]
			t.Memory.Ptr, t.Memory.Bytes = t.Memory.Ptr+cudart.DevPtr(at), size
		}
		tensors, places = append(tensors, t), append(places, at)
		left, at = left-size, (at+size+511)&^511
	}
	if s.snapshot {
		s.options.Snapshot = must(pool.New(memory[0].Device, pool.Options{}))(f)
		f.later(s.options.Snapshot.Close)
	}
	f.ownFile(s.folder, n) // there is room for a file, or the row is skipped
	path := filepath.Join(f.folder(s.folder), "save.safetensors")
	f.later(func() error { return os.RemoveAll(path) })
	var saving *weights.Saving
	op := func() (err error) {
		saving, err = weights.Save(ctx, path, tensors, s.options)
		if err != nil || s.returned {
			return err
		}
		return saving.Wait(ctx)
	}
	after := func() error {
		var err error
		if s.returned {
			err = saving.Wait(ctx)
		}
		return errors.Join(err, os.Remove(path))
	}
	return task{bytes: n, op: op, after: after, verify: func(op func() error) error {
		want := f.source()
		if !s.host {
			pattern := f.newPattern()
			want = f.target()
			pattern.fill(want)
			if err := onEach(gpus, func(i int) error { return put(memory[i].Device, memory[i].Ptr, want) }); err != nil {
				return err
			}
		}
		if err := op(); err != nil {
			return err
		}
		if s.returned && saving != nil {
			if err := saving.Wait(ctx); err != nil {
				return err
			}
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		got := content[8+binary.LittleEndian.Uint64(content):]
		for i, t := range tensors {
			if err := equal(got[:t.Shape[0]], want[places[i]:][:t.Shape[0]]); err != nil {
				return fmt.Errorf("%s: %w", t.Name, err)
			}
			got = got[t.Shape[0]:]
		}
		return os.Remove(path)
	}}
}
