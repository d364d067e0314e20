package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
)

func resultOf(t *testing.T, got outcome) *report.Result {
	t.Helper()
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err, got.stderr)
	return r
}

// ids are the findings, with the GPU.
func ids(r *report.Result) (list []string) {
	for _, f := range r.Findings {
		list = append(list, f.ID+": "+f.Summary)
	}
	return list
}

// What is found of other processes is in an archive, and their files are not.
func TestCaptureHasNoFilesOfProcesses(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := oneCPU(t)
	host := sys.root.(fstest.MapFS)
	host["proc/77/maps"] = &fstest.MapFile{Data: []byte("7e1000000000-7e1000400000 r-xp 00000000 00:01 7 /usr/lib/libcuda.so.1\n7e3000000000-7e3080000000 r--p 00000000 00:02 10 /models/model-1.safetensors\n")}
	host["proc/77/status"] = &fstest.MapFile{Data: []byte("Name:\tvllm\n")}
	host["proc/78/maps"] = &fstest.MapFile{Data: []byte("7e1000000000-7e1000400000 r-xp 00000000 00:01 7 /opt/secret/project\n")}
	file := filepath.Join(t.TempDir(), "x.tar.gz")
	got := call(t, sys, "capture", "-o", file, "--quiet")
	require.Equal(t, exitWarnings, got.code, got.stderr)
	whole := contents(t, file)
	assert.NotContains(t, whole, "secret")
	assert.NotContains(t, whole, "proc/77")
	assert.Contains(t, whole, `"name": "vllm"`)
	assert.Contains(t, whole, "/models/model-1.safetensors")
}

// An archive leads to the findings of the host, on another host.
func TestCapture(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := oneCPU(t)
	sys.environ = []string{"LD_LIBRARY_PATH=/home/alice/cuda/lib64/stubs", "HOME=/home/alice", "USER=alice"}
	slow := cudasim.Speed{Rate: 30}
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{
		PCIBusID: "0000:00:06.0", UUID: [16]byte{0xab, 0xcd}, Link: cudasim.Link{HostToDevice: slow, DeviceToHost: slow},
	}}})
	sys.hostname = func() (string, error) { return "gpu17.example.com", nil }
	file := filepath.Join(t.TempDir(), "x.tar.gz")
	got := call(t, sys, "capture", "-o", file)
	require.Equal(t, exitProblems, got.code, got.stderr)
	assert.Empty(t, got.stdout)
	assert.Contains(t, got.stderr, "written: "+file)
	live := resultOf(t, call(t, sys, "--quiet", "--format", "json"))
	assert.Contains(t, strings.Join(ids(live), "\n"), "few_cpus")

	elsewhere := failing(t, "no-gpu-cgroup-v1", errors.New("an archive needs no library"), "CUDA_VISIBLE_DEVICES=")
	got = call(t, elsewhere, "--from", file, "--format", "json")
	r := resultOf(t, got)
	assert.Equal(t, exitProblems, got.code)
	assert.Equal(t, live.Verdict, r.Verdict)
	var liveIDs, fromIDs []string
	for _, f := range live.Findings {
		liveIDs = append(liveIDs, f.ID)
	}
	for _, f := range r.Findings {
		fromIDs = append(fromIDs, f.ID)
	}
	assert.Equal(t, liveIDs, fromIDs)
	assert.Equal(t, live.Host.Kernel, r.Host.Kernel)
	assert.Len(t, r.Devices, 1)
	assert.Empty(t, r.HostName)

	// Names are left out, unless they are asked for.
	whole := contents(t, file)
	for _, name := range []string{"alice", "gpu17", "abcd0000"} {
		assert.NotContains(t, whole, name)
	}
	assert.Contains(t, whole, "/home/user-1/cuda/lib64/stubs")
	require.Equal(t, exitProblems, call(t, sys, "capture", "-o", file, "--with-names", "-q").code)
	whole = contents(t, file)
	assert.Contains(t, whole, "/home/alice/cuda/lib64/stubs")
	assert.Contains(t, whole, "GPU-abcd0000")
}

