package weights_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

// mustParse parses a file made by a test.
func mustParse(t testing.TB, file []byte, name string) *weights.File {
	t.Helper()
	f, err := weights.Parse(strings.NewReader(string(file)), int64(len(file)), name)
	require.NoError(t, err)
	return f
}

// firstAddress is the address of the memory of each device in uploadsOf.
const firstAddress = 1 << 30

// uploadsOf returns the uploads of a plan for four simulated devices at most.
func uploadsOf(t testing.TB, p *weights.Plan) []weights.Upload {
	t.Helper()
	return uploadsOnto(t, simulatedDevices(t), p)
}

func simulatedDevices(t testing.TB) []*cudart.Device {
	t.Helper()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4)})
	return rt.Devices()
}

func uploadsOnto(t testing.TB, devs []*cudart.Device, p *weights.Plan) []weights.Upload {
	t.Helper()
	memory := map[int]weights.Memory{}
	for i, d := range p.Devices {
		memory[d.Device] = weights.Memory{Device: devs[i], Ptr: firstAddress, Bytes: d.Bytes}
	}
	uploads, err := p.Uploads(memory)
	require.NoError(t, err)
	return uploads
}

// bytesAt returns a segment of n bytes at an offset of a file, at a place of an upload.
func bytesAt(f *weights.File, off int64, n, at int) weights.Segment {
	return weights.Segment{File: f, Range: transfer.Range{Reader: f.Reader(), Off: off, N: n}, At: at}
}

// u8 is a tensor of n bytes.
func u8(name string, n int) spec { return spec{name, weights.I8, []int{n}} }

func TestNeighboursAreOneSegment(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 256), u8("b", 512), u8("c", 100), u8("d", 28), u8("e", 256), u8("f", 0)), "f")
	start := f.Size() - 256 - 512 - 100 - 28 - 256
	tensors := slices.Collect(f.Tensors())

	p, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{})
	require.NoError(t, err)
	assert.Equal(t, []weights.DevicePlan{{
		Device: 0,
		Bytes:  1536,
		Tensors: []weights.Placed{
			{Part: tensors[0].Whole(), Offset: 0}, {Part: tensors[1].Whole(), Offset: 256}, {Part: tensors[2].Whole(), Offset: 768},
			{Part: tensors[3].Whole(), Offset: 1024}, {Part: tensors[4].Whole(), Offset: 1280}, {Part: tensors[5].Whole(), Offset: 1536},
		},
	}}, p.Devices)
	want := weights.Upload{Devices: []int{0}, Bytes: 1536, Segments: []weights.Segment{
		bytesAt(f, start, 868, 0), // a, b and c
		bytesAt(f, start+868, 28, 1024),
		bytesAt(f, start+896, 256, 1280),
	}, Pieces: []transfer.Piece{{N: 1536, Dsts: []cudart.DevPtr{firstAddress}}}}
	assert.Equal(t, []weights.Upload{want}, uploadsOf(t, p))

	p, err = weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{Align: 1})
	require.NoError(t, err)
	assert.Equal(t, 1152, p.Devices[0].Bytes)
	assert.Equal(t, []weights.Segment{bytesAt(f, start, 1152, 0)}, uploadsOf(t, p)[0].Segments)
}

func TestPlanHasOffsetsForEachDevice(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 300), u8("b", 300), u8("c", 300), u8("d", 300), u8("e", 300)), "f")
	start := f.Size() - 1500
	place := func(t *weights.Tensor) int {
		return map[string]int{"a": 7, "b": 2, "c": 7, "d": weights.Skip, "e": 2}[t.Name]
	}
	p, err := weights.NewPlan(f.Tensors(), place, weights.PlanOptions{})
	require.NoError(t, err)
	require.Len(t, p.Devices, 2)
	assert.Equal(t, 2, p.Devices[0].Device)
	assert.Equal(t, 812, p.Devices[0].Bytes)
	uploads := uploadsOf(t, p)
	require.Len(t, uploads, 2)
	assert.Equal(t, []int{7}, uploads[0].Devices, "by their first tensors")
	assert.Equal(t, []int{2}, uploads[1].Devices)
	assert.Equal(t, []weights.Segment{bytesAt(f, start+300, 300, 0), bytesAt(f, start+1200, 300, 512)}, uploads[1].Segments)
	assert.Equal(t, 7, p.Devices[1].Device)
	var placed []string
	for _, tensor := range p.Devices[1].Tensors {
		placed = append(placed, fmt.Sprint(tensor.Tensor.Name, tensor.Offset))
	}
	assert.Equal(t, []string{"a0", "c512"}, placed)

	p, err = weights.NewPlan(f.Tensors(), func(*weights.Tensor) int { return weights.Skip }, weights.PlanOptions{})
	require.NoError(t, err)
	assert.Empty(t, p.Devices)
}

