package stage

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/testgpu"
)

func cpu() float64 {
	var u unix.Rusage
	_ = unix.Getrusage(0, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

func rate(n, reps int, f func()) (gbs, lo, hi, cpugb float64) {
	f()
	var v []float64
	c := cpu()
	for range reps {
		t := time.Now()
		f()
		v = append(v, float64(n)/time.Since(t).Seconds()/1e9)
	}
	c = cpu() - c
	slices.Sort(v)
	return v[len(v)/2], v[0], v[len(v)-1], c / (float64(n) * float64(reps) / 1e9)
}

func TestTune(t *testing.T) {
	if os.Getenv("TUNE") == "" {
		t.Skip("TUNE is not set")
	}
	dev := testgpu.Device(t)
	n := 1 << 30
	if !testgpu.Real() {
		n = 64 * mib
	}
	mem, mem2 := device(t, dev, n), device(t, dev, n)
	src, dst := random(n, 1), make([]byte, n)
	copy(dst, src)
	ctx := context.Background()
	must := func(_ int, err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	run := func(name string, mid bool) {
		stages.crews = nil
		stages.all = nil
		s, err := Acquire(ctx, dev)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Release(ctx)
		g, lo, hi, c := rate(n, 6, func() { must(s.Upload(ctx, mem, src, nil)) })
		fmt.Printf("%-44s up %5.1f (%.1f-%.1f) %.3f", name, g, lo, hi, c)
		g, lo, hi, c = rate(n, 6, func() { must(s.Download(ctx, dst, mem, nil)) })
		fmt.Printf(" | down %5.1f (%.1f-%.1f) %.3f", g, lo, hi, c)
		g, lo, hi, c = rate(2*n, 4, func() {
			var wg sync.WaitGroup
			wg.Go(func() { must(s.Upload(ctx, mem, src, nil)) })
			wg.Go(func() { must(s.Download(ctx, dst, mem2, nil)) })
			wg.Wait()
		})
		fmt.Printf(" | both %5.1f (%.1f-%.1f) %.3f\n", g, lo, hi, c)
		if !mid {
			return
		}
		for _, k := range []int{1, 4 * kib, 64 * kib, 128 * kib, 256 * kib, 512 * kib, mib, 2 * mib, 4 * mib, 16 * mib, 64 * mib} {
			reps := min(2000, 400*mib/k)
			i := 0
			at := func() int { i = (i + 1) % 8; return i * (n / 8) % (n - k + 1) }
			up, _, _, c1 := rate(k, reps, func() { o := at(); must(s.Upload(ctx, mem, src[o:o+k], nil)) })
			cm, _, _, _ := rate(k, reps, func() { o := at(); must(0, dev.CopyToDevice(mem, unsafe.Pointer(&src[o]), k)) })
			down, _, _, c2 := rate(k, reps, func() { o := at(); must(s.Download(ctx, dst[o:o+k], mem, nil)) })
			cd, _, _, _ := rate(k, reps, func() { o := at(); must(0, dev.CopyToHost(unsafe.Pointer(&dst[o]), mem, k)) })
			fmt.Printf("   %9d B: up %8.3f GB/s (cudaMemcpy %8.3f, %.2fx) cpu %.3f | down %8.3f (%8.3f, %.2fx) %.3f\n", k, up, cm, up/cm, c1, down, cd, down/cd, c2)
		}
		for _, k := range []int{64 * kib, mib} {
			const g = 16
			lat := make([][]time.Duration, g)
			t0 := time.Now()
			var wg sync.WaitGroup
			for w := range g {
				wg.Go(func() {
					for r := range 300 {
						o := (w*300 + r) * k % (n - k)
						b := time.Now()
						must(s.Upload(ctx, mem, src[o:o+k], nil))
						lat[w] = append(lat[w], time.Since(b))
					}
				})
			}
			wg.Wait()
			el := time.Since(t0)
			all := slices.Concat(lat...)
			slices.Sort(all)
			fmt.Printf("   16 goroutines x %d B: %.1f GB/s, median %v, p99 %v\n", k, float64(len(all)*k)/el.Seconds()/1e9, all[len(all)/2], all[len(all)*99/100])
		}
	}
	run("default", true)
	set := func(name string, f func(), mid bool) {
		a, b, c, d, e, g, h := upHelpers, downHelpers, chunkMost, ringChunks, mostSpin, spinFor, mostPiece
		f()
		run(name, mid)
		upHelpers, downHelpers, chunkMost, ringChunks, mostSpin, spinFor, mostPiece = a, b, c, d, e, g, h
	}
	set("up 6 down 3", func() { upHelpers, downHelpers = 6, 3 }, false)
	set("up 5 down 2", func() { upHelpers, downHelpers = 5, 2 }, false)
	set("up 9 down 5", func() { upHelpers, downHelpers = 9, 5 }, false)
	set("up 11 down 7", func() { upHelpers, downHelpers = 11, 7 }, false)
	set("4 MiB x 8", func() { chunkMost, ringChunks = 4*mib, 8 }, false)
	set("4 MiB x 10", func() { chunkMost, ringChunks = 4*mib, 10 }, false)
	set("8 MiB x 5", func() { ringChunks = 5 }, false)
	set("8 MiB x 8", func() { ringChunks = 8 }, false)
	set("spin 20us", func() { mostSpin = 20 * time.Microsecond }, false)
	set("spin 300us", func() { mostSpin = 300 * time.Microsecond }, true)
	set("pieces 256K", func() { mostPiece = 256 * kib }, false)
	set("caller spin 200us", func() { spinFor = 200 * time.Microsecond }, false)
	_ = time.Now
}
