package weights_test

import (
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/gopinned/pinned/weights"
)

// mostSeed keeps long seeds away from the fuzzers: they would spend their time
// on making them shorter.
const mostSeed = 2048

// FuzzSafetensors reads a header with its right size before it, and so many
// bytes of data behind it; and the same bytes as a whole file.
func FuzzSafetensors(f *testing.F) {
	add := func(file []byte) {
		if len(file) > mostSeed {
			return
		}
		f.Add(file, uint16(0))
		if len(file) > 8 {
			if n := binary.LittleEndian.Uint64(file); n <= uint64(len(file)-8) {
				f.Add(file[8:8+n], uint16(len(file)-8-int(n)))
			}
		}
	}
	for _, l := range safetensorsLies() {
		add([]byte(l.file))
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

func FuzzGGUF(f *testing.F) {
	for _, l := range ggufLies() {
		if len(l.file) <= mostSeed {
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
// The factor is JSON's: a number of a shape, two bytes, is some small objects.
func fuzz(t *testing.T, file []byte) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	parsed, err := parse(file)
	runtime.ReadMemStats(&after)
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(len(file))*200+256<<10; got > most {
		t.Errorf("%d bytes were allocated for a file of %d, want at most %d", got, len(file), most)
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
		checkPlan(t, plan, chosen, place, options, nil)
	}
}
