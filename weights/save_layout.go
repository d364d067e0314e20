package weights

import (
	"cmp"
	"context"
	"encoding/binary"
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
	"github.com/gopinned/pinned/internal/raw"
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
	off   int64
	size  int
	align int // the size of an element, 1 for those that are smaller than a byte
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
	names := &File{source: source{name: s.path}, byName: make(map[string]*Tensor, len(tensors))}
	named := &Tensor{} // one for all: only the names matter
	for i := range tensors {
		t := savedAt{SavedTensor: &tensors[i]}
		named.Name = t.Name
		if err := names.add(named); err != nil {
			return err
		}
		if err := t.check(); err != nil {
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
	slices.SortStableFunc(placed, func(t, u savedAt) int { return cmp.Compare(u.align, t.align) })
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

// check sets the size and the alignment of the tensor, or returns an error.
func (t *savedAt) check() (err error) {
	block, known := safetensorsTypes[t.DType]
	switch {
	case !known:
		return fmt.Errorf("type %s is not one of safetensors", quote(string(t.DType)))
	case t.Name == metadataKey:
		return errors.New("the format keeps this name for the metadata")
	case len(t.Shape) > maxDimensions:
		return fmt.Errorf("%d dimensions, want at most %d", len(t.Shape), maxDimensions)
	}
	if t.align = 1; block.elements == 1 {
		t.align = block.bytes
	}
	t.size, err = t.DType.size(t.Shape)
	m := t.Memory
	switch {
	case err != nil:
		return err
	case m.Device == nil && m != Memory{}:
		return fmt.Errorf("memory at %v of a nil device", m.Ptr)
	case m.Device == nil && len(t.Host) < t.size:
		return fmt.Errorf("%d bytes of host memory, %s of shape %v has %d", len(t.Host), t.DType, t.Shape, t.size)
	case m.Device == nil:
		return nil
	case t.Host != nil:
		return errors.New("it has device memory and host memory")
	}
	return m.check(t.size)
}

// checkMemory asks CUDA whether the tensors' memory is that of their devices, and splits runs between allocations: CUDA
// refuses a copy that spans two.
func (s *Saving) checkMemory(ctx context.Context) error {
	if err := bounded.Ended(ctx); err != nil {
		return err
	}
	files, checks := s.files, make(map[*cudart.Device]*memoryCheck, len(s.devices))
	for _, dev := range s.devices {
		checks[dev] = &memoryCheck{device: dev}
	}
	split, err := bounded.Do(ctx, bounded.Call[[][]savedRun]{Run: func() ([][]savedRun, error) {
		split := make([][]savedRun, len(files))
		for i, f := range files {
			split[i] = make([]savedRun, 0, len(f.runs))
			for _, r := range f.runs {
				var err error
				if split[i], err = checks[r.device].split(split[i], r); err != nil {
					return nil, fmt.Errorf("the memory from tensor %s on: %w", quote(f.tensorAt(r.off)), err)
				}
			}
		}
		return split, nil
	}})
	if err != nil {
		return err
	}
	for i, f := range files {
		f.runs = split[i]
	}
	return nil
}

// A memoryCheck asks CUDA whether addresses are memory of a device, once for each allocation: a query takes half a
// microsecond (H200, 2026-11-22), which adds up for many small tensors.
type memoryCheck struct {
	device *cudart.Device
	known  []span // the device's allocations, by address
}

// split appends the parts of a run that are in one allocation each. If the library cannot tell that, it looks at the first
// byte and at the last. Nil is for host memory.
func (c *memoryCheck) split(parts []savedRun, r savedRun) ([]savedRun, error) {
	for c != nil {
		in, err := c.allocation(r.ptr)
		if err == nil && in.n == 0 {
			in, err = c.allocation(r.ptr + cudart.DevPtr(r.n-1))
		}
		if err != nil {
			return nil, err
		}
		n := in.end() - int64(r.ptr)
		if in.n == 0 || n >= int64(r.n) {
			break
		}
		part := r
		part.n = int(n)
		parts = append(parts, part)
		r.off, r.ptr, r.n = part.end(), r.ptr+cudart.DevPtr(n), r.n-part.n
	}
	return append(parts, r), nil
}

// allocation returns the allocation of an address, an empty one if the library cannot tell.
func (c *memoryCheck) allocation(address cudart.DevPtr) (in span, err error) {
	i := sort.Search(len(c.known), func(i int) bool { return c.known[i].end() > int64(address) })
	if i < len(c.known) && c.known[i].off <= int64(address) {
		return c.known[i], nil
	}
	a, err := c.device.PointerAttributes(uintptr(address))
	if err != nil {
		return in, err
	}
	if a.Type == cudart.MemoryUnregistered || a.Type == cudart.MemoryDevice && a.Device != c.device.Ordinal() {
		return in, fmt.Errorf("address %v is not memory of %v", address, c.device)
	}
	if base, n := raw.AddressRange(c.device, uintptr(address)); n > 0 {
		in = span{int64(base), n}
		c.known = slices.Insert(c.known, i, in)
	}
	return in, nil
}

// layOut sets the offsets, the header and the runs.
func (f *savedFile) layOut(o SaveOptions) error {
	data, blocks := 0, 0 // bytes of tensors, and a limit of their blocks
	for i := range f.tensors {
		t := &f.tensors[i]
		t.off = int64(data)
		data += t.size
		blocks += t.size/blockBytes + 1
	}
	metadata := maps.Clone(o.Metadata)
	delete(metadata, checksumKey) // that of another file
	if !o.NoChecksums {
		if blocks > maxHeader/digits {
			return fmt.Errorf("checksums of %d blocks have no room in a header: set ShardBytes or NoChecksums", blocks)
		}
		list := make([]span, 0, blocks)
		for _, t := range f.tensors {
			list = blocksOf(list, t.off, t.size, blockBytes)
		}
		if metadata == nil {
			metadata = map[string]string{}
		}
		metadata[checksumKey] = checksumText(blockBytes, 0, make([]uint32, len(list)))
		f.sums = newSums(list)
	}
	f.header = f.headerText(metadata)
	if n := len(f.header) - 8; n > maxHeader {
		return fmt.Errorf("a header of %d bytes, want at most %d: set ShardBytes", n, maxHeader)
	}
	if data > math.MaxInt-len(f.header) {
		return fmt.Errorf("the file would have more than %d bytes", math.MaxInt)
	}
	f.place(int64(len(f.header)))
	f.size = int64(len(f.header) + data)
	return nil
}

// headerText returns the header, with its size before it. The keys are sorted, as encoding/json sorts
// those of a map.
func (f *savedFile) headerText(metadata map[string]string) []byte {
	inOrder, size := make([]*savedAt, 0, len(f.tensors)+1), saveAlign+len(metadata[checksumKey])
	for i := range f.tensors {
		inOrder = append(inOrder, &f.tensors[i])
		size += len(f.tensors[i].Name) + 100 // enough for nearly all entries
	}
	if len(metadata) > 0 {
		inOrder = append(inOrder, &savedAt{SavedTensor: &SavedTensor{Name: metadataKey}})
	}
	slices.SortFunc(inOrder, func(t, u *savedAt) int { return strings.Compare(t.Name, u.Name) })
	h := append(make([]byte, 8, size), '{')
	for i, t := range inOrder {
		if i > 0 {
			h = append(h, ',')
		}
		h = append(appendString(h, t.Name), ':')
		if t.Name == metadataKey {
			h = appendJSON(h, metadata)
			continue
		}
		h = append(append(append(h, `{"dtype":"`...), t.DType...), `","shape":[`...)
		h = appendInts(h, t.Shape...)
		h = append(h, `],"data_offsets":[`...)
		h = appendInts(h, int(t.off), int(t.off)+t.size)
		h = append(h, "]}"...)
	}
	h = append(h, '}')
	for len(h)%saveAlign != 0 {
		h = append(h, ' ')
	}
	binary.LittleEndian.PutUint64(h, uint64(len(h)-8))
	return h
}

// place moves the tensors and blocks behind the header, and sets the runs.
func (f *savedFile) place(header int64) {
	f.runs = make([]savedRun, 0, len(f.tensors))
	for i := range f.tensors {
		t := &f.tensors[i]
		t.off += header
		f.add(t)
	}
	if f.sums != nil {
		for i := range f.sums.blocks {
			f.sums.blocks[i].off += header
		}
	}
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
	value, at, _ := checksumAt(f.header)
	copy(f.header[value:], checksumText(blockBytes, 0, sums))
	sum, _ := headerSum(f.header)
	copy(f.header[at:], fmt.Sprintf("%08x", sum))
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
