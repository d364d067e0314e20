package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
	"github.com/gopinned/pinned/weights/httpfs"
)

func TestModelsAreLoadedAndVerified(t *testing.T) {
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first.safetensors"), filepath.Join(dir, "second.safetensors")
	require.NoError(t, write("80MiB", first))
	require.NoError(t, write("3000001", second))
	for path, size := range map[string]int64{first: 80 << 20, second: 3000001} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, size, info.Size())
	}
	var out strings.Builder
	o := options{verify: true, load: weights.LoadOptions{DropCache: true, DirectIO: true}, sim: !testgpu.Real()}
	if o.sim {
		o.devices = "0,1"
	}
	err := run(t.Context(), []string{first, second}, o, &out)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, out.String(), first+": 83885")
	require.Contains(t, out.String(), first+": the same bytes: SHA-256 of 2 tensors\n")
	require.Contains(t, out.String(), second+": the same bytes: SHA-256 of 1 tensor\n")
	require.Contains(t, out.String(), "total: 8688")
	if o.sim {
		require.Regexp(t, `bytes onto 2 simulated devices in .* [MG]B/s`, out.String())
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, []string{first}, options{sim: !testgpu.Real()}, &out), context.Canceled)
	require.ErrorIs(t, run(t.Context(), []string{filepath.Join(dir, "none")}, options{sim: !testgpu.Real()}, &out), os.ErrNotExist)
	require.ErrorContains(t, run(t.Context(), []string{first}, options{sim: true, devices: "0,x"}, &out), "-devices 0,x")
	require.ErrorContains(t, run(t.Context(), []string{first}, options{sim: true, devices: "7"}, &out), "device 7")
}

// A model behind HTTP is loaded as one on disk is, by the URL of its file or of its directory.
func TestModelsOfAServerAreLoaded(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, write("40MiB", filepath.Join(dir, "model.safetensors")))
	t.Setenv("WEIGHTS_TOKEN", "open sesame")
	files := http.FileServer(http.Dir(dir))
	var digest [sha256.Size]byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer open sesame" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		if digest != [sha256.Size]byte{} {
			w.Header().Set("Repr-Digest", "sha-256=:"+base64.StdEncoding.EncodeToString(digest[:])+":")
		}
		files.ServeHTTP(w, r)
	}))
	defer server.Close()
	o := options{verify: true, sim: !testgpu.Real()}
	for _, path := range []string{"/model.safetensors", "/"} {
		var out strings.Builder
		err := run(t.Context(), []string{server.URL + path}, o, &out)
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip(err)
		}
		require.NoError(t, err)
		require.Contains(t, out.String(), path+": the same bytes: SHA-256 of 1 tensor\n")
	}
	require.ErrorIs(t, run(t.Context(), []string{server.URL + "/other.gguf"}, o, io.Discard), os.ErrNotExist)
	o.load.Checksums = true
	var out strings.Builder
	require.NoError(t, run(t.Context(), []string{server.URL + "/"}, o, &out))
	require.Contains(t, out.String(), "not compared")
	content, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
	require.NoError(t, err)
	digest = sha256.Sum256(content)
	out.Reset()
	require.NoError(t, run(t.Context(), []string{server.URL + "/"}, o, &out))
	require.Contains(t, out.String(), "model.safetensors: the checksum that the server has\n")
	digest[5]++
	require.ErrorIs(t, run(t.Context(), []string{server.URL + "/"}, o, io.Discard), httpfs.ErrChecksum)
	t.Setenv("WEIGHTS_TOKEN", "")
	require.ErrorIs(t, run(t.Context(), []string{server.URL + "/model.safetensors"}, o, io.Discard), os.ErrPermission)
}

