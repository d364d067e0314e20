package httpfs

import (
	"context"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"bytes"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const sumsPart = 100_001

// digests returns the digest of the digests of the parts, and their number.
func digests(k *kind, content []byte) (digest []byte, parts int) {
	var all []byte
	for off := 0; off < len(content); off += sumsPart {
		all = append(all, k.of(content[off:min(off+sumsPart, len(content))])...)
		parts++
	}
	return k.of(all), parts
}

func base64Of(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

// told are the headers of servers that tell a checksum of the content, and of which kind it is.
var tellers = map[string]struct {
	kind *kind
	set  func(h http.Header, content []byte)
}{
	"CRC-32C of S3":    {crc32C, amzTeller("Crc32c", crc32C, false)},
	"CRC-64 of S3":     {crc64N, amzTeller("Crc64nvme", crc64N, false)},
	"CRC-32 of S3":     {crc32I, amzTeller("Crc32", crc32I, false)},
	"SHA-256 of S3":    {sha, amzTeller("Sha256", sha, false)},
	"CRC-32C of parts": {crc32C, amzTeller("Crc32c", crc32C, true)},
	"SHA-256 of parts": {sha, amzTeller("Sha256", sha, true)},
	"MD5 of parts": {md5Kind, func(h http.Header, content []byte) {
		sum, n := digests(md5Kind, content)
		h.Set("ETag", fmt.Sprintf(`"%x-%d"`, sum, n))
		h.Set("X-Amz-Request-Id", "1")
	}},
	"MD5 of S3": {md5Kind, func(h http.Header, content []byte) {
		h.Set("ETag", fmt.Sprintf(`"%x"`, md5.Sum(content)))
		h.Set("X-Amz-Request-Id", "1")
	}},
	"CRC-32C of GCS": {crc32C, func(h http.Header, content []byte) {
		h.Add("X-Goog-Hash", "crc32c="+base64Of(crc32C.of(content)))
		h.Add("X-Goog-Hash", "md5="+base64Of(md5Kind.of(content)))
	}},
	"MD5 of GCS":  {md5Kind, func(h http.Header, content []byte) { h.Set("X-Goog-Hash", "md5="+base64Of(md5Kind.of(content))) }},
	"Repr-Digest": {sha, func(h http.Header, content []byte) { h.Set("Repr-Digest", "sha-256=:"+base64Of(sha.of(content))+":") }},
	"a model hub": {sha, func(h http.Header, content []byte) {
		h.Set("X-Linked-Etag", fmt.Sprintf(`"%x"`, sha256.Sum256(content)))
		h.Set("X-Linked-Size", fmt.Sprint(len(content)))
	}},
}

func amzTeller(key string, k *kind, parts bool) func(http.Header, []byte) {
	return func(h http.Header, content []byte) {
		h.Set("X-Amz-Request-Id", "1")
		h.Set("ETag", `"v1"`)
		if !parts {
			h.Set("X-Amz-Checksum-"+key, base64Of(k.of(content)))
			return
		}
		sum, n := digests(k, content)
		h.Set("X-Amz-Checksum-"+key, fmt.Sprintf("%s-%d", base64Of(sum), n))
		h.Set("X-Amz-Checksum-Type", "COMPOSITE")
	}
}

// serveSums serves content whose checksum it tells, as the server of a name of tellers does.
func serveSums(t *testing.T, name string, content, right []byte, lie func(int64, http.ResponseWriter, *http.Request) bool) *server {
	return serve(t, content, func(i int64, w http.ResponseWriter, r *http.Request) bool {
		if lie != nil && lie(i, w, r) {
			return true
		}
		all := http.Header{}
		tellers[name].set(all, right)
		if name == "a model hub" && r.URL.Path == "/dir/file" { // as it redirects
			for key := range all {
				w.Header().Set(key, all.Get(key))
			}
			w.Header().Set("ETag", `"of the hub"`)
			http.Redirect(w, r, "/cdn/file", http.StatusFound)
			return true
		}
		if name == "a model hub" {
			all = http.Header{}
		}
		for key, values := range all {
			if r.Method == http.MethodHead && r.Header.Get("X-Amz-Checksum-Mode") == "ENABLED" || len(key) < 14 || key[:14] != "X-Amz-Checksum" {
				w.Header()[key] = values
			}
		}
		if r.URL.Query().Get("partNumber") == "1" {
			_, n := digests(crc32C, content)
			w.Header().Set("X-Amz-Mp-Parts-Count", fmt.Sprint(n))
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content[:min(sumsPart, len(content))]))
			return true
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
		return true
	})
}

// readRanges reads a file by ranges at the same time, but for the bytes from skip to end.
func readRanges(f fs.File, n, ranges, skip, end int) error {
	var running sync.WaitGroup
	errs := make([]error, ranges)
	for i := range ranges {
		from, to := n*i/ranges, n*(i+1)/ranges
		if from >= skip && from < end {
			continue
		}
		running.Go(func() {
			r, err := f.(*handle).OpenRange(context.Background(), int64(from), int64(to-from))
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				err = errors.Join(err, r.Close())
			}
			errs[i] = err
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// Checksums are computed as the bytes come, whatever tells them, and what was not read is read by Verify.
func TestChecksumsOfServers(t *testing.T) {
	t.Parallel()
	for name, tt := range tellers {
		for _, n := range []int{0, 1, headBytes, 4*headBytes + 17} {
			if n == 0 && strings.HasSuffix(name, "parts") {
				continue // an object has one at least
			}
			content := contentOf(n)
			s := serveSums(t, name, content, content, nil)
			fsys, _ := s.fs(t, Options{Checksums: true})
			require.NoError(t, fsys.Verify(t.Context(), "file"), "%s %d", name, n)
			opened, err := fsys.open("file")
			require.NoError(t, err)
			if n > headBytes {
				require.Equal(t, tt.kind, opened.sums.kind, name)
			}
			before := s.requests.Load()
			require.NoError(t, fsys.Verify(t.Context(), "file"))
			require.Equal(t, before, s.requests.Load(), "all bytes were read before")

			fsys, _ = s.fs(t, Options{Checksums: true})
			f, err := fsys.Open("file")
			require.NoError(t, err)
			require.NoError(t, readRanges(f, n, 5, n, n))
			complete, err := f.(*handle).sums.outcome()
			require.NoError(t, err, name)
			require.True(t, complete, name)
			require.Zero(t, f.(*handle).sums.early.Load(), name)

			fsys, _ = s.fs(t, Options{Checksums: true})
			f, err = fsys.Open("file")
			require.NoError(t, err)
			require.NoError(t, readRanges(f, n, 7, n/3, n/2))
			require.NoError(t, fsys.Verify(t.Context(), "file"))
		}
	}
}

// Another goroutine may have read the last bytes of a part, and be about to take the digest.
func TestVerifyTakesTheDigestsOfOthers(t *testing.T) {
	t.Parallel()
	right := contentOf(4*headBytes + 17)
	wrong := bytes.Clone(right)
	wrong[len(wrong)-1] ^= 1
	for name := range tellers {
		for _, content := range [][]byte{right, wrong} {
			fsys, _ := serveSums(t, name, content, right, nil).fs(t, Options{Checksums: true})
			f, err := fsys.open("file")
			require.NoError(t, err, name)
			for _, p := range f.sums.parts {
				if mem := content[p.off:p.end]; p.hash != nil {
					p.addInOrder(f.sums, p.off, mem)
				} else {
					p.addCRC(f.sums.kind, p.off, mem)
				}
			}
			err = fsys.Verify(t.Context(), "file")
			require.Equal(t, bytes.Equal(content, wrong), errors.Is(err, ErrChecksum), "%s: %v", name, err)
			complete, _ := f.sums.outcome()
			require.True(t, complete, name)
		}
	}
}

// A byte that differs from what was stored is an error of the read that completes the checksum, and of Verify.
func TestWrongBytesOfServers(t *testing.T) {
	t.Parallel()
	right := contentOf(4*headBytes + 17)
	for name := range tellers {
		for _, at := range []int{0, headBytes, len(right) - 1} {
			wrong := bytes.Clone(right)
			wrong[at] ^= 1
			s := serveSums(t, name, wrong, right, nil)
			fsys, _ := s.fs(t, Options{Checksums: true})
			f, err := fsys.Open("file")
			require.NoError(t, err, "%s %d", name, at)
			err = readRanges(f, len(right), 5, 0, 0)
			require.ErrorIs(t, err, ErrChecksum, "%s %d", name, at)
			require.NotContains(t, err.Error(), "secret")
			require.ErrorIs(t, fsys.Verify(t.Context(), "file"), ErrChecksum)
			fsys, _ = s.fs(t, Options{Checksums: true})
			require.ErrorIs(t, fsys.Verify(t.Context(), "file"), ErrChecksum)
			fsys, _ = s.fs(t, Options{})
			_, err = read(fsys, 0)
			require.NoError(t, err, "without the option")
		}
	}
	short := contentOf(10)
	s := serveSums(t, "CRC-32C of S3", short, right[:10], nil)
	fsys, _ := s.fs(t, Options{Checksums: true})
	if bytes.Equal(short, right[:10]) {
		short[3] ^= 1
	}
	_, err := fsys.Open("file")
	require.ErrorIs(t, err, ErrChecksum, "the head is all of the file")
}

func TestServersWithoutChecksums(t *testing.T) {
	t.Parallel()
	content := contentOf(3 * headBytes)
	plain := serve(t, content, nil)
	fsys, _ := plain.fs(t, Options{Checksums: true})
	err := fsys.Verify(t.Context(), "file")
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.NotContains(t, err.Error(), "secret")
	fsys, _ = plain.fs(t, Options{})
	require.ErrorContains(t, fsys.Verify(t.Context(), "file"), "Options.Checksums")
	require.ErrorContains(t, fsys.Verify(context.Context(nil), "file"), "context")
	ended, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	known := serveSums(t, "CRC-32C of S3", content, content, nil)
	fsys, _ = known.fs(t, Options{Checksums: true})
	require.ErrorIs(t, fsys.Verify(ended, "file"), cause)

	for name, tt := range map[string]struct {
		of  string
		lie func(i int64, w http.ResponseWriter, r *http.Request) bool
		has *kind // nil for none
	}{
		"a URL signed for another method": {"CRC-32C of S3", refuse(http.StatusForbidden), nil},
		"the ETag has it":                 {"MD5 of S3", refuse(http.StatusForbidden), md5Kind},
		"the parts have no size":          {"MD5 of parts", refuse(http.StatusMethodNotAllowed), nil},
		"busy": {"CRC-32C of parts", func(i int64, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodHead && i%2 == 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return true
			}
			return false
		}, crc32C},
		"another version": {"CRC-32C of S3", func(_ int64, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodHead {
				w.Header().Set("ETag", `"v2"`)
			}
			return r.Method == http.MethodHead
		}, nil},
		"other parts": {"MD5 of parts", func(_ int64, w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Query().Has("partNumber") {
				w.Header().Set("ETag", `"v2"`)
			}
			return r.URL.Query().Has("partNumber")
		}, nil},
		"encrypted": {"MD5 of S3", func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("X-Amz-Server-Side-Encryption", "aws:kms")
			return false
		}, nil},
		"no size of the hub's file": {"a model hub", func(_ int64, w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/dir/file" {
				http.Redirect(w, r, "/cdn/file", http.StatusFound)
				return true
			}
			return false
		}, nil},
	} {
		s := serveSums(t, tt.of, content, content, tt.lie)
		fsys, _ := s.fs(t, Options{Checksums: true})
		opened, err := fsys.open("file")
		require.NoError(t, err, name)
		require.Equal(t, tt.has == nil, opened.sums == nil, name)
		if tt.has != nil {
			require.Equal(t, tt.has, opened.sums.kind, name)
			require.NoError(t, fsys.Verify(t.Context(), "file"), name)
		} else {
			require.ErrorIs(t, fsys.Verify(t.Context(), "file"), errors.ErrUnsupported, name)
		}
		require.Empty(t, fsys.slots, name)
	}
	busy := serveSums(t, "CRC-32C of S3", content, content, refuse(http.StatusServiceUnavailable))
	fsys, _ = busy.fs(t, Options{Checksums: true, Attempts: 3})
	_, err = fsys.Open("file")
	require.ErrorContains(t, err, "after 3 attempts")
	require.Empty(t, fsys.slots)
}

func refuse(status int) func(int64, http.ResponseWriter, *http.Request) bool {
	return func(_ int64, w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodHead {
			w.WriteHeader(status)
		}
		return r.Method == http.MethodHead
	}
}

// Pieces in any order, several at a time and some of them again, give the digest, or leave it incomplete.
func TestSumsOfPiecesInAnyOrder(t *testing.T) {
	t.Parallel()
	content := contentOf(300_000)
	for round := range 10 {
		random := rand.New(rand.NewPCG(1, uint64(round)))
		for _, k := range []*kind{crc32C, crc32I, crc64N, sha, md5Kind} {
			for _, partSize := range []int64{1, 70_001, int64(len(content))} {
				content := content[:min(int64(len(content)), 40*partSize)]
				var all []byte
				for off := 0; off < len(content); off += int(partSize) {
					all = append(all, k.of(content[off:min(off+int(partSize), len(content))])...)
				}
				s := newSums(k, k.of(all), true, int64(len(content)), partSize)
				var running sync.WaitGroup
				cuts := []int{0}
				for at := 0; at < len(content); {
					at = min(at+1+random.IntN(len(content)/3+1), len(content))
					cuts = append(cuts, at)
				}
				for _, i := range random.Perm(len(cuts) - 1) {
					again := round%2 == 0 && random.IntN(3) == 0
					running.Go(func() {
						from, to := cuts[i], cuts[i+1]
						assert.NoError(t, s.add(int64(from), content[from:to]))
						if again {
							from = (from + to) / 2
							to = min(to+100, len(content))
							assert.NoError(t, s.add(int64(from), content[from:to]))
						}
					})
				}
				running.Wait()
				for from := range cuts[:len(cuts)-1] { // what overlaps has left out
					require.NoError(t, s.add(int64(cuts[from]), content[cuts[from]:cuts[from+1]]))
				}
				complete, err := s.outcome()
				require.NoError(t, err)
				require.True(t, complete, "%s %d %d", k.name, partSize, round)
				if round%2 == 1 {
					require.Zero(t, s.early.Load())
				}
			}
		}
	}
}

// Bytes that come early are kept up to a limit: beyond it, the checksum stays incomplete until they come again.
func TestBytesThatComeTooEarly(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	const n = limit + 2_000
	content := make([]byte, n)
	s := newSums(sha, sha.of(content), false, n, n)
	s.limit = limit
	for off := 1_000; off < n; off += 1 << 18 {
		require.NoError(t, s.add(int64(off), content[off:min(off+1<<18, n)]))
		require.LessOrEqual(t, s.early.Load(), s.limit)
	}
	require.Zero(t, s.early.Load())
	require.True(t, s.parts[0].lost)
	require.NoError(t, s.add(0, content[:1_000]))
	complete, _ := s.outcome()
	require.False(t, complete)
	require.NoError(t, s.add(500, content[500:]))
	complete, err := s.outcome()
	require.NoError(t, err)
	require.True(t, complete)
}

// A server that sends a byte at a time takes no more memory for those that come early than one that sends many.
func TestSingleBytesThatComeEarly(t *testing.T) {
	t.Parallel()
	content := contentOf(5_000)
	n := int64(len(content))
	for _, k := range []*kind{crc32C, crc64N} {
		s := newSums(k, k.of(content), false, n, n)
		for off := 10; off < len(content); off++ {
			require.NoError(t, s.add(int64(off), content[off:off+1]))
			require.Len(t, s.parts[0].pieces, 1, k.name)
		}
		require.NoError(t, s.add(0, content[:10]))
		complete, err := s.outcome()
		require.NoError(t, err)
		require.True(t, complete)
	}
	s := newSums(sha, sha.of(content), false, n, n)
	s.limit = 10_000
	for off := 10; off < len(content); off++ {
		require.NoError(t, s.add(int64(off), content[off:off+1]))
		require.LessOrEqual(t, len(s.parts[0].pieces)*pieceBytes, 10_000)
	}
	require.True(t, s.parts[0].lost)
	require.Zero(t, s.early.Load())
}

// The parts that a server tells of take memory: there are no more than storage has.
func TestManyPartsAreNoChecksum(t *testing.T) {
	t.Parallel()
	for _, parts := range []int{maxParts, maxParts + 1} {
		content := contentOf(parts)
		s := serve(t, content, nil)
		s.lie = func(_ int64, w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("ETag", fmt.Sprintf(`"%032d-%d"`, 0, parts))
			w.Header().Set("X-Amz-Request-Id", "1")
			if r.URL.Query().Has("partNumber") {
				w.Header().Set("X-Amz-Mp-Parts-Count", fmt.Sprint(parts))
				w.Header().Set("Content-Length", "1")
				w.WriteHeader(http.StatusPartialContent)
				return true
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
			return true
		}
		fsys, _ := s.fs(t, Options{Checksums: true})
		_, err := fsys.Open("file")
		if parts > maxParts {
			require.NoError(t, err)
			require.ErrorIs(t, fsys.Verify(t.Context(), "file"), errors.ErrUnsupported)
		} else {
			require.ErrorIs(t, err, ErrChecksum)
		}
	}
}

func TestKindsHaveTheirCheckValues(t *testing.T) {
	t.Parallel()
	for k, want := range map[*kind]string{
		crc32C: "e3069283", crc32I: "cbf43926", crc64N: "ae8b14860a799888", md5Kind: "25f9e794323b453885f5181f1b624d0b",
		sha: "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
	} {
		require.Equal(t, want, hex.EncodeToString(k.of([]byte("123456789"))), k.name)
	}
}
