package weights

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// parseSafetensors reads the header: a JSON object that has an entry for each
// tensor. The file's first 8 bytes, start, are its size.
func (f *File) parseSafetensors(start []byte) error {
	f.format = Safetensors
	n := binary.LittleEndian.Uint64(start)
	if n > maxHeader {
		return f.refuse("", "%s, as safetensors its header would have %d bytes, want at most %d", notWeights(start), n, maxHeader)
	}
	data := int64(len(start)) + int64(n)
	if data > f.size {
		return f.refuse("", "its header has %d bytes by its first 8, the file has %d after these", n, f.size-int64(len(start)))
	}
	j := newJSONReader(f.source, int64(len(start)), int64(n))
	if j.more() && bytes.IndexByte([]byte(" \t\r\n"), j.ahead[0]) >= 0 {
		j.fail("the header begins with white space, want {")
	}
	metadata := false
	j.object("the header", func(key []byte) {
		switch {
		case string(key) != "__metadata__":
			f.safetensorsTensor(j, string(key), data)
		case metadata:
			j.fail("the header has the key %s twice", quote(string(key)))
		default:
			metadata = true
			f.safetensorsMetadata(j)
		}
	})
	if err := j.end(); err != nil {
		return err
	}
	end, err := f.arrange(data)
	if err == nil && end != f.size {
		err = f.refuse("", "its tensors end at offset %d, the file has %d bytes: the last %d belong to no tensor", end, f.size, f.size-end)
	}
	return err
}

// notWeights names what a file is instead, by its first bytes.
func notWeights(start []byte) string {
	for _, known := range []struct{ prefix, is string }{
		{"version ", "a Git LFS pointer in place of the file (run git lfs pull)"},
		{"PK\x03\x04", "a zip archive, such as PyTorch's .pt and .bin (convert it to safetensors)"},
		{"\x80", "a Python pickle (convert it to safetensors)"},
		{"<", "HTML or XML, such as a failed download's page"},
	} {
		if bytes.HasPrefix(start, []byte(known.prefix)) {
			return "looks like " + known.is
		}
	}
	return "neither GGUF nor safetensors"
}

// safetensorsMetadata reads the value of __metadata__: an object of strings.
// The reference reader takes null for an empty one.
func (f *File) safetensorsMetadata(j *jsonReader) {
	const what = "__metadata__"
	if j.next() == 'n' {
		j.found()
		return
	}
	j.object(what, func(key []byte) {
		k := string(key)
		if _, twice := f.metadata[k]; twice {
			j.fail("%s has the key %s twice", what, quote(k))
		}
		f.metadata[k] = string(j.strOf(func() string { return "the value of " + quote(k) + " in " + what }))
	})
}

// safetensorsTensor reads a tensor's entry. The tensors' data starts at offset
// data of the file. Keys that the format does not have are ignored, as the reference
// reader does.
func (f *File) safetensorsTensor(j *jsonReader, name string, data int64) {
	t := &Tensor{Name: name, File: f}
	if err := f.add(t); err != nil {
		j.stop(err)
		return
	}
	j.tensor = name
	keys := [...]string{"dtype", "shape", "data_offsets"}
	var has [len(keys)]bool
	var from, to int
	j.object("its entry", func(key []byte) {
		i := slices.Index(keys[:], string(key))
		if i < 0 {
			j.skip()
			return
		}
		if has[i] {
			j.fail("its entry has the key %q twice", key)
		}
		has[i] = true
		switch i {
		case 0:
			t.DType = j.dtype()
		case 1:
			t.Shape = append([]int{}, j.counts(keys[i], maxDimensions)...)
		case 2:
			if ends := j.counts(keys[i], 2); len(ends) == 2 {
				from, to = ends[0], ends[1]
			} else {
				j.fail("data_offsets has %d numbers, want 2", len(ends))
			}
		}
	})
	if missing := slices.Index(has[:], false); missing >= 0 {
		j.fail("its entry has no %s", keys[missing])
	}
	if j.err != nil {
		return
	}
	var err error
	if t.Size, err = t.DType.size(t.Shape); err != nil {
		j.fail("%v", err)
	}
	switch room := f.size - data; {
	case from > to:
		j.fail("data_offsets start at %d and end at %d, before it", from, to)
	case int64(to) > room:
		j.fail("data_offsets end at %d, the file has %d bytes after its header", to, room)
	case to-from != t.Size:
		j.fail("data_offsets %d to %d are %d bytes, %s of shape %v takes %d", from, to, to-from, t.DType, t.Shape, t.Size)
	}
	t.Offset = data + int64(from)
	j.tensor = ""
}

// maxDimensions is the largest number of dimensions of PyTorch's and NumPy's tensors.
const maxDimensions = 64

func (j *jsonReader) dtype() DType {
	d := DType(j.intern(j.strOf(func() string { return "dtype" })))
	if _, known := safetensorsTypes[d]; !known {
		j.fail("dtype %s is not one of safetensors", quote(string(d)))
	}
	return d
}
