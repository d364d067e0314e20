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

	"github.com/gopinned/pinned/weights"
)

// mustParse parses a file made by a test.
func mustParse(t testing.TB, file []byte, name string) *weights.File {
	t.Helper()
	f, err := weights.Parse(strings.NewReader(string(file)), int64(len(file)), name)
	require.NoError(t, err)
	return f
}

// A deviceRead is what one device has of a weights.Read.
type deviceRead struct {
	File   *weights.File
	Offset int64
	Size   int
	Pieces []devicePiece
}

type devicePiece struct{ From, To, Size int }

// readsOf returns the reads for a device.
func readsOf(p *weights.Plan, device int) (list []deviceRead) {
	reads, err := p.Reads()
	if err != nil {
		panic(err)
	}
	for _, r := range reads {
		at := slices.Index(r.Devices, device)
		if at < 0 {
			continue
		}
		d := deviceRead{File: r.File, Offset: r.Offset, Size: r.Size}
		for _, piece := range r.Pieces {
			d.Pieces = append(d.Pieces, devicePiece{piece.From, piece.To[at], piece.Size})
		}
		list = append(list, d)
	}
	return list
}

// u8 is a tensor of n bytes.
func u8(name string, n int) spec { return spec{name, weights.I8, []int{n}} }

func TestNeighboursAreOneRead(t *testing.T) {
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
			{tensors[0].Whole(), 0}, {tensors[1].Whole(), 256}, {tensors[2].Whole(), 768},
			{tensors[3].Whole(), 1024}, {tensors[4].Whole(), 1280}, {tensors[5].Whole(), 1536},
		},
	}}, p.Devices)
	reads, err := p.Reads()
	require.NoError(t, err)
	assert.Equal(t, []weights.Read{{File: f, Offset: start, Size: 1152, Devices: []int{0}, Pieces: []weights.Piece{
		{From: 0, To: []int{0}, Size: 868}, // a, b and c
		{From: 868, To: []int{1024}, Size: 28},
		{From: 896, To: []int{1280}, Size: 256},
	}}}, reads)

	p, err = weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{Align: 1})
	require.NoError(t, err)
	assert.Equal(t, 1152, p.Devices[0].Bytes)
	assert.Equal(t, []deviceRead{{f, start, 1152, []devicePiece{{0, 0, 1152}}}}, readsOf(p, 0), "one copy")
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
	assert.Equal(t, []deviceRead{
		{File: f, Offset: start + 300, Size: 300, Pieces: []devicePiece{{0, 0, 300}}},
		{File: f, Offset: start + 1200, Size: 300, Pieces: []devicePiece{{0, 512, 300}}},
	}, readsOf(p, 2))
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

func TestPlanReadsPaddingOfGGUF(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeGGUF(3, 64, u8("a", 65), u8("b", 64), u8("c", 1), u8("d", 5)), "f")
	a, _ := f.Tensor("a")
	b, _ := f.Tensor("b")
	d, _ := f.Tensor("d")
	p, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{Align: 64})
	require.NoError(t, err)
	assert.Equal(t, []deviceRead{{File: f, Offset: a.Offset, Size: 64*4 + 5, Pieces: []devicePiece{
		{From: 0, To: 0, Size: 65}, {From: 128, To: 128, Size: 65}, {From: 256, To: 256, Size: 5},
	}}}, readsOf(p, 0))

	p, err = weights.NewPlan(slices.Values([]*weights.Tensor{b, d}), nil, weights.PlanOptions{})
	require.NoError(t, err)
	assert.Len(t, readsOf(p, 0), 2, "c between them is no padding")
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
		checkPlan(t, p, chosen, place, o, contents)
		if t.Failed() {
			t.Fatalf("seed %d, options %+v", seed, o)
		}
	}
}

// checkPlan asserts what NewPlan promises, independently of how it does it, and
// carries the plan out. contents has the bytes of each tensor.
func checkPlan(t testing.TB, p *weights.Plan, chosen []*weights.Tensor, place func(*weights.Tensor) int, o weights.PlanOptions, contents map[string][]byte) {
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
	for i, d := range p.Devices {
		assert.True(t, i == 0 || p.Devices[i-1].Device < d.Device, "devices ascend")
		assert.Len(t, d.Tensors, want[d.Device])
		delete(want, d.Device)

		memory := make([]byte, d.Bytes)
		written := make([]bool, d.Bytes)
		var end int64
		var before deviceRead
		for k, read := range readsOf(p, d.Device) {
			file := slices.Index(files, read.File)
			require.GreaterOrEqual(t, file, 0)
			if k > 0 && before.File == read.File {
				assert.Greater(t, read.Offset-end, int64(padding(read.File)-1), "reads ascend, and are as large as the padding allows")
			} else if k > 0 {
				assert.Greater(t, file, slices.Index(files, before.File), "files ascend")
			}
			end = read.Offset + int64(read.Size)
			require.Greater(t, read.Size, 0)
			require.GreaterOrEqual(t, read.Offset, int64(0))
			require.LessOrEqual(t, end, read.File.Size())
			bytes := make([]byte, read.Size)
			_, err := read.File.Reader().ReadAt(bytes, read.Offset)
			require.NoError(t, err)
			at := 0
			for n, piece := range read.Pieces {
				require.Greater(t, piece.Size, 0)
				gap := piece.From - at
				require.GreaterOrEqual(t, gap, 0, "pieces ascend")
				assert.LessOrEqual(t, gap, padding(read.File)-1, "gaps within a read")
				if n > 0 && gap == 0 {
					last := read.Pieces[n-1]
					assert.NotEqual(t, last.To+last.Size, piece.To, "neighbours are one piece")
				}
				at = piece.From + piece.Size
				require.LessOrEqual(t, at, read.Size)
				for b := range piece.Size {
					require.False(t, written[piece.To+b], "two pieces write byte %d", piece.To+b)
					written[piece.To+b] = true
					memory[piece.To+b] = bytes[piece.From+b]
				}
			}
			assert.Equal(t, 0, read.Pieces[0].From, "a read starts with what is wanted")
			assert.Equal(t, read.Size, at, "and ends with it")
			before = read
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
		assert.NotContains(t, written, true, "nothing is written outside of tensors")
	}
	assert.Empty(t, want)
}

// padding is what tensors' offsets in a file are a multiple of, counted from
// the first.
func padding(f *weights.File) int {
	if align, ok := f.Metadata("general.alignment"); ok && f.Format() == weights.GGUF {
		return int(align.(uint32))
	}
	return map[weights.Format]int{weights.Safetensors: 1, weights.GGUF: 32}[f.Format()]
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
		reads, err := p.Reads()
		require.NoError(t, err)
		require.Len(t, reads, n)
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
		reads, err := p.Reads()
		require.NoError(t, err)
		require.Len(t, reads, more/2)
	}
}