// The check is one: it fails where nothing was loaded.
func TestVerifyFindsWrongBytes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "w.safetensors")
	require.NoError(t, write("100kB", path))
	m, err := weights.OpenModel(path)
	require.NoError(t, err)
	defer m.Close()
	dev := testgpu.Device(t)
	plan, n, err := planEvenly(m, 1)
	require.NoError(t, err)
	c, err := transfer.NewCopier(t.Context(), dev, transfer.Options{})
	require.NoError(t, err)
	defer c.Close()
	loaded, err := plan.LoadNew(t.Context(), []*cudart.Device{dev}, weights.LoadOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, loaded.Close()) }()
	tensors, err := verify(t.Context(), loaded, []*transfer.Copier{c})
	require.NoError(t, err)
	require.Equal(t, 1, tensors)
	p, err := loaded.Ptr("layers.0")
	require.NoError(t, err)
	require.NoError(t, dev.Memset(p, 0, n))
	require.NoError(t, dev.Synchronize(t.Context())) // Memset does not wait
	_, err = verify(t.Context(), loaded, []*transfer.Copier{c})
	require.ErrorContains(t, err, `tensor "layers.0": the bytes on device 0`)
}

// The help names the arguments, and not where the program lies.
func TestHelpNamesTheArguments(t *testing.T) {
	var o options
	var help strings.Builder
	f := newFlags(&o)
	f.Init("/tmp/go-build/exe/weights", flag.ContinueOnError)
	f.SetOutput(&help)
	require.ErrorIs(t, f.Parse([]string{"-h"}), flag.ErrHelp)
	require.Contains(t, help.String(), "[-sim] MODEL...\n       weights -save FILE [-snapshot] [-devices 0,1] [-direct] [-sim] MODEL\n       weights -make SIZE FILE\n")
	require.NotContains(t, help.String(), "go-build")
	f.VisitAll(func(f *flag.Flag) { require.Contains(t, help.String(), "  -"+f.Name) })
}

func TestSizesAreParsed(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "1000": 1000, "64MiB": 64 << 20, "8GB": 8e9, "3kB": 3000, "2GiB": 2 << 30} {
		n, err := parseSize(s)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	for _, s := range []string{"", "-1", "GB", "1.5GB", "8 GB", "99999999999GiB", "1TB"} {
		_, err := parseSize(s)
		require.Error(t, err, s)
	}
	for _, n := range []int64{1000, 8e9 + 1, 5 << 40} {
		header, err := headerFor(n)
		require.NoError(t, err)
		require.Less(t, int64(len(header)), n)
	}
	_, err := headerFor(100)
	require.ErrorContains(t, err, "too small")
}

// Small models have a rate, too.
func TestRatesHaveDigits(t *testing.T) {
	require.Equal(t, "60 MB/s", rate(300_000, 5*time.Millisecond))
	require.Equal(t, "0.0012 MB/s", rate(12, 10*time.Millisecond))
	require.Equal(t, "55.4 GB/s", rate(55_400_000_000, time.Second))
	require.Equal(t, []string{"0 devices", "1 device", "2 devices"}, []string{count(0, "device"), count(1, "device"), count(2, "device")})
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	file := filepath.Join(t.TempDir(), "w.safetensors")
	require.Empty(t, exampletest.Run(t, main, "-make", "300kB", file))
	saved := filepath.Join(t.TempDir(), "saved.safetensors")
	for _, args := range [][]string{{"-sim", "-save", saved, file}, {"-sim", "-snapshot", "-save", saved, file}} {
		require.Regexp(t, `\n.*saved.safetensors: 299888 bytes on storage in \S+, \S*[1-9]\S* [MG]B/s; the tensors could change after \S+\n`+
			`.*saved.safetensors: the checksums that were saved, in \S+, \S+ [MG]B/s\ntotal: `, exampletest.Run(t, main, args...))
	}
	require.Regexp(t, `: 299888 bytes onto 1 simulated device .*\n.*SHA-256 of 1 tensor\n.*: the checksums that were saved, in `, exampletest.Run(t, main, "-sim", "-verify", saved))
	out := exampletest.Run(t, main, "-sim", "-verify", file)
	require.Regexp(t, `^.*: 299888 bytes onto 1 simulated device in \S+, \S*[1-9]\S* [MG]B/s\n.*: the same bytes: SHA-256 of 1 tensor\ntotal: `, out)
}
