package weights_test

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// An unlisted file system opens files, as servers do, and has no directories.
type unlisted struct{ files fs.FS }

func (u unlisted) Open(name string) (fs.File, error) {
	if info, err := fs.Stat(u.files, name); err == nil && info.IsDir() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return u.files.Open(name)
}

// sequential hides the ReadAt of files.
type sequential struct{ fs.FS }

func (s sequential) Open(name string) (fs.File, error) {
	f, err := s.FS.Open(name)
	return struct{ fs.File }{f}, err
}

func mapFS(files map[string][]byte) fstest.MapFS {
	m := fstest.MapFS{}
	for name, content := range files {
		m[name] = &fstest.MapFile{Data: content}
	}
	return m
}

// A model of a file system is the one that its files are on disk, whether the file system lists them or not.
func TestModelsOfFileSystems(t *testing.T) {
	t.Parallel()
	const of = "-of-00003.safetensors"
	parts := shards(t, "model-", of)
	indexed := join(parts, map[string][]byte{"model.safetensors.index.json": indexOf("model-", of)})
	single := map[string][]byte{"model.safetensors": makeSafetensors(t, nil, three...)}
	gguf := ggufParts("m-", "-of-00003.gguf")
	for name, tt := range map[string]struct {
		files map[string][]byte
		path  string
		want  string // "" for the model on disk
		other string // error of a file system that lists nothing
	}{
		"index":           {indexed, "model.safetensors.index.json", "", ""},
		"directory":       {indexed, ".", "", ""},
		"one file":        {single, ".", "", ""},
		"its name":        {single, "model.safetensors", "", ""},
		"a part":          {parts, "model-00002" + of, "", ""},
		"GGUF":            {gguf, "m-00001-of-00003.gguf", "", ""},
		"unusual names":   {gguf, ".", "", "lists no files"},
		"a missing part":  {join(parts, map[string][]byte{"model-00003" + of: nil}), "model-00001" + of, "lacks 1 of its 3 parts", "model-00003"},
		"missing":         {single, "other.gguf", "other.gguf", "other.gguf"},
		"not valid":       {single, "../model.safetensors", "../model.safetensors", "../model.safetensors"},
		"missing indexed": {join(indexed, map[string][]byte{"model-00001" + of: nil}), ".", "named by the index", "named by the index"},
	} {
		files := mapFS(tt.files)
		dir := put(t, tt.files)
		for kind, fsys := range map[string]fs.FS{"listed": files, "unlisted": unlisted{files}, "system": os.DirFS(dir)} {
			what, want := name+", "+kind, tt.want
			if kind == "unlisted" {
				want = tt.other
			}
			m, err := weights.OpenModelFS(fsys, tt.path)
			if want != "" {
				require.ErrorContains(t, err, want, what)
				continue
			}
			require.NoError(t, err, what)
			onDisk := open(t, dir)
			assert.Equal(t, names(onDisk.Tensors()), names(m.Tensors()), what)
			assert.Len(t, m.Files(), len(onDisk.Files()), what)
			require.NoError(t, m.Close(), what)
		}
	}
	_, err := weights.OpenModelFS(sequential{mapFS(single)}, "model.safetensors")
	require.ErrorContains(t, err, "no ReadAt")
	_, err = weights.OpenModelFS(nil, "x")
	require.ErrorContains(t, err, "nil file system")
	_, err = weights.OpenModelFS(mapFS(map[string][]byte{"a.gguf/x": nil}), "a.gguf")
	require.ErrorContains(t, err, "no safetensors or GGUF model")
}

// Files of a model that does not open are closed, also those that were opened before their turn.
func TestFilesOfAModelThatFailsAreClosed(t *testing.T) {
	t.Parallel()
	const of = "-of-00003.safetensors"
	files := shards(t, "model-", of)
	files["model-00001"+of] = []byte("no weights file at all")
	dir := put(t, files)
	before := len(openFiles(t, dir))
	_, err := weights.OpenModelFS(os.DirFS(dir), "model-00002"+of)
	var format *weights.FormatError
	require.ErrorAs(t, err, &format)
	require.Len(t, openFiles(t, dir), before)
}

// foreignFS calls a function before each file is opened.
type foreignFS struct {
	fs.FS
	before func()
}

func (f foreignFS) Open(name string) (fs.File, error) {
	f.before()
	return f.FS.Open(name)
}

// An index that names many files which are missing is refused at the first ones.
func TestFewMissingFilesAreOpened(t *testing.T) {
	t.Parallel()
	var index strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&index, `,"t%d":"f%d.safetensors"`, i, i)
	}
	files := mapFS(map[string][]byte{"model.safetensors.index.json": []byte(`{"weight_map":{` + index.String()[1:] + "}}")})
	var opens atomic.Int64
	_, err := weights.OpenModelFS(foreignFS{unlisted{files}, func() { opens.Add(1) }}, "model.safetensors.index.json")
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "named by the index")
	require.Less(t, opens.Load(), int64(100))
}

// A file system that panics makes an error, although its files are opened by other goroutines; one that ends these is
// called by the caller's.
func TestFileSystemsThatPanicOrExit(t *testing.T) {
	t.Parallel()
	files := mapFS(shards(t, "model-", "-of-00003.safetensors"))
	// afterTwo calls a function at the opens that follow those of the path and of its directory.
	afterTwo := func(times int64, do func()) fs.FS {
		opens := new(atomic.Int64)
		return foreignFS{unlisted{files}, func() {
			if n := opens.Add(1) - 2; n > 0 && n <= times {
				do()
			}
		}}
	}
	_, err := weights.OpenModelFS(afterTwo(3, func() { panic("boom") }), "model-00001-of-00003.safetensors")
	require.ErrorContains(t, err, "panic: boom")
	m, err := weights.OpenModelFS(afterTwo(3, runtime.Goexit), "model-00001-of-00003.safetensors")
	require.NoError(t, err)
	require.Len(t, m.Files(), 3)
	require.NoError(t, m.Close())
}

// A model of a file system loads as one of files does.
func TestModelOfAFileSystemLoads(t *testing.T) {
	t.Parallel()
	content := map[string][]byte{"model.safetensors": makeSafetensors(t, nil, three...)}
	devs := devicesOf(t, 1)
	m, err := weights.OpenModelFS(mapFS(content), "model.safetensors")
	require.NoError(t, err)
	plan, err := weights.NewPlan(m.Tensors(), nil, weights.PlanOptions{})
	require.NoError(t, err)
	l, err := plan.LoadNew(t.Context(), devs, weights.LoadOptions{})
	require.NoError(t, err)
	for p := range l.All() {
		at, err := p.Ptr()
		require.NoError(t, err)
		want := make([]byte, p.Size)
		_, err = p.Tensor.File.Reader().ReadAt(want, p.Tensor.Offset)
		if err != io.EOF {
			require.NoError(t, err)
		}
		require.Equal(t, want, onDevice(t, weights.Memory{Device: devs[0], Ptr: at, Bytes: p.Size}))
	}
	require.NoError(t, l.Close())
	require.NoError(t, m.Close())
}
