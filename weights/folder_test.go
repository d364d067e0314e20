package weights_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// ggufParts makes the tensors of three files of these names, with these pairs of the metadata.
func ggufParts(before, after string, pairs ...string) map[string][]byte {
	files := map[string][]byte{}
	for i, s := range three {
		g := newGGUF(3, 1, uint64(len(pairs)/2)+1)
		for k := 0; k < len(pairs); k += 2 {
			g.pair(pairs[k], ggufString).str(pairs[k+1])
		}
		files[fmt.Sprintf("%s%05d%s", before, i+1, after)] = writeGGUF(g, 32, s)
	}
	return files
}

// shards makes the tensors of three files of these names.
func shards(t *testing.T, before, after string) map[string][]byte {
	files := map[string][]byte{}
	for i, s := range three {
		files[fmt.Sprintf("%s%05d%s", before, i+1, after)] = makeSafetensors(t, nil, s)
	}
	return files
}

// indexOf makes the index of three files of these names.
func indexOf(before, after string) []byte {
	var entries []string
	for i, s := range three {
		entries = append(entries, fmt.Sprintf("%q:\"%s%05d%s\"", s.name, before, i+1, after))
	}
	return []byte(`{"weight_map":{` + strings.Join(entries, ",") + `}}`)
}

// join returns the files of several sets; a nil content removes a file.
func join(sets ...map[string][]byte) map[string][]byte {
	files := map[string][]byte{}
	for _, set := range sets {
		maps.Copy(files, set)
	}
	maps.DeleteFunc(files, func(_ string, content []byte) bool { return content == nil })
	return files
}

