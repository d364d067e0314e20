package bench

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

type explanation func(measure.Env, *result.Bench) ([]string, []result.Table)

// answersTo returns the sentences that follow from series.
func answersTo(explain explanation, b *result.Bench) []string {
	answers, _ := explain(measure.Env{}, b)
	return answers
}

// titles returns the titles of the key figures.
func titles(b *result.Bench) (out []string) {
	for _, t := range b.Figures {
		out = append(out, t.Title)
	}
	return out
}

// tableText is a table in a line for each of its rows.
func tableText(t result.Table) string {
	var b strings.Builder
	b.WriteString(t.Title)
	for _, r := range t.Rows {
		b.WriteString("\n" + r.Name)
		for i, c := range r.Cells {
			if c != nil {
				fmt.Fprintf(&b, " %s=%.3g", t.Columns[i], c.Value)
			}
		}
		if r.Note != "" {
			b.WriteString(" (" + r.Note + ")")
		}
	}
	return b.String()
}

// copiesOf returns the series of bandwidth of a device, a kind of memory and a direction.
func copiesOf(b *result.Bench, device, memory, direction string) []*result.Series {
	return b.Select(result.View{Series: seriesBandwidth, Where: labelled(result.Device, device, result.Memory, memory, result.Direction, direction)})
}

// measuredSeries parses series: a name, labels, and a value, such as "bandwidth device=0 size_bytes=4096 50".
func measuredSeries(t *testing.T, texts ...string) *result.Bench {
	t.Helper()
	b := &result.Bench{}
	for _, text := range texts {
		fields := strings.Fields(text)
		v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		require.NoError(t, err, text)
		s := result.Series{Name: fields[0], Samples: []float64{v}, Stats: result.Summarize([]float64{v}), Unit: result.GBPerSecond}
		for _, f := range fields[1 : len(fields)-1] {
			key, value, _ := strings.Cut(f, "=")
			key = cmp.Or(map[string]string{"n": result.Size, "in": result.Direction}[key], key)
			value = cmp.Or(map[string]string{"up": result.HostToDevice, "down": result.DeviceToHost}[value], value)
			s.Labels = append(s.Labels, result.Label{Key: key, Value: value})
		}
		b.Series = append(b.Series, s)
	}
	return b
}

