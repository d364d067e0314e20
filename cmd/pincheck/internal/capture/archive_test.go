package capture_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/internal/hosttest"
)

func write(t testing.TB, a *capture.Archive) []byte {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, capture.Write(&b, a))
	return b.Bytes()
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	a := &capture.Archive{
		Host: fstest.MapFS{
			"proc/meminfo": {Mode: 0o444, Data: []byte("MemTotal: 12 kB\n")},
			"dev/nvidia0":  {Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666},
			"sys/a":        {Mode: fs.ModeSymlink | 0o777, Data: []byte("../proc")},
		},
		Environ: []string{"CUDA_VISIBLE_DEVICES=", "LD_LIBRARY_PATH=/x:/y"},
		Facts:   []byte("{\n  \"devices\": []\n}"),
	}
	once := write(t, a)
	assert.Equal(t, once, write(t, a), "the same bytes each time")
	got, err := capture.Read(bytes.NewReader(once))
	require.NoError(t, err)
	assert.Equal(t, a, got)
	assert.Less(t, len(once), 2000)

	got, err = capture.Read(bytes.NewReader(write(t, &capture.Archive{})))
	require.NoError(t, err)
	assert.Empty(t, got.Host)
	assert.Empty(t, got.Environ)
	assert.Nil(t, got.Facts)
}

type member struct {
	tar.Header
	body string
}

func file(name, body string) member {
	return member{tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(body))}, body}
}

func pack(t testing.TB, members ...member) []byte { return zip(t, tarOf(t, members...)) }

func tarOf(t testing.TB, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		require.NoError(t, w.WriteHeader(&m.Header))
		_, err := w.Write([]byte(m.body))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

func zip(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write(data)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return b.Bytes()
}

// wrongChecksum changes the checksum at the end of a file.
func wrongChecksum(packed []byte) []byte {
	packed = bytes.Clone(packed)
	packed[len(packed)-8] ^= 1
	return packed
}

func noise(n int) string {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b) // it never fails
	return string(b)
}

// chains are n chains of 39 links each, of which none goes in a circle.
func chains(n int) string {
	var b strings.Builder
	for i := range n {
		for j := range 39 {
			fmt.Fprintf(&b, "-- c%d.%d -> c%d.%d --\n", i, j, i, j+1)
		}
		if b.Len() > 200_000 {
			break
		}
	}
	return b.String()
}

