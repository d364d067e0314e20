package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestBlocksComeBackWithTheirContent(t *testing.T) {
	t.Parallel()
	o := options{blocks: 250, size: 4096, requests: 200, requestBlocks: 8, share: 0.2, sim: !testgpu.Real()}
	var out strings.Builder
	err := run(t.Context(), o, &out)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	assert.Contains(t, out.String(), ": 250 blocks of 4096 bytes, 50 of them on the device\n")
	assert.Contains(t, out.String(), "filled: 200 blocks (819200 bytes) were spilled\n")
	assert.Regexp(t, `(?m)^200 requests of 8 blocks: all on the device for \d+, median .*, p99 `, out.String())
	assert.Regexp(t, `(?m)^hit in pinned memory: [1-9]\d*, median .*, p99 `, out.String())
	assert.Regexp(t, `(?m)^\d+ bytes \(\d+ blocks\) came back, \d+ bytes \(\d+ blocks\) were spilled: `, out.String())
	assert.Contains(t, out.String(), "the content of all 250 blocks is right\n")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, o, &out), context.Canceled)
	for want, change := range map[string]func(*options){
		"-share 0: must be above 0": func(o *options) { o.share = 0 },
		"-blocks 9223372036854775807 of 4096 bytes: at most 2147483647 blocks": func(o *options) { o.blocks = math.MaxInt },
		"-blocks, -block-size, -requests and -request-blocks must be positive": func(o *options) { o.size = 0 },
		"-share 0.01: the device has room for 2 blocks, and a request needs 8": func(o *options) { o.share = 0.01 },
	} {
		wrong := o
		change(&wrong)
		assert.ErrorContains(t, run(t.Context(), wrong, &out), want)
	}
}

// newTestServer has 20 blocks, all made, and room for 6.
func newTestServer(t *testing.T) *server {
	t.Helper()
	s, err := newServer(t.Context(), testgpu.Device(t), options{blocks: 20, size: 1000, requests: 1, requestBlocks: 2, share: 0.3})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	require.NoError(t, s.fill(t.Context()))
	return s
}

// onDevice returns the blocks that have slots.
func (s *server) onDevice() (all []int) {
	for b := range s.blocks {
		if s.blocks[b].slot != nil {
			all = append(all, b)
		}
	}
	return all
}

// The least recently used blocks leave, and only those that were written since they were spilled are copied.
func TestTheLeastRecentlyUsedBlocksAreSpilled(t *testing.T) {
	s := newTestServer(t)
	assert.Equal(t, []int{14, 15, 16, 17, 18, 19}, s.onDevice())
	s.stats = stats{}
	for _, step := range []struct {
		get      []int
		onDevice []int
		stats    stats
	}{
		{[]int{14, 15}, []int{14, 15, 16, 17, 18, 19}, stats{}},
		{[]int{0, 1}, []int{0, 1, 14, 15, 18, 19}, stats{restored: 2, spilled: 2}},
		{[]int{2, 15, 3}, []int{0, 1, 2, 3, 14, 15}, stats{restored: 4, spilled: 4}},
	} {
		restored, err := s.get(t.Context(), step.get)
		require.NoError(t, err)
		assert.LessOrEqual(t, restored, len(step.get))
		assert.Equal(t, step.onDevice, s.onDevice(), step.get)
		assert.Equal(t, step.stats, s.stats, step.get)
	}
	// 0 and 1 are as they were in pinned memory: they leave without a copy, unlike 14, which never was there.
	_, err := s.get(t.Context(), []int{16, 17, 18})
	require.NoError(t, err)
	assert.Equal(t, []int{2, 3, 15, 16, 17, 18}, s.onDevice())
	assert.Equal(t, stats{restored: 7, spilled: 5}, s.stats)
	require.NoError(t, s.checkAll(t.Context()))
}

// The checks are some: they fail where content is wrong, in either place.
func TestWrongContentIsFound(t *testing.T) {
	s := newTestServer(t)
	s.host.Bytes()[3*s.size+999]++
	assert.ErrorContains(t, s.checkAll(t.Context()), "block 3 in pinned memory is wrong")
	_, err := s.get(t.Context(), []int{2, 3})
	require.NoError(t, err)
	assert.ErrorContains(t, s.check(t.Context(), []int{2, 3}), "of blocks 2 to 3 on the device 1 bytes are wrong")
	_, err = s.ptr(10)
	assert.EqualError(t, err, "block 10 is not on the device")
}

func TestLatency(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "none", latency(nil))
	assert.Equal(t, "median 3ns, p99 3ns", latency([]time.Duration{3}))
	var hundred []time.Duration
	for i := range 200 {
		hundred = append(hundred, time.Duration(200-i))
	}
	assert.Equal(t, fmt.Sprintf("median %v, p99 %v", time.Duration(101), time.Duration(198)), latency(hundred))
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	out := exampletest.Run(t, main, "-sim", "-blocks", "256", "-requests", "20", "-request-blocks", "8", "-block-size", "512")
	require.Contains(t, out, "256 blocks of 512 bytes, 64 of them on the device\n")
	require.Contains(t, out, "\nthe content of all 256 blocks is right\n")
}
