package weights_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// put writes files into a new directory.
func put(t testing.TB, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, content, 0o600))
	}
	return dir
}

func open(t testing.TB, path string) *weights.Model {
	t.Helper()
	m, err := weights.OpenModel(path)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

func names(tensors func(func(*weights.Tensor) bool)) []string {
	all := []string{}
	for t := range tensors {
		all = append(all, t.Name)
	}
	return all
}

func fileNames(m *weights.Model) []string {
	var all []string
	for _, f := range m.Files() {
		all = append(all, filepath.Base(f.Name()))
	}
	return all
}

// three are the tensors of the models below.
var three = []spec{
	{"b", weights.BF16, []int{4, 8}},
	{"c", weights.F32, []int{3}},
	{"a", weights.I8, []int{5}},
}

func TestOpenFileReadsRegularFilesOnly(t *testing.T) {
	t.Parallel()
	dir := put(t, map[string][]byte{"x": makeSafetensors(t, nil, three...), "bad": []byte("no weights")})
	f, err := weights.OpenFile(filepath.Join(dir, "x"))
	require.NoError(t, err)
	checkTensors(t, f, three...)
	assert.Equal(t, filepath.Join(dir, "x"), f.Name())
	assert.IsType(t, (*os.File)(nil), f.Reader())
	info, err := os.Stat(f.Name())
	require.NoError(t, err)
	assert.Equal(t, info.Size(), f.Size())

	require.NoError(t, f.Close())
	assert.ErrorIs(t, f.Close(), os.ErrClosed)
	tensor, ok := f.Tensor("a")
	require.True(t, ok, "the header stays")
	_, err = f.Reader().ReadAt(make([]byte, tensor.Size), tensor.Offset)
	assert.ErrorIs(t, err, os.ErrClosed)

	_, err = weights.OpenFile(filepath.Join(dir, "none"))
	assert.ErrorIs(t, err, fs.ErrNotExist)
	assert.ErrorContains(t, err, "weights: ")
	_, err = weights.OpenFile(dir)
	assert.ErrorContains(t, err, "not a regular file (d")
	_, err = weights.OpenFile(filepath.Join(dir, "bad"))
	var refused *weights.FormatError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, filepath.Join(dir, "bad"), refused.File)
}

func TestIndexNamesTheFilesOfTensors(t *testing.T) {
	t.Parallel()
	files := map[string][]byte{
		"model-00001.safetensors":     makeSafetensors(t, nil, three[0], spec{"old", weights.U8, []int{2}}, spec{"a", weights.U8, []int{9}}),
		"sub/model-00002.safetensors": makeSafetensors(t, nil, three[1:]...),
		"model.safetensors":           makeSafetensors(t, nil, spec{"stray", weights.U8, []int{1}}),
		"model.safetensors.index.json": []byte(`{"metadata":{"total_size":1,"x":[{"y":null}]},"weight_map":{
			"c":"sub/model-00002.safetensors","b":"model-00001.safetensors","a":"sub/model-00002.safetensors"},"more":1.5}`),
	}
	dir := put(t, files)
	for _, path := range []string{dir, filepath.Join(dir, "model.safetensors.index.json")} {
		m := open(t, path)
		assert.Equal(t, []string{"model-00001.safetensors", "model-00002.safetensors"}, fileNames(m))
		assert.Equal(t, []string{"b", "c", "a"}, names(m.Tensors()), "by file and offset")
		a, ok := m.Tensor("a")
		require.True(t, ok)
		assert.Equal(t, weights.I8, a.DType)
		assert.Same(t, m.Files()[1], a.File)
		_, ok = m.Tensor("old")
		assert.False(t, ok)
		for range m.Tensors() {
			break
		}
		for _, f := range m.Files() {
			checkFile(t, f)
		}
		require.NoError(t, m.Close())
		assert.ErrorIs(t, m.Close(), os.ErrClosed)
	}
}

