package main

import (
	"bytes"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/hostmem/pool"
)

var modified = time.Unix(1_700_000_000, 0).UTC()

// storage serves one object as S3 does, cut to the given length.
func storage(t *testing.T, object []byte, served int) *minio.Core {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/models/a/weights" || r.Method != http.MethodGet {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("ETag", `"0123456789abcdef0123456789abcdef"`)
		if served < len(object) {
			w.Header().Set("Content-Length", strconv.Itoa(len(object)))
			w.Header().Set("Last-Modified", modified.Format(http.TimeFormat))
			_, _ = w.Write(object[:served])
			return
		}
		http.ServeContent(w, r, "", modified, bytes.NewReader(object))
	}))
	t.Cleanup(server.Close)
	client, err := minio.NewCore(strings.TrimPrefix(server.URL, "http://"), &minio.Options{
		Creds: credentials.NewStaticV4("key", "secret", ""), Region: "us-east-1", BucketLookup: minio.BucketLookupPath,
	})
	require.NoError(t, err)
	return client
}

func TestAnObjectReachesTheGPU(t *testing.T) {
	t.Parallel()
	object := make([]byte, 4_000_000)
	for i := range object {
		object[i] = byte(rand.Uint32())
	}
	_, rt := cudasim.Start(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	stream, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, stream.Close()) }()
	p, err := pool.New(dev, pool.Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, p.Close()) }()

	mem, err := upload(t.Context(), storage(t, object, len(object)), "models", "a/weights", p, stream)
	require.NoError(t, err)
	defer func() { assert.NoError(t, mem.Close()) }()
	require.Equal(t, len(object), mem.Len())
	back, err := p.Get(t.Context(), mem.Len())
	require.NoError(t, err)
	defer func() { assert.NoError(t, back.Release()) }()
	require.NoError(t, stream.CopyToHost(unsafe.Pointer(unsafe.SliceData(back.Bytes())), mem.Ptr(), mem.Len()))
	require.NoError(t, stream.Synchronize(t.Context()))
	assert.True(t, bytes.Equal(object, back.Bytes()), "the bytes on the GPU differ")

	_, err = upload(t.Context(), storage(t, object, 1000), "models", "a/weights", p, stream)
	assert.ErrorContains(t, err, "unexpected EOF", "a response that was cut off")
}

func TestTheProgramRuns(t *testing.T) {
	t.Parallel()
	require.NoError(t, run(t.Context(), storage(t, []byte("weights"), 7), "models", "a/weights", true))
	require.ErrorContains(t, run(t.Context(), storage(t, nil, 0), "models", "none", true), "does not exist")
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	require.Regexp(t, `^models/weights: 4000000 bytes on device 0`, exampletest.Run(t, main, "-sim"))
}
