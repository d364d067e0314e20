package bench

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// lockedFreely maps memory as on a host without a limit of locked memory.
func lockedFreely(n int, _ string) ([]byte, func() error, error) { return hostos.Map(n, 0) }

func TestFramesMeasuresTheLinkModel(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	const n = 4 << 20
	b := runAll(t, frames(simClock(t, dev), lockedFreely), short(dev, n))
	for method, rate := range map[string]float64{
		framesAnew:       2 / (1.0/5 + 1.0/4),
		framesPinned:     2 / (1.0/20 + 1.0/4),
		framesPageable:   2 / (1.0/5 + 1.0/4),
		framesMlock:      2 / (1.0/5 + 1.0/4),
		framesMapLocked:  2 / (1.0/5 + 1.0/4),
		framesReused:     2 / (1.0/20 + 1.0/10),
		framesOverlapped: 2 / (1.0 / 10), // the slower direction, always busy
	} {
		s := b.Find(roundTrip, label(result.Method, method), label(result.Size, strconv.Itoa(n)))
		require.NotNil(t, s, method)
		assert.InEpsilon(t, rate, s.Median, 0.02, method)
		assert.True(t, s.Verified, method)
		for stage, took := range map[string]float64{stageUpload: n / 20e9, stageDownload: n / 10e9} {
			if method == framesReused {
				assert.InEpsilon(t, took, b.Find(stageTime, s.Labels.With(framesStage, stage)...).Median, 0.02, stage)
			}
		}
		assert.Equal(t, method == framesPinned, b.Find(stageTime, s.Labels.With(framesStage, stageHostCopy)...) != nil, method)
	}
	require.Len(t, b.Answers, 5)
	assert.Contains(t, b.Answers[0], "Reused pinned buffers are 3.")
	assert.Contains(t, b.Answers[1], "% of the time is the download, whose target has no pages yet, and ")
	assert.Contains(t, b.Answers[2], "With a pinned source alone, the download to new pageable memory takes ")
	assert.Contains(t, b.Answers[3], "is not pinned for CUDA, which stages its copies.")
	assert.Equal(t, "Copies both ways at once are 1.5 times as fast as one way after the other.", b.Answers[4])
	require.Equal(t, []string{"both ways, 4 MiB"}, titles(b))
	assert.InDelta(t, 4.4, b.Figures[0].Rows[0].Cells[0].Value, 0.1)
}

// What each method allocates in a step: the point of the experiment.
func TestFramesAllocatesWhereItSays(t *testing.T) {
	t.Parallel()
	for method, mallocs := range map[string]int{framesAnew: 1, framesPinned: 1, framesPageable: 0, framesMlock: 0, framesReused: 0, framesOverlapped: 0} {
		t.Run(method, func(t *testing.T) {
			sim, dev := slowSim(t)
			f := &trip{resources: resources{dev: dev, now: wall()}, method: method, n: 100_001, lock: lockedFreely}
			defer func() {
				assert.NoError(t, f.close())
				assert.Zero(t, sim.Outstanding().DeviceAllocs)
			}()
			require.NoError(t, f.open(t.Context()))
			require.Error(t, uploaded.compare(t.Context(), make([]byte, f.n), 0))
			if f.reuses() {
				require.Error(t, f.verify(t.Context()), "nothing came back yet")
			}
			require.NoError(t, f.step(t.Context()))
			before, registered := sim.Calls("cudaMalloc"), sim.Calls("cudaHostRegister")
			for range 2 {
				require.NoError(t, f.step(t.Context()))
			}
			assert.Equal(t, 2*mallocs, sim.Calls("cudaMalloc")-before)
			assert.Equal(t, registered, sim.Calls("cudaHostRegister"))
			require.NoError(t, f.verify(t.Context()))
		})
	}
}