func TestMalformedIndexesAreRefused(t *testing.T) {
	t.Parallel()
	file := makeSafetensors(t, nil, three...)
	for name, tt := range map[string]struct{ index, tensor, reason string }{
		"empty":                {``, "", "the index is not JSON: unexpected end of JSON input at byte 0"},
		"not UTF-8":            {"{\"\xff\":1}", "", "the index is not UTF-8"},
		"an array":             {`[]`, "", "the index is an array, want an object"},
		"no map":               {`{"metadata":{}}`, "", "the index has no weight_map"},
		"map a string":         {`{"weight_map":"x"}`, "", `weight_map is the string "x", want an object`},
		"map twice":            {`{"weight_map":{},"weight_map":{}}`, "", `the index has the key "weight_map" twice`},
		"tensor twice":         {`{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}`, "", `weight_map has the key "a" twice`},
		"file a number":        {`{"weight_map":{"a":1}}`, "", `the file of tensor "a" is the number 1, want a string`},
		"file outside":         {`{"weight_map":{"a":"../x.safetensors"}}`, "a", `its file is "../x.safetensors", want a path within the index's directory`},
		"file outside, hidden": {`{"weight_map":{"a":"y/../../x.safetensors"}}`, "a", `its file is "y/../../x.safetensors", want a path within the index's directory`},
		"absolute file":        {`{"weight_map":{"a":"/etc/passwd"}}`, "a", `its file is "/etc/passwd", want a path within the index's directory`},
		"empty file":           {`{"weight_map":{"a":""}}`, "a", `its file is "", want a path within the index's directory`},
		"text behind":          {`{"weight_map":{}}}`, "", "the index is not JSON: invalid character '}' after top-level value at byte 17"},
		"nested deeply in a field that is skipped": {`{"metadata":` + strings.Repeat(`[`, 20000) + strings.Repeat(`]`, 20000) + `}`, "", "the index is not JSON: invalid character '[' exceeded max depth at byte 10011"},
		"cut off":                            {`{"weight_map":{"a":"x.safetensors"`, "", "the index is not JSON: unexpected end of JSON input at byte 33"},
		"cut off in a field that is skipped": {`{"metadata":[1`, "", "the index is not JSON: unexpected end of JSON input at byte 13"},
		"half a name":                        {`{"weight_map":{"\ud83d":"x.safetensors"}}`, "", "the index has half of a surrogate pair at byte 16"},
	} {
		path := filepath.Join(put(t, map[string][]byte{"x.safetensors": file, "m.safetensors.index.json": []byte(tt.index)}), "m.safetensors.index.json")
		m, err := weights.OpenModel(path)
		assert.Nil(t, m, name)
		var refused *weights.FormatError
		if !assert.ErrorAs(t, err, &refused, name) {
			continue
		}
		if start, cut := strings.CutSuffix(tt.reason, "..."); cut && strings.HasPrefix(refused.Reason, start) {
			tt.reason = refused.Reason
		}
		assert.Equal(t, &weights.FormatError{File: path, Tensor: tt.tensor, Reason: tt.reason}, refused, name)
	}
}

