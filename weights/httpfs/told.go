package httpfs

import (
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/gopinned/pinned/internal/crc"
)

// A kind is a kind of checksum: a hash of bytes in order, or a CRC, which can be combined.
type kind struct {
	name string
	size int // bytes
	hash func() hash.Hash
	sum  func([]byte) uint64
	poly uint64
}

// combine returns the CRC of bytes with the CRC a, followed by n bytes with the CRC b.
func (k *kind) combine(a, b uint64, n int64) uint64 {
	if k.size == 4 {
		return uint64(crc.Combine(uint32(k.poly), uint32(a), uint32(b), n))
	}
	return crc.Combine(k.poly, a, b, n)
}

// bytes returns a CRC as a digest.
func (k *kind) bytes(sum uint64) []byte {
	return binary.BigEndian.AppendUint64(nil, sum)[8-k.size:]
}

// of returns the digest of bytes.
func (k *kind) of(mem []byte) []byte {
	if k.hash == nil {
		return k.bytes(k.sum(mem))
	}
	h := k.hash()
	_, _ = h.Write(mem)
	return h.Sum(nil)
}

func newCRC32(name string, poly uint32) *kind {
	table := crc32.MakeTable(poly)
	return &kind{name: name, size: 4, poly: uint64(poly), sum: func(mem []byte) uint64 { return uint64(crc32.Checksum(mem, table)) }}
}

// nvme is the polynomial of CRC-64/NVME.
const nvme = 0x9a6c9329ac4bc9b5

var (
	crc32C  = newCRC32("CRC-32C", crc32.Castagnoli)
	crc32I  = newCRC32("CRC-32", crc32.IEEE)
	crc64N  = &kind{name: "CRC-64/NVME", size: 8, poly: nvme, sum: func(mem []byte) uint64 { return crc64.Checksum(mem, nvmeTable()) }}
	sha     = &kind{name: "SHA-256", size: sha256.Size, hash: sha256.New}
	md5Kind = &kind{name: "MD5", size: md5.Size, hash: md5.New}

	nvmeTable = sync.OnceValue(func() *crc64.Table { return crc64.MakeTable(nvme) })
)

// amz are the checksums that S3-compatible storage tells, in the order of preference.
var amz = []struct {
	key  string
	kind *kind
}{{"Crc32c", crc32C}, {"Crc64nvme", crc64N}, {"Crc32", crc32I}, {"Sha256", sha}}

// findSums returns what a file is compared with: the first checksum that the server tells; nil if it tells none.
func (f *file) findSums() (*sums, error) {
	h := f.told.Header
	isS3 := h.Get("X-Amz-Request-Id") != ""
	goog := listed(h.Values("X-Goog-Hash"))
	if want := fromBase64(goog["crc32c"], crc32C); want != nil {
		return f.whole(crc32C, want), nil
	}
	if isS3 {
		// URLs that are signed beforehand are for one method only, and refuse this one: they have the ETag.
		more, err := f.ask("")
		if err != nil {
			return nil, err
		}
		if s, err := f.amzSums(more); s != nil || err != nil {
			return s, err
		}
	}
	if md, n, ok := strings.Cut(strings.Trim(f.etag, `"`), "-"); ok && isS3 && !isEncrypted(h) {
		if s, err := f.composite(md5Kind, fromHex(md, md5Kind), n); s != nil || err != nil {
			return s, err
		}
	}
	if want := f.linked(); want != nil {
		return f.whole(sha, want), nil
	}
	if want := fromBase64(strings.Trim(listed(h.Values("Repr-Digest"))["sha-256"], ":"), sha); want != nil {
		return f.whole(sha, want), nil
	}
	if want := fromBase64(goog["md5"], md5Kind); want != nil {
		return f.whole(md5Kind, want), nil
	}
	if want := fromHex(strings.Trim(f.etag, `"`), md5Kind); want != nil && isS3 && !isEncrypted(h) {
		return f.whole(md5Kind, want), nil
	}
	return nil, nil
}

func (f *file) whole(k *kind, want []byte) *sums {
	return newSums(k, want, false, f.size, max(f.size, 1))
}

