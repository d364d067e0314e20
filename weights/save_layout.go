package weights

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"sort"
	"strings"
	"unicode/utf8"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostos"
)

// saveAlign is the alignment of the data in a file: that of pages, and of O_DIRECT.
const saveAlign = 4096

// A savedFile is one file of a save.
type savedFile struct {
	header  []byte // with its size before it
	tensors []savedAt
	runs    []savedRun
	pieces  [][]savedRun // of the pipeline
	size    int64        // of the whole file
	sums    *sums        // nil without checksums
	temp    *os.File
	direct  *os.File           // temp, with O_DIRECT, or nil
	mapped  *hostos.PagesAhead // of a file of tmpfs, or nil
}

// A savedAt is a tensor and its place in the file.
type savedAt struct {
	*SavedTensor
	off  int64
	size int
}

// A savedRun is tensors that are neighbours in the file and in memory.
type savedRun struct {
	device *cudart.Device // nil for host memory
	ptr    cudart.DevPtr
	host   []byte
	off    int64 // in the file
	n      int
}

func (s *Saving) checkOptions() error {
	switch {
	case !strings.HasSuffix(s.path, ".safetensors") || stem(s.path) == "":
		return errors.New("want a file name that ends in .safetensors")
	case s.o.ShardBytes < 0:
		return fmt.Errorf("ShardBytes is %d", s.o.ShardBytes)
	case slices.Contains(s.o.Streams, nil):
		return errors.New("a nil stream in Streams")
	}
	for key, value := range s.o.Metadata {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return fmt.Errorf("the metadata %s is not UTF-8", quote(key))
		}
	}
	return nil
}

// layOut checks the tensors, and sets the files with their headers and runs.
func (s *Saving) layOut(tensors []SavedTensor) error {
	if err := s.checkOptions(); err != nil {
		return err
	}
	placed := make([]savedAt, 0, len(tensors))
	names := &File{source: source{name: s.path}, byName: map[string]*Tensor{}}
	for i := range tensors {
		t := savedAt{SavedTensor: &tensors[i]}
		err := names.add(&Tensor{Name: t.Name})
		if err != nil {
			return err
		}
		if t.size, err = t.check(); err != nil {
			return fmt.Errorf("tensor %s: %w", quote(t.Name), err)
		}
		if s.total > math.MaxInt-t.size {
			return fmt.Errorf("the tensors have more than %d bytes", math.MaxInt)
		}
		s.total += t.size
		if dev := t.Memory.Device; t.size > 0 && dev != nil && !slices.Contains(s.devices, dev) {
			s.devices = append(s.devices, dev)
		}
		placed = append(placed, t)
	}
	slices.SortStableFunc(placed, func(t, u savedAt) int { return -cmp.Compare(t.align(), u.align()) })
	for first, n := 0, 0; first < len(placed) || len(s.files) == 0; first = n {
		bytes := 0
		for n = first; n < len(placed) && (n == first || s.o.ShardBytes == 0 || placed[n].size <= s.o.ShardBytes-bytes); n++ {
			bytes += placed[n].size
		}
		f := &savedFile{tensors: placed[first:n]}
		if err := f.layOut(s.o); err != nil {
			return err
		}
		s.files = append(s.files, f)
	}
	return nil
}

// align returns the size of an element, 1 for those that are smaller than a byte.
func (t savedAt) align() int {
	elements, bytes := t.DType.Block()
	if elements > 1 {
		return 1
	}
	return bytes
}

// check returns the size of the tensor, or an error.
func (t *SavedTensor) check() (int, error) {
	_, known := safetensorsTypes[t.DType]
	switch {
	case !known:
		return 0, fmt.Errorf("type %s is not one of safetensors", quote(string(t.DType)))
	case t.Name == metadataKey:
		return 0, errors.New("the format keeps this name for the metadata")
	case len(t.Shape) > maxDimensions:
		return 0, fmt.Errorf("%d dimensions, want at most %d", len(t.Shape), maxDimensions)
	}
	size, err := t.DType.size(t.Shape)
	m := t.Memory
	switch {
	case err != nil:
		return 0, err
	case m.Device == nil && m != Memory{}:
		return 0, fmt.Errorf("memory at %v of a nil device", m.Ptr)
	case m.Device == nil && len(t.Host) < size:
		return 0, fmt.Errorf("%d bytes of host memory, %s of shape %v has %d", len(t.Host), t.DType, t.Shape, size)
	case m.Device == nil:
		return size, nil
	case t.Host != nil:
		return 0, errors.New("it has device memory and host memory")
	}
	return size, m.check(size)
}

// checkMemory asks CUDA whether the tensors' memory is that of their devices.
func (s *Saving) checkMemory(ctx context.Context) error {
	if err := bounded.Ended(ctx); err != nil {
		return err
	}
	files := s.files
	_, err := bounded.Do(ctx, bounded.Call[struct{}]{Run: func() (none struct{}, err error) {
		for _, f := range files {
			for _, r := range f.runs {
				if err := r.checkMemory(); err != nil {
					return none, fmt.Errorf("the memory from tensor %s on: %w", quote(f.tensorAt(r.off)), err)
				}
			}
		}
		return none, nil
	}})
	return err
}

