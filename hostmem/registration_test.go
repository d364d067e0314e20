//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestSpanLimit(t *testing.T) {
	t.Parallel()
	for release, want := range map[linux.Release]int{
		{Major: 6, Minor: 10}: maxSpan, {Major: 6, Minor: 11}: maxSpanLinux6, {Major: 6, Minor: 12}: maxSpan, {Major: 7, Minor: 11}: maxSpan,
		{Major: 6, Minor: 8}: maxSpan, {Major: 5, Minor: 11}: maxSpan, {}: maxSpan,
	} {
		assert.Equal(t, want, new(host).limit(release), "%v", release)
	}
}

// Where a registration is refused for its size, smaller ones are made, and
// copies across their seams are right.
func TestRefusedRegistrationsAreMadeSmaller(t *testing.T) {
	t.Parallel()
	const n = 200<<20 + 1
	g := newSimFixture(t, cudasim.Config{MaxRegister: 100 << 20})
	b := g.alloc(n, Options{})
	require.Greater(t, len(slices.Collect(b.Spans(0, b.Len()))), 1)
	end := 0
	for _, s := range slices.Collect(b.Spans(0, b.Len())) {
		require.Equal(t, end, s.Off, "spans follow each other")
		require.LessOrEqual(t, s.Len, 100<<20)
		end += s.Len
	}
	require.Equal(t, n, end)

	seam := slices.Collect(b.Spans(0, b.Len()))[1].Off
	p := g.Device(8192)
	want := filled(8192, 3)
	copy(b.Bytes()[seam-4000:], want)
	require.NoError(t, b.CopyToDevice(g.Stream, p, seam-4000, 8192))
	g.Synchronize()
	assert.True(t, bytes.Equal(want, g.Download(p, 8192)))

	require.Equal(t, RegisteredInSpans, b.Info().Method)
}

func TestNodes(t *testing.T) {
	t.Parallel()
	files := fstest.MapFS{
		"sys/bus/pci/devices/0000:06:00.0/numa_node":  {Data: []byte("1\n")},
		"sys/bus/pci/devices/0000:07:00.0/numa_node":  {Data: []byte("-1\n")},
		"sys/bus/pci/devices/0000:08:00.0/numa_node":  {Data: []byte("many\n")},
		"sys/bus/pci/devices/10000:06:00.0/numa_node": {Data: []byte("0\n")},
	}
	for _, id := range []string{"0000:06:00.0", "00000000:06:00.0"} {
		n, err := nodeOf(files, id)
		require.NoError(t, err, id)
		assert.Equal(t, 1, n)
	}
	n, err := nodeOf(files, "10000:06:00.0")
	require.NoError(t, err)
	assert.Equal(t, 0, n, "a device of another domain")
	_, err = nodeOf(files, "0000:07:00.0")
	require.EqualError(t, err, "the firmware reports none for PCI device 0000:07:00.0")
	for _, id := range []string{"0000:07:00.0", "0000:08:00.0", "0000:09:00.0", ""} {
		_, err := nodeOf(files, id)
		require.Error(t, err, id)
	}

	g := newSimFixture(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrHostNumaID: 1}}}})
	several, single := &pages.System{Nodes: []int{0, 1}}, &pages.System{Nodes: []int{0}}
	for _, tc := range []struct {
		node Node
		sys  *pages.System
		want int
		ok   bool
	}{
		{0, single, 0, false}, {OnNode(1), single, 0, false}, {AnyNode, several, 0, false},
		{OnNode(0), several, 0, true}, {OnNode(1), several, 1, true}, {0, several, 1, true},
	} {
		node, ok, note := tc.node.choose(t.Context(), g.Dev, tc.sys)
		assert.Equal(t, tc.ok, ok, "%+v", tc)
		assert.Equal(t, tc.want, node, "%+v", tc)
		assert.Empty(t, note)
	}
	unknown := newSimFixture(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrHostNumaID: -1}}}})
	_, ok, note := Node(0).choose(t.Context(), unknown.Dev, several)
	assert.False(t, ok)
	assert.Contains(t, note, "node of device 0")
}

func TestOutstandingListsOpenMemory(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	require.NoError(t, err)
	t.Cleanup(func() { testgpu.End(t, sim) })
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim, Debug: true})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	b, err := Alloc(t.Context(), dev, 5000, Options{Label: "TestOutstanding"})
	require.NoError(t, err)
	find := func() (found []Holding) {
		for _, h := range Outstanding() {
			if h.Label == "TestOutstanding" {
				found = append(found, h)
			}
		}
		return found
	}
	open := find()
	require.Len(t, open, 1)
	assert.Equal(t, "buffer", open[0].Kind)
	assert.Equal(t, b.Info().Reserved, open[0].Bytes)
	assert.Contains(t, open[0].Stack, "TestOutstandingListsOpenMemory", "in debug mode")
	assert.Contains(t, open[0].String(), `"TestOutstanding"`)
	require.NoError(t, b.Close())
	assert.Empty(t, find())
}
