//go:build linux

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

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
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
		g, lo, hi, c := rate(n, 6, func() { must(up(ctx, s, mem, src)) })
		fmt.Printf("%-44s up %5.1f (%.1f-%.1f) %.3f", name, g, lo, hi, c)
		g, lo, hi, c = rate(n, 6, func() { must(down(ctx, s, dst, mem)) })
		fmt.Printf(" | down %5.1f (%.1f-%.1f) %.3f", g, lo, hi, c)
		g, lo, hi, c = rate(2*n, 4, func() {
			var wg sync.WaitGroup
			wg.Go(func() { must(up(ctx, s, mem, src)) })
			wg.Go(func() { must(down(ctx, s, dst, mem2)) })
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
			up, _, _, c1 := rate(k, reps, func() { o := at(); must(up(ctx, s, mem, src[o:o+k])) })
			cm, _, _, _ := rate(k, reps, func() { o := at(); must(0, dev.CopyToDevice(mem, unsafe.Pointer(&src[o]), k)) })
			down, _, _, c2 := rate(k, reps, func() { o := at(); must(down(ctx, s, dst[o:o+k], mem)) })
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
						must(up(ctx, s, mem, src[o:o+k]))
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
	if os.Getenv("TUNE") == "micro" || os.Getenv("TUNE") == "all" {
		micro(t, dev, mem, src, dst)
	}
	run("default", true)
	set := func(name string, f func(), mid bool) {
		a, b, c, d, e, g, l := upHelpers, downHelpers, chunkMost, ringMiB, mostSpin, spinFor, wakeMost
		f()
		run(name, mid)
		upHelpers, downHelpers, chunkMost, ringMiB, mostSpin, spinFor, wakeMost = a, b, c, d, e, g, l
	}
	set("ring 36", func() { ringMiB = 36 }, false)
	set("ring 64", func() { ringMiB = 64 }, false)
	set("up 8 down 4", func() { upHelpers, downHelpers = 8, 4 }, false)
	set("up 6 down 3", func() { upHelpers, downHelpers = 6, 3 }, false)
	set("spin 100us", func() { mostSpin = 100 * time.Microsecond }, true)
}

func micro(t *testing.T, dev *cudart.Device, mem cudart.DevPtr, src, dst []byte) {
	ctx := context.Background()
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p, err := dev.HostAlloc(4*mib, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.FreeHost(p)
	pin := unsafe.Slice((*byte)(p), 4*mib)
	reg, err := hostmem.Alloc(ctx, dev, 4*mib, hostmem.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Close()
	rp := unsafe.Pointer(&reg.Bytes()[0])
	b2, err := hostmem.Alloc(ctx, dev, 38*mib, hostmem.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer b2.Close()
	rq := unsafe.Pointer(&b2.Bytes()[0])
	ok := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range []int{1, 4 * kib, 64 * kib, 256 * kib} {
		reps := min(3000, 200*mib/k)
		us := func(f func(i int)) float64 {
			var v []float64
			for i := range reps + 20 {
				b := time.Now()
				f(i)
				if i >= 20 {
					v = append(v, float64(time.Since(b).Nanoseconds())/1e3)
				}
			}
			slices.Sort(v)
			return v[len(v)/2]
		}
		from := func(i int) []byte { o := i * 4 * mib % (len(src) - 4*mib); return src[o : o+k] }
		to := func(i int) []byte { o := i * 4 * mib % (len(dst) - 4*mib); return dst[o : o+k] }
		a := us(func(i int) { ok(dev.CopyToDevice(mem, unsafe.Pointer(&from(i)[0]), k)) })
		b := us(func(i int) { ok(s.CopyToDevice(mem, unsafe.Pointer(&from(i)[0]), k)); ok(s.Synchronize(ctx)) })
		c := us(func(i int) { copy(pin, from(i)); ok(s.CopyToDevice(mem, p, k)); ok(s.Synchronize(ctx)) })
		d := us(func(i int) { copy(pin, from(i)); ok(s.CopyToDevice(mem, p, k)); ok(s.Point().Wait(ctx)) })
		e := us(func(i int) { ok(s.CopyToDevice(mem, unsafe.Pointer(&from(i)[0]), k)) })
		ok(s.Synchronize(ctx))
		f := us(func(i int) { ok(s.CopyToDevice(mem, p, k)) })
		ok(s.Synchronize(ctx))
		g := us(func(i int) { copy(pin, from(i)) })
		h := us(func(i int) { ok(dev.CopyToHost(unsafe.Pointer(&to(i)[0]), mem, k)) })
		l := us(func(i int) { ok(s.CopyToHost(p, mem, k)); ok(s.Synchronize(ctx)); copy(to(i), pin) })
		m := us(func(i int) { ok(s.CopyToHost(unsafe.Pointer(&to(i)[0]), mem, k)); ok(s.Synchronize(ctx)) })
		r1 := us(func(i int) { ok(s.CopyToDevice(mem, rp, k)) })
		ok(s.Synchronize(ctx))
		r2 := us(func(i int) { ok(s.CopyToDevice(mem, rp, k)); ok(s.Synchronize(ctx)) })
		r3 := us(func(i int) { ok(s.CopyToDevice(mem, rq, k)); ok(s.Synchronize(ctx)) })
		r4 := us(func(i int) { ok(s.CopyToDevice(mem, rp, k)); ok(s.Point().Wait(ctx)) })
		r5 := us(func(i int) { ok(s.CopyToDevice(mem, p, k)); ok(s.Synchronize(ctx)) })
		var t1, t2, t3 []float64
		for range 1000 {
			x := time.Now()
			ok(s.CopyToDevice(mem, rp, k))
			y := time.Now()
			q := s.Point()
			z := time.Now()
			ok(q.Wait(ctx))
			t1 = append(t1, float64(y.Sub(x).Nanoseconds())/1e3)
			t2 = append(t2, float64(z.Sub(y).Nanoseconds())/1e3)
			t3 = append(t3, float64(time.Since(z).Nanoseconds())/1e3)
		}
		slices.Sort(t1)
		slices.Sort(t2)
		slices.Sort(t3)
		st, err := Acquire(ctx, dev)
		ok(err)
		s1 := us(func(i int) { _, err := up(ctx, st, mem, from(i)); ok(err) })
		st.Release(ctx)
		fmt.Printf("micro %7d B: registered issue %.2f, +sync %.2f (38 MiB %.2f), +point %.2f, hostalloc +sync %.2f; parts: copy %.2f point %.2f wait %.2f; stage %.2f\n", k, r1, r2, r3, r4, r5, t1[500], t2[500], t3[500], s1)
		can, cancel := context.WithCancel(ctx)
		n := us(func(i int) { copy(pin, from(i)); ok(s.CopyToDevice(mem, p, k)); ok(s.Synchronize(can)) })
		cancel()
		fmt.Printf("micro %7d B us: up cudaMemcpy %.2f | async pageable+sync %.2f | pinned+sync %.2f | pinned+point %.2f | with cancel %.2f | issue pageable %.2f, pinned %.2f | memcpy %.2f || down cudaMemcpy %.2f | pinned+sync %.2f | pageable async+sync %.2f\n", k, a, b, c, d, n, e, f, g, h, l, m)
	}
}
