package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/internal/bounded"
)

// An examiner examines GPUs. It is a probe.Prober, except in tests.
type examiner interface {
	Device(ctx context.Context, r probe.Request, show func(probe.Device)) (probe.Device, error)
	NVML(ctx context.Context, r probe.Request) (probe.NVML, error)
}

const (
	// maxSideBySide is the number of GPUs that are verified at once.
	maxSideBySide = 8
	// verifyBytes and fullBytes estimate the host memory of one such process.
	verifyBytes = 1 << 30
	fullBytes   = 12 << 30
)

// sideBySide returns the number of GPUs to verify at the same time, limited by the memory of the
// host and its control group.
func sideBySide(h *hostinfo.Host, full bool) int {
	each := verifyBytes
	if full {
		each = fullBytes
	}
	n := maxSideBySide
	if h == nil {
		return n
	}
	if h.Memory.Available > 0 {
		n = min(n, h.Memory.Available/each)
	}
	if left, ok := h.Cgroup.Headroom.Finite(); ok {
		n = min(n, left/each)
	}
	return max(n, 1)
}

// togetherShare estimates the share of a run's time for the copies with all GPUs at the same time,
// including the start of their process.
const togetherShare = 0.1

// An examination does the steps of a request with each GPU.
type examination struct {
	*session
	p       examiner
	facts   *doctor.Facts
	request probe.Request
	shown   *totalProgress

	// By GPU.
	ordinals []int
	failed   []bool      // its process hung or died, and no other one is started
	measured []time.Time // when its copies were measured first
}

// examine verifies GPUs side by side, as that is no measurement and takes most of the time:
// each in a process of its own, which then waits for its turn with all that takes long to make.
// Copies are measured on one GPU after the other, and at the end on all at once.
func (s *session) examine(ctx context.Context, p examiner, request probe.Request) error {
	facts := s.result.Facts
	all, ordinals := make([]int, len(facts.Devices)), make([]int, len(facts.Devices))
	for i := range all {
		all[i], ordinals[i] = i, facts.Devices[i].Ordinal
	}
	e := &examination{session: s, p: p, facts: facts, request: request, ordinals: ordinals, failed: make([]bool, len(all)), measured: make([]time.Time, len(all)),
		shown: &totalProgress{s: s, shares: make([]float64, len(all)), scale: 1}}
	if len(all) > 1 && request.Steps.Bandwidth {
		e.shown.scale = 1 - togetherShare
	}
	n := 1 // in this process, one after the other
	if s.sys.isolated {
		n = sideBySide(facts.Host, request.Steps.Full)
	}
	for group := range slices.Chunk(all, n) {
		if err := e.group(ctx, group); err != nil {
			return err
		}
	}
	if !request.Steps.Bandwidth {
		return nil
	}
	if err := e.again(ctx); err != nil {
		return err
	}
	return e.together(ctx)
}

// pauses are the pauses before slow copies are measured again. A neighbour that copies for half a minute
// is not mistaken for slow hardware.
var pauses = []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second}

// againTime estimates the time of measuring again, with the start of the process.
const againTime = 3 * time.Second

// again measures slow copies again, until they are as fast as they should be: they may have met
// others who copied. What is slow by half is measured once more at once, and then known. There are no
// more pauses than --timeout leaves time for.
func (e *examination) again(ctx context.Context) error {
	unmeasurable := make([]bool, len(e.facts.Devices))
	for _, pause := range pauses {
		var slow []int
		var names []string
		for i := range e.facts.Devices {
			if d := &e.facts.Devices[i]; !e.failed[i] && !unmeasurable[i] && e.facts.Slow(d) && (pause == 0 || !e.facts.SlowByHalf(d)) {
				slow, names = append(slow, i), append(names, fmt.Sprint(d.Ordinal))
			}
		}
		deadline, limited := ctx.Deadline()
		if len(slow) == 0 || limited && time.Until(deadline) < pause+time.Duration(len(slow))*againTime {
			return nil
		}
		if pause > 0 {
			e.show(report.At{What: fmt.Sprintf("slow copies of GPU %s: measuring again in %v", strings.Join(names, ", "), pause), Share: e.shown.scale, Left: pause})
		}
		if err := e.wait(ctx, pause); err != nil {
			return err
		}
		for _, i := range slow {
			d := &e.facts.Devices[i]
			before := d.Measurements()
			if err := e.examineGPU(ctx, i, probe.Steps{Bandwidth: true, Again: true}, nil, func() {}); err != nil {
				return err
			}
			unmeasurable[i] = d.Measurements() == before
		}
	}
	return nil
}

// wait returns after d, or when ctx ends, with its error.
func (e *examination) wait(ctx context.Context, d time.Duration) error {
	if d > 0 {
		select {
		case <-e.sys.timer(d):
		case <-ctx.Done():
		}
	}
	return bounded.Ended(ctx)
}