// A file may be a link to anywhere, as in Hugging Face's cache. A folder may be one within
// the model's directory.
func TestLinksOutOfTheModelAreRefused(t *testing.T) {
	t.Parallel()
	file := makeSafetensors(t, nil, three...)
	dir := put(t, map[string][]byte{
		"blobs/0123":              file,
		"blobs/index":             []byte(`{"weight_map":{"a":"model.safetensors"}}`),
		"snapshots/rev/README.md": nil,
		"m/real/x.safetensors":    file,
		"outside/x.safetensors":   file,
		"m-too/x.safetensors":     file,
	})
	link := func(to, name string) {
		if err := os.Symlink(filepath.FromSlash(to), filepath.Join(dir, filepath.FromSlash(name))); err != nil {
			t.Skipf("the system makes no symbolic links: %v", err)
		}
	}
	link("../../blobs/0123", "snapshots/rev/model.safetensors")
	link("../../blobs/index", "snapshots/rev/model.safetensors.index.json")
	link("snapshots/rev", "current")
	for _, path := range []string{"snapshots/rev", "current", "current/model.safetensors.index.json", "current/model.safetensors"} {
		assert.Equal(t, []string{"model.safetensors"}, fileNames(open(t, filepath.Join(dir, path))), path)
	}

	link("real", "m/linked")
	link(filepath.Join(dir, "m", "real"), "m/absolute")
	link("../outside", "m/out")
	link("../m-too", "m/sibling")
	link("linked/..", "m/itself")
	link(filepath.Join(dir, "outside"), "m/real/out")
	link("/", "m/root")
	link("nowhere", "m/dangling")
	link("loop", "m/loop")
	index := filepath.Join(dir, "m", "model.safetensors.index.json")
	here, err := os.Getwd()
	require.NoError(t, err)
	relative, err := filepath.Rel(here, filepath.Join(dir, "m"))
	require.NoError(t, err)
	for folder, want := range map[string]string{
		"real": "", "linked": "", "absolute": "", "itself/linked": "", "itself": "x.safetensors: no such file",
		"out": "link out", "sibling": "link out", "linked/out": "link out", "absolute/out": "link out", "root": "link out", "itself/../../out": "want a path",
		"dangling": "x.safetensors: no such file", "loop": "x.safetensors: too many levels",
	} {
		name := folder + "/x.safetensors"
		require.NoError(t, os.WriteFile(index, []byte(`{"weight_map":{"a":"`+name+`"}}`), 0o600))
		m, err := weights.OpenModel(filepath.Join(dir, "m"))
		if want == "" {
			require.NoError(t, err, folder)
			require.NoError(t, m.Close())
			m, err = weights.OpenModel(relative)
			require.NoError(t, err, folder)
			require.NoError(t, m.Close())
			continue
		}
		assert.Nil(t, m)
		assert.ErrorContains(t, err, want, folder)
		var refused *weights.FormatError
		if assert.Equal(t, !strings.Contains(want, ":"), errors.As(err, &refused), folder) && refused != nil && want == "link out" {
			assert.Equal(t, &weights.FormatError{File: index, Tensor: "a", Reason: `its file is "` + name + `", whose folder is a link out of the index's directory`}, refused)
		}
	}
}

func TestIndexWithoutMatchingFilesIsRefused(t *testing.T) {
	t.Parallel()
	const index = "model.safetensors.index.json"
	dir := put(t, map[string][]byte{
		"x.safetensors": makeSafetensors(t, nil, three...),
		index:           []byte(`{"weight_map":{"a":"x.safetensors","missing":"x.safetensors"}}`),
	})
	_, err := weights.OpenModel(dir)
	var refused *weights.FormatError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, filepath.Join(dir, "x.safetensors"), refused.File)
	assert.Equal(t, "missing", refused.Tensor)
	assert.Equal(t, "the file has no such tensor, "+filepath.Join(dir, index)+" says that it has", refused.Reason)

	require.NoError(t, os.WriteFile(filepath.Join(dir, index), []byte(`{"weight_map":{"a":"x.safetensors","y":"y.safetensors"}}`), 0o600))
	_, err = weights.OpenModel(dir)
	assert.ErrorIs(t, err, fs.ErrNotExist)
	assert.ErrorContains(t, err, "y.safetensors: no such file or directory (named by the index "+filepath.Join(dir, index)+")")

	require.NoError(t, os.WriteFile(filepath.Join(dir, "y.safetensors"), []byte("12345678"), 0o600))
	_, err = weights.OpenModel(dir)
	require.ErrorAs(t, err, &refused, "a file that the index names is bad")
	assert.Equal(t, filepath.Join(dir, "y.safetensors"), refused.File)
	assert.Empty(t, openFiles(t, dir), "all that was opened is closed")

	require.NoError(t, os.Truncate(filepath.Join(dir, index), 100_000_001))
	_, err = weights.OpenModel(dir)
	assert.ErrorContains(t, err, "the index has 100000001 bytes, want at most 100000000")
}

// openFiles lists which files below a directory the process has open, where the
// system shows that.
func openFiles(t *testing.T, dir string) []string {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Logf("open files are not checked: %v", err)
	}
	dir, err = filepath.EvalSymlinks(dir)
	require.NoError(t, err)
	var open []string
	for _, e := range entries {
		if path, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(path, dir) {
			open = append(open, filepath.Base(path))
		}
	}
	slices.Sort(open)
	return open
}

