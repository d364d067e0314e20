package main

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/weights/httpfs"
)

// model returns a model of n bytes at random, with its header.
func model(n int) []byte {
	header := fmt.Sprintf(`{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%[1]d]}}`, n)
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	tensor := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(tensor)
	return append(file, tensor...)
}

// storage serves one object to requests that are signed, as S3 does. It is busy at every third request, and cuts each
// second one.
func storage(t *testing.T, object []byte) (url string, s *signing) {
	t.Helper()
	s = &signing{credentials.NewStaticV4("key", "secret", ""), "eu-central-1"}
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		again := r.Clone(r.Context())
		again.URL.Host, again.URL.Scheme = r.Host, "http"
		at, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
		if err != nil || time.Since(at) > time.Minute || !strings.Contains(r.Header.Get("Authorization"), "Credential=key/") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		signed := signer.SignV4(*again, "key", "secret", "", "eu-central-1")
		if signed.Header.Get("X-Amz-Date") == r.Header.Get("X-Amz-Date") && signed.Header.Get("Authorization") != r.Header.Get("Authorization") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		n := requests.Add(1)
		switch {
		case r.URL.Path != "/models/a/model.safetensors":
			w.WriteHeader(http.StatusNotFound)
			return
		case n%3 == 0:
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("ETag", `"0123456789abcdef0123456789abcdef"`)
		if n%2 == 0 {
			w = &cutWriter{w, 100_000}
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(object))
	}))
	t.Cleanup(server.Close)
	return server.URL + "/models/a/model.safetensors", s
}

// A cutWriter cuts the connection after some bytes.
type cutWriter struct {
	http.ResponseWriter
	left int
}

func (c *cutWriter) Write(p []byte) (int, error) {
	if c.left -= len(p); c.left < 0 {
		panic(http.ErrAbortHandler)
	}
	return c.ResponseWriter.Write(p)
}

func TestAModelReachesTheGPU(t *testing.T) {
	t.Parallel()
	const n = 1_000_000
	object := model(n)
	_, rt := cudasim.Start(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	url, s := storage(t, object)
	loaded, err := load(t.Context(), url, s, dev)
	require.NoError(t, err)
	defer func() { assert.NoError(t, loaded.Close()) }()
	at, err := loaded.Ptr("t")
	require.NoError(t, err)
	back := make([]byte, n)
	require.NoError(t, dev.CopyToHost(unsafe.Pointer(unsafe.SliceData(back)), at, n))
	assert.True(t, bytes.Equal(object[len(object)-n:], back), "the bytes on the GPU differ")

	_, err = load(t.Context(), strings.Replace(url, "/a/", "/b/", 1), s, dev)
	require.ErrorIs(t, err, fs.ErrNotExist)
	for _, key := range []string{"", "other"} {
		s.creds = credentials.NewStaticV4(key, key, "")
		_, err = load(t.Context(), url, s, dev)
		require.ErrorIs(t, err, fs.ErrPermission)
	}
}

// server starts the server of S3-compatible storage that is installed, versitygw or minio, and returns its address.
// PINNED_TEST_S3 is the path of one of them. The test is skipped if there is neither.
func server(t *testing.T) (address, key string) {
	t.Helper()
	path := os.Getenv("PINNED_TEST_S3")
	for _, name := range []string{"versitygw", "minio"} {
		if found, err := exec.LookPath(name); path == "" && err == nil {
			path = found
		}
	}
	if path == "" {
		t.Skip("no server of S3-compatible storage is installed: versitygw or minio, or PINNED_TEST_S3=PATH of one of them")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address, key = listener.Addr().String(), "pinned-test-key"
	require.NoError(t, listener.Close())
	cmd := exec.Command(path, "server", "--address", address, t.TempDir())
	if strings.HasPrefix(filepath.Base(path), "versitygw") {
		cmd = exec.Command(path, "--port", address, "posix", "--sidecar", t.TempDir(), t.TempDir())
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Env = append(os.Environ(), "MINIO_ROOT_USER="+key, "MINIO_ROOT_PASSWORD="+key, "ROOT_ACCESS_KEY="+key, "ROOT_SECRET_KEY="+key)
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	for until := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			require.NoError(t, conn.Close())
			return address, key
		}
		select {
		case why := <-ended:
			ended <- why
			require.FailNow(t, "the server has ended", "%s: %v: %s", path, why, out.Bytes())
		default:
			require.True(t, time.Now().Before(until), "%s does not listen: %s", path, out.Bytes())
		}
	}
}

// A real server has a model in one part and in several, with checksums.
func TestAModelOfARealServer(t *testing.T) {
	t.Parallel()
	address, key := server(t)
	creds := credentials.NewStaticV4(key, key, "")
	client, err := minio.New(address, &minio.Options{Creds: creds, Region: "us-east-1"})
	require.NoError(t, err)
	require.NoError(t, client.MakeBucket(t.Context(), "models", minio.MakeBucketOptions{}))
	const n = 23_000_001
	object := model(n)
	sum := base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc32.Checksum(object, crc32.MakeTable(crc32.Castagnoli))))
	_, rt := cudasim.Start(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	transport := &signing{creds, "us-east-1"}
	for name, o := range map[string]minio.PutObjectOptions{
		"whole.safetensors":   {DisableMultipart: true, UserMetadata: map[string]string{"X-Amz-Checksum-Crc32c": sum}},
		"a/parts.safetensors": {PartSize: 5 << 20},
	} {
		_, err := client.PutObject(t.Context(), "models", name, bytes.NewReader(object), int64(len(object)), o)
		require.NoError(t, err, name)
		url := "http://" + address + "/models/" + name
		loaded, err := load(t.Context(), url, transport, dev)
		require.NoError(t, err, name)
		at, err := loaded.Ptr("t")
		require.NoError(t, err, name)
		back := make([]byte, n)
		require.NoError(t, dev.CopyToHost(unsafe.Pointer(unsafe.SliceData(back)), at, n), name)
		assert.True(t, bytes.Equal(object[len(object)-n:], back), "%s: the bytes on the GPU differ", name)
		require.NoError(t, loaded.Close(), name)

		fsys, base, err := httpfs.New(t.Context(), url, httpfs.Options{Client: &http.Client{Transport: transport}, Checksums: true})
		require.NoError(t, err, name)
		require.NoError(t, fsys.Verify(t.Context(), base), name)
		require.NoError(t, fsys.Close(), name)
	}
	_, err = load(t.Context(), "http://"+address+"/models/none.safetensors", transport, dev)
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = load(t.Context(), "http://"+address+"/models/whole.safetensors", &signing{credentials.NewStaticV4(key, "another", ""), "us-east-1"}, dev)
	require.ErrorIs(t, err, fs.ErrPermission)
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	require.Regexp(t, `model.safetensors: 1 tensors, 4000000 bytes on device 0`, exampletest.Run(t, main, "-sim"))
}