// A half that is fetched before it was sent, or sent over what is being fetched, would
// come back wrong: the batch changes with every step here, and one direction is much
// faster than the other.
func TestOverlappedHalvesKeepTheirOrder(t *testing.T) {
	t.Parallel()
	slow, fast := cudasim.Speed{Rate: 0.2}, cudasim.Speed{Rate: 200}
	for name, link := range map[string]cudasim.Link{"slow upload": {HostToDevice: slow, DeviceToHost: fast}, "slow download": {HostToDevice: fast, DeviceToHost: slow}} {
		t.Run(name, func(t *testing.T) {
			_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: link}}})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			f := &trip{resources: resources{dev: dev, now: wall()}, method: framesOverlapped, n: 1<<18 + 1}
			require.NoError(t, f.open(t.Context()))
			defer func() { assert.NoError(t, f.close()) }()
			half := f.n / 2
			for i := range 5 {
				content := pattern(4099 * i)
				require.NoError(t, content.fill(t.Context(), f.source.Bytes()))
				require.NoError(t, f.step(t.Context()))
				require.NoError(t, content.compare(t.Context(), f.returned.Bytes()[:half], 0), "sent and fetched in this step")
				if i > 0 {
					require.NoError(t, pattern(4099*(i-1)).compare(t.Context(), f.returned.Bytes()[half:], half), "sent in the step before")
				}
			}
		})
	}
}

func TestFramesInterruptedAnywhere(t *testing.T) {
	t.Parallel()
	interruptAnywhere(t, func(*cudart.Device) measure.Experiment { return frames(wall(), lockedFreely) }, 5000)
}

func TestBatchesFitTheMemory(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 3 * 2 * frameBytes}}})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	assert.Equal(t, []int{maxSimulated}, batches(measure.Env{Devices: []*cudart.Device{dev}}, dev))
	got := batches(measure.Env{}, dev) // as of a real one
	require.Len(t, got, 1)
	assert.Zero(t, got[0]%frameBytes)
	assert.LessOrEqual(t, got[0], 3*frameBytes)
	assert.Equal(t, []int{1, frameBytes - 1, frameBytes, 3 * frameBytes},
		batches(measure.Env{Options: measure.Options{Sizes: []int{1, frameBytes, 3 * frameBytes, 4*frameBytes - 1, frameBytes - 1}}}, dev))
	for n, want := range map[int]string{frameBytes: "1 frame (99.5 MB)", 50 * frameBytes: "50 frames (4.98 GB)", 1 << 20: "1 MiB"} {
		assert.Equal(t, want, batchText(n, frameBytes))
	}
	e := frames(wall(), lockedFreely)
	_, footprint, err := measure.Estimate(e, measure.Env{Devices: []*cudart.Device{dev}, Options: measure.Options{Sizes: []int{1 << 20}}})
	require.NoError(t, err)
	assert.Equal(t, measure.Footprint{Pinned: 2 << 20, Pageable: 2 << 20, Device: 1 << 20}, footprint)
	full, _, err := measure.Estimate(e, measure.Env{Devices: []*cudart.Device{dev}, Options: measure.Options{Sizes: []int{frameBytes}}})
	require.NoError(t, err)
	assert.Less(t, full, 2*time.Second)
}

func TestFramesAreOfTheAskedShape(t *testing.T) {
	t.Parallel()
	_, dev := slowSim(t)
	none := 0
	env := short(dev)
	env.Frames = measure.Frames{Batch: 3, Bytes: 1000, Repeats: 5, WarmUp: &none}
	b := runAll(t, frames(wall(), lockedFreely), env)
	all := b.Select(result.View{Series: roundTrip})
	require.Len(t, all, len(framesMethods))
	for _, s := range all {
		assert.Equal(t, 3000, s.Labels.Size())
		assert.Len(t, s.Samples, 5)
		assert.True(t, s.Verified)
	}
	assert.Equal(t, []string{"both ways, 3 frames (3 kB)"}, titles(b))

	env.Frames = measure.Frames{Bytes: 12345}
	assert.Equal(t, []int{12345}, batches(env, dev), "a simulated device copies one frame")
	assert.Equal(t, []int{12345 * 2}, batches(measure.Env{Options: measure.Options{Sizes: []int{30000}, Frames: env.Frames}}, dev))
	env.Frames.Batch = 1 << 40 / 12345
	_, _, err := measure.Estimate(frames(wall(), lockedFreely), env)
	require.ErrorContains(t, err, "of host memory, and")

	// The calls that a series takes are those that were asked for.
	sim, dev := slowSim(t)
	env.Devices, env.Frames = []*cudart.Device{dev}, measure.Frames{Batch: 1, Bytes: 4096, Repeats: 2, WarmUp: &none}
	groups := framesGroups(env, dev, 4096, wall(), lockedFreely)
	before := sim.Calls("cudaMalloc")
	one := frames(wall(), lockedFreely)
	one.Plan = func(measure.Env) ([]measure.Group, error) { return groups[:1], nil }
	runAll(t, one, env)
	assert.Equal(t, 2, sim.Calls("cudaMalloc")-before, "each sample allocates once, and none was discarded")
}