// An archive of a run that was interrupted leads to no verdict on the host, whatever was known.
func TestCaptureInterrupted(t *testing.T) {
	t.Parallel()
	needsSim(t)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	for _, fn := range []string{"", "cudaGetDeviceCount", "cudaMemGetInfo", "cudaMemcpyAsync"} {
		waiting.Go(func() {
			t.Run(fn, func(t *testing.T) {
				sim, unblock := stalling(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}}}, fn, cudasim.Fault{Times: -1})
				file := filepath.Join(t.TempDir(), "x.tar.gz")
				sys := hasty(on(t, "h200-vm"))
				if fn == "" { // before any call is made
					sys.adjust = nil
					ctx, cancel := context.WithCancel(t.Context())
					cancel()
					var stdout, stderr bytes.Buffer
					require.Equal(t, exitInterrupted, run(ctx, []string{"capture", "-o", file}, &stdout, &stderr, sys), stderr.String())
				} else {
					require.Equal(t, exitInterrupted, interrupted(t, sys, sim, fn, "capture", "-o", file).code)
				}
				unblock()
				got := call(t, failing(t, "no-gpu-cgroup-v1", errors.New("an archive needs no library")), "--from", file, "--format", "json", "--expect-gpus", "1")
				r := resultOf(t, got)
				assert.Equal(t, exitIncomplete, got.code)
				assert.Equal(t, doctor.Incomplete, r.Verdict)
				assert.Equal(t, "the run of this archive was ended: interrupted", r.Stopped)
				for _, f := range r.Findings {
					assert.Equal(t, doctor.Note, f.Severity, "%s", f.Summary)
				}
			})
		})
	}
}

// contents are all files of an archive.
func contents(t *testing.T, file string) (text string) {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	for archive := tar.NewReader(z); ; {
		header, err := archive.Next()
		if err == io.EOF {
			return text
		}
		require.NoError(t, err)
		b, err := io.ReadAll(archive)
		require.NoError(t, err)
		text += header.Name + "\n" + string(b)
	}
}

