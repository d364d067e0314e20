package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/examples/internal/exampletest"
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

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	require.Regexp(t, `model.safetensors: 1 tensors, 4000000 bytes on device 0`, exampletest.Run(t, main, "-sim"))
}