func TestAnswersAreOfWhatIsThere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		explain explanation
		series  []string
		answers []string
		figures []string
	}{
		"no registered memory": {explainBandwidth, []string{"bandwidth device=0 memory=pageable in=up n=4096 3"}, nil,
			[]string{"at 4 KiB\nto GPU pageable=3"}},
		"a full speed": {explainBandwidth,
			[]string{"bandwidth device=0 memory=registered in=up n=4096 1", "bandwidth device=0 memory=registered in=up n=65536 30",
				"bandwidth device=0 memory=registered in=up n=1048576 50", "bandwidth device=0 memory=registered in=down n=1048576 49"},
			[]string{"Pinned copies reach 50.0 GB/s to GPU and 49.0 from GPU.", "Copies run at full speed from 1 MiB up; those of 4 KiB reach 2.0% of it. Batch smaller ones."},
			[]string{"at 1 MiB\nto GPU pinned=50 4 KiB pinned=1\nfrom GPU pinned=49"}},
		"a slow GPU that shares an uplink": {explainBandwidth,
			[]string{"bandwidth device=0 memory=registered in=up n=4096 50", "bandwidth device=0 memory=registered in=down n=4096 50", "bandwidth device=0 memory=registered in=both n=4096 55",
				"bandwidth device=1 memory=registered in=up n=4096 40", "bandwidth device=1 memory=registered in=down n=4096 50",
				"bandwidth_all_devices device=all in=up n=4096 50", "bandwidth_all_devices device=0 in=up n=4096 30", "bandwidth_all_devices device=1 in=up n=4096 20"},
			[]string{"Pinned copies reach 40.0 GB/s to GPU and 50.0 from GPU. That is GPU 1, the slowest; GPU 0 reaches 50.0 GB/s.",
				"Both ways at once copies reach 55.0 GB/s, 55% of the sum of each way alone."},
			[]string{"at 4 KiB\nto GPU pinned=50\nfrom GPU pinned=50\nboth ways pinned=55",
				"Both GPUs at once\nto GPU together=50 of each alone=0.556 (limited by a shared uplink or host memory)"}},
		"pinning": {explainAlloc,
			[]string{"pin_rate method=hostmem n=1073741825 26", "pin_rate method=cuda_host_alloc n=1073741825 3.2", "pin_rate method=hostmem n=4096 100",
				"pin_time method=cuda_host_alloc n=1073741825 0.34", "pin_time method=power_of_two n=1073741825 0.68",
				"pin_time method=pool_first_use n=1073741825 0.042", "pin_time method=pool_reuse n=1073741825 200e-9"},
			[]string{"hostmem.Alloc pins 8.1 times as fast as cudaHostAlloc.", "An allocator that rounds up to a power of two pins 2 GiB for 1 GiB + 1 B, and takes 680 ms instead of 340 ms."},
			[]string{"at 1 GiB + 1 B\n hostmem.Alloc=26 cudaHostAlloc=3.2", "pool, 1 GiB + 1 B\n first lease=0.042 again=2e-07"}},
		"pinning, slower": {explainAlloc, []string{"pin_rate method=hostmem n=4096 1", "pin_rate method=cuda_host_alloc n=4096 3.2"},
			[]string{"cudaHostAlloc pins 3.2 times as fast as hostmem.Alloc."}, []string{"at 4 KiB\n hostmem.Alloc=1 cudaHostAlloc=3.2"}},
		"memory of some allocators": {explainMemory, []string{"kept_per_byte method=cuda_host_alloc n=65536 32", "kept_per_byte method=power_of_two n=1048576 1.001"},
			[]string{"cudaHostAlloc keeps at most 32.0 bytes for each byte requested."}, []string{"at 64 KiB\n cudaHostAlloc=32"}},
		"a read of old bytes": {explainOverlap, []string{"old_bytes_share device=0 reader=non_blocking_stream memory=pageable method=cudaMemcpy n=1048576 0.25"},
			[]string{"Work on a non-blocking stream after cudaMemcpy of pageable memory read old bytes, up to 25% of 1 MiB. The call returns when the bytes are staged, not when they have arrived: copy on the stream that uses them, or make it wait for an event."}, nil},
		"no old bytes": {explainOverlap, []string{"old_bytes_share device=0 reader=host 0"},
			[]string{"In 1 try no read without synchronizing was early enough to find old bytes. It is wrong nevertheless."}, nil},
		"copies that block": {explainOverlap, []string{"blocked_share device=0 memory=pageable in=up n=4096 0.3", "blocked_share device=0 memory=pinned in=up n=4096 0.9"},
			[]string{"Copies to GPU of pinned memory block their caller as well.", "Copies to GPU of pageable memory do not block their caller."},
			[]string{"time in the call, 4 KiB\nto GPU pageable=0.3 pinned=0.9"}},
		"streams": {explainOverlap, []string{"piped_rate device=0 in=up n=64 pieces=uncut streams=1 25", "piped_rate device=0 in=up n=64 pieces=16_pieces streams=1 20",
			"piped_rate device=0 in=up n=64 pieces=16_pieces streams=2 38", "piped_rate device=0 in=up n=64 pieces=16_pieces streams=4 43", "piped_rate device=0 in=up n=64 pieces=16_pieces streams=8 44"},
			[]string{"Beside work, a copy is 1.7 times as fast in pieces on 4 streams as uncut."},
			[]string{"with work\nto GPU uncut=25 1 stream=20 2=38 4=43 8=44"}},
		"frames": {explainFrames, []string{"round_trip method=reused n=99532800 55", "round_trip method=allocated_anew n=99532800 2.98", "round_trip method=overlapped n=99532800 56"},
			[]string{"Reused pinned buffers are 18 times as fast as new pageable buffers.", "Copies both ways at once are about as fast as one way after the other."},
			[]string{"both ways, 1 frame (99.5 MB)\n new=2.98 reused pinned=55 overlapped=56"}},
		"stages of a pinned source": {explainFrames, []string{"round_trip method=pinned_source n=64 3", "stage_time method=pinned_source n=64 stage=upload 1",
			"stage_time method=pinned_source n=64 stage=download 6", "stage_time method=pinned_source n=64 stage=copy_on_host 3"},
			[]string{"With a pinned source alone, the download to new pageable memory takes 60% of the time and the copy from there 30%."},
			[]string{"both ways, 64 B\n pinned source=3"}},
		"samples": {explainLoading, []string{"samples source=memory workers=2 reader=loader memory=pinned copies=non_blocking gpu_work=yes 1234567",
			"samples source=memory workers=2 reader=plain memory=pinned copies=non_blocking gpu_work=yes 617283",
			"waited_share source=memory workers=2 reader=loader memory=pinned copies=non_blocking gpu_work=yes 0.25",
			"bound_by source=memory workers=2 reader=loader memory=pinned copies=non_blocking gpu_work=yes stage=copy 0.9",
			"samples_by_prefetch prefetch=1 1", "samples_by_prefetch prefetch=64 3"},
			[]string{"1,234,567 samples a second reach the GPU with 2 workers and pinned memory, limited by copying.", "With pinned memory package loader is 2.0 times as fast as a plain reader.",
				"Samples in memory load 3.0 times as fast with 64 batches ahead as with 1."},
			[]string{"\nin memory samples=1.23e+06 workers=2 loop waits=0.25 (limited by copying)"}},
		"files": {explainFiles, []string{"file_to_device device=0 cache=resident method=pinned n=1048576 50", "file_to_device device=0 cache=resident method=mmap n=1048576 5",
			"file_to_device device=0 cache=resident method=staged n=1048576 40", "file_to_device device=0 cache=cold method=direct n=1048576 2", "file_to_device device=all cache=resident method=fanout n=1048576 97"},
			[]string{"A cached file uploads 8.0 times as fast staged as through mmap.", "From the page cache a file reaches 80% of the rate of pinned memory.",
				"All GPUs together receive one cached file at 97.0 GB/s, read once (transfer.Fanout)."},
			[]string{"at 1 MiB\ncached staged=40 mmap=5 link=50\nuncached O_DIRECT=2 (limited by the disk)"}},
		// An engine that is faster once, but not for larger blocks, is not faster from there on.
		"blocks": {explainBlocks, []string{"blocks_bandwidth device=0 in=up method=kernel n=4096 blocks=16 9", "blocks_bandwidth device=0 in=up method=engine n=4096 blocks=16 10",
			"blocks_bandwidth device=0 in=up method=quickest n=4096 blocks=16 9", "blocks_bandwidth device=0 in=up method=copy_each n=4096 blocks=16 0.5",
			"blocks_bandwidth device=0 in=up method=kernel n=65536 blocks=16 9", "blocks_bandwidth device=0 in=up method=engine n=65536 blocks=16 8",
			"blocks_bandwidth device=0 in=down method=kernel n=4096 blocks=10000 9", "blocks_bandwidth device=0 in=down method=engine n=4096 blocks=10000 9.5",
			"engines_quicker_from device=0 in=down blocks=10000 4096"},
			[]string{"16 blocks of 4 KiB upload 18 times as fast in one batch as singly.", "Copies to GPU are faster by the kernel than by copy engines at every size.",
				"Copies from GPU are faster by copy engines than by the kernel from these sizes of a block up: 4 KiB (10,000 blocks).",
				"The chosen method reaches at least 90% of the fastest one (16 blocks of 4 KiB to GPU)."},
			[]string{"in blocks of 4 KiB\nto GPU chosen=9 kernel=9 engines=10 singly=0.5"}},
		"managed memory": {explainManaged, []string{"managed_bandwidth device=0 method=prefetch_to_device n=1048576 46", "managed_bandwidth device=0 method=gpu_faults n=1048576 11.5"},
			[]string{"Managed memory moves 4.0 times as fast by prefetch as by page faults."}, []string{"at 1 MiB\nto GPU prefetched=46 faults=11.5"}},
		"calls": {explainCalls, []string{"call_time device=0 call=cudaStreamQuery 1e-6", "call_time device=0 call=cudaFree 1e-3", "call_allocations device=0 call=cudaFree 2"},
			[]string{"A call takes from 1.00 µs (cudaStreamQuery) to 1.00 ms (cudaFree).", "These calls allocate Go memory, so many times each: cudaFree (2)."}, nil},
	} {
		answers, figures := c.explain(measure.Env{}, measuredSeries(t, c.series...))
		assert.Equal(t, c.answers, answers, name)
		var texts []string
		for _, f := range figures {
			texts = append(texts, tableText(f))
		}
		assert.Equal(t, c.figures, texts, name)
	}
}