// A captured host of any kind leads to the same findings from its archive, also without
// names.
func TestEachHostIsJudgedTheSameFromItsArchive(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(testdata("hosts", "*.txtar"))
	require.NoError(t, err)
	threads, err := filepath.Glob(testdata("threads", "*.txtar"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	require.NotEmpty(t, threads)
	files = hosttest.Sample(hosttest.Sample(append(files, threads...))) // a quarter of a second each under the race detector
	judge := func(host *hostinfo.Host, facts []byte) (doctor.Verdict, []string) {
		f, err := doctor.FromCapture(host, facts)
		require.NoError(t, err)
		verdict, found := doctor.Evaluate(f)
		var ids []string
		for _, one := range found {
			ids = append(ids, one.ID)
		}
		return verdict, ids
	}
	for _, file := range files {
		c, err := hosttest.LoadCase(file)
		require.NoError(t, err)
		recorder := hostinfo.Record(c.Host)
		host := hostinfo.Read(recorder, c.Environ)
		verdict, found := judge(host, c.Facts)
		a := &capture.Archive{Host: recorder.Host(), Environ: capture.Environ(host), Facts: c.Facts}
		kinds := []*capture.Archive{a.WithoutSecrets().WithoutNames(capture.Names{Hosts: []string{"gpu17"}, Users: []string{"alice"}})}
		if _, long := os.LookupEnv("PINNED_SOAK"); long {
			kinds = append(kinds, a.WithoutSecrets())
		}
		for _, a := range kinds {
			var b bytes.Buffer
			require.NoError(t, capture.Write(&b, a))
			back, err := capture.Read(&b)
			require.NoError(t, err, file)
			v, ids := judge(hostinfo.Read(back.Files(), back.Environ), back.Facts)
			assert.Equal(t, verdict, v, file)
			assert.Equal(t, found, ids, file)
		}
	}
}

func TestFromWhatIsNoArchive(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("an archive needs no library"))
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	require.NoError(t, os.WriteFile(text, []byte("hello"), 0o600))
	odd := filepath.Join(dir, "odd")
	var b bytes.Buffer
	require.NoError(t, capture.Write(&b, &capture.Archive{Host: fstest.MapFS{}, Facts: json.RawMessage(`{"devices": 7}`)}))
	require.NoError(t, os.WriteFile(odd, b.Bytes(), 0o600))
	for file, says := range map[string]string{
		filepath.Join(dir, "none"): "no such file",
		text:                       "its form is not known: it begins with \"hello\"",
		odd:                        "facts.json",
	} {
		got := call(t, sys, "--from", file)
		assert.Equal(t, exitUsage, got.code, file)
		assert.Contains(t, got.stderr, says, file)
	}
}

// Facts of a stranger do not crash what judges and shows them.
func FuzzFacts(f *testing.F) {
	files, err := filepath.Glob(testdata("hosts", "*.txtar"))
	require.NoError(f, err)
	for _, file := range hosttest.Sample(files) {
		c, err := hosttest.LoadCase(file)
		require.NoError(f, err)
		if len(c.Facts) > 0 {
			f.Add([]byte(c.Facts))
		}
	}
	c, err := hosttest.LoadCase(testdata("hosts", "epyc-dual-cgroup-v2.txtar"))
	require.NoError(f, err)
	host := hostinfo.Read(c.Host, c.Environ)
	f.Add([]byte(`{"library":{"attempts":[{}]},"devices":[{"verify":{"stale":{},"mismatches":[{}],"failures":[{}]},"bandwidth":{"series":[{}],"views":[{}]},"trials":{},"link":{"bottleneck":{}},"health":{},"attributes":{}},{}],"processes":[{"weights":[{}],"frameworks":[{}]}],"nvml":{"gpus":[{}]},"opening":{},"probes":[{}],"requirements":[{}],"search":{},"together":{"series":[{}]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		facts, err := doctor.FromCapture(host, text)
		if err != nil {
			return
		}
		r := &report.Result{Command: "check", Complete: true, Facts: facts}
		r.Conclude(true)
		for _, format := range []report.Format{report.Text, report.JSON, report.Prometheus, report.CSV} {
			require.NoError(t, report.Write(io.Discard, r, format, report.Style{}))
		}
	})
}

// --from refuses flags that need a machine, and names the command that shows a result. --timeout works.
func TestFromRefusesWhatItCannotUse(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("an archive needs no library"))
	dir := t.TempDir()
	archive, result := filepath.Join(dir, "a.tar.gz"), filepath.Join(dir, "a.json")
	call(t, sys, "capture", "-o", archive)
	call(t, sys, "--format", "json", "-o", result)
	for args, want := range map[string]string{
		"--sim --device 0": "--from excludes --device, --sim: files are read, and no GPU is used",
		"--library x.so":   "--from excludes --library: files are read, and no GPU is used",
	} {
		got := call(t, sys, append(strings.Fields(args), "--from", archive)...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Contains(t, got.stderr, want, args)
	}
	got := call(t, sys, "--from", result)
	assert.Equal(t, exitUsage, got.code)
	assert.Contains(t, got.stderr, "this is a result file, not an archive of pincheck\ncapture. To show it, run: pincheck report "+result+"\n")
	assert.Less(t, call(t, sys, "--from", archive, "--timeout", "1h").code, exitUsage)

	for flag, want := range map[string]string{"--sim": "--sim: with files nothing is measured or evaluated again", "--fail-on=note": "--fail-on: with files"} {
		got := call(t, sys, "report", result, "-o", filepath.Join(dir, "page.html"), flag)
		assert.Equal(t, exitUsage, got.code, flag)
		assert.Contains(t, got.stderr, want, flag)
	}
}