func TestHostileArchives(t *testing.T) {
	t.Parallel()
	good := file("host.txt", "-- a --\n")
	whole := pack(t, good)
	for what, c := range map[string]struct {
		data []byte
		says string
	}{
		"nothing":             {nil, "not an archive of pincheck capture"},
		"text":                {[]byte("hello"), "not an archive of pincheck capture"},
		"cut off":             {whole[:len(whole)/2], "unexpected EOF"},
		"no host":             {pack(t, file("README.txt", "x")), "there is no host.txt"},
		"a path upwards":      {pack(t, good, file("../../etc/cron.d/x", "x")), "is in no archive"},
		"an absolute path":    {pack(t, good, file("/etc/cron.d/x", "x")), "is in no archive"},
		"a link":              {pack(t, member{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "host.txt", Linkname: "/etc/passwd"}}), "neither links"},
		"a hard link":         {pack(t, member{Header: tar.Header{Typeflag: tar.TypeLink, Name: "host.txt", Linkname: "/etc/passwd"}}), "neither links"},
		"a device":            {pack(t, member{Header: tar.Header{Typeflag: tar.TypeChar, Name: "host.txt"}}), "neither links"},
		"twice":               {pack(t, good, good), "comes twice"},
		"twice, empty":        {pack(t, file("facts.json", ""), file("facts.json", "")), "comes twice"},
		"facts":               {pack(t, good, file("facts.json", "{")), "facts.json is no JSON"},
		"a path in the host":  {pack(t, file("host.txt", "-- ../../etc/passwd --\nx\n")), "not a path below the root"},
		"a long path":         {pack(t, file("host.txt", "-- "+strings.Repeat("x", 5000)+" --\n")), "a path of 5000 bytes"},
		"a link to itself":    {pack(t, file("host.txt", "-- c -> c --\n")), `"c": links in a circle`},
		"a link below itself": {pack(t, file("host.txt", "-- d -> d/d --\n")), `"d": links in a circle`},
		"links in a circle":   {pack(t, file("host.txt", "-- x/e -> ../f/g --\n-- f -> x --\n-- x/g -> e --\n")), "links in a circle"},
		"many files":          {pack(t, file("host.txt", manyFiles(5001))), "more than 5000"},
		"deep facts":          {pack(t, good, file("facts.json", strings.Repeat("[", 33)+strings.Repeat("]", 33))), "facts.json is nested deeper than 32"},
		"broad facts":         {pack(t, good, file("facts.json", "["+strings.Repeat("{},", 4_000)+"0]")), "more than 4000 objects"},
		"long facts":          {pack(t, good, file("facts.json", "["+strings.Repeat("0,", 20_000)+"0]")), "more than 20000 values"},
		"a deep path":         {pack(t, file("host.txt", "-- "+strings.Repeat("x/", 64)+"x --\n")), "more than 64 parts"},
		"a deep link":         {pack(t, file("host.txt", "-- a -> "+strings.Repeat("x/", 64)+"x --\n")), "more than 64 parts"},
		"chains of links":     {pack(t, file("host.txt", chains(128))), "more than 20000 links"},
		"a wrong checksum":    {wrongChecksum(whole), "invalid checksum"},
		"no checksum":         {whole[:len(whole)-8], "unexpected EOF"},
		"a second archive":    {append(bytes.Clone(whole), whole...), "there is more behind its end"},
		"text behind it":      {append(bytes.Clone(whole), "x"...), "there is more behind its end"},
		"a large file":        {append(bytes.Clone(whole), make([]byte, 10<<20)...), "more behind its end"},
		"incompressible":      {pack(t, good, file("facts.json", noise(3<<20))), "facts.json: more than 2 MiB"},
		"a large tar file":    {zip(t, append(tarOf(t, good), make([]byte, 5<<20)...)), "(4.12 MiB), decompressed"},
		"a size that lies":    {zip(t, tarOf(t, file("host.txt", "-- a --\n"+strings.Repeat("0", 1<<20)))[:1<<20]), "unexpected EOF"},
		"much, well packed":   {pack(t, file("host.txt", "-- a --\n"+strings.Repeat("0", 5<<20))), "host.txt: more than 2 MiB"},
		"much, in the README": {pack(t, file("README.txt", strings.Repeat("0", 5<<20))), "README.txt: more than 64 KiB"},
	} {
		_, err := capture.Read(bytes.NewReader(c.data))
		require.ErrorContains(t, err, c.says, what)
		assert.ErrorContains(t, err, "capture: read: ", what)
	}
}

func manyFiles(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString("-- a" + strings.Repeat("0", i%7) + string(rune('a'+i%26)) + strings.Repeat("1", i/182) + " --\n")
	}
	return b.String()
}

// An archive is made to be looked at: what is in it commands no terminal, and reads the same.
func TestControlCharacters(t *testing.T) {
	t.Parallel()
	a := &capture.Archive{
		Host:    fstest.MapFS{"a": {Data: []byte("\x1b[2Jx\ty\u009b1m\r\n")}, "sys/config": {Data: []byte("\xff\xff\xff\xff\n")}},
		Environ: []string{"A=\x1b]52;c;x\a"},
		Facts:   []byte(`{"devices":[{"name":"\u001b]0;x\u0007` + "\u009b\u202e" + `","memory_total_bytes":9007199254740993}]}`),
	}
	packed := write(t, a)
	unpacked, err := gzip.NewReader(bytes.NewReader(packed))
	require.NoError(t, err)
	archive := tar.NewReader(unpacked)
	for {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		text, err := io.ReadAll(archive)
		require.NoError(t, err)
		shown := strings.ReplaceAll(string(text), "\xff", "")
		assert.Equal(t, printable.Text(shown), shown, header.Name)
	}
	got, err := capture.Read(bytes.NewReader(packed))
	require.NoError(t, err)
	assert.Equal(t, "?[2Jx\ty?1m?\n", string(got.Host["a"].Data))
	assert.Equal(t, "\xff\xff\xff\xff\n", string(got.Host["sys/config"].Data))
	assert.Equal(t, []string{"A=?]52;c;x?"}, got.Environ)
	assert.JSONEq(t, string(a.Facts), string(got.Facts))
	assert.Contains(t, string(got.Facts), "9007199254740993")
}

// A link in a host leads to files of that host alone.
func TestLinksStayInside(t *testing.T) {
	t.Parallel()
	a, err := capture.Read(bytes.NewReader(pack(t, file("host.txt", "-- etc/os-release -> ../../../../../../../etc/hostname --\n-- b -> /etc/passwd --\n-- c -> b --\n"))))
	require.NoError(t, err)
	for _, name := range []string{"etc/os-release", "b", "c", "c/c"} {
		_, err := fs.ReadFile(a.Files(), name)
		require.Error(t, err, name)
	}
	hostinfo.Read(a.Files(), a.Environ)
}

