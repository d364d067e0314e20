package transfer

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// piecesAtRandom are pieces of n bytes with gaps between them, at places in another
// order on each device. It returns what is to be there.
func piecesAtRandom(seed uint64, mems []cudart.DevPtr, source []byte, capacity int) (list []Piece, want [][]byte) {
	rnd := rand.New(rand.NewPCG(seed, 3))
	for off := 0; off < len(source); {
		n := min([]int{0, 1, 777, 70_000, 600_000, 3 * mib}[rnd.IntN(6)], len(source)-off)
		list = append(list, Piece{Off: off, N: n, Dsts: make([]cudart.DevPtr, len(mems))})
		off += n
		if rnd.IntN(2) == 0 {
			off += rnd.IntN(5000)
		}
		if rnd.IntN(8) == 0 {
			off += rnd.IntN(2 * mib)
		}
	}
	for d, mem := range mems {
		want = append(want, bytes.Repeat([]byte{0xEE}, capacity))
		at := 0
		for _, i := range rnd.Perm(len(list)) {
			p := &list[i]
			at += rnd.IntN(200)
			p.Dsts[d] = mem + cudart.DevPtr(at)
			copy(want[d][at:], source[p.Off:][:p.N])
			at += p.N
		}
	}
	return list, want
}

func TestPiecesComeToTheirPlaces(t *testing.T) {
	t.Parallel()
	_, noPeers := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2), NoPeerAccess: [][2]int{{0, 1}}})
	for name, devs := range map[string][]*cudart.Device{"peers": devicesOf(t, 2), "no peers": noPeers.Devices(), "one": devicesOf(t, 1)} {
		t.Run(name, func(t *testing.T) {
			r := newFanFixture(t, devs, Options{})
			const skip, n = 99, 20*mib + 77
			const capacity = n + mib
			all := bytesOf(9, skip+n)
			mems := r.devices(capacity)
			file, err := os.Create(filepath.Join(t.TempDir(), "source"))
			require.NoError(t, err)
			defer file.Close()
			_, err = file.Write(all)
			require.NoError(t, err)
			pinned, err := hostmem.Alloc(t.Context(), r.devs[0], len(all), hostmem.Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, pinned.Close()) }()
			copy(pinned.Bytes(), all)
			for what, from := range map[string]io.ReaderAt{
				"file": file, "reader": onlyReaderAt{bytes.NewReader(all)}, "bytes": bytes.NewReader(all), "pinned": bytes.NewReader(pinned.Bytes()),
			} {
				for seed := range uint64(2) {
					pieces, want := piecesAtRandom(seed, mems, all[skip:], capacity)
					r.forget(mems, capacity)
					last := 0
					v := r.f.With(Call{DirectIO: seed == 1, Progress: func(done, total int) { last = done; require.Equal(t, n, total) }})
					done, err := v.UploadPieces(t.Context(), from, skip, n, pieces)
					require.NoError(t, err, what)
					require.Equal(t, n, done, what)
					require.Equal(t, n, last, what)
					for i, dev := range devs {
						got := (&fixture{TB: t, dev: dev}).onDevice(mems[i], capacity)
						require.True(t, bytes.Equal(want[i], got), "%s, %d, %v", what, seed, dev)
					}
				}
			}
			// Of a source that ends, the pieces before are there.
			pieces, want := piecesAtRandom(7, mems, all[skip:], capacity)
			r.forget(mems, capacity)
			const end = 9*mib + 5
			done, err := r.f.UploadPieces(t.Context(), bytes.NewReader(all[:skip+end]), skip, n, pieces)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.Equal(t, end, done)
			for _, p := range pieces {
				if p.Off+p.N > end || p.N == 0 {
					continue
				}
				for i, dev := range devs {
					got := (&fixture{TB: t, dev: dev}).onDevice(p.Dsts[i], p.N)
					require.True(t, bytes.Equal(want[i][p.Dsts[i]-mems[i]:][:p.N], got), "piece at %d", p.Off)
				}
			}
		})
	}
}

func TestPiecesThatAreRefused(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	r := newFanFixture(t, rt.Devices(), Options{})
	mems := r.devices(100)
	at := func(off, n int, dst cudart.DevPtr) Piece {
		return Piece{off, n, []cudart.DevPtr{mems[0] + dst, mems[1] + dst}}
	}
	source := bytes.NewReader(make([]byte, 100))
	for want, pieces := range map[string][]Piece{
		"piece 0: -1 bytes: must not be negative":       {at(0, -1, 0)},
		"piece 1: at byte 5, before the end of the las": {at(0, 6, 0), at(5, 1, 10)},
		"piece 0: at byte -1, before the end":           {at(-1, 1, 0)},
		"piece 0: 2 bytes at 99, of 100 that are read":  {at(99, 2, 0)},
		"piece 0: 0 bytes at 101, of 100 that are read": {at(101, 0, 0)},
		"piece 0: 1 destinations for 2 devices":         {{0, 1, mems[:1]}},
		"piece 0: 1 bytes at 0xffffffffffffffff of dev": {{0, 1, []cudart.DevPtr{math.MaxUint64, 5}}},
		"the destinations of byte 50 on device 0 (":     {at(0, 10, 9), at(50, 10, 0)},
	} {
		done, err := r.f.UploadPieces(t.Context(), source, 0, 100, pieces)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, fmt.Sprintf("transfer: upload %d pieces of 100 bytes from offset 0 of *bytes.Reader onto 2 devices: ", len(pieces)))
		require.Zero(t, done)
	}
	_, err := r.f.UploadPieces(t.Context(), nil, 0, 1, nil)
	require.ErrorContains(t, err, "reader or writer is nil")
	done, err := r.f.UploadPieces(t.Context(), source, 0, 100, nil)
	require.NoError(t, err, "all of it is dropped")
	require.Equal(t, 100, done)
	require.NoError(t, r.f.Close())
	_, err = r.f.UploadPieces(t.Context(), source, 0, 100, nil)
	require.ErrorIs(t, err, cudart.ErrClosed)
}
