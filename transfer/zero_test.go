package transfer

import (
	"bytes"
	"context"
	"io"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

// The exported functions and methods, with values that nobody should pass: zero ones, nil,
// typed nil, and sizes and offsets out of range. All are errors, and none panics.
func TestZeroNilAndOutOfRangeAreErrors(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, twoDevices)
	devs := rt.Devices()
	r := fixtureOn(t, devs[0], Options{})
	f, err := NewFanout(t.Context(), devs, Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, f.Close()) }()
	mem, host, ctx := r.device(16), make([]byte, 16), t.Context()
	dsts := []cudart.DevPtr{mem, (&fixture{TB: t, dev: devs[1]}).device(16)}
	var none context.Context

	owned, err := devs[0].Alloc(64)
	require.NoError(t, err)
	defer func() { assert.NoError(t, owned.Close()) }()

	type calls map[string]func() error
	count := func(_ int, err error) error { return err }
	count64 := func(_ int64, err error) error { return err }
	source := func() io.Reader { return strings.NewReader("0123456789abcdef") }
	// ofView are the methods of a Copier.
	ofView := func(v *Copier, ctx context.Context) calls {
		return calls{
			"Upload":              func() error { return v.Upload(ctx, mem, host) },
			"Upload of nothing":   func() error { return v.Upload(ctx, mem, nil) },
			"UploadFrom":          func() error { return count(v.UploadFrom(ctx, mem, bytes.NewReader(host), 0, 16)) },
			"UploadReader":        func() error { return count(v.UploadReader(ctx, mem, source(), 16)) },
			"UploadAll":           func() error { return v.UploadAll(ctx, []Part{{mem, host}}) },
			"Download":            func() error { return v.Download(ctx, host, mem) },
			"DownloadTo":          func() error { return count(v.DownloadTo(ctx, hooked{host, func() {}}, 0, mem, 16)) },
			"DownloadWriter":      func() error { return count(v.DownloadWriter(ctx, io.Discard, mem, 16)) },
			"DownloadAll":         func() error { return v.DownloadAll(ctx, []Part{{mem, host}}) },
			"Reader.Read":         func() error { return count(v.NewReader(ctx, mem, 16).Read(host)) },
			"Reader.Read nothing": func() error { return count(v.NewReader(ctx, mem, 16).Read(nil)) },
			"Reader.ReadAt":       func() error { return count(v.NewReader(ctx, mem, 16).ReadAt(host, 0)) },
			"Reader.WriteTo":      func() error { return count64(v.NewReader(ctx, mem, 16).WriteTo(io.Discard)) },
			"Writer.Write":        func() error { return count(v.NewWriter(ctx, mem, 16).Write(host)) },
			"Writer.ReadFrom":     func() error { return count64(v.NewWriter(ctx, mem, 16).ReadFrom(source())) },
		}
	}
	ofFanout := func(v *Fanout, ctx context.Context) calls {
		return calls{
			"Upload":       func() error { return v.Upload(ctx, dsts, host) },
			"UploadFrom":   func() error { return count(v.UploadFrom(ctx, dsts, bytes.NewReader(host), 0, 16)) },
			"UploadReader": func() error { return count(v.UploadReader(ctx, dsts, source(), 16)) },
			"UploadPieces": func() error {
				return count(v.UploadPieces(ctx, bytes.NewReader(host), 0, 16, []Piece{{N: 16, Dsts: dsts}}))
			},
		}
	}
	// ofSource are the methods that take a source, ofTarget those that take a target.
	ofSource := func(from io.ReaderAt) calls {
		c := calls{
			"UploadFrom":        func() error { return count(r.c.UploadFrom(ctx, mem, from, 0, 16)) },
			"Fanout.UploadFrom": func() error { return count(f.UploadFrom(ctx, dsts, from, 0, 16)) },
			"Fanout.UploadPieces": func() error {
				return count(f.UploadPieces(ctx, from, 0, 16, []Piece{{N: 16, Dsts: dsts}}))
			},
		}
		from2, ok := from.(io.Reader)
		if from == nil || ok {
			c["UploadReader"] = func() error { return count(r.c.UploadReader(ctx, mem, from2, 16)) }
			c["Fanout.UploadReader"] = func() error { return count(f.UploadReader(ctx, dsts, from2, 16)) }
			c["Writer.ReadFrom"] = func() error { return count64(r.c.NewWriter(ctx, mem, 16).ReadFrom(from2)) }
		}
		return c
	}
	ofTarget := func(to any) calls {
		c := calls{}
		if to, ok := to.(io.WriterAt); ok || to == nil {
			c["DownloadTo"] = func() error { return count(r.c.DownloadTo(ctx, to, 0, mem, 16)) }
		}
		if to, ok := to.(io.Writer); ok || to == nil {
			c["DownloadWriter"] = func() error { return count(r.c.DownloadWriter(ctx, to, mem, 16)) }
			c["Reader.WriteTo"] = func() error { return count64(r.c.NewReader(ctx, mem, 16).WriteTo(to)) }
		}
		return c
	}
	pieces := func(list ...Piece) error {
		return count(f.UploadPieces(ctx, bytes.NewReader(host), 0, 16, list))
	}
	var noCopier *Copier
	var noFanout *Fanout
	var zeroCopier Copier
	var zeroFanout Fanout
	var noReader *Reader
	var noWriter *Writer
	var zeroReader Reader
	var zeroWriter Writer
	all := map[string]calls{
		"nil Copier":             ofView(nil, ctx),
		"zero Copier":            ofView(new(Copier), ctx),
		"view of a zero Copier":  ofView(new(Copier).With(Call{}), ctx),
		"view of a nil Copier":   ofView((*Copier)(nil).With(Call{}), ctx),
		"nil context":            ofView(r.c, none),
		"nil Fanout":             ofFanout(nil, ctx),
		"zero Fanout":            ofFanout(new(Fanout), ctx),
		"view of a nil Fanout":   ofFanout((*Fanout)(nil).With(Call{}), ctx),
		"Fanout, nil context":    ofFanout(f, none),
		"zero stream":            ofView(r.c.With(Call{Stream: new(cudart.Stream)}), ctx),
		"Fanout, zero stream":    ofFanout(f.With(Call{Stream: new(cudart.Stream)}), ctx),
		"nil source":             ofSource(nil),
		"nil file":               ofSource((*os.File)(nil)),
		"zero file":              ofSource(new(os.File)),
		"nil section":            ofSource((*io.SectionReader)(nil)),
		"zero section":           ofSource(new(io.SectionReader)),
		"section of nil":         ofSource(io.NewSectionReader(nil, 0, 16)),
		"section of a nil file":  ofSource(io.NewSectionReader((*os.File)(nil), 0, 16)),
		"section of a zero file": ofSource(io.NewSectionReader(new(os.File), 0, 16)),
		"nil bytes.Reader":       ofSource((*bytes.Reader)(nil)),
		"zero bytes.Reader":      ofSource(new(bytes.Reader)),
		"nil strings.Reader":     ofSource((*strings.Reader)(nil)),
		"nil of another type":    ofSource((*hookedStream)(nil)),
		"no target":              ofTarget(nil),
		"to a nil file":          ofTarget((*os.File)(nil)),
		"to a zero file":         ofTarget(new(os.File)),
		"to a nil buffer":        ofTarget((*bytes.Buffer)(nil)),
		"to a nil writer":        ofTarget((*io.OffsetWriter)(nil)),
		"to a zero writer":       ofTarget(new(io.OffsetWriter)),
		"to nil of another type": ofTarget((*hookedStream)(nil)),
		"functions": {
			"NewCopier without a device":   func() error { _, err := NewCopier(ctx, nil, Options{}); return err },
			"NewCopier with a zero device": func() error { _, err := NewCopier(ctx, new(cudart.Device), Options{}); return err },
			"NewCopier without a context":  func() error { _, err := NewCopier(none, devs[0], Options{}); return err },
			"NewFanout without devices":    func() error { _, err := NewFanout(ctx, nil, Options{}); return err },
			"NewFanout with no device":     func() error { _, err := NewFanout(ctx, []*cudart.Device{devs[0], nil}, Options{}); return err },
			"NewFanout with a zero device": func() error { _, err := NewFanout(ctx, []*cudart.Device{new(cudart.Device)}, Options{}); return err },
			"NewFanout without a context":  func() error { _, err := NewFanout(none, devs, Options{}); return err },
			"Options":                      Options{Workers: -1}.validate,
		},
		"closing": {
			"nil Copier":                      noCopier.Close,
			"nil Copier, CloseContext":        func() error { return noCopier.CloseContext(ctx) },
			"zero Copier":                     zeroCopier.Close,
			"zero Copier, CloseContext":       func() error { return zeroCopier.CloseContext(ctx) },
			"Copier without a context":        func() error { return r.c.CloseContext(none) },
			"nil Fanout":                      noFanout.Close,
			"nil Fanout, CloseContext":        func() error { return noFanout.CloseContext(ctx) },
			"zero Fanout":                     zeroFanout.Close,
			"zero Fanout, CloseContext":       func() error { return zeroFanout.CloseContext(ctx) },
			"Fanout without a context":        func() error { return f.CloseContext(none) },
			"nil Fanout without a context":    func() error { return noFanout.CloseContext(none) },
			"nil Copier without a context":    func() error { return noCopier.CloseContext(none) },
			"zero Copier, nil context, twice": func() error { return zeroCopier.CloseContext(none) },
		},
		"streams": {
			"nil Reader, Read":      func() error { return count(noReader.Read(host)) },
			"nil Reader, ReadAt":    func() error { return count(noReader.ReadAt(host, 0)) },
			"nil Reader, WriteTo":   func() error { return count64(noReader.WriteTo(io.Discard)) },
			"zero Reader, Read":     func() error { return count(zeroReader.Read(host)) },
			"zero Reader, ReadAt":   func() error { return count(zeroReader.ReadAt(host, 0)) },
			"zero Reader, WriteTo":  func() error { return count64(zeroReader.WriteTo(io.Discard)) },
			"nil Writer, Write":     func() error { return count(noWriter.Write(host)) },
			"nil Writer, ReadFrom":  func() error { return count64(noWriter.ReadFrom(source())) },
			"zero Writer, Write":    func() error { return count(zeroWriter.Write(host)) },
			"zero Writer, ReadFrom": func() error { return count64(zeroWriter.ReadFrom(source())) },
			"negative Reader":       func() error { return count(r.c.NewReader(ctx, mem, -1).Read(host)) },
			"negative ReadAt":       func() error { return count(r.c.NewReader(ctx, mem, 16).ReadAt(host, math.MinInt64)) },
			"ReadAt far behind":     func() error { return count(r.c.NewReader(ctx, mem, 16).ReadAt(host, math.MaxInt64)) },
			"negative Writer":       func() error { return count(r.c.NewWriter(ctx, mem, math.MinInt).Write(host)) },
		},
		"sizes": {
			"UploadFrom, negative":   func() error { return count(r.c.UploadFrom(ctx, mem, bytes.NewReader(host), 0, math.MinInt)) },
			"UploadFrom, too much":   func() error { return count(r.c.UploadFrom(ctx, mem, bytes.NewReader(host), 0, math.MaxInt)) },
			"UploadFrom, offset":     func() error { return count(r.c.UploadFrom(ctx, mem, bytes.NewReader(host), math.MinInt64, 1)) },
			"UploadFrom, far offset": func() error { return count(r.c.UploadFrom(ctx, mem, bytes.NewReader(host), math.MaxInt64-1, 1)) },
			"UploadFrom, section": func() error {
				return count(r.c.UploadFrom(ctx, mem, io.NewSectionReader(bytes.NewReader(host), 4, math.MaxInt64), math.MaxInt64-8, 8))
			},
			"UploadReader, negative":       func() error { return count(r.c.UploadReader(ctx, mem, source(), -1)) },
			"UploadReader, too much":       func() error { return count(r.c.UploadReader(ctx, mem, onlyReader{source()}, math.MaxInt)) },
			"DownloadTo, negative":         func() error { return count(r.c.DownloadTo(ctx, hooked{host, func() {}}, 0, mem, -1)) },
			"DownloadTo, offset":           func() error { return count(r.c.DownloadTo(ctx, hooked{host, func() {}}, math.MaxInt64, mem, 1)) },
			"DownloadTo, offset and panic": func() error { return count(r.c.DownloadTo(ctx, hooked{host, func() {}}, 1<<62, mem, 1)) },
			"DownloadWriter, negative":     func() error { return count(r.c.DownloadWriter(ctx, io.Discard, mem, -1)) },
			"DownloadWriter, too much":     func() error { return count(r.c.DownloadWriter(ctx, new(bytes.Buffer), mem, math.MaxInt)) },
			"Fanout, no places":            func() error { return f.Upload(ctx, nil, host) },
			"Fanout, a place too few":      func() error { return f.Upload(ctx, dsts[:1], host) },
			"Fanout, negative":             func() error { return count(f.UploadFrom(ctx, dsts, bytes.NewReader(host), 0, -1)) },
			"Fanout, far places":           func() error { return f.Upload(ctx, []cudart.DevPtr{math.MaxUint64, math.MaxUint64 - 20}, host) },
			"pieces, negative":             func() error { return pieces(Piece{N: -1, Dsts: dsts}) },
			"pieces, negative offset":      func() error { return pieces(Piece{Off: math.MinInt, N: 1, Dsts: dsts}) },
			"pieces, too far":              func() error { return pieces(Piece{Off: 1, N: math.MaxInt, Dsts: dsts}) },
			"pieces, far places":           func() error { return pieces(Piece{N: 16, Dsts: []cudart.DevPtr{math.MaxUint64, 1}}) },
			"pieces, no places":            func() error { return pieces(Piece{N: 16}) },
		},
	}
	delete(all["zero bytes.Reader"], "Writer.ReadFrom") // it is empty, and that is no error
	for group, calls := range all {
		for name, call := range calls {
			what := group + ": " + name
			assert.NotPanics(t, func() { assert.Error(t, call(), what) }, what)
		}
	}
	for name, call := range map[string]func(){
		"nil Copier":  func() { (*Copier)(nil).Device(); (*Copier)(nil).Stats(); (*Copier)(nil).With(Call{}) },
		"zero Copier": func() { new(Copier).Device(); new(Copier).Stats(); new(Copier).With(Call{}) },
		"nil Fanout":  func() { (*Fanout)(nil).Stats(); (*Fanout)(nil).With(Call{}) },
		"zero Fanout": func() { zeroFanout.Stats() },
		"streams": func() {
			assert.Zero(t, noReader.Len()+noWriter.Len()+zeroReader.Len()+zeroWriter.Len())
			assert.Zero(t, r.c.NewReader(ctx, mem, -1).Len()+r.c.NewWriter(ctx, mem, -1).Len())
		},
	} {
		require.NotPanics(t, call, name)
	}
	require.NoError(t, r.c.Upload(ctx, mem, host), "all still works")
	require.NoError(t, f.Upload(ctx, dsts, host))
}