// splitFiles makes the parts of a GGUF model that has the tensors of three.
func splitFiles(version uint32) map[string][]byte {
	files := map[string][]byte{}
	for i, s := range three {
		g := newGGUF(version, 1, 4)
		g.pair("split.no", ggufU16).u16(uint16(i))
		g.pair("split.count", ggufU16).u16(3)
		g.pair("split.tensors.count", ggufI32).u32(3)
		files[fmt.Sprintf("m-0000%d-of-00003.gguf", i+1)] = writeGGUF(g, 32, s)
	}
	return files
}

func TestSplitModelHasAllParts(t *testing.T) {
	t.Parallel()
	dir := put(t, splitFiles(3))
	for _, path := range []string{"", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"} {
		m := open(t, filepath.Join(dir, path))
		assert.Equal(t, []string{"m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"}, fileNames(m), path)
		assert.Equal(t, []string{"b", "c", "a"}, names(m.Tensors()))
		for i, f := range m.Files() {
			checkTensors(t, f, three[i])
		}
		if runtime.GOOS == "linux" {
			assert.Equal(t, fileNames(m), openFiles(t, dir))
		}
		require.NoError(t, m.Close())
		assert.Empty(t, openFiles(t, dir))
	}
	f, err := weights.OpenFile(filepath.Join(dir, "m-00002-of-00003.gguf"))
	require.NoError(t, err)
	assert.Equal(t, []string{"c"}, names(f.Tensors()), "OpenFile opens one")
	require.NoError(t, f.Close())
}

func TestFileOfOnePartIsAModel(t *testing.T) {
	t.Parallel()
	for name, file := range map[string][]byte{
		"no parts":    writeGGUF(newGGUF(3, 3, 2).pair("split.count", ggufU16).u16(0), 32, three...),
		"one part":    writeGGUF(newGGUF(3, 3, 2).pair("split.count", ggufU16).u16(1), 32, three...),
		"safetensors": makeSafetensors(t, map[string]string{"split.count": "3"}, three...),
	} {
		m := open(t, filepath.Join(put(t, map[string][]byte{"file": file}), "file"))
		assert.Equal(t, []string{"b", "c", "a"}, names(m.Tensors()), name)
	}
}

