// Command minio reads an object of S3-compatible storage straight into pinned memory and copies it to a GPU.
//
//	go run ./minio -endpoint HOST:PORT -bucket B -object O        # credentials from MINIO_ACCESS_KEY, MINIO_SECRET_KEY
//	go run ./minio -endpoint HOST:PORT -bucket B -object O -sim   # onto a simulated GPU
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/pool"
)

func main() {
	log.SetFlags(0)
	endpoint := flag.String("endpoint", "localhost:9000", "host and port of the storage")
	secure := flag.Bool("secure", false, "use HTTPS")
	bucket := flag.String("bucket", "", "bucket of the object")
	object := flag.String("object", "", "name of the object")
	sim := flag.Bool("sim", false, "use a simulated GPU")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client, err := minio.NewCore(*endpoint, &minio.Options{Creds: credentials.NewEnvMinio(), Secure: *secure})
	if err != nil {
		log.Fatal(err)
	}
	if err := run(ctx, client, *bucket, *object, *sim); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, client *minio.Core, bucket, object string, sim bool) (err error) {
	options := cudart.Options{}
	if sim {
		simulator, err := cudasim.New(cudasim.Config{})
		if err != nil {
			return err
		}
		defer simulator.Close()
		options.Source = simulator
	}
	rt, err := cudart.Open(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close()) }()
	dev, err := rt.Device(0)
	if err != nil {
		return err
	}
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