func TestPaddingOfGGUFIsNotRead(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeGGUF(3, 64, u8("a", 65), u8("b", 64), u8("c", 1), u8("d", 5)), "f")
	a, _ := f.Tensor("a")
	p, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{Align: 64})
	require.NoError(t, err)
	uploads := uploadsOf(t, p)
	require.Len(t, uploads, 1)
	assert.Equal(t, []weights.Segment{bytesAt(f, a.Offset, 65, 0), bytesAt(f, a.Offset+128, 65, 128), bytesAt(f, a.Offset+256, 5, 256)}, uploads[0].Segments)
	assert.Len(t, uploads[0].Pieces, 1, "zeros are copied to the bytes between them")
}

func TestPlanRefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 3), u8("b", 4)), "the file")
	a, _ := f.Tensor("a")
	copied := *a
	on := func(device int) func(*weights.Tensor) int { return func(*weights.Tensor) int { return device } }
	list := func(tensors ...*weights.Tensor) func(func(*weights.Tensor) bool) { return slices.Values(tensors) }
	tests := []struct {
		tensors func(func(*weights.Tensor) bool)
		place   func(*weights.Tensor) int
		options weights.PlanOptions
		says    string
	}{
		{nil, nil, weights.PlanOptions{}, "no tensors: the sequence is nil"},
		{list(a, nil), nil, weights.PlanOptions{}, "nil tensor"},
		{list(a, a), nil, weights.PlanOptions{}, `duplicate tensor "a" of the file`},
		{list(a, a), on(weights.Skip), weights.PlanOptions{}, `duplicate tensor "a" of the file`},
		{list(&copied), nil, weights.PlanOptions{}, `tensor "a": not from a File's or Model's tensors`},
		{list(&weights.Tensor{Name: "x"}), nil, weights.PlanOptions{}, `tensor "x": not from a File's or Model's tensors`},
		{list(a), on(-2), weights.PlanOptions{}, `tensor "a" is placed on device -2, want 0 or more, or Skip`},
		{list(a), nil, weights.PlanOptions{Align: 3}, "PlanOptions.Align is 3, want a power of two"},
		{list(a), nil, weights.PlanOptions{Align: -256}, "PlanOptions.Align is -256, want a power of two"},
		{list(a), nil, weights.PlanOptions{Align: -maxInt - 1}, "want a power of two"},
		{f.Tensors(), nil, weights.PlanOptions{Align: maxInt/2 + 1}, ""},
	}
	for _, tt := range tests {
		p, err := weights.NewPlan(tt.tensors, tt.place, tt.options)
		if tt.says == "" {
			require.NoError(t, err)
			assert.Equal(t, maxInt/2+1+4, p.Devices[0].Bytes)
			continue
		}
		assert.Nil(t, p)
		assert.ErrorContains(t, err, tt.says)
		assert.ErrorContains(t, err, "weights: plan: ")
	}

	// Numbers that contradict one another, or that no tensor has.
	for says, part := range map[string]weights.Part{
		"a Stride of 2 without a Row: want both, or neither":                         {Size: 2, Stride: 2},
		"a Stride of -2 without a Row":                                               {Size: 2, Stride: -2},
		"2 bytes from byte 0 on in rows of 1 every 0 bytes, it has 3":                {Size: 2, Row: 1},
		"in rows of -1 every 2 bytes":                                                {Size: 2, Row: -1, Stride: 2},
		fmt.Sprintf("in rows of 1 every %d bytes", maxInt):                           {Size: 2, Row: 1, Stride: maxInt},
		fmt.Sprintf("%d bytes from byte 1 on", maxInt):                               {From: 1, Size: maxInt},
		fmt.Sprintf("%d bytes from byte 0 on", maxInt):                               {Size: maxInt, Row: 1, Stride: 2},
		fmt.Sprintf("1 bytes from byte %d on", maxInt):                               {From: maxInt, Size: 1},
		"-1 bytes from byte 0 on":                                                    {Size: -1},
		"1 bytes from byte -1 on":                                                    {From: -1, Size: 1},
		fmt.Sprintf("1 bytes from byte 0 on in rows of 4 every %d bytes", -maxInt-1): {Size: 1, Row: 4, Stride: -maxInt - 1},
	} {
		part.Tensor = a
		_, err := weights.PlanShares([]weights.Share{{Part: part}}, weights.PlanOptions{})
		assert.ErrorContains(t, err, says)
	}
	_, err := weights.PlanShares([]weights.Share{{Part: a.Whole(), Device: -1}}, weights.PlanOptions{})
	assert.ErrorContains(t, err, "device -1, want 0 or more")

	// Files that together have more bytes than an int counts.
	header := fmt.Sprintf(`{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, maxInt-1000, maxInt-1000)
	r := &sparse{start: st(header, 0), size: int64(8+len(header)) + maxInt - 1000}
	x, err := weights.Parse(r, r.size, "x")
	require.NoError(t, err)
	y, err := weights.Parse(r, r.size, "y")
	require.NoError(t, err)
	xa, _ := x.Tensor("a")
	ya, _ := y.Tensor("a")
	_, err = weights.NewPlan(list(xa, ya), nil, weights.PlanOptions{})
	assert.ErrorContains(t, err, fmt.Sprintf("weights: plan: device 0 gets more than %d bytes", maxInt))
	p, err := weights.NewPlan(list(ya, xa), func(t *weights.Tensor) int { return len(t.File.Name()) + int(t.File.Name()[0]) }, weights.PlanOptions{})
	require.NoError(t, err)
	assert.Len(t, p.Devices, 2)
}

// TestPlansOfRandomModelsCopyEachByteOnce checks plans by their properties, and by doing what
// they say.
func TestPlansOfRandomModelsCopyEachByteOnce(t *testing.T) {
	t.Parallel()
	rounds := 100
	if long() {
		rounds = 1000
	}
	devs := simulatedDevices(t)
	for seed := range rounds {
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		var all []*weights.Tensor
		contents := map[string][]byte{}
		for i := range 1 + r.IntN(4) {
			var specs []spec
			for j := range r.IntN(12) {
				n := []int{0, 1, r.IntN(40), 32 * r.IntN(10), 256 * r.IntN(6)}[r.IntN(5)]
				s := u8(fmt.Sprintf("%d.%d", i, r.IntN(1<<30)*100+j), n)
				specs = append(specs, s)
				contents[s.name] = s.content()
			}
			file := makeSafetensors(t, nil, specs...)
			if r.IntN(2) == 0 {
				file = makeGGUF(3, 1<<r.IntN(8), specs...)
			}
			all = slices.AppendSeq(all, mustParse(t, file, fmt.Sprint("file ", i)).Tensors())
		}
		// Any choice of them, in any order.
		var chosen []*weights.Tensor
		for _, tensor := range all {
			if r.IntN(5) > 0 {
				chosen = append(chosen, tensor)
			}
		}
		if r.IntN(2) == 0 {
			r.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
		}
		on := map[*weights.Tensor]int{}
		devices := 1 + r.IntN(3)
		for _, tensor := range chosen {
			on[tensor] = r.IntN(devices+1) - 1
		}
		place := func(t *weights.Tensor) int { return on[t] }
		o := weights.PlanOptions{Align: 1 << r.IntN(10)}
		if r.IntN(4) == 0 {
			o.Align = 0
		}
		p, err := weights.NewPlan(slices.Values(chosen), place, o)
		require.NoError(t, err)
		again, err := weights.NewPlan(slices.Values(chosen), place, o)
		require.NoError(t, err)
		require.Equal(t, p, again, "the same arguments, the same plan")
		checkPlan(t, devs, p, chosen, place, o, contents)
		if t.Failed() {
			t.Fatalf("seed %d, options %+v", seed, o)
		}
	}
}

// checkPlan asserts what NewPlan promises, independently of how it does it, and
// carries the plan out. contents has the bytes of each tensor.
func checkPlan(t testing.TB, devs []*cudart.Device, p *weights.Plan, chosen []*weights.Tensor, place func(*weights.Tensor) int, o weights.PlanOptions, contents map[string][]byte) {
	t.Helper()
	align := o.Align
	if align == 0 {
		align = 256
	}
	want := map[int]int{} // tensors by device
	var files []*weights.File
	for _, tensor := range chosen {
		if device := place(tensor); device != weights.Skip {
			want[device]++
			if !slices.Contains(files, tensor.File) {
				files = append(files, tensor.File)
			}
		}
	}
	assert.Len(t, p.Devices, len(want))
	uploads := uploadsOnto(t, devs, p)
	for i, d := range p.Devices {
		assert.True(t, i == 0 || p.Devices[i-1].Device < d.Device, "devices ascend")
		assert.Len(t, d.Tensors, want[d.Device])
		delete(want, d.Device)

		memory, written := make([]byte, d.Bytes), make([]bool, d.Bytes)
		var upload weights.Upload
		if at := slices.IndexFunc(uploads, func(u weights.Upload) bool { return slices.Equal(u.Devices, []int{d.Device}) }); at >= 0 {
			upload = uploads[at]
		}
		bytes, end := make([]byte, upload.Bytes), 0
		var before weights.Segment
		for k, s := range upload.Segments {
			file := slices.Index(files, s.File)
			require.GreaterOrEqual(t, file, 0)
			require.Greater(t, s.N, 0)
			require.GreaterOrEqual(t, s.At, end, "segments ascend")
			require.Less(t, s.At-end, 256, "and have no more than alignment between them")
			if k > 0 && before.File == s.File {
				require.GreaterOrEqual(t, s.Off, before.Off+int64(before.N), "offsets ascend")
				assert.True(t, s.Off > before.Off+int64(before.N) || s.At > end, "neighbours are one segment")
			} else if k > 0 {
				assert.Greater(t, file, slices.Index(files, before.File), "files ascend")
			}
			_, err := s.File.Reader().ReadAt(bytes[s.At:][:s.N], s.Off)
			require.NoError(t, err)
			before, end = s, s.At+s.N
		}
		assert.Equal(t, end, upload.Bytes)
		for _, piece := range upload.Pieces {
			require.Len(t, piece.Dsts, 1)
			to := int(piece.Dsts[0] - firstAddress)
			assert.Equal(t, to%256, piece.Off%256)
			copy(memory[to:][:piece.N], bytes[piece.Off:][:piece.N])
			for b := range piece.N {
				require.False(t, written[to+b], "two pieces write byte %d", to+b)
				written[to+b] = true
			}
		}
		last := 0
		for k, placed := range d.Tensors {
			tensor := placed.Tensor
			assert.Equal(t, d.Device, place(tensor))
			assert.True(t, slices.Contains(chosen, tensor))
			assert.Zero(t, placed.Offset%align)
			assert.Less(t, placed.Offset-last, align, "no more padding than the alignment takes")
			assert.GreaterOrEqual(t, placed.Offset, last, "places ascend and do not overlap")
			if k > 0 {
				other := d.Tensors[k-1].Tensor
				assert.True(t, other != tensor && (other.File != tensor.File || other.Offset <= tensor.Offset))
			}
			last = placed.Offset + tensor.Size
			if content := contents[tensor.Name]; contents != nil {
				assert.Equal(t, content, memory[placed.Offset:last], "the bytes of %s arrive", tensor.Name)
			}
			for b := placed.Offset; b < last; b++ {
				require.True(t, written[b], "byte %d of %s is not copied", b-placed.Offset, tensor.Name)
				written[b] = false
			}
		}
		assert.Equal(t, last, d.Bytes)
		for b, zero := range written {
			require.True(t, !zero || memory[b] == 0, "nothing but zeros is written outside of tensors")
		}
	}
	assert.Empty(t, want)
}

// What is refused is what overlaps, byte for byte, whatever the rows and strides of the parts.
func TestPartsOverlapWhereTheirBytesDo(t *testing.T) {
	t.Parallel()
	const size = 48
	f := mustParse(t, makeSafetensors(t, nil, u8("a", size)), "f")
	a, _ := f.Tensor("a")
	rnd := rand.New(rand.NewPCG(1, 5))
	refused := 0
	const rounds = 20_000
	for range rounds {
		var shares []weights.Share
		used, overlap := map[[2]int]bool{}, false
		from := 0
		for range 2 + rnd.IntN(5) {
			p := weights.Part{Tensor: a, From: from, Size: rnd.IntN(6)}
			if rnd.IntN(4) > 0 {
				p.Row = 1 + rnd.IntN(3)
				p.Stride = max(p.Row, []int{8, 8, 8, 12, 5}[rnd.IntN(5)])
				p.Size = rnd.IntN(min(4, 1+(size-p.Row-p.From)/p.Stride)*p.Row + 1)
			}
			from += 1 + rnd.IntN(3)
			device := rnd.IntN(2)
			for i := range p.Size {
				at := p.From + i
				if p.Row > 0 {
					at = p.From + i/p.Row*p.Stride + i%p.Row
				}
				overlap = overlap || used[[2]int{device, at}]
				used[[2]int{device, at}] = true
			}
			shares = append(shares, weights.Share{Part: p, Device: device})
		}
		_, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.Equal(t, overlap, err != nil, "%v: %v", shares, err)
		if overlap {
			refused++
		}
	}
	require.Greater(t, refused, rounds/10)
	require.Less(t, refused, rounds-rounds/10)
}

// The time of a plan with 100,000 parts of one tensor is that of 100,000 parts: pairs would take minutes.
func TestManyPartsOfOneTensor(t *testing.T) {
	t.Parallel()
	const n = 100_000
	f := mustParse(t, makeSafetensors(t, nil, spec{"a", weights.I8, []int{n, 4}}, spec{"b", weights.I8, []int{4, n}}), "f")
	for dim, name := range []string{"a", "b"} {
		tensor, _ := f.Tensor(name)
		var shares []weights.Share
		for i := range n {
			part, err := tensor.Slice(dim, i, i+1)
			require.NoError(t, err)
			shares = append(shares, weights.Share{Part: part, Device: i % 2})
		}
		p, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err)
		segments := 0
		for _, u := range uploadsOf(t, p) {
			segments += len(u.Segments)
		}
		require.Equal(t, n, segments)
	}
}

// The end of a part whose rows and strides make more than 2^64 bytes is not within its tensor.
func TestPartsThatEndPastAnyOffset(t *testing.T) {
	t.Parallel()
	const size = 1 << 32
	header := `{"a":{"dtype":"I8","shape":[4294967296],"data_offsets":[0,4294967296]}}`
	header = string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header
	f, err := weights.Parse(strings.NewReader(header), int64(len(header)+size), "f")
	require.NoError(t, err)
	a, _ := f.Tensor("a")
	for _, p := range []weights.Part{{Size: size, Row: 1, Stride: size}, {Size: size, Row: 1, Stride: size / 2}, {From: 1, Size: size - 1, Row: 1, Stride: 3}} {
		p.Tensor = a
		_, err = weights.PlanShares([]weights.Share{{Part: p}}, weights.PlanOptions{})
		require.ErrorContains(t, err, "bytes from byte")
	}
}

func TestEmptyColumnsAreNotRead(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 8), u8("b", 8)), "f")
	b, _ := f.Tensor("b")
	for _, more := range []int{0, 2} {
		p, err := weights.PlanShares([]weights.Share{{Part: weights.Part{Tensor: b, Row: 2, Stride: 4}}, {Part: weights.Part{Tensor: b, Size: more}}}, weights.PlanOptions{})
		require.NoError(t, err)
		require.Len(t, uploadsOf(t, p), more/2)
	}
}
