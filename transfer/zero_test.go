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
// typed nil, and sizes and offsets out of range. All are errors, and none panics. (A method
// that a nil *Copier or *Fanout has from its embedded view panics in the caller.)
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
	view, err := cudart.ViewOf[int32](owned)
	require.NoError(t, err)
	numbers := []int32{1}

	type calls map[string]func() error
	count := func(_ int, err error) error { return err }
	count64 := func(_ int64, err error) error { return err }
	source := func() io.Reader { return strings.NewReader("0123456789abcdef") }
	// ofView are the methods of a View.
	ofView := func(v *View, ctx context.Context) calls {
		return calls{
			"Upload":              func() error { return v.Upload(ctx, mem, host) },
			"Upload of nothing":   func() error { return v.Upload(ctx, mem, nil) },
			"UploadFrom":          func() error { return count(v.UploadFrom(ctx, mem, bytes.NewReader(host), 0, 16)) },
			"UploadReader":        func() error { return count(v.UploadReader(ctx, mem, source(), 16)) },
			"UploadAll":           func() error { return v.UploadAll(ctx, []Part{{mem, host}}) },
			"UploadSlice":         func() error { return UploadSlice(ctx, v, mem, host) },
			"Download":            func() error { return v.Download(ctx, host, mem) },
			"DownloadNew":         func() error { _, err := v.DownloadNew(ctx, mem, 16); return err },
			"DownloadTo":          func() error { return count(v.DownloadTo(ctx, hooked{host, func() {}}, 0, mem, 16)) },
			"DownloadWriter":      func() error { return count(v.DownloadWriter(ctx, io.Discard, mem, 16)) },
			"DownloadAll":         func() error { return v.DownloadAll(ctx, []Part{{mem, host}}) },
			"DownloadSlice":       func() error { return DownloadSlice(ctx, v, host, mem) },
			"Reader.Read":         func() error { return count(v.NewReader(ctx, mem, 16).Read(host)) },
			"Reader.Read nothing": func() error { return count(v.NewReader(ctx, mem, 16).Read(nil)) },
			"Reader.ReadAt":       func() error { return count(v.NewReader(ctx, mem, 16).ReadAt(host, 0)) },
			"Reader.WriteTo":      func() error { return count64(v.NewReader(ctx, mem, 16).WriteTo(io.Discard)) },
			"Writer.Write":        func() error { return count(v.NewWriter(ctx, mem, 16).Write(host)) },
			"Writer.ReadFrom":     func() error { return count64(v.NewWriter(ctx, mem, 16).ReadFrom(source())) },
		}
	}
	ofFanout := func(v *FanoutView, ctx context.Context) calls {
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
		"nil View":               ofView(nil, ctx),
		"zero View":              ofView(new(View), ctx),
		"view of a zero View":    ofView(new(View).With(Call{}), ctx),
		"view of a nil View":     ofView((*View)(nil).With(Call{}), ctx),
		"zero Copier":            ofView(&zeroCopier.View, ctx),
		"nil context":            ofView(&r.c.View, none),
		"nil FanoutView":         ofFanout(nil, ctx),
		"zero FanoutView":        ofFanout(new(FanoutView), ctx),
		"view of a nil Fanout":   ofFanout((*FanoutView)(nil).With(Call{}), ctx),
		"zero Fanout":            ofFanout(&zeroFanout.FanoutView, ctx),
		"Fanout, nil context":    ofFanout(&f.FanoutView, none),
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
			"UploadSlice, nil":             func() error { return UploadSlice(ctx, nil, mem, []int32{1}) },
			"UploadSlice, nil Copier":      func() error { return UploadSlice(ctx, noCopier, mem, []int32{1}) },
			"UploadSlice, zero Copier":     func() error { return UploadSlice(ctx, &zeroCopier, mem, []int32{1}) },
			"UploadSlice, nil Fanout":      func() error { return UploadSlice(ctx, noFanout, dsts, []int32{1}) },
			"UploadSlice, nil FanoutView":  func() error { return UploadSlice(ctx, (*FanoutView)(nil), dsts, []int32{1}) },
			"UploadSlice, no places":       func() error { return UploadSlice(ctx, f, nil, []int32{1}) },
			"UploadSlice of pointers":      func() error { return UploadSlice(ctx, r.c, mem, []*int{nil}) },
			"UploadSlice of no bytes":      func() error { return UploadSlice(ctx, r.c, mem, []struct{}{{}}) },
			"UploadSlice past the end":     func() error { return UploadSlice(ctx, r.c, cudart.DevPtr(math.MaxUint64-3), []int32{1}) },
			"UploadElements, nil":          func() error { return UploadElements(ctx, nil, view, numbers) },
			"UploadElements, nil Copier":   func() error { return UploadElements(ctx, noCopier, view, numbers) },
			"UploadElements, nil View":     func() error { return UploadElements(ctx, (*View)(nil), view, numbers) },
			"UploadElements, zero Copier":  func() error { return UploadElements(ctx, &zeroCopier, view, numbers) },
			"UploadElements, zero memory":  func() error { return UploadElements(ctx, r.c, cudart.DeviceSlice[int32]{}, numbers) },
			"UploadElements, no context":   func() error { return UploadElements(none, r.c, view, numbers) },
			"DownloadElements, nil":        func() error { return DownloadElements(ctx, nil, numbers, view) },
			"DownloadElements, nil Copier": func() error { return DownloadElements(ctx, noCopier, numbers, view) },
			"DownloadElements, nil View":   func() error { return DownloadElements(ctx, (*View)(nil), numbers, view) },
			"DownloadElements, no memory":  func() error { return DownloadElements(ctx, r.c, numbers, cudart.DeviceSlice[int32]{}) },
			"DownloadSlice, nil":           func() error { return DownloadSlice(ctx, nil, []int32{1}, mem) },
			"DownloadSlice, nil Copier":    func() error { return DownloadSlice(ctx, noCopier, []int32{1}, mem) },
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
			"DownloadNew, negative":        func() error { _, err := r.c.DownloadNew(ctx, mem, -1); return err },
			"DownloadNew, too much":        func() error { _, err := r.c.DownloadNew(ctx, mem, math.MaxInt); return err },
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
		"nil View":       func() { (*View)(nil).Device(); (*View)(nil).Stats(); (*View)(nil).With(Call{}) },
		"zero View":      func() { new(View).Device(); new(View).Stats(); new(View).With(Call{}) },
		"zero Copier":    func() { zeroCopier.Device(); zeroCopier.Stats() },
		"nil FanoutView": func() { (*FanoutView)(nil).Devices(); (*FanoutView)(nil).Stats(); (*FanoutView)(nil).With(Call{}) },
		"zero Fanout":    func() { zeroFanout.Devices(); zeroFanout.Stats() },
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
