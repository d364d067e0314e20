package capture_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
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

func pack(t *testing.T, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, m := range members {
		require.NoError(t, w.WriteHeader(&m.Header))
		_, err := w.Write([]byte(m.body))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.NoError(t, z.Close())
	return b.Bytes()
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
		"a link to itself":    {pack(t, file("host.txt", "-- c -> c --\n")), "c: links in a circle"},
		"a link below itself": {pack(t, file("host.txt", "-- d -> d/d --\n")), "d: links in a circle"},
		"links in a circle":   {pack(t, file("host.txt", "-- x/e -> ../f/g --\n-- f -> x --\n-- x/g -> e --\n")), "links in a circle"},
		"many files":          {pack(t, file("host.txt", manyFiles(20_001))), "more than 20000"},
		"much, well packed":   {pack(t, file("host.txt", "-- a --\n"+strings.Repeat("0", 65<<20))), "more than 64 MiB, decompressed"},
		"much, in the README": {pack(t, file("README.txt", strings.Repeat("0", 65<<20))), "more than 64 MiB, decompressed"},
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

// What commands a terminal does not reach one.
func TestControlCharacters(t *testing.T) {
	t.Parallel()
	a, err := capture.Read(bytes.NewReader(pack(t, file("host.txt", "-- a --\n\x1b[2Jx\ty\u009b1m\r\n"), file("facts.json", `{"devices":[{"name":"\u001b]0;x\u0007","memory_total_bytes":9007199254740993}]}`))))
	require.NoError(t, err)
	assert.Equal(t, "?[2Jx\ty?1m?\n", string(a.Host["a"].Data))
	assert.JSONEq(t, `{"devices":[{"name":"?]0;x?","memory_total_bytes":9007199254740993}]}`, string(a.Facts))
	assert.Contains(t, string(a.Facts), "9007199254740993")
}

// A link in a host leads to files of that host alone.
func TestLinksStayInside(t *testing.T) {
	t.Parallel()
	a, err := capture.Read(bytes.NewReader(pack(t, file("host.txt", "-- etc/os-release -> ../../../../../../../etc/hostname --\n-- b -> /etc/passwd --\n-- c -> b --\n"))))
	require.NoError(t, err)
	for _, name := range []string{"etc/os-release", "b", "c", "c/c"} {
		_, err := fs.ReadFile(a.Host, name)
		require.Error(t, err, name)
	}
	hostinfo.Read(a.Host, a.Environ)
}

// What was captured reads as the host did.
func TestCapturedHostsReadTheSame(t *testing.T) {
	t.Parallel()
	hosts, err := filepath.Glob("../../../../testdata/hosts/*.txtar")
	require.NoError(t, err)
	require.NotEmpty(t, hosts)
	for _, name := range hosts {
		fsys, err := hosttest.Load(name)
		require.NoError(t, err)
		environ := []string{"CUDA_VISIBLE_DEVICES=0,1", "HOME=/home/someone", "container=podman"}
		rec := hostinfo.Record(fsys)
		live := hostinfo.Read(rec, environ)
		a, err := capture.Read(bytes.NewReader(write(t, &capture.Archive{Host: rec.Host(), Environ: capture.Environ(live)})))
		require.NoError(t, err)
		assert.Equal(t, live, hostinfo.Read(a.Host, a.Environ), name)
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
		hostinfo.Read(host, nil)
		(&capture.Archive{Host: host}).WithoutNames(capture.Names{Hosts: []string{"a"}})
	})
}
