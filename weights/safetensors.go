package weights

import (
	"bytes"
	"encoding/binary"
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
	header := make([]byte, n)
	if err := f.read(header, int64(len(start))); err != nil {
		return err
	}
	j, err := newJSONReader(f.source, header)
	if err != nil {
		return err
	}
	err = j.object("the header", func(key string) error {
		if key == "__metadata__" {
			return f.safetensorsMetadata(j)
		}
		return f.safetensorsTensor(j, key, data)
	})
	if err != nil {
		return err
	}
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
func (f *File) safetensorsMetadata(j *jsonReader) error {
	return j.objectOrNull("__metadata__", func(key string) error {
		value, err := j.str("the value of " + quote(key) + " in __metadata__")
		f.metadata[key] = value
		return err
	})
}

// safetensorsTensor reads a tensor's entry. The tensors' data starts at offset
// data of the file.
func (f *File) safetensorsTensor(j *jsonReader, name string, data int64) error {
	t := &Tensor{Name: name, File: f}
	if err := f.add(t); err != nil {
		return err
	}
	var ends []int
	j.tensor = name
	err := j.object("its entry", func(key string) (err error) {
		switch key {
		case "dtype":
			t.DType, err = j.dtype()
		case "shape":
			t.Shape, err = j.counts(key, maxDimensions)
		case "data_offsets":
			ends, err = j.counts(key, 2)
			if err == nil && len(ends) != 2 {
				err = j.fail("data_offsets has %d numbers, want 2", len(ends))
			}
		default:
			err = j.fail("its entry has the key %s, want dtype, shape and data_offsets alone", quote(key))
		}
		return err
	})
	if err != nil {
		return err
	}
	switch {
	case t.DType == "":
		return j.fail("its entry has no dtype")
	case t.Shape == nil:
		return j.fail("its entry has no shape")
	case ends == nil:
		return j.fail("its entry has no data_offsets")
	}
	if t.Size, err = t.DType.size(t.Shape); err != nil {
		return j.fail("%v", err)
	}
	switch room := f.size - data; {
	case ends[0] > ends[1]:
		return j.fail("data_offsets start at %d and end at %d, before it", ends[0], ends[1])
	case int64(ends[1]) > room:
		return j.fail("data_offsets end at %d, the file has %d bytes after its header", ends[1], room)
	case ends[1]-ends[0] != t.Size:
		return j.fail("data_offsets %d to %d are %d bytes, %s of shape %v takes %d", ends[0], ends[1], ends[1]-ends[0], t.DType, t.Shape, t.Size)
	}
	t.Offset = data + int64(ends[0])
	j.tensor = ""
	return nil
}

// maxDimensions is how many dimensions a tensor of PyTorch or NumPy has at
// most.
const maxDimensions = 64

func (j *jsonReader) dtype() (DType, error) {
	s, err := j.str("dtype")
	if err != nil {
		return "", err
	}
	d := DType(s)
	if _, known := safetensorsTypes[d]; !known {
		return "", j.fail("dtype %s is not one of safetensors", quote(s))
	}
	return d, nil
}

// counts reads an array of whole numbers, which is not nil.
func (j *jsonReader) counts(what string, most int) ([]int, error) {
	numbers := []int{}
	err := j.array(what, func() error {
		if len(numbers) == most {
			return j.fail("%s has more than %d numbers", what, most)
		}
		n, err := j.count(what)
		numbers = append(numbers, n)
		return err
	})
	return numbers, err
}