func TestInvalidSplitModelsAreRefused(t *testing.T) {
	t.Parallel()
	part := func(no, count, tensors uint32, specs ...spec) []byte {
		g := newGGUF(3, uint64(len(specs)), 4)
		g.pair("split.no", ggufU16).u16(uint16(no))
		g.pair("split.count", ggufU16).u16(uint16(count))
		g.pair("split.tensors.count", ggufI32).u32(tensors)
		return writeGGUF(g, 32, specs...)
	}
	odd := writeGGUF(newGGUF(3, 0, 2).pair("split.count", ggufU32).u32(3), 32)
	oddNumber := writeGGUF(newGGUF(3, 0, 3).pair("split.count", ggufU16).u16(3).pair("split.no", ggufU32).u32(1), 32)
	for name, tt := range map[string]struct {
		path    string
		change  map[string][]byte
		file    string
		reason  string
		missing bool
	}{
		"a part missing":            {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": nil}, "", "m-00001-of-00003.gguf: file does not exist: the model lacks 1 of its 3 parts: m-00002-of-00003.gguf", true},
		"a part of another":         {"m-00001-of-00003.gguf", map[string][]byte{"m-00003-of-00003.gguf": part(1, 3, 3, three[2])}, "m-00003-of-00003.gguf", "split.no is 1 and split.count is 3, want 2 and 3 by the file's name", false},
		"another count":             {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": part(1, 4, 3, three[1])}, "m-00002-of-00003.gguf", "split.no is 1 and split.count is 4, want 1 and 3 by the file's name", false},
		"no part":                   {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": makeGGUF(3, 32, three[1])}, "m-00002-of-00003.gguf", "split.no is 0 and split.count is 0, want 1 and 3 by the file's name", false},
		"too few tensors":           {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": part(1, 3, 3)}, "m-00001-of-00003.gguf", "split.tensors.count is 3, the 3 parts have 2 tensors", false},
		"too many tensors":          {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": part(1, 3, 3, three[1], u8("d", 1))}, "m-00001-of-00003.gguf", "split.tensors.count is 3, the 3 parts have 4 tensors", false},
		"a tensor twice":            {"m-00001-of-00003.gguf", map[string][]byte{"m-00003-of-00003.gguf": part(2, 3, 3, three[0])}, "m-00003-of-00003.gguf", "m-00001-of-00003.gguf has a tensor of this name too", false},
		"another name":              {"x.gguf", map[string][]byte{"x.gguf": part(0, 3, 3, three[0])}, "x.gguf", "the file is one of 3 parts of a model, want a name that ends in -00001-of-00003.gguf or the number of another part", false},
		"number past the end":       {"m-00004-of-00003.gguf", map[string][]byte{"m-00004-of-00003.gguf": part(3, 3, 3, three[0])}, "m-00004-of-00003.gguf", "its name has the number 4 of 3 parts, want 1 to 3", false},
		"number 0":                  {"m-00000-of-00003.gguf", map[string][]byte{"m-00000-of-00003.gguf": part(0, 3, 3, three[0])}, "m-00000-of-00003.gguf", "its name has the number 0 of 3 parts, want 1 to 3", false},
		"another total":             {"m-00001-of-00004.gguf", map[string][]byte{"m-00001-of-00004.gguf": part(0, 3, 3, three[0])}, "", "m-00001-of-00004.gguf: file does not exist: the model lacks 3 of its 4 parts: m-00002-of-00004.gguf, m-00003-of-00004.gguf, m-00004-of-00004.gguf", true},
		"another total, all there":  {"m-00001-of-00001.gguf", map[string][]byte{"m-00001-of-00001.gguf": part(0, 3, 3, three[0])}, "m-00001-of-00001.gguf", "the file is one of 3 parts of a model, want a name that ends in -00001-of-00003.gguf or the number of another part", false},
		"one of one by its keys":    {"m-00001-of-00003.gguf", map[string][]byte{"m-00001-of-00003.gguf": part(0, 1, 1, three[0])}, "m-00001-of-00003.gguf", "split.no is 0 and split.count is 1, want 0 and 3 by the file's name", false},
		"count a uint32":            {"odd.gguf", map[string][]byte{"odd.gguf": odd}, "odd.gguf", "split.count is of type uint32, want uint16", false},
		"count of another a uint32": {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": odd}, "m-00002-of-00003.gguf", "split.count is of type uint32, want uint16", false},
		"number a uint32":           {"m-00001-of-00003.gguf", map[string][]byte{"m-00002-of-00003.gguf": oddNumber}, "m-00002-of-00003.gguf", "split.no is of type uint32, want uint16", false},
		"a part is bad":             {"m-00003-of-00003.gguf", map[string][]byte{"m-00001-of-00003.gguf": []byte("GGUFxxxxx")}, "m-00001-of-00003.gguf", "GGUF version", false},
	} {
		t.Run(name, func(t *testing.T) {
			files := splitFiles(3)
			for file, content := range tt.change {
				if files[file] = content; content == nil {
					delete(files, file)
				}
			}
			dir := put(t, files)
			m, err := weights.OpenModel(filepath.Join(dir, tt.path))
			assert.Nil(t, m)
			require.Error(t, err)
			assert.ErrorContains(t, err, tt.reason)
			assert.Equal(t, tt.missing, errors.Is(err, fs.ErrNotExist))
			var refused *weights.FormatError
			if assert.Equal(t, !tt.missing, errors.As(err, &refused)) && !tt.missing {
				assert.Equal(t, filepath.Join(dir, tt.file), refused.File)
			}
			assert.Empty(t, openFiles(t, dir), "all that was opened is closed")
		})
	}
}

func TestDirectoryWithOneModelIsOpened(t *testing.T) {
	t.Parallel()
	one := makeSafetensors(t, nil, three...)
	index := []byte(`{"weight_map":{"a":"shard.safetensors"}}`)
	ggufFile := makeGGUF(3, 32, three...)
	for name, tt := range map[string]struct {
		files map[string][]byte
		want  []string // or
		says  string
	}{
		"nothing":             {map[string][]byte{"config.json": nil}, nil, "no safetensors or GGUF model in this directory"},
		"one file":            {map[string][]byte{"x.safetensors": one, "config.json": nil}, []string{"x.safetensors"}, ""},
		"the usual file":      {map[string][]byte{"x.safetensors": one, "model.safetensors": one, "m.gguf": ggufFile}, []string{"model.safetensors"}, ""},
		"one index":           {map[string][]byte{"shard.safetensors": one, "d.safetensors.index.json": index}, []string{"shard.safetensors"}, ""},
		"the usual index":     {map[string][]byte{"shard.safetensors": one, "model.safetensors": one, "d.safetensors.index.json": index, "model.safetensors.index.json": index}, []string{"shard.safetensors"}, ""},
		"one GGUF file":       {map[string][]byte{"m.gguf": ggufFile}, []string{"m.gguf"}, ""},
		"two files":           {map[string][]byte{"x.safetensors": one, "y.safetensors": one}, nil, "the directory has 2 models (open one by its path: x.safetensors, y.safetensors)"},
		"two indexes":         {map[string][]byte{"x.safetensors.index.json": index, "y.safetensors.index.json": index}, nil, "the directory has 2 models (open one by its path: x.safetensors.index.json, y.safetensors.index.json)"},
		"two GGUF files":      {map[string][]byte{"mmproj.gguf": ggufFile, "m-00001-of-00002.gguf": nil, "m-00002-of-00002.gguf": nil}, nil, "2 models (open one by its path: m-00001-of-00002.gguf, mmproj.gguf)"},
		"a file of each kind": {map[string][]byte{"m.gguf": ggufFile, "m.safetensors": one}, nil, "2 models (open one by its path: m.gguf, m.safetensors)"},
	} {
		dir := put(t, tt.files)
		m, err := weights.OpenModel(dir)
		if tt.says != "" {
			assert.ErrorContains(t, err, tt.says, name)
			assert.Equal(t, name == "nothing", errors.Is(err, fs.ErrNotExist), name)
			continue
		}
		if assert.NoError(t, err, name) {
			assert.Equal(t, tt.want, fileNames(m), name)
			assert.NoError(t, m.Close(), name)
		}
	}
	_, err := weights.OpenModel(filepath.Join(t.TempDir(), "none"))
	assert.ErrorIs(t, err, fs.ErrNotExist)
	bad := put(t, map[string][]byte{"model.safetensors": []byte("12345678")})
	_, err = weights.OpenModel(bad)
	var refused *weights.FormatError
	assert.ErrorAs(t, err, &refused)
}

func TestNewModelRefusesTwoTensorsOfOneName(t *testing.T) {
	t.Parallel()
	x, err := weights.Parse(strings.NewReader(string(makeSafetensors(t, nil, three[0]))), int64(len(makeSafetensors(t, nil, three[0]))), "x")
	require.NoError(t, err)
	y, err := parse(makeGGUF(3, 32, three[2], three[1]))
	require.NoError(t, err)
	m, err := weights.NewModel(y, x)
	require.NoError(t, err)
	assert.Equal(t, []*weights.File{y, x}, m.Files())
	assert.Equal(t, []string{"a", "c", "b"}, names(m.Tensors()))
	files := []*weights.File{y, x}
	m, err = weights.NewModel(files...)
	require.NoError(t, err)
	files[0] = nil
	slices.Reverse(m.Files())
	assert.Equal(t, []*weights.File{y, x}, m.Files(), "slices of callers are their own")
	assert.NoError(t, m.Close())

	_, err = weights.NewModel(x, y, x)
	var refused *weights.FormatError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, &weights.FormatError{File: "x", Tensor: "b", Reason: "x has a tensor of this name too"}, refused)
	_, err = weights.NewModel(x, nil)
	assert.ErrorContains(t, err, "weights: new model: nil file")
	m, err = weights.NewModel()
	require.NoError(t, err)
	assert.Empty(t, names(m.Tensors()))
}