// However a model is opened, by its directory, its index or any of its files, all of it is opened, or an
// error names what is missing.
func TestAModelIsOpenedAsAWholeOrNotAtAll(t *testing.T) {
	t.Parallel()
	const of = "-of-00003."
	one := makeSafetensors(t, nil, three...)
	gguf := ggufParts("m-", of+"gguf")
	st := shards(t, "model-", of+"safetensors")
	without := func(name string) map[string][]byte { return map[string][]byte{name: nil} }
	all := func(before, after string) string {
		return fmt.Sprintf("%s00001%s %s00002%s %s00003%s", before, after, before, after, before, after)
	}
	type paths map[string]string // the files that are opened, in order; or, after "!", the error
	same := func(want string, names ...string) paths {
		p := paths{}
		for _, name := range names {
			p[name] = want
		}
		return p
	}
	theGGUF, theShards := all("m-", of+"gguf"), all("model-", of+"safetensors")
	for name, tt := range map[string]struct {
		files map[string][]byte
		paths paths
	}{
		"GGUF parts without keys":      {gguf, same(theGGUF, "", "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf")},
		"GGUF parts in upper case":     {ggufParts("m-", of+"GGUF"), same(all("m-", of+"GGUF"), "", "m-00002-of-00003.GGUF")},
		"the first GGUF part is gone":  {join(gguf, without("m-00001-of-00003.gguf")), same("!file does not exist: the model lacks 1 of its 3 parts: m-00001-of-00003.gguf", "", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf")},
		"the last GGUF part is gone":   {join(gguf, without("m-00003-of-00003.gguf")), same("!the model lacks 1 of its 3 parts: m-00003-of-00003.gguf", "", "m-00001-of-00003.gguf")},
		"two GGUF parts are gone":      {join(gguf, without("m-00001-of-00003.gguf"), without("m-00003-of-00003.gguf")), same("!the model lacks 2 of its 3 parts: m-00001-of-00003.gguf, m-00003-of-00003.gguf", "", "m-00002-of-00003.gguf")},
		"a folder instead of the part": {join(gguf, without("m-00002-of-00003.gguf"), map[string][]byte{"m-00002-of-00003.gguf/x": {}}), same("!the model lacks 1 of its 3 parts: m-00002-of-00003.gguf", "", "m-00001-of-00003.gguf")},
		"a part of another model, by its name": {join(gguf, without("m-00002-of-00003.gguf"), map[string][]byte{"o-00002-of-00003.gguf": gguf["m-00002-of-00003.gguf"]}), paths{
			"":                      "!the directory has 2 models (open one by its path: m-00001-of-00003.gguf (which lacks 1 of its 3 parts: m-00002-of-00003.gguf), o-00002-of-00003.gguf (which lacks 2 of its 3 parts: o-00001-of-00003.gguf, o-00003-of-00003.gguf))",
			"m-00003-of-00003.gguf": "!the model lacks 1 of its 3 parts: m-00002-of-00003.gguf",
			"o-00002-of-00003.gguf": "!the model lacks 2 of its 3 parts: o-00001-of-00003.gguf, o-00003-of-00003.gguf",
		}},
		"a part of another model, by its tensors": {join(gguf, map[string][]byte{"m-00002-of-00003.gguf": gguf["m-00003-of-00003.gguf"]}), same("!m-00002-of-00003.gguf has a tensor of this name too", "", "m-00001-of-00003.gguf")},
		"a part of another model, by its metadata": {
			join(ggufParts("m-", of+"gguf", "general.architecture", "llama", "llama.rope.scaling.type", "none"),
				map[string][]byte{"m-00002-of-00003.gguf": ggufParts("m-", of+"gguf", "general.architecture", "llama", "llama.rope.scaling.type", "yarn")["m-00002-of-00003.gguf"]}),
			same(`!"llama.rope.scaling.type" differs from that of `, "", "m-00001-of-00003.gguf"),
		},
		"metadata that may differ":  {join(ggufParts("m-", of+"gguf", "general.name", "a"), map[string][]byte{"m-00002-of-00003.gguf": ggufParts("m-", of+"gguf", "general.name", "b")["m-00002-of-00003.gguf"]}), same(theGGUF, "", "m-00001-of-00003.gguf")},
		"another count":             {join(gguf, map[string][]byte{"m-00002-of-00004.gguf": gguf["m-00002-of-00003.gguf"]}), paths{"m-00001-of-00003.gguf": theGGUF, "m-00002-of-00004.gguf": "!lacks 3 of its 4 parts", "": "!2 models"}},
		"a number beyond the count": {join(gguf, map[string][]byte{"m-00004-of-00003.gguf": makeGGUF(3, 32, u8("d", 1))}), paths{"m-00001-of-00003.gguf": theGGUF, "m-00004-of-00003.gguf": "!its name has the number 4 of 3 parts, want 1 to 3", "": "!2 models"}},
		"one number in two forms":   {join(gguf, map[string][]byte{"m-2-of-00003.gguf": gguf["m-00002-of-00003.gguf"]}), same("!has a tensor of this name too", "", "m-2-of-00003.gguf", "m-00001-of-00003.gguf")},
		"two models": {join(gguf, ggufParts("n-", of+"gguf")), paths{
			"": "!the directory has 2 models (open one by its path: m-00001-of-00003.gguf, n-00001-of-00003.gguf)", "m-00001-of-00003.gguf": theGGUF, "m-00003-of-00003.gguf": theGGUF, "n-00002-of-00003.gguf": all("n-", of+"gguf"),
		}},

		"shards without an index":       {st, same(theShards, "", "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")},
		"a shard is gone":               {join(st, without("model-00002-of-00003.safetensors")), same("!the model lacks 1 of its 3 parts: model-00002-of-00003.safetensors", "", "model-00001-of-00003.safetensors")},
		"shards in short numbers":       {map[string][]byte{"x_1_of_2.safetensors": st["model-00001-of-00003.safetensors"], "x_2_of_2.safetensors": st["model-00002-of-00003.safetensors"]}, same("x_1_of_2.safetensors x_2_of_2.safetensors", "", "x_1_of_2.safetensors", "x_2_of_2.safetensors")},
		"one of ten in short numbers":   {map[string][]byte{"x-10-of-10.safetensors": one, "x-2-of-10.safetensors": one}, same("!lacks 8 of its 10 parts: x-1-of-10.safetensors, x-3-of-10.safetensors", "")},
		"shards of two variants":        {join(st, shards(t, "model-", of+"fp16.safetensors"), shards(t, "model.fp8-", of+"safetensors")), paths{"": "!the directory has 3 models", "model-00001-of-00003.safetensors": theShards, "model-00001-of-00003.fp16.safetensors": all("model-", of+"fp16.safetensors"), "model.fp8-00003-of-00003.safetensors": all("model.fp8-", of+"safetensors")}},
		"two sets of shards":            {join(st, shards(t, "old-", of+"safetensors")), paths{"": "!the directory has 2 models (open one by its path: model-00001-of-00003.safetensors, old-00001-of-00003.safetensors)", "old-00003-of-00003.safetensors": all("old-", of+"safetensors"), "model-00001-of-00003.safetensors": theShards}},
		"shards and one file":           {join(st, map[string][]byte{"other.safetensors": one}), paths{"": "!the directory has 2 models (open one by its path: model-00001-of-00003.safetensors, other.safetensors)", "other.safetensors": "other.safetensors", "model-00002-of-00003.safetensors": theShards}},
		"shards and the usual file":     {join(st, map[string][]byte{"model.safetensors": one}), paths{"": "model.safetensors", "model-00002-of-00003.safetensors": theShards}},
		"the files of many shards gone": {map[string][]byte{"model-00001-of-00142.safetensors": one}, same("!lacks 141 of its 142 parts: model-00002-of-00142.safetensors, ", "", "model-00001-of-00142.safetensors")},

		"the usual index":       {join(st, map[string][]byte{"model.safetensors.index.json": indexOf("model-", of+"safetensors")}), same(theShards, "", "model.safetensors.index.json", "model-00001-of-00003.safetensors")},
		"a variant's index":     {join(st, map[string][]byte{"model.safetensors.index.fp16.json": indexOf("model-", of+"safetensors")}), same(theShards, "", "model.safetensors.index.fp16.json", "model-00002-of-00003.safetensors")},
		"a variant before it":   {join(st, map[string][]byte{"diffusion_pytorch_model.fp16.safetensors.index.json": indexOf("model-", of+"safetensors")}), same(theShards, "", "diffusion_pytorch_model.fp16.safetensors.index.json", "model-00002-of-00003.safetensors")},
		"an index of any name":  {join(st, map[string][]byte{"weights.index.json": indexOf("model-", of+"safetensors")}), same(theShards, "", "weights.index.json", "model-00002-of-00003.safetensors")},
		"an index by its path":  {join(st, map[string][]byte{"map.json": indexOf("model-", of+"safetensors")}), same(theShards, "", "map.json")},
		"an index of GGUF":      {join(gguf, map[string][]byte{"m.index.json": indexOf("m-", of+"gguf")}), same(theGGUF, "", "m.index.json", "m-00002-of-00003.gguf")},
		"names without numbers": {map[string][]byte{"a.safetensors": st["model-00003-of-00003.safetensors"], "b.safetensors": st["model-00001-of-00003.safetensors"], "x.safetensors.index.json": []byte(`{"weight_map":{"a":"a.safetensors","b":"./b.safetensors"}}`)}, same("a.safetensors b.safetensors", "", "a.safetensors", "b.safetensors", "x.safetensors.index.json")},
		"two indexes": {join(st, map[string][]byte{"a.index.json": indexOf("model-", of+"safetensors"), "b.index.json": indexOf("model-", of+"safetensors")}), paths{
			"": "!the directory has 2 models (open one by its path: a.index.json, b.index.json)", "model-00001-of-00003.safetensors": "!the file is in 2 models (open one by its path: a.index.json, b.index.json)", "b.index.json": theShards,
		}},
		"an index and another model": {join(st, map[string][]byte{"a.safetensors.index.json": indexOf("model-", of+"safetensors"), "other.safetensors": one}), paths{
			"": "!the directory has 2 models (open one by its path: a.safetensors.index.json, other.safetensors)", "other.safetensors": "other.safetensors", "a.safetensors.index.json": theShards,
		}},
		"indexes of other files":          {join(st, map[string][]byte{"pytorch_model.bin.index.json": []byte(`{"weight_map":{"a":"pytorch_model-00001-of-00001.bin"}}`), "search.index.json": []byte(`[1]`), "tf_model.h5.index.json": []byte(`{`)}), same(theShards, "", "model-00003-of-00003.safetensors")},
		"an index that is cut off":        {join(st, map[string][]byte{"x.safetensors.index.json": []byte(`{"weight`)}), paths{"": "!x.safetensors.index.json: the index is not JSON", "model-00003-of-00003.safetensors": theShards}},
		"an index of nothing":             {join(st, map[string][]byte{"model.safetensors.index.json": []byte(`{"weight_map":{}}`)}), same("!model.safetensors.index.json: weight_map has no tensor", "", "model.safetensors.index.json")},
		"an index, a shard gone":          {join(st, map[string][]byte{"model.safetensors.index.json": indexOf("model-", of+"safetensors")}, without("model-00002-of-00003.safetensors")), same("!model-00002-of-00003.safetensors: no such file or directory (named by the index ", "", "model.safetensors.index.json", "model-00001-of-00003.safetensors")},
		"an index without a shard":        {join(st, map[string][]byte{"model.safetensors.index.json": []byte(`{"weight_map":{"b":"model-00001-of-00003.safetensors","c":"model-00002-of-00003.safetensors"}}`)}), same("!model.safetensors.index.json: weight_map has no tensor of 1 of the 3 parts of the model: model-00003-of-00003.safetensors", "", "model.safetensors.index.json", "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")},
		"an index of an absent tensor":    {join(st, map[string][]byte{"model.safetensors.index.json": []byte(strings.Replace(string(indexOf("model-", of+"safetensors")), `{"b"`, `{"none":"model-00001-of-00003.safetensors","b"`, 1))}), same(`!tensor "none": the file has no such tensor`, "", "model.safetensors.index.json", "model-00001-of-00003.safetensors")},
		"an index without every tensor":   {join(st, map[string][]byte{"model-00001-of-00003.safetensors": makeSafetensors(t, nil, three[0], u8("more", 1)), "model.safetensors.index.json": indexOf("model-", of+"safetensors")}), same(theShards, "", "model.safetensors.index.json", "model-00001-of-00003.safetensors")},
		"an index that names other files": {join(st, map[string][]byte{"x.safetensors.index.json": []byte(`{"weight_map":{"a":"a.bin"}}`)}), same(theShards, "", "model-00001-of-00003.safetensors")},

		"a folder named as a file": {map[string][]byte{"old.safetensors/x": one, "new.safetensors": one}, same("new.safetensors", "", "new.safetensors")},
		"a folder of a model":      {map[string][]byte{"old.safetensors/x.safetensors": one}, paths{"": "!no safetensors or GGUF model in this directory", "old.safetensors": "x.safetensors"}},
		"files of macOS":           {join(st, map[string][]byte{"._model-00001-of-00003.safetensors": []byte("\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X"), "._x.safetensors.index.json": []byte("\x00\x05\x16\x07"), ".x.gguf": gguf["m-00001-of-00003.gguf"]}), paths{"": theShards, "model-00001-of-00003.safetensors": theShards, ".x.gguf": ".x.gguf", "._model-00001-of-00003.safetensors": "!the model lacks 2 of its 3 parts"}},
		"a file of macOS":          {map[string][]byte{"._x.safetensors": []byte("\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X"), "x.safetensors": one}, paths{"": "x.safetensors", "x.safetensors": "x.safetensors", "._x.safetensors": "!looks like macOS's metadata of another file"}},
		"other case":               {map[string][]byte{"X.SafeTensors": one}, same("X.SafeTensors", "", "X.SafeTensors")},
	} {
		dir := put(t, tt.files)
		for path, want := range tt.paths {
			m, err := weights.OpenModel(filepath.Join(dir, path))
			if want, refused := strings.CutPrefix(want, "!"); refused {
				assert.Nil(t, m, name)
				assert.ErrorContains(t, err, want, "%s: %q", name, path)
				assert.Empty(t, openFiles(t, dir), name)
				continue
			}
			if assert.NoError(t, err, "%s: %q", name, path) {
				assert.Equal(t, strings.Fields(want), fileNames(m), "%s: %q", name, path)
				assert.NoError(t, m.Close())
			}
		}
	}
}

// In Hugging Face's cache files are links to blobs, whose names say nothing. A link to nothing is a file
// that is missing, not one that is passed over.
func TestLinksToFilesAreTheirFiles(t *testing.T) {
	t.Parallel()
	st := shards(t, "model-", "-of-00003.safetensors")
	dir := put(t, map[string][]byte{
		"blobs/1": st["model-00001-of-00003.safetensors"], "blobs/2": st["model-00002-of-00003.safetensors"], "blobs/3": st["model-00003-of-00003.safetensors"],
		"blobs/index": indexOf("model-", "-of-00003.safetensors"), "snapshots/rev/config.json": []byte("{}"), "folder/x.safetensors": st["model-00001-of-00003.safetensors"],
	})
	link := func(to, name string) {
		if err := os.Symlink(filepath.FromSlash(to), filepath.Join(dir, filepath.FromSlash(name))); err != nil {
			t.Skipf("the system makes no symbolic links: %v", err)
		}
	}
	all := slices.Sorted(maps.Keys(st))
	for i, name := range all {
		link(fmt.Sprintf("../../blobs/%d", i+1), "snapshots/rev/"+name)
	}
	link("../../folder", "snapshots/rev/old.safetensors") // a folder
	link("snapshots/rev/"+all[1], "one.safetensors")      // a part by another name
	opensAll := func(paths ...string) {
		for _, path := range paths {
			m, err := weights.OpenModel(filepath.Join(dir, filepath.FromSlash(path)))
			require.NoError(t, err, path)
			assert.Equal(t, all, fileNames(m), path)
			require.NoError(t, m.Close())
		}
	}
	opensAll("snapshots/rev", "snapshots/rev/"+all[2])
	link("../../blobs/index", "snapshots/rev/model.safetensors.index.json")
	opensAll("snapshots/rev", "snapshots/rev/"+all[0], "snapshots/rev/model.safetensors.index.json")

	for _, indexed := range []bool{true, false} {
		_ = os.Remove(filepath.Join(dir, "blobs", "2"))
		if !indexed {
			require.NoError(t, os.Remove(filepath.Join(dir, "snapshots", "rev", "model.safetensors.index.json")))
		}
		for _, path := range append(all, "") {
			_, err := weights.OpenModel(filepath.Join(dir, "snapshots", "rev", path))
			assert.ErrorIs(t, err, fs.ErrNotExist)
			assert.ErrorContains(t, err, all[1]+": no such file or directory (it is a symbolic link to ../../blobs/2)")
		}
	}
	assert.Empty(t, openFiles(t, dir))
}

// A part that is a link by another name is opened with the parts beside the file that it leads to.
func TestALinkToAPartOpensTheModel(t *testing.T) {
	t.Parallel()
	dir := put(t, ggufParts("real/m-", "-of-00003.gguf"))
	if err := os.Symlink(filepath.Join("real", "m-00002-of-00003.gguf"), filepath.Join(dir, "current.gguf")); err != nil {
		t.Skipf("the system makes no symbolic links: %v", err)
	}
	for _, path := range []string{"", "current.gguf"} {
		m, err := weights.OpenModel(filepath.Join(dir, path))
		require.NoError(t, err, path)
		assert.Len(t, m.Files(), 3, path)
		require.NoError(t, m.Close())
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "real", "m-00003-of-00003.gguf")))
	for _, path := range []string{"", "current.gguf"} {
		_, err := weights.OpenModel(filepath.Join(dir, path))
		assert.True(t, errors.Is(err, fs.ErrNotExist))
		assert.ErrorContains(t, err, "the model lacks 1 of its 3 parts: m-00003-of-00003.gguf")
	}
}
