// Command minio reads an object of S3-compatible storage straight into pinned memory and copies it to a GPU.
//
//	go run ./minio -endpoint HOST:PORT -bucket B -object O        # credentials from MINIO_ACCESS_KEY, MINIO_SECRET_KEY
//	go run ./minio -endpoint HOST:PORT -bucket B -object O -sim   # onto a simulated GPU
//	go run ./minio -sim                                           # from storage in this process
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/hostmem/pool"
)

func main() {
	log.SetFlags(0)
	endpoint := flag.String("endpoint", "", "host and port of the storage (default localhost:9000, and with -sim storage in this process)")
	secure := flag.Bool("secure", false, "use HTTPS")
	bucket := flag.String("bucket", "", "bucket of the object")
	object := flag.String("object", "", "name of the object")
	sim := flag.Bool("sim", false, "use a simulated GPU")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	options := minio.Options{Creds: credentials.NewEnvMinio(), Secure: *secure}
	if *sim && *endpoint == "" {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			log.Fatal(err)
		}
		defer listener.Close()
		go func() { _ = http.Serve(listener, http.HandlerFunc(serveObject)) }() // ends with the listener
		*endpoint, *bucket, *object = listener.Addr().String(), "models", "weights"
		options = minio.Options{Creds: credentials.NewStaticV4("", "", ""), Region: "us-east-1"}
	}
	client, err := minio.NewCore(cmp.Or(*endpoint, "localhost:9000"), &options)
	if err != nil {
		log.Fatal(err)
	}
	if err := run(ctx, client, *bucket, *object, *sim); err != nil {
		log.Fatal(err)
	}
}

// serveObject is storage with one object of 4 MB.
func serveObject(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || r.URL.Path != "/models/weights" {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("ETag", `"0123456789abcdef0123456789abcdef"`)
	http.ServeContent(w, r, "", time.Now(), bytes.NewReader(make([]byte, 4_000_000)))
}

func run(ctx context.Context, client *minio.Core, bucket, object string, sim bool) (err error) {
	dev, err := device.First(ctx, sim)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Runtime().Close()) }()
	stream, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()

	mem, err := upload(ctx, client, bucket, object, p, stream)
	if err != nil {
		return err
	}
	fmt.Printf("%s/%s: %d bytes on %v\n", bucket, object, mem.Len(), dev)
	return mem.Close()
}

// upload returns device memory with an object. It reads the response's body into pinned memory, which the stream
// copies from: the bytes pass no other buffer of this program than that of the connection.
func upload(ctx context.Context, client *minio.Core, bucket, object string, p *pool.Pool, stream *cudart.Stream) (_ *cudart.DeviceMemory, err error) {
	// Core's body is read by this goroutine alone. That of Client.GetObject has a goroutine of its own.
	body, info, _, err := client.GetObject(ctx, bucket, object, minio.GetObjectOptions{})
	if err != nil {
		return nil, err
	}
	defer body.Close()
	n := int(info.Size)
	lease, err := p.Get(ctx, n)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lease.Release()) }() // reused when the copy below has run
	if _, err := io.ReadFull(body, lease.Bytes()); err != nil {
		return nil, fmt.Errorf("read %s/%s: %w", bucket, object, err)
	}
	mem, err := stream.Device().Alloc(n)
	if err != nil {
		return nil, err
	}
	if err = lease.CopyToDevice(stream, mem.Ptr(), 0, n); err == nil {
		err = stream.Synchronize(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, mem.Close())
	}
	return mem, nil
}