// checkMemory looks at the first byte and the last.
func (r savedRun) checkMemory() error {
	if r.device == nil {
		return nil
	}
	for _, address := range []cudart.DevPtr{r.ptr, r.ptr + cudart.DevPtr(r.n-1)} {
		a, err := r.device.PointerAttributes(uintptr(address))
		if err != nil {
			return err
		}
		if a.Type == cudart.MemoryUnregistered || a.Type == cudart.MemoryDevice && a.Device != r.device.Ordinal() {
			return fmt.Errorf("address %v is not memory of %v", address, r.device)
		}
	}
	return nil
}

// layOut sets the offsets, the header and the runs.
func (f *savedFile) layOut(o SaveOptions) error {
	metadata := maps.Clone(o.Metadata)
	delete(metadata, checksumKey) // that of another file
	if !o.NoChecksums {
		blocks := 0
		for _, t := range f.tensors {
			blocks += t.size/blockBytes + 1 // at most
		}
		if blocks > maxHeader/digits {
			return fmt.Errorf("checksums of %d blocks have no room in a header: set ShardBytes or NoChecksums", blocks)
		}
		if metadata == nil {
			metadata = map[string]string{}
		}
		metadata[checksumKey] = checksumText(blockBytes, 0, make([]uint32, len(f.blocks())))
	}
	header := map[string]any{}
	if len(metadata) > 0 {
		header[metadataKey] = metadata
	}
	data := 0
	for i := range f.tensors {
		t := &f.tensors[i]
		shape := append([]int{}, t.Shape...) // [] of none
		header[t.Name] = struct {
			DType   DType  `json:"dtype"`
			Shape   []int  `json:"shape"`
			Offsets [2]int `json:"data_offsets"`
		}{t.DType, shape, [2]int{data, data + t.size}}
		t.off = int64(data)
		data += t.size
	}
	var h bytes.Buffer
	h.Write(make([]byte, 8))
	e := json.NewEncoder(&h)
	e.SetEscapeHTML(false)
	if err := e.Encode(header); err != nil {
		return err
	}
	h.Truncate(h.Len() - 1) // the end of the line
	h.WriteString(strings.Repeat(" ", -h.Len()&(saveAlign-1)))
	if n := h.Len() - 8; n > maxHeader {
		return fmt.Errorf("a header of %d bytes, want at most %d: set ShardBytes", n, maxHeader)
	}
	f.header = h.Bytes()
	binary.LittleEndian.PutUint64(f.header, uint64(len(f.header)-8))
	if data > math.MaxInt-len(f.header) {
		return fmt.Errorf("the file would have more than %d bytes", math.MaxInt)
	}
	f.size = int64(len(f.header) + data)
	for i := range f.tensors {
		t := &f.tensors[i]
		t.off += int64(len(f.header))
		f.add(t)
	}
	if !o.NoChecksums {
		f.sums = newSums(f.blocks())
	}
	return nil
}

// blocks returns the blocks of the tensors, by their offsets.
func (f *savedFile) blocks() (list []span) {
	for _, t := range f.tensors {
		list = blocksOf(list, t.off, t.size, blockBytes)
	}
	return list
}

// seal sets the checksums in the header, when all bytes have passed and have those that the devices computed.
func (f *savedFile) seal() error {
	if f.sums == nil {
		return nil
	}
	sums := make([]uint32, len(f.sums.blocks))
	var wrong []error
	for i, b := range f.sums.blocks {
		switch of, _ := f.sums.of(i); {
		case len(of) == 0:
			return fmt.Errorf("tensor %s, at offset %d: not all bytes have passed (a bug: please report it)", quote(f.tensorAt(b.off)), b.off)
		case len(of) == 1:
			sums[i] = of[0]
		case len(of) > 1 && len(wrong) < maxChecksumErrors:
			wrong = append(wrong, &ChecksumError{File: f.temp.Name(), Tensor: f.tensorAt(b.off), Offset: b.off, Size: b.n, InCopy: true})
		}
	}
	if passed := f.sums.added.Load(); passed != f.size-int64(len(f.header)) {
		return fmt.Errorf("%d of %d bytes have passed (a bug: please report it)", passed, f.size-int64(len(f.header)))
	}
	if wrong != nil {
		return errors.Join(wrong...)
	}
	value, _, _ := checksumAt(f.header)
	copy(f.header[value:], checksumText(blockBytes, 0, sums))
	sum, _ := headerSum(f.header)
	copy(f.header[value:], checksumText(blockBytes, sum, sums))
	return nil
}

// add adds a tensor to the runs.
func (f *savedFile) add(t *savedAt) {
	if t.size == 0 {
		return
	}
	r := savedRun{device: t.Memory.Device, ptr: t.Memory.Ptr, off: t.off, n: t.size}
	if r.device == nil {
		r.host = t.Host[:t.size]
	} else if n := len(f.runs); n > 0 {
		if last := &f.runs[n-1]; last.device == r.device && last.ptr+cudart.DevPtr(last.n) == r.ptr {
			last.n += r.n
			return
		}
	}
	f.runs = append(f.runs, r)
}

func (r savedRun) end() int64 { return r.off + int64(r.n) }

// tensorAt returns the name of the tensor that has a byte of the file.
func (f *savedFile) tensorAt(off int64) string {
	i := sort.Search(len(f.tensors), func(i int) bool { return f.tensors[i].off+int64(f.tensors[i].size) > off })
	if i == len(f.tensors) {
		i--
	}
	return f.tensors[i].Name
}
