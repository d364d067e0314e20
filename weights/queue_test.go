package weights

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// Each piece is in the upload where its address is, by alignment; positions of the upload are those of
// the reads.
func TestUploadsAreAlignedAsTheirAddresses(t *testing.T) {
	t.Parallel()
	f := &File{}
	l := &loading{devices: make([]*cudart.Device, 2), reads: []Read{
		{File: f, Offset: 8, Size: 300, Devices: []int{0}, Pieces: []Piece{{0, 100, []int{0x1000}}, {100, 200, []int{0x1100}}}},
		{File: f, Offset: 400, Size: 7, Devices: []int{0, 1}, Pieces: []Piece{{0, 7, []int{0x2003, 0x3000}}}},
		{File: f, Offset: 500, Size: 50, Devices: []int{0}, Pieces: []Piece{{0, 20, []int{0x5001}}, {30, 20, []int{0x4000}}}},
	}}
	for _, owned := range []bool{false, true} {
		l.owned = owned
		queues := l.queues()
		require.Len(t, queues, 2)
		for _, q := range queues {
			for _, p := range q.pieces {
				assert.Equal(t, p.Off%transferAlign, int(p.Dsts[0]%transferAlign))
			}
		}
		one := queues[0]
		assert.Equal(t, 788, one.n)
		wantPieces := 4
		if owned {
			wantPieces = 3 // the first two are one copy
		}
		assert.Len(t, one.pieces, wantPieces)
		for done, want := range map[int][3]int{0: {0, 0, 0}, 99: {0, 0, 99}, 100: {0, 100, 100}, 256: {0, 100, 100}, 257: {0, 100, 101}, 456: {2, 0, 300}, 514: {2, 0, 301}, 600: {2, 30, 330}, one.n: {2, 30, 350}} {
			s, within := one.at(done)
			assert.Equal(t, want, [3]int{s.read, s.from, one.read(done)}, "%d", done)
			assert.Equal(t, want[2], s.before+within)
		}
	}
}

// Zero bytes between two pieces are written only where no other part is, which another queue may copy at
// the same time.
func TestZerosAreWrittenOverNoOtherPart(t *testing.T) {
	t.Parallel()
	f := &File{}
	a, c := []int{0x1000}, []int{0x1080}
	b := []int{0x1070, 0x2000}
	l := &loading{owned: true, devices: make([]*cudart.Device, 2), reads: []Read{
		{File: f, Offset: 0, Size: 100, Devices: []int{0}, Pieces: []Piece{{0, 100, a}}},
		{File: f, Offset: 100, Size: 10, Devices: []int{0, 1}, Pieces: []Piece{{0, 10, b}}},
		{File: f, Offset: 110, Size: 10, Devices: []int{0}, Pieces: []Piece{{0, 10, c}}},
	}}
	for between, parts := range map[string][]target{
		"a part between":       {{Part{Size: 100}, 0, a[0]}, {Part{Size: 10}, 0, b[0]}, {Part{Size: 10}, 0, c[0]}, {Part{Size: 10}, 1, b[1]}},
		"the rest of the part": {{Part{Size: 122}, 0, a[0]}, {Part{Size: 10}, 0, c[0]}, {Part{Size: 10}, 1, b[1]}},
		"nothing":              {{Part{Size: 100}, 0, a[0]}, {Part{Size: 10}, 0, c[0]}, {Part{Size: 10}, 1, b[0]}},
	} {
		l.placed = parts
		queues := l.queues()
		require.Len(t, queues, 2)
		wantPieces := 2
		if between == "nothing" {
			wantPieces = 1
		}
		require.Len(t, queues[0].pieces, wantPieces, between)
		last := queues[0].pieces[wantPieces-1]
		assert.EqualValues(t, c[0]+10, int(last.Dsts[0])+last.N)
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
		l := &loading{owned: true, devices: make([]*cudart.Device, 2), reads: []Read{
			{File: f, Offset: 0, Size: 100, Devices: []int{0, 1}, Pieces: []Piece{{0, 100, []int{a, a}}}},
			{File: f, Offset: 100, Size: 10, Devices: []int{0, 1}, Pieces: []Piece{{0, 10, []int{c, tt.second}}}},
		}}
		l.placed = append([]target{{Part{Size: 100}, 0, a}, {Part{Size: 10}, 0, c}, {Part{Size: 100}, 1, a}, {Part{Size: 10}, 1, tt.second}}, tt.between...)
		slices.SortFunc(l.placed, target.compareAddress)
		queues := l.queues()
		require.Len(t, queues, 1)
		assert.Len(t, queues[0].pieces, tt.pieces, name)
	}
}
