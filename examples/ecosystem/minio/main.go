// Command minio loads a model of S3-compatible storage onto a GPU, by ranges through pinned memory and without a copy on
// disk.
//
//	go run ./minio -endpoint HOST:PORT -bucket B -object O        # credentials from MINIO_ACCESS_KEY, MINIO_SECRET_KEY
//	go run ./minio -endpoint HOST:PORT -bucket B -object O -sim   # onto a simulated GPU
//	go run ./minio -sim                                           # from storage in this process
//
// The object is a safetensors or GGUF file, a part of a model, or an index.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/weights"
	"github.com/gopinned/pinned/weights/httpfs"
)

func main() {
	log.SetFlags(0)
	endpoint := flag.String("endpoint", "localhost:9000", "host and port of the storage")
	secure := flag.Bool("secure", false, "use HTTPS")
	region := flag.String("region", "us-east-1", "region of the bucket")
	bucket := flag.String("bucket", "", "bucket of the object; with -sim, none is storage in this process")
	object := flag.String("object", "", "name of the object")
	sim := flag.Bool("sim", false, "use a simulated GPU")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	creds := credentials.NewEnvMinio()
	if *sim && *bucket == "" {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			log.Fatal(err)
		}
		defer listener.Close()
		go func() { _ = http.Serve(listener, http.HandlerFunc(serveObject)) }() // ends with the listener
		*endpoint, *bucket, *object = listener.Addr().String(), "models", "a/model.safetensors"
		creds = credentials.NewStaticV4("", "", "")
	}
	scheme := "http"
	if *secure {
		scheme = "https"
	}
	at := url.URL{Scheme: scheme, Host: *endpoint, Path: "/" + *bucket + "/" + *object}
	if err := run(ctx, at.String(), &signing{creds, *region}, *sim); err != nil {
		log.Fatal(err)
	}
}

// serveObject is storage with one model of 4 MB.
func serveObject(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || r.URL.Path != "/models/a/model.safetensors" {
		http.NotFound(w, r)
		return
	}
	header := `{"zeros":{"dtype":"U8","shape":[4000000],"data_offsets":[0,4000000]}}`
	model := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	w.Header().Set("ETag", `"0123456789abcdef0123456789abcdef"`)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(append(model, make([]byte, 4_000_000)...)))
}

// A signing transport signs requests for S3 (signature version 4).
type signing struct {
	creds  *credentials.Credentials
	region string
}

// RoundTrip asks for credentials each time, as those of a role expire.
func (s *signing) RoundTrip(r *http.Request) (*http.Response, error) {
	v, err := s.creds.GetWithContext(&credentials.CredContext{Client: http.DefaultClient})
	if err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	r = r.Clone(r.Context())
	if v.AccessKeyID != "" { // else the object is public
		r.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD")
		r = signer.SignV4(*r, v.AccessKeyID, v.SecretAccessKey, v.SessionToken, s.region)
	}
	return connections.RoundTrip(r)
}

// connections keeps a connection for each range. The default keeps two, and HTTP/2 has one for all ranges.
var connections = func() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConnsPerHost = 16
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	return t
}()

func run(ctx context.Context, url string, transport http.RoundTripper, sim bool) (err error) {
	dev, err := device.First(ctx, sim)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Runtime().Close()) }()
	loaded, err := load(ctx, url, transport, dev)
	if err != nil {
		return err
	}
	n, tensors := 0, 0
	for p := range loaded.All() {
		n, tensors = n+p.Size, tensors+1
	}
	fmt.Printf("%s: %d tensors, %d bytes on %v\n", url, tensors, n, dev)
	return loaded.Close()
}

// load loads the model of an object.
func load(ctx context.Context, url string, transport http.RoundTripper, dev *cudart.Device) (loaded *weights.Loaded, err error) {
	fsys, name, err := httpfs.New(ctx, url, httpfs.Options{Client: &http.Client{Transport: transport}})
	if err != nil {
		return nil, err
	}
	m, err := weights.OpenModelFS(fsys, name)
	if err != nil {
		return nil, errors.Join(err, fsys.Close())
	}
	defer func() { err = errors.Join(err, m.Close(), fsys.Close()) }()
	plan, err := weights.NewPlan(m.Tensors(), nil, weights.PlanOptions{})
	if err != nil {
		return nil, err
	}
	return plan.LoadNew(ctx, []*cudart.Device{dev}, weights.LoadOptions{})
}