// amzSums returns a checksum of x-amz-checksum-*: of the whole file and combinable, of parts, or of the whole file.
func (f *file) amzSums(h http.Header) (*sums, error) {
	for _, a := range amz[:3] {
		if want := fromBase64(h.Get("X-Amz-Checksum-"+a.key), a.kind); want != nil && h.Get("X-Amz-Checksum-Type") != "COMPOSITE" {
			return f.whole(a.kind, want), nil
		}
	}
	for _, a := range amz {
		sum, n, ok := strings.Cut(h.Get("X-Amz-Checksum-"+a.key), "-")
		if !ok {
			continue
		}
		if s, err := f.composite(a.kind, fromBase64(sum, a.kind), n); s != nil || err != nil {
			return s, err
		}
	}
	if want := fromBase64(h.Get("X-Amz-Checksum-Sha256"), sha); want != nil {
		return f.whole(sha, want), nil
	}
	return nil, nil
}

// maxParts is the largest number of parts of an object of S3: memory is allocated for each.
const maxParts = 10_000

// composite returns the checksum of a number of parts. The server is asked for their size: all but the last one have it.
func (f *file) composite(k *kind, want []byte, parts string) (*sums, error) {
	n, err := strconv.ParseInt(parts, 10, 32)
	if want == nil || err != nil || n < 1 || n > maxParts {
		return nil, nil
	}
	h, err := f.ask("partNumber=1")
	if err != nil {
		return nil, err
	}
	size, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64)
	if err != nil || size < 1 || (f.size+size-1)/size != n || n > 1 && h.Get("X-Amz-Mp-Parts-Count") != parts {
		return nil, nil
	}
	return newSums(k, want, true, f.size, size), nil
}

// ask asks for the header of the file with its checksums, nil if the server does not tell it.
func (f *file) ask(query string) (http.Header, error) {
	to := *f.url
	if query != "" {
		to.RawQuery = strings.TrimPrefix(to.RawQuery+"&"+query, "&")
	}
	b := &body{ctx: f.fs.ctx, file: f}
	for {
		r, err := b.send(http.MethodHead, &to, func(h http.Header) { h.Set("X-Amz-Checksum-Mode", "ENABLED") })
		b.stop()
		if err == nil && r.StatusCode/100 == 2 {
			if f.etag != r.Header.Get("ETag") {
				return nil, nil
			}
			return r.Header, nil
		}
		if err == nil {
			err = statusError(r)
			if _, ok := err.(final); ok {
				return nil, nil
			}
		}
		if err := b.retry(err); err != nil {
			return nil, err
		}
	}
}

// linked returns the SHA-256 that a model hub tells when it redirects to its storage.
func (f *file) linked() []byte {
	for r := f.told; r != nil; r = r.Request.Response {
		size, err := strconv.ParseInt(r.Header.Get("X-Linked-Size"), 10, 64)
		if want := fromHex(strings.Trim(r.Header.Get("X-Linked-Etag"), `"`), sha); want != nil && err == nil && size == f.size {
			return want
		}
	}
	return nil
}

// isEncrypted reports whether an object is stored in a way in which its ETag is no MD5.
func isEncrypted(h http.Header) bool {
	how := h.Get("X-Amz-Server-Side-Encryption")
	return how != "" && how != "AES256" || h.Get("X-Amz-Server-Side-Encryption-Customer-Algorithm") != ""
}

// listed parses "key=value, key=value" of one or several headers. Base64 may end in =.
func listed(headers []string) map[string]string {
	list := map[string]string{}
	for _, header := range headers {
		for one := range strings.SplitSeq(header, ",") {
			key, value, _ := strings.Cut(strings.TrimSpace(one), "=")
			list[strings.ToLower(key)] = value
		}
	}
	return list
}

// fromBase64 and fromHex return a digest, nil if it is not one of that kind.
func fromBase64(s string, k *kind) []byte {
	if b, err := base64.StdEncoding.DecodeString(s); err == nil && len(b) == k.size {
		return b
	}
	return nil
}

func fromHex(s string, k *kind) []byte {
	if b, err := hex.DecodeString(s); err == nil && len(b) == k.size {
		return b
	}
	return nil
}