// sentence matches what answers look like: an end, no gap, and no verb that fmt did not understand.
var sentence = regexp.MustCompile(`^[A-Za-z0-9][^\n]*[.)]$`)

// keptRun is a run of nine experiments on two GPUs.
func keptRun(t *testing.T) *report.Result {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "testdata", "results", "report-two-h200-2026-11-22.json"))
	require.NoError(t, err)
	kept, err := report.Read(data)
	require.NoError(t, err)
	return kept
}

func explanations() map[string]explanation {
	all := map[string]explanation{}
	for _, e := range All() {
		all[e.Name] = e.Explain
	}
	return all
}

// A run of two GPUs that is kept gives these answers. Without any of its series, and without many of them, answers are
// still sentences, and tables are complete.
func TestAnswersOfAKeptRun(t *testing.T) {
	t.Parallel()
	kept, explain := keptRun(t), explanations()
	headlines := map[string]string{
		"bandwidth": "Pinned copies reach 55.1 GB/s to GPU and 55.0 from GPU, 99% of the reference.",
		"latency":   "A copy of 1 B takes 1.86 µs to issue and 9.16 µs until it is done.",
		"memory":    "hostmem.Alloc keeps at most 1.02 bytes for each byte requested.",
		"alloc":     "hostmem.Alloc pins 7.0 times as fast as cudaHostAlloc.",
		"overlap":   "A read of pinned memory that does not synchronize finds old bytes, 99% of those sampled, and no call fails.",
		"frames":    "Reused pinned buffers are 26 times as fast as new pageable buffers.",
		"loader":    "3,181,919 samples a second reach the GPU with 4 workers and pinned memory, limited by the source.",
		"files":     "A cached file uploads 6.9 times as fast staged as through mmap.",
		"calls":     "A call takes from 145 ns (cudaDeviceGetAttribute) to 1.56 ms (cudaHostAlloc + FreeHost, 4 KiB).",
	}
	r := rand.New(rand.NewPCG(1, 2))
	for i := range kept.Benches {
		b := &kept.Benches[i]
		answers := answersTo(explain[b.Name], b)
		require.NotEmpty(t, answers, b.Name)
		assert.Equal(t, headlines[b.Name], answers[0])
		for range 300 {
			some := *b
			some.Series = nil
			share := r.Float64()
			for _, s := range b.Series {
				if r.Float64() < share {
					some.Series = append(some.Series, s)
				}
			}
			answers, figures := explain[b.Name](measure.Env{}, &some)
			for _, a := range answers {
				assert.Regexp(t, sentence, a)
				assert.NotRegexp(t, `%!|  |NaN|\bInf\b`, a)
			}
			for _, f := range figures {
				require.NotEmpty(t, f.Rows, f.Title)
				for _, row := range f.Rows {
					require.Len(t, row.Cells, len(f.Columns), f.Title)
				}
			}
		}
	}
}

// The text of many experiments fits a screen or two.
func TestTextOfAKeptRunIsShort(t *testing.T) {
	t.Parallel()
	kept := keptRun(t)
	kept.Command, kept.Verdict = "bench", doctor.Measured
	explain := explanations()
	for i := range kept.Benches {
		b := &kept.Benches[i]
		b.Answers, b.Figures = explain[b.Name](measure.Env{}, b)
	}
	var text bytes.Buffer
	require.NoError(t, report.Write(&text, kept, report.Text, report.Style{}))
	lines := strings.Split(text.String(), "\n")
	assert.LessOrEqual(t, len(lines), 50, text.String())
	for _, l := range lines {
		assert.LessOrEqual(t, utf8.RuneCountInString(l), 80, l)
	}
	assert.Equal(t, "Pinned copies reach 55.1 GB/s to GPU and 55.0 from GPU, 99% of the reference.", lines[0])
}

// Nothing follows from nothing.
func TestNoSeriesHaveNoAnswers(t *testing.T) {
	t.Parallel()
	for _, e := range All() {
		answers, figures := e.Explain(measure.Env{}, &result.Bench{})
		assert.Empty(t, answers, e.Name)
		assert.Empty(t, figures, e.Name)
	}
}
