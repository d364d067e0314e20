package weights

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
)

// parseSafetensors reads the header: a JSON object that has an entry for each tensor, padded with
// white space on both sides. The first 8 bytes of the file are its size.
func (f *File) parseSafetensors(start []byte) error {
	f.format = Safetensors
	n, header := binary.LittleEndian.Uint64(start), int64(len(start)-1)
	switch rest := uint64(f.size - header); {
	case n > maxHeader:
		return f.invalid("", "%s, as safetensors its header would have %d bytes, want at most %d", notWeights(start), n, maxHeader)
	case n > rest:
		return f.invalid("", "its header has %d bytes by its first %d, the file has %d after these", n, header, rest)
	case strings.IndexByte(jsonSpace+"{", start[header]) < 0:
		return f.invalid("", "the header begins with %q, want {", start[header:])
	}
	text, err := f.readJSON("the header", header, int64(n))
	if err != nil {
		return err
	}
	const minEntry = 50 // bytes of a tensor's key and entry
	tensors := min(bytes.Count(text, []byte{'{'}), len(text)/minEntry)
	f.byName, f.tensors = make(map[string]*Tensor, tensors), make([]*Tensor, 0, tensors)
	metadata, dtype := false, DType("")
	j := scan(text)
	for key := j.next(); len(key) > 0; key = j.next() {
		value := j.next()
		switch name := string(unquote(key)); {
		case name != metadataKey:
			dtype, err = f.safetensorsTensor(name, value, dtype)
		case metadata:
			err = f.invalid("", "the header has the key %s twice", quote(name))
		default:
			metadata = true
			err = f.safetensorsMetadata(name, value)
		}
		if err != nil {
			return err
		}
	}
	end, err := f.arrange(header + int64(n))
	if err == nil && end != f.size {
		err = f.invalid("", "its tensors end at offset %d, the file has %d bytes: the last %d belong to no tensor", end, f.size, f.size-end)
	}
	return err
}

// metadataKey is the one key of a header that is no tensor.
const metadataKey = "__metadata__"

// notWeights guesses the format of another file by its first bytes.
func notWeights(start []byte) string {
	for _, other := range []struct{ prefix, is string }{
		{"version ", "a Git LFS pointer instead of the file (run git lfs pull)"},
		{"PK\x03\x04", "a zip archive, such as PyTorch's .pt and .bin (convert it to safetensors)"},
		{"\x80", "a Python pickle (convert it to safetensors)"},
		{"\x00\x05\x16\x07", "macOS's metadata of another file"},
		{"<", "HTML or XML, such as a failed download's page"},
	} {
		if bytes.HasPrefix(start, []byte(other.prefix)) {
			return "looks like " + other.is
		}
	}
	return "neither GGUF nor safetensors"
}

// safetensorsMetadata reads the value of __metadata__: an object of strings. The reference
// reader takes null for an empty one.
func (f *File) safetensorsMetadata(what string, value []byte) error {
	if value[0] == 'n' {
		return nil
	}
	if err := f.wantList("", what, value, '{'); err != nil {
		return err
	}
	j := scan(value)
	for key := j.next(); len(key) > 0; key = j.next() {
		k, value := string(unquote(key)), j.next()
		if _, twice := f.metadata[k]; twice {
			return f.invalid("", "%s has the key %s twice", what, quote(k))
		}
		if value[0] != '"' {
			return f.invalid("", "the value of %s in %s is %s, want a string", quote(k), what, describe(value))
		}
		f.metadata[k] = string(unquote(value))
	}
	return nil
}

// maxDimensions is the largest number of dimensions of PyTorch's and NumPy's tensors.
const maxDimensions = 64

var entryKeys = [...]string{"dtype", "shape", "data_offsets"}

// safetensorsEntry returns the values of a tensor's entry in the order of entryKeys. Keys that the format
// does not have are ignored, as the reference reader does.
func (f *File) safetensorsEntry(name string, entry []byte) (values [len(entryKeys)][]byte, err error) {
	if err := f.wantList(name, "its entry", entry, '{'); err != nil {
		return values, err
	}
	j := scan(entry)
	for key := j.next(); len(key) > 0; key = j.next() {
		key, value := unquote(key), j.next()
		switch i := slices.Index(entryKeys[:], string(key)); {
		case i < 0:
		case values[i] != nil:
			return values, f.invalid(name, "its entry has the key %q twice", key)
		default:
			values[i] = value
		}
	}
	if missing := slices.IndexFunc(values[:], func(value []byte) bool { return value == nil }); missing >= 0 {
		return values, f.invalid(name, "its entry has no %s", entryKeys[missing])
	}
	return values, nil
}

// safetensorsTensor reads a tensor's entry, and returns its type. before is the type of the
// tensor before.
func (f *File) safetensorsTensor(name string, entry []byte, before DType) (DType, error) {
	t := &Tensor{Name: name, File: f, DType: before}
	if err := f.add(t); err != nil {
		return "", err
	}
	values, err := f.safetensorsEntry(name, entry)
	if err != nil {
		return "", err
	}
	if values[0][0] != '"' {
		return "", f.invalid(name, "dtype is %s, want a string", describe(values[0]))
	}
	dtype := unquote(values[0])
	if string(dtype) != string(before) { // else one string serves both
		t.DType = DType(dtype)
	}
	if _, ok := safetensorsTypes[t.DType]; !ok {
		return "", f.invalid(name, "dtype %s is not one of safetensors", quote(string(dtype)))
	}
	var numbers [maxDimensions]int
	shape, err := f.counts(name, entryKeys[1], values[1], numbers[:0], maxDimensions)
	if err != nil {
		return "", err
	}
	t.Shape = append([]int{}, shape...)
	if t.Size, err = t.DType.size(t.Shape); err != nil {
		return "", f.invalid(name, "%v", err)
	}
	ends, err := f.counts(name, entryKeys[2], values[2], numbers[:0], 2)
	if err != nil {
		return "", err
	}
	if len(ends) != 2 {
		return "", f.invalid(name, "data_offsets has %d numbers, want 2", len(ends))
	}
	switch from, to := ends[0], ends[1]; {
	case from > to:
		err = f.invalid(name, "data_offsets start at %d and end at %d, before it", from, to)
	case to-from != t.Size:
		err = f.invalid(name, "data_offsets %d to %d are %d bytes, %s of shape %v takes %d", from, to, to-from, t.DType, t.Shape, t.Size)
	default:
		t.Offset = int64(from)
	}
	return t.DType, err
}