// group examines GPUs that are verified at the same time and measured one after the other.
func (e *examination) group(ctx context.Context, gpus []int) error {
	steps := e.request.Steps
	if len(gpus) == 1 {
		return e.examineGPU(ctx, gpus[0], steps, nil, func() {})
	}
	var ready, done sync.WaitGroup
	mayMeasure := make([]chan struct{}, len(gpus))
	ended := make([]chan struct{}, len(gpus))
	for j, i := range gpus {
		mayMeasure[j], ended[j] = make(chan struct{}), make(chan struct{})
		ready.Add(1)
		isReady := sync.OnceFunc(ready.Done)
		turn := mayMeasure[j]
		if !steps.Bandwidth {
			turn = nil
		}
		done.Go(func() {
			defer close(ended[j])
			defer isReady()
			_ = e.examineGPU(ctx, i, steps, turn, isReady) // the end of ctx, which is looked at below
		})
	}
	ready.Wait()
	for j := range gpus {
		close(mayMeasure[j])
		<-ended[j]
	}
	done.Wait()
	return bounded.Ended(ctx)
}

// examineGPU runs the steps on GPU i. It calls ready when the GPU waits for its turn to be
// measured. It returns only ctx's error; other errors go into the result.
func (e *examination) examineGPU(ctx context.Context, i int, steps probe.Steps, turn <-chan struct{}, ready func()) error {
	d := &e.facts.Devices[i]
	if e.failed[i] {
		return bounded.Ended(ctx)
	}
	r := e.request
	r.Device, r.Steps, r.Turn = d.Ordinal, steps, turn
	if steps.Verify { // from the next one on, so that not all go by the same
		r.Peers = slices.Concat(e.ordinals[i+1:], e.ordinals[:i])
	}
	reply, err := e.p.Device(ctx, r, func(now probe.Device) {
		e.shown.showStep(i, now)
		if now.Stage == doctor.StageWaiting {
			ready()
		}
	})
	e.shown.ended(i)
	e.change(func(r *report.Result) {
		d.Take(&reply.Facts)
		switch {
		case d.Repeats != nil:
			d.Repeats.Seconds = e.sys.clock().Sub(e.measured[i]).Seconds()
		case reply.Facts.Bandwidth != nil:
			e.measured[i] = e.sys.clock()
		}
		r.Errors = append(r.Errors, reply.Errors...)
		if !reply.Probe.State.Ended() {
			e.facts.Probes = append(e.facts.Probes, reply.Probe)
			e.failed[i] = true
		}
		if err != nil && ctx.Err() == nil {
			d.Errors = append(d.Errors, err.Error())
		}
	})
	if reply.Facts.Bandwidth != nil { // the link has not gone to sleep yet
		e.health(ctx, e.p, e.facts, true)
		host := e.readHost()
		e.change(func(*report.Result) { d.Relink(host) })
	}
	return bounded.Ended(ctx)
}

// together measures copies with all GPUs at the same time, after each was measured alone.
func (e *examination) together(ctx context.Context) error {
	steps := probe.Steps{}
	for i := range e.facts.Devices {
		d := &e.facts.Devices[i]
		if rate := d.Slowest(); rate > 0 && !e.failed[i] {
			steps.Together = append(steps.Together, d.Ordinal)
			if steps.Rate == 0 || rate < steps.Rate {
				steps.Rate = rate
			}
		}
	}
	if len(steps.Together) < 2 {
		return nil
	}
	r := e.request
	r.Steps = steps
	reply, err := e.p.Device(ctx, r, e.shown.together)
	e.change(func(r *report.Result) {
		e.facts.Together, e.facts.PeerPaths = reply.Together, reply.PeerPaths
		r.Errors = append(append(r.Errors, reply.Errors...), reply.Facts.Errors...)
		if !reply.Probe.State.Ended() {
			e.facts.Probes = append(e.facts.Probes, reply.Probe)
		}
		if err != nil && ctx.Err() == nil {
			r.Errors = append(r.Errors, err.Error())
		}
	})
	return bounded.Ended(ctx)
}

// totalProgress displays the progress of the examination of all GPUs. The session's lock guards it.
type totalProgress struct {
	s      *session
	shares []float64 // by GPU
	scale  float64   // their share of all
}

func (o *totalProgress) showStep(i int, now probe.Device) {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.shares[i] = max(o.shares[i], now.Share)
	sum := 0.0
	for _, share := range o.shares {
		sum += share
	}
	if now.Stage == doctor.StageWaiting {
		return // others are at work
	}
	o.s.showLocked(report.At{
		What:  fmt.Sprintf("GPU %d, %s", now.Facts.Ordinal, now.Step),
		Share: o.scale * sum / float64(len(o.shares)), Left: now.Left,
	})
}

// ended counts a GPU as done. The display changes with the next step of another GPU.
func (o *totalProgress) ended(i int) {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.shares[i] = 1
}

// together shows the last step, with all GPUs at once.
func (o *totalProgress) together(now probe.Device) {
	o.s.show(report.At{What: now.Step, Share: 1 - togetherShare*(1-now.Share), Left: now.Left})
}
