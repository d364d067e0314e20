//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"context"
	"debug/elf"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/findlib"
	"github.com/gopinned/pinned/internal/hosttest"
)

// aLibrary returns the contents of a shared library of this machine, for this
// architecture, and where its last segment ends.
func aLibrary(t *testing.T) (contents []byte, end int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	libc := regexp.MustCompile(`/\S*/libc\.so\.6`).Find(maps)
	require.NotEmpty(t, libc, "this process has the C library loaded")
	file := filepath.Join(filepath.Dir(string(libc)), "libm.so.6")
	contents, err = os.ReadFile(file)
	require.NoError(t, err)
	library, err := elf.Open(file)
	require.NoError(t, err)
	defer library.Close()
	for _, p := range library.Progs {
		if p.Type == elf.PT_LOAD {
			end = max(end, int(p.Off+p.Filesz))
		}
	}
	return contents, end
}

// The dynamic loader ends the process with SIGBUS on most of these files.
func TestLibraryThatIsCutOffIsRefused(t *testing.T) {
	t.Parallel()
	contents, end := aLibrary(t)
	lengths := []int{1, 10, 64, 1000, 4096, 8192, len(contents) / 2, end - 4096, end - 1}
	for n, want := range map[int]string{
		0:             "an empty file",
		1:             "not an ELF file",
		end:           "no function cudaRuntimeGetVersion", // whole, as far as the loader reads it
		len(contents): "no function cudaRuntimeGetVersion",
	} {
		lengths = append(lengths, n)
		requireRefused(t, contents[:n], want)
	}
	slices.Sort(lengths)
	for _, n := range slices.Compact(lengths) {
		if n >= 4 && n < end {
			requireRefused(t, contents[:n], "truncated: ")
		}
	}
}

func TestRealLibrariesThatAreCutOffAreRefused(t *testing.T) {
	for _, file := range realLibraries(t) {
		contents, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, n := range []int{1000, len(contents) / 4, len(contents) / 2} {
			requireRefused(t, contents[:n], "truncated: ")
		}
	}
}

func requireRefused(t *testing.T, contents []byte, want string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "libcudart.so.12.4.127")
	require.NoError(t, os.WriteFile(file, contents, 0o644))
	_, err := Open(context.Background(), Options{Library: file})
	require.ErrorIs(t, err, ErrNoLibrary, "%d bytes", len(contents))
	var open *OpenError
	require.ErrorAs(t, err, &open)
	require.Len(t, open.Attempts, 1)
	require.ErrorContains(t, open.Attempts[0].Err, want, "%d bytes", len(contents))
	require.Equal(t, Version(12040), open.Attempts[0].Runtime, "as the file's name says")
}

// The same if the dynamic loader finds the file by its bare name: for that a process is
// started with the file's directory in LD_LIBRARY_PATH.
func TestLibraryThatIsCutOffOnTheLoadersPath(t *testing.T) {
	const child = "PINNED_TEST_CUT_OFF"
	if dir := os.Getenv(child); dir != "" {
		for _, soname := range libcudart.Sonames {
			_, err := Open(context.Background(), Options{Library: soname})
			require.ErrorIs(t, err, ErrNoLibrary)
			require.ErrorContains(t, err, "tried "+soname+" (Options.Library): "+filepath.Join(dir, soname)+": truncated: ")
		}
		if rt, err := Open(context.Background(), Options{API: RuntimeAPI}); err == nil { // of another directory, on a host with a GPU
			require.NoError(t, rt.Close())
		} else {
			require.ErrorContains(t, err, "truncated: ")
		}
		return
	}

	contents, end := aLibrary(t)
	dir := t.TempDir()
	for _, soname := range libcudart.Sonames {
		require.NoError(t, os.WriteFile(filepath.Join(dir, soname), contents[:end-4096], 0o644))
	}
	startAgain(t, child+"="+dir, "LD_LIBRARY_PATH="+dir, libraryEnv+"=")
}

// Where no libcudart works the driver's library is tried last, unless libcudart's API is asked
// for. Here the one that is found is another library.
func TestDriverLibraryIsTriedLast(t *testing.T) {
	const child = "PINNED_TEST_DRIVER_LAST"
	if dir := os.Getenv(child); dir != "" {
		file := filepath.Join(dir, "libcuda.so.1")
		_, err := Open(context.Background(), Options{})
		var open *OpenError
		require.ErrorAs(t, err, &open)
		last := open.Attempts[len(open.Attempts)-1]
		require.Equal(t, Attempt{Path: file, Found: "the driver's library", Err: last.Err}, last)
		require.ErrorContains(t, last.Err, "no function cudaRuntimeGetVersion")
		require.Greater(t, len(open.Attempts), 1, "libcudarts before it")
		require.Contains(t, open.Searched, "the driver's library: "+file)
		require.ErrorIs(t, err, ErrNoLibrary)

		_, err = Open(context.Background(), Options{API: RuntimeAPI})
		require.ErrorAs(t, err, &open)
		for _, a := range open.Attempts {
			require.NotEqual(t, file, a.Path)
		}
		_, err = Open(context.Background(), Options{API: DriverAPI})
		require.ErrorAs(t, err, &open)
		require.Len(t, open.Attempts, 1)
		require.Equal(t, file, open.Attempts[0].Path)
		return
	}
	if os.Getenv("PINNED_TEST_GPU") == "1" {
		t.Skip("this machine's libcudart works")
	}
	contents, _ := aLibrary(t)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "libcuda.so.1"), contents, 0o644))
	startAgain(t, child+"="+dir, "LD_LIBRARY_PATH="+dir, libraryEnv+"=", apiEnv+"=")
}

// startAgain runs the test in a new process, with more in its environment.
func startAgain(t *testing.T, environ ...string) {
	t.Helper()
	cmd := hosttest.Command(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), environ...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: "+t.Name())
}

// A driver's library that is cut off needs another copy of the driver, and no runtime library.
func TestADriversLibraryThatIsCutOff(t *testing.T) {
	t.Parallel()
	contents, _ := aLibrary(t)
	file := filepath.Join(t.TempDir(), "libcuda.so.1")
	require.NoError(t, os.WriteFile(file, contents[:len(contents)/2], 0o644))
	for _, api := range []API{AnyAPI, DriverAPI} {
		op := &librarySearch{o: Options{API: api}, host: findlib.This()}
		require.Nil(t, op.try(t.Context(), Attempt{Path: file, Found: foundDriver}))
		err := &OpenError{Err: verdict(op.attempts), Attempts: op.attempts}
		require.NotErrorIs(t, err, ErrNoLibrary)
		require.ErrorContains(t, err, "the driver's library is damaged: ")
		require.ErrorContains(t, err, "truncated: ")
		require.ErrorContains(t, err, "what helps: install the driver again")
	}
	op := &librarySearch{host: findlib.This()}
	require.Nil(t, op.try(t.Context(), Attempt{Path: filepath.Join(t.TempDir(), "libcuda.so.1"), Found: foundDriver}))
	require.ErrorIs(t, verdict(op.attempts), ErrNoLibrary, "there is none")
}