// What was captured reads as the host did.
func TestCapturedHostsReadTheSame(t *testing.T) {
	t.Parallel()
	hosts, err := filepath.Glob("../../../../testdata/hosts/*.txtar")
	require.NoError(t, err)
	require.NotEmpty(t, hosts)
	for _, name := range hosttest.Sample(hosts) {
		fsys, err := hosttest.Load(name)
		require.NoError(t, err)
		environ := []string{"CUDA_VISIBLE_DEVICES=0,1", "HOME=/home/someone", "container=podman"}
		rec := hostinfo.Record(fsys)
		live := hostinfo.Read(rec, environ)
		a, err := capture.Read(bytes.NewReader(write(t, &capture.Archive{Host: rec.Host(), Environ: capture.Environ(live)})))
		require.NoError(t, err)
		assert.Equal(t, live, hostinfo.Read(a.Files(), a.Environ), name)
	}
}

// The file system of an archive is an fstest.MapFS, but for the time that it takes.
func TestFilesAreThoseOfTheHost(t *testing.T) {
	t.Parallel()
	host, err := capture.ParseHost("-- a/b/c --\ntext\n-- a/l -> b --\n-- a/m -> l/c --\n-- up -> ../x --\n-- abs -> /a/b/c --\n-- to -> a/l/../b --\n-- dev/n (device 0660 0:44) --\n-- f --\n-- f/below --\n")
	require.NoError(t, err)
	files := (&capture.Archive{Host: host}).Files()
	for _, name := range []string{".", "a", "a/b", "a/b/c", "a/l", "a/l/c", "a/m", "up", "abs", "to", "to/c", "dev", "dev/n", "dev/n/x", "f", "f/below", "none", "a/none", "../x", "/a", ""} {
		text, err := fs.ReadFile(files, name)
		wantText, wantErr := fs.ReadFile(host, name)
		assert.Equal(t, wantErr == nil, err == nil, name)
		assert.Equal(t, string(wantText), string(text), name)
		info, err := fs.Stat(files, name)
		wantInfo, wantErr := fs.Stat(host, name)
		if assert.Equal(t, wantErr == nil, err == nil, name) && err == nil {
			assert.Equal(t, wantInfo.Mode(), info.Mode(), name)
			assert.Equal(t, wantInfo.Sys(), info.Sys(), name)
		}
		info, err = fs.Lstat(files, name)
		wantInfo, wantErr = fs.Lstat(host, name)
		if assert.Equal(t, wantErr == nil, err == nil, name) && err == nil {
			assert.Equal(t, wantInfo.Mode(), info.Mode(), name)
		}
		target, err := fs.ReadLink(files, name)
		wantTarget, wantErr := fs.ReadLink(host, name)
		assert.Equal(t, wantErr == nil, err == nil, name)
		assert.Equal(t, wantTarget, target, name)
		names := func(fsys fs.FS) (all []string) {
			entries, _ := fs.ReadDir(fsys, name)
			for _, e := range entries {
				all = append(all, e.Name()+" "+e.Type().String())
			}
			return all
		}
		assert.Equal(t, names(host), names(files), name)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(write(f, &capture.Archive{Host: fstest.MapFS{"proc/meminfo": {Data: []byte("x")}}, Environ: []string{"A=b"}, Facts: []byte("{}")}))
	f.Add([]byte("\x1f\x8b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if a, err := capture.Read(bytes.NewReader(data)); err == nil {
			again, err := capture.Read(bytes.NewReader(write(t, a)))
			require.NoError(t, err)
			assert.Len(t, again.Host, len(a.Host))
		}
	})
}

// Any text as the host: it is read within the host, or it is an error.
func FuzzHost(f *testing.F) {
	for _, name := range []string{"h200-vm", "vmd-cxl", "damaged", "container-cgroup-v1"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "testdata", "hosts", name+".txtar"))
		require.NoError(f, err)
		f.Add(string(text))
	}
	f.Add("-- sys/bus/pci/devices/0000:01:00.0 -> ../../../../0000:01:00.0 --\n-- 0000:01:00.0/vendor --\n0x10de\n-- 0000:01:00.0/class --\n0x030200\n")
	f.Fuzz(func(t *testing.T, text string) {
		host, err := capture.ParseHost(text)
		if err != nil {
			return
		}
		for name := range host {
			require.True(t, fs.ValidPath(name))
		}
		hostinfo.Read((&capture.Archive{Host: host}).Files(), nil)
		(&capture.Archive{Host: host}).WithoutNames(capture.Names{Hosts: []string{"a"}})
	})
}
