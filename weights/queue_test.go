package weights

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// addBytes adds bytes at an offset of a file.
func (l *loading) addBytes(f *File, off int64, n int, devices []int, to ...int) {
	l.addSegment(Part{Tensor: &Tensor{File: f, Offset: off}, Size: n}, devices, to)
}

// Each segment is in the upload where its address is, by alignment; positions of the upload are those of
// the files.
func TestUploadsAreAlignedAsTheirAddresses(t *testing.T) {
	t.Parallel()
	f := &File{}
	for _, owned := range []bool{false, true} {
		l := &loading{owned: owned, devices: make([]*cudart.Device, 2)}
		l.addBytes(f, 8, 100, []int{0}, 0x1000)
		l.addBytes(f, 108, 200, []int{0}, 0x1100)
		l.addBytes(f, 400, 7, []int{0, 1}, 0x2003, 0x3000)
		l.addBytes(f, 500, 20, []int{0}, 0x5001)
		l.addBytes(f, 530, 20, []int{0}, 0x4000)
		l.addBytes(f, 550, 10, []int{0}, 0x4014)
		require.Len(t, l.queues, 2)
		for _, q := range l.queues {
			for _, p := range q.pieces {
				assert.Equal(t, p.Off%transferAlign, int(p.Dsts[0]%transferAlign))
			}
		}
		one := l.queues[0]
		assert.Equal(t, 798, one.n)
		wantPieces := 4
		if owned {
			wantPieces = 3 // the first two are one copy
		}
		assert.Len(t, one.pieces, wantPieces)
		for done, want := range map[int][2]int{0: {0, 0}, 99: {0, 99}, 100: {1, 100}, 256: {1, 100}, 257: {1, 101}, 456: {2, 300}, 514: {2, 301}, 600: {3, 320}, 788: {3, 340}, one.n: {3, 350}} {
			i, within := one.find(done)
			assert.Equal(t, want, [2]int{i, one.read(done)}, "%d", done)
			assert.Equal(t, want[1], one.segments[i].before+within)
		}
	}
}

// Zero bytes between two pieces are written only where no other part is, which another queue may copy at
// the same time.
func TestZerosAreWrittenOverNoOtherPart(t *testing.T) {
	t.Parallel()
	f := &File{}
	const a, c = 0x1000, 0x1080
	b := []int{0x1070, 0x2000}
	for between, parts := range map[string][]target{
		"a part between":       {{Part{Size: 100}, 0, a}, {Part{Size: 10}, 0, b[0]}, {Part{Size: 10}, 0, c}, {Part{Size: 10}, 1, b[1]}},
		"the rest of the part": {{Part{Size: 122}, 0, a}, {Part{Size: 10}, 0, c}, {Part{Size: 10}, 1, b[1]}},
		"nothing":              {{Part{Size: 100}, 0, a}, {Part{Size: 10}, 0, c}, {Part{Size: 10}, 1, b[0]}},
	} {
		l := &loading{owned: true, devices: make([]*cudart.Device, 2), placed: parts}
		l.addBytes(f, 0, 100, []int{0}, a)
		l.addBytes(f, 100, 10, []int{0, 1}, b...)
		l.addBytes(f, 110, 10, []int{0}, c)
		queues := l.queues
		require.Len(t, queues, 2)
		wantPieces := 2
		if between == "nothing" {
			wantPieces = 1
		}
		require.Len(t, queues[0].pieces, wantPieces, between)
		last := queues[0].pieces[wantPieces-1]
		assert.EqualValues(t, c+10, int(last.Dsts[0])+last.N)
	}
}

// Two pieces for several devices are one copy only if all of the devices allow that: zero bytes between
// them must overwrite no part on any device, and have the same number on each.
func TestPiecesAreJoinedOnlyWhereEveryDeviceAllowsIt(t *testing.T) {
	t.Parallel()
	const a, c = 0x1000, 0x1080
	for name, tt := range map[string]struct {
		second  int // address of the second piece on device 1
		between []target
		pieces  int
	}{
		"nothing between":                    {c, nil, 1},
		"a part between, on the first one":   {c, []target{{Part{Size: 10}, 0, a + 110}}, 2},
		"a part between, on the second one":  {c, []target{{Part{Size: 10}, 1, a + 110}}, 2},
		"another distance on the second one": {c + transferAlign, nil, 2},
	} {
		f := &File{}
		l := &loading{owned: true, devices: make([]*cudart.Device, 2)}
		l.placed = append([]target{{Part{Size: 100}, 0, a}, {Part{Size: 10}, 0, c}, {Part{Size: 100}, 1, a}, {Part{Size: 10}, 1, tt.second}}, tt.between...)
		slices.SortFunc(l.placed, target.compareAddress)
		l.addBytes(f, 0, 100, []int{0, 1}, a, a)
		l.addBytes(f, 100, 10, []int{0, 1}, c, tt.second)
		require.Len(t, l.queues, 1)
		assert.Len(t, l.queues[0].pieces, tt.pieces, name)
	}
}
