package weights_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// maxSeed keeps long seeds away from the fuzzers: they would spend their time
// on making them shorter.
const maxSeed = 2048

// FuzzSafetensors reads a header with its right size before it, and so many
// bytes of data behind it; and the same bytes as a whole file.
func FuzzSafetensors(f *testing.F) {
	add := func(file []byte) {
		if len(file) > maxSeed {
			return
		}
		f.Add(file, uint16(0))
		if len(file) > 8 {
			if n := binary.LittleEndian.Uint64(file); n <= uint64(len(file)-8) {
				f.Add(file[8:8+n], uint16(len(file)-8-int(n)))
			}
		}
	}
	for _, l := range malformedSafetensors() {
		add([]byte(l.file))
	}
	for _, b := range badHeaders {
		add(st(b.header, 1))
	}
	var specs []spec
	for _, d := range safetensorsTypes {
		specs = append(specs, spec{string(d), d, []int{2, 4}})
		add(makeSafetensors(f, nil, spec{"a", d, []int{4}}, spec{"b", d, []int{0}}))
	}
	add(makeSafetensors(f, map[string]string{"format": "pt"}, specs...))
	f.Fuzz(func(t *testing.T, header []byte, data uint16) {
		fuzz(t, header)
		fuzz(t, st(string(header), int(data)))
	})
}

// allocated returns the bytes and objects that f allocates. No other test may run.
func allocated(f func()) (bytes, objects int) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc), int(after.Mallocs - before.Mallocs)
}

// Memory grows with what is read of a header, and not with what it declares.
func TestMemoryGrowsWithTheBytesRead(t *testing.T) {
	const n = 20_000
	specs := make([]spec, n)
	for i := range specs {
		specs[i] = spec{fmt.Sprintf("model.layers.%d.mlp.down_proj.weight", i), weights.BF16, []int{0, 8}}
	}
	for format, file := range map[string][]byte{"safetensors": makeSafetensors(t, nil, specs...), "GGUF": makeGGUF(3, 32, specs...)} {
		var err error
		bytes, objects := allocated(func() { _, err = parse(file) })
		require.NoError(t, err)
		require.Less(t, bytes, 8*len(file), format)
		require.Less(t, objects, 4*n, format) // a tensor, its name and its shape
	}
	const claim = 30_000_000
	for name, tt := range map[string]struct {
		start []byte
		size  int64
		read  int64 // at most
		bytes int   // at most
	}{
		"white space":           {st("{}"+strings.Repeat(" ", claim), 0), 0, 1 << 30, claim + 2<<20},
		"white space within":    {st("{"+strings.Repeat(" ", claim)+"}", 0), 0, 1 << 30, claim + 2<<20},
		"zeros":                 {binary.LittleEndian.AppendUint64(nil, claim), claim + 8, 9, 1 << 20},
		"zeros after {":         {append(binary.LittleEndian.AppendUint64(nil, claim), '{'), claim + 8, claim + 9, claim + 2<<20},
		"tensors":               {newGGUF(3, claim/25, 0).length(claim).b, claim, 1 << 20, 1 << 20},
		"pairs":                 {newGGUF(3, 0, claim/14).length(claim).b, claim, 1 << 20, 1 << 20},
		"strings":               {newGGUF(3, 0, 1).array("k", ggufString, claim/9).length(claim).b, claim, 1 << 20, 1 << 20},
		"bools":                 {newGGUF(3, 0, 1).array("k", ggufBool, claim/2).u8(2).b, claim, 1 << 20, 1 << 20},
		"strings that are read": {newGGUF(3, 0, 1).array("k", ggufString, claim/9).b, claim, claim, 5 * claim},
	} {
		r := &sparse{start: tt.start, size: max(tt.size, int64(len(tt.start)))}
		bytes, _ := allocated(func() { _, _ = weights.Parse(r, r.size, name) })
		require.Less(t, bytes, tt.bytes, name)
		require.LessOrEqual(t, r.read, tt.read, name)
	}
}

func FuzzGGUF(f *testing.F) {
	for _, l := range malformedGGUF() {
		if len(l.file) <= maxSeed {
			f.Add([]byte(l.file))
		}
	}
	for version := uint32(1); version <= 3; version++ {
		var specs []spec
		for d := range ggmlIDs {
			perBlock, _ := d.Block()
			specs = append(specs, spec{string(d), d, []int{2, perBlock}})
		}
		g := newGGUF(version, uint64(len(specs)), 4)
		g.pair("name", ggufString).str("x")
		g.array("tokens", ggufString, 2).str("a").str("b")
		g.array("scores", ggufF32, 2).u32(1).u32(2)
		f.Add(writeGGUF(g, 32, specs...))
	}
	f.Fuzz(fuzz)
}

// fuzz asserts that a file is refused with a FormatError or has all that is
// promised of files, and that reading it allocates in proportion to its size.
func fuzz(t *testing.T, file []byte) {
	var parsed *weights.File
	var err error
	got, _ := allocated(func() { parsed, err = parse(file) })
	if limit := len(file)*24 + 64<<10; got > limit {
		t.Errorf("%d bytes were allocated for a file of %d, want at most %d", got, len(file), limit)
	}
	if err != nil {
		var refused *weights.FormatError
		if !errors.As(err, &refused) || refused.Reason == "" || len(err.Error()) > 3000 {
			t.Errorf("refused with %v", err)
		}
		if parsed != nil {
			t.Error("a file with an error")
		}
		return
	}
	checkFile(t, parsed)
	chosen := slices.Collect(parsed.Tensors())
	options := weights.PlanOptions{Align: 1 << (len(file) % 9)}
	place := func(t *weights.Tensor) int { return len(t.Name)%3 - 1 }
	plan, err := weights.NewPlan(parsed.Tensors(), place, options)
	if err != nil {
		t.Fatal(err)
	}
	if len(file) < 64<<10 {
		checkPlan(t, simulatedDevices(t), plan, chosen, place, options, nil)
	}
}
