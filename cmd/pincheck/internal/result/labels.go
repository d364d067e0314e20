package result

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

// Text returns the value in words: sizes with their units, names without underscores, and for yes or no the key.
func (l Label) Text() string {
	if n, err := strconv.Atoi(l.Value); err == nil {
		switch {
		case strings.HasSuffix(l.Key, "_bytes"):
			return units.Bytes(n)
		case l.Key == Device:
			return "GPU " + l.Value
		case l.Key == Blocks && n == 1:
			return "1 block"
		case l.Key == Blocks:
			return units.Count(n) + " blocks"
		}
	}
	switch l.Value {
	case "true", "yes":
		return Words(l.Key)
	case "false", "no":
		return "no " + Words(l.Key)
	}
	return Words(l.Value)
}

// texts are values that are not their own words.
var texts = map[string]string{
	HostToDevice: "to GPU", DeviceToHost: "from GPU", Both: "both ways", "on_device": "within the GPU",
	"cuda_host_alloc": "cudaHostAlloc", "hostmem": "hostmem.Alloc", "write_combined": "write-combined", "non_blocking": "non-blocking",
}

// Words makes a text of a name in snake_case. O_DIRECT is none.
func Words(name string) string {
	if text := texts[name]; text != "" {
		return text
	}
	if strings.ToLower(name) != name {
		return name
	}
	fields := strings.Fields(strings.ReplaceAll(name, "_", " "))
	for i, f := range fields {
		switch f {
		case "cpu", "cuda", "gpu", "io", "numa":
			fields[i] = strings.ToUpper(f)
		}
	}
	return strings.Join(fields, " ")
}

// MarshalJSON writes an object, in the order of the labels.
func (l Labels) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, label := range l {
		if i > 0 {
			b.WriteByte(',')
		}
		for j, text := range []string{label.Key, label.Value} {
			if j > 0 {
				b.WriteByte(':')
			}
			quoted, err := json.Marshal(text)
			if err != nil {
				return nil, err
			}
			b.Write(quoted)
		}
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// UnmarshalJSON reads an object of strings.
func (l *Labels) UnmarshalJSON(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	open, err := d.Token()
	if err != nil {
		return err
	}
	if open == nil {
		*l = nil
		return nil
	}
	if open != json.Delim('{') {
		return fmt.Errorf("labels: %v, want an object", open)
	}
	*l = Labels{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		value, err := d.Token()
		if err != nil {
			return err
		}
		text, ok := value.(string)
		if !ok {
			return fmt.Errorf("label %q: %v, want a string", key, value)
		}
		*l = append(*l, Label{key.(string), text})
	}
	return nil
}
