package probe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/peers"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/verify"
)

// Request names what to examine and the steps to do.
type Request struct {
	Grace    time.Duration `json:"grace_ns,omitempty"` // Local.Grace of a child process that opens the library
	Library  string        `json:"library,omitempty"`  // libcudart; empty to find one
	Simulate bool          `json:"simulate,omitempty"`
	Device   int           `json:"device"` // for Device: its ordinal
	// Peers are the ordinals of other devices that Device may use. Round trips go through the
	// first one with peer access, else through the first one. If there is none, no other
	// device gets a context.
	Peers []int `json:"peers,omitempty"`
	Steps Steps `json:"steps"`
	// Turn makes Device wait in doctor.StageWaiting, before it measures, until Turn is
	// closed. Nil does not wait.
	Turn   <-chan struct{} `json:"-"`
	InTurn bool            `json:"in_turn,omitempty"` // set by Prober if there is a Turn
}

// Steps selects what Device does with a GPU after it has read the free memory.
type Steps struct {
	Verify    bool `json:"verify,omitempty"`
	Full      bool `json:"full,omitempty"` // of Verify: all combinations
	Bandwidth bool `json:"bandwidth,omitempty"`
	// Again, of Bandwidth, times single copies: a sample of several would hide that some of them
	// are as fast as they should be.
	Again bool `json:"again,omitempty"`
	// Together are the ordinals of devices that copy at the same time. It replaces all other
	// steps. Rate is the lowest rate that one of them reaches alone, in GB/s; 0 is unknown.
	Together []int   `json:"together,omitempty"`
	Rate     float64 `json:"rate,omitempty"`
}

// Plans are the plans of the steps.
type Plans struct {
	Verify    verify.Plan
	Bandwidth bench.LinkPlan
	Together  bench.LinkPlan
}

// A Device has the results of the examination of a GPU so far.
type Device struct {
	Facts doctor.Device `json:"facts"`
	// Together has the measurements of the step of this name.
	Together *result.Bench `json:"together,omitempty"`
	// PeerPaths are those between the devices of this step.
	PeerPaths []doctor.PeerPath `json:"peer_paths,omitempty"`
	// Errors are those of releasing what was used.
	Errors []string `json:"errors,omitempty"`
	// Probe is how the examination ended. Its state is empty while it runs.
	Probe doctor.Probe `json:"probe"`
	// Stage is the running stage, After the last piece of its work that ended, and Step what is
	// done, in words. Share is the finished share of all steps, from 0 to 1. Left is the
	// estimated time until this step ends; 0 is unknown.
	Stage doctor.Stage  `json:"stage"`
	After string        `json:"after,omitempty"`
	Step  string        `json:"step"`
	Share float64       `json:"share"`
	Left  time.Duration `json:"left"`
	// Inside are the calls that have been inside the library for a second or more.
	Inside []string `json:"inside,omitempty"`
}

// Time limits of calls that the user waits for. A call that takes longer hangs. They are much
// longer than those of package bounded: calls of --full copy up to 4 GiB, and the first call
// of a process initializes the GPU.
const (
	openLimit      = time.Minute
	firstCallLimit = 30 * time.Second
	nextGPULimit   = 10 * time.Second // added for each other GPU: the driver starts one after the other
	callLimit      = 10 * time.Second
	fullCallLimit  = time.Minute
	nvmlCallLimit  = 30 * time.Second // one call starts a GPU without persistence mode
	nvmlCalls      = 2                // times nvmlCallLimit: all calls together
	silenceLimit   = 15 * time.Second // of a child process
)

// Local examines the machine in this process. Tests set its fields; the zero value of each
// stands for the machine.
type Local struct {
	// OpenLibrary is cudart.Open, if it is nil.
	OpenLibrary func(context.Context, cudart.Options) (*cudart.Runtime, error)
	// ReadNVML is nvml.Read of the library that is found, if it is nil.
	ReadNVML func(calling func(function string, report *nvml.Report)) (*nvml.Report, error)
	// ReadHost reads the host, for what a GPU needs of it. It must not be nil.
	ReadHost func() *hostinfo.Host
	// Adjust changes the plans, if it is not nil: tests make them small.
	Adjust func(Plans) Plans
	// Tick is the time between two lists of the calls inside the library; 0 means a second.
	Tick time.Duration
	// Limit replaces the time limits of calls, and Silence the time in which a child process
	// may send nothing, though it does so each Tick. 0 means the constants above.
	Limit, Silence time.Duration
	// Grace is the time that calls in flight at the end of a context may take to return. Only
	// what takes longer is reported as unreturned. 0 means defaultGrace.
	Grace time.Duration
}

const defaultGrace = 600 * time.Millisecond

func (l Local) limit(byDefault time.Duration) time.Duration { return cmp.Or(l.Limit, byDefault) }

func (l Local) grace() time.Duration { return cmp.Or(l.Grace, defaultGrace) }

// openInTime is openLibrary within its time limit, which counts while this process runs. A call
// that is about to return at the end of ctx does so.
func (l Local) openInTime(ctx context.Context, r Request) (*cudart.Runtime, func() []string, error) {
	extended, stop := bounded.Extend(ctx, l.grace())
	defer stop()
	limit := l.limit(openLimit)
	limited, _, stopLimit := listen(extended, limit, limit, fmt.Errorf("time limit of %v: %w", limit, context.Canceled))
	defer stopLimit()
	return l.openLibrary(limited, r)
}

func (l Local) openLibrary(ctx context.Context, r Request) (rt *cudart.Runtime, closeAll func() []string, err error) {
	var closers []func() error
	closeAll = func() (errs []string) {
		for i := range closers {
			if err := closers[len(closers)-1-i](); err != nil {
				errs = append(errs, err.Error())
			}
		}
		return errs
	}
	options := cudart.Options{Library: r.Library}
	if r.Simulate {
		sim, err := NewSimulation()
		if err != nil {
			return nil, closeAll, err
		}
		closers = append(closers, sim.Close) // what it still counts would be a leak of ours
		options = cudart.Options{Source: sim}
	}
	open := l.OpenLibrary
	if open == nil || r.Simulate {
		open = cudart.Open
	}
	if rt, err = open(ctx, options); err == nil {
		closers = append(closers, rt.Close)
	}
	return rt, closeAll, err
}

// Opened has the facts from opening the library.
type Opened struct {
	Facts  *doctor.Facts `json:"facts"`
	Errors []string      `json:"errors,omitempty"` // of releasing
}

// Open opens the library and lists the devices, without making a context on any. What the host
// shows of them comes with Facts.SetHost. That there is no library and no GPU is no error. The error wraps errors.ErrUnsupported on other
// platforms.
func (l Local) Open(ctx context.Context, r Request) (Opened, error) {
	began := time.Now()
	rt, closeAll, err := l.openInTime(ctx, r)
	var out Opened
	if failed := (*cudart.OpenError)(nil); errors.As(err, &failed) && ctx.Err() != nil && failed.Stuck == "" {
		err = bounded.Ended(ctx) // there was no time
	} else if failed != nil && failed.Stuck != "" {
		out.Facts = l.NotOpened(ctx, failed, l.ReadHost(), time.Since(began))
		err = nil
	} else if failed != nil {
		host := l.ReadHost()
		out.Facts = doctor.WithoutLibrary(failed, host)
		if l.OpenLibrary == nil {
			out.Facts.NodeErrors = openNodes(host)
		}
		err = nil
	} else if err == nil {
		out.Facts = doctor.Gather(rt)
		if l.OpenLibrary == nil && !r.Simulate {
			out.Facts.NodeErrors = refusedNodes(ctx, l.ReadHost(), rt.DeviceCount())
		}
	}
	out.Errors = closeAll()
	return out, err
}

// NotOpened returns the facts after a call of opening the library had not returned, because it
// takes more than it may, or because ctx ended before.
func (l Local) NotOpened(ctx context.Context, failed *cudart.OpenError, host *hostinfo.Host, took time.Duration) *doctor.Facts {
	probe := unreturned(ctx, failed.Stuck, took, l.limit(openLimit))
	probe.Name, probe.Stage, probe.Seconds = probeCUDA, doctor.StageOpen, took.Seconds()
	if probe.State == doctor.ProbeUnfinished {
		return doctor.WithoutAnswer(probe, host)
	}
	f := doctor.WithoutLibrary(failed, host)
	f.Probes = append(f.Probes, probe)
	return f
}

// nodesLimit is how long refusedNodes tries: the node of a GPU that is broken may not open for long.
const nodesLimit = 2 * time.Second

// refusedNodes is openNodes of a host that has more nodes of GPUs than CUDA shows. It is nil if a node does not open
// in time.
func refusedNodes(ctx context.Context, host *hostinfo.Host, shown int) map[string]string {
	if len(host.NVIDIA.GPUNodes()) <= shown {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, nodesLimit)
	defer cancel()
	errs, err := bounded.Do(limited, bounded.Call[map[string]string]{Grace: bounded.NoGrace, Run: func() (map[string]string, error) {
		return openNodes(host), nil
	}})
	if err != nil {
		return nil
	}
	return errs
}

// openNodes opens and closes the device nodes, as CUDA does first: control groups of version 2
// do not show what they deny.
func openNodes(host *hostinfo.Host) map[string]string {
	errs := map[string]string{}
	for _, n := range host.NVIDIA.Nodes {
		file, err := os.OpenFile(n.Path, os.O_RDWR, 0)
		if err == nil {
			err = file.Close()
		}
		if failed := (*fs.PathError)(nil); errors.As(err, &failed) {
			errs[n.Path] = failed.Err.Error()
		}
	}
	return errs
}

// The names of probes.
const (
	probeCUDA = "cuda"
	probeNVML = "nvml"
	probeGPU  = "gpu"
	probeAll  = "all gpus"
)

// probe is that of Device, before it begins.
func (r Request) probe() doctor.Probe {
	if len(r.Steps.Together) > 0 {
		return doctor.Probe{Name: probeAll}
	}
	return doctor.Probe{Name: fmt.Sprintf("%s %d", probeGPU, r.Device), Device: &r.Device}
}

// unreturned returns the outcome of a probe whose call has not returned. The call hangs if it has
// been inside the library for limit or longer. Otherwise it is unfinished: ctx ended first.
func unreturned(ctx context.Context, call string, inside, limit time.Duration) doctor.Probe {
	if cause := context.Cause(ctx); cause != nil && inside < limit {
		return doctor.Probe{Call: call, State: doctor.ProbeUnfinished, Detail: "had not returned at the end: " + cause.Error()}
	}
	return doctor.Probe{Call: call, State: doctor.ProbeHung, Detail: fmt.Sprintf("did not return in %v", limit)}
}

// Device examines one GPU, or several at the same time for Steps.Together. It calls send with what
// it has found so far after each piece of work and each Tick. It returns when ctx ends, and when a
// call exceeds its limit.
func (l Local) Device(ctx context.Context, r Request, send func(Device)) (Device, error) {
	ongoing := &examination{send: send}
	ongoing.Facts.Ordinal = r.Device
	ongoing.Stage, ongoing.Probe = doctor.StageOpen, r.probe()
	began := time.Now()
	rt, closeAll, err := l.openInTime(ctx, r)
	if err != nil {
		ongoing.Errors = closeAll()
		if failed := (*cudart.OpenError)(nil); errors.As(err, &failed) && failed.Stuck != "" {
			took := time.Since(began)
			return ongoing.end(unreturned(ctx, failed.Stuck, took, l.limit(openLimit)), took), nil
		}
		return ongoing.Device, err
	}
	ordinals := r.Steps.Together
	if len(ordinals) == 0 {
		ordinals = []int{r.Device}
	}
	var devices []*cudart.Device
	for _, ordinal := range ordinals {
		dev, err := rt.Device(ordinal)
		if err != nil {
			ongoing.Facts.Errors = append(ongoing.Facts.Errors, err.Error())
			ongoing.Errors = closeAll()
			return ongoing.Device, nil
		}
		devices = append(devices, dev)
	}
	watching, stop := context.WithCancel(context.Background())
	defer stop()
	hung, abandon := context.WithCancel(context.Background())
	var probe doctor.Probe
	go func() {
		defer abandon()
		probe = l.watch(watching, ctx, rt, r, ongoing)
	}()
	errs, err := bounded.Do(hung, bounded.Call[[]string]{Grace: bounded.NoGrace, Run: func() ([]string, error) {
		var err error
		if len(r.Steps.Together) > 0 {
			err = l.together(ctx, devices, r, ongoing)
		} else {
			err = l.work(ctx, devices[0], r, ongoing)
		}
		if err != nil && ctx.Err() == nil {
			ongoing.update(func(d *Device) { d.Facts.Errors = append(d.Facts.Errors, err.Error()) })
		}
		return closeAll(), nil
	}})
	if err != nil { // a call hangs
		return ongoing.end(probe, time.Since(began)), nil
	}
	ongoing.update(func(d *Device) { d.Errors = append(d.Errors, errs...) })
	return ongoing.end(doctor.Probe{State: doctor.ProbeOK}, time.Since(began)), nil
}

// watch returns when a call exceeds its limit, or when a call is still inside the library after
// the grace period that follows ctx's end: of several the one that has been inside for longest.
func (l Local) watch(watching, ctx context.Context, rt *cudart.Runtime, r Request, ongoing *examination) doctor.Probe {
	tick := l.Tick
	if tick == 0 {
		tick = time.Second
	}
	inside := map[cudart.StuckCall]time.Duration{}
	var ended time.Time
	for watching.Err() == nil {
		calls := map[cudart.StuckCall]time.Duration{}
		var names []string
		stuck := rt.Stuck(watching, tick)
		if stuck == nil { // it has returned at once
			select {
			case <-time.After(tick):
			case <-watching.Done():
			}
		}
		for _, c := range stuck {
			calls[c] = inside[c] + tick
			names = append(names, c.String())
		}
		inside = calls
		ongoing.update(func(d *Device) { d.Inside = names })
		limit := l.limit(ongoing.callLimit(r, rt.DeviceCount()))
		for _, c := range stuck {
			if calls[c] >= limit {
				return unreturned(ctx, c.String(), calls[c], limit)
			}
		}
		if ctx.Err() == nil {
			continue
		}
		if ended.IsZero() {
			ended = time.Now()
		}
		if len(stuck) > 0 && time.Since(ended) >= l.grace() {
			longest := slices.MaxFunc(stuck, func(a, b cudart.StuckCall) int { return cmp.Compare(calls[a], calls[b]) })
			return unreturned(ctx, longest.String(), calls[longest], limit)
		}
	}
	return doctor.Probe{}
}

// An examination is the Device so far, which the goroutine that works and the one that watches
// its calls share.
//
//	state     entered by                   | update            | limit of a call
//	starting                               | changes and sends | that of a first call
//	started   begun: the first call has    | changes and sends | those of other calls
//	          returned                     |                   |
//	ended     end                          | does nothing      | –
//
// mu guards all fields but send, which is called under it.
type examination struct {
	send    func(Device)
	mu      sync.Mutex
	started bool
	ended   bool
	Device
}

// update changes the device and sends it, until the end.
func (e *examination) update(do func(*Device)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.ended {
		do(&e.Device)
		e.send(e.Device)
	}
}

// end returns the device, and makes later updates no-ops.
func (e *examination) end(probe doctor.Probe, took time.Duration) Device {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
	e.Device.ended(e.Probe, probe, took)
	return e.Device
}

// ended sets the probe's outcome, with the name and the device that it had at the beginning.
func (d *Device) ended(begun, end doctor.Probe, took time.Duration) {
	end.Name, end.Device = begun.Name, begun.Device
	end.Stage, end.After, end.Seconds = d.Stage, d.After, took.Seconds()
	d.Probe = end
}

// begun records that the first call has returned: later calls have shorter limits.
func (e *examination) begun() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.started = true
}

// callLimit returns the current limit of a call on a host with this number of GPUs.
func (e *examination) callLimit(r Request, gpus int) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case !e.started:
		return firstCallLimit + time.Duration(gpus-1)*nextGPULimit
	case r.Steps.Full:
		return fullCallLimit
	}
	return callLimit
}

// slowerThanNodes is the rate of a link, in GB/s, below which memory of a far node makes no
// difference: 2.5 GB/s is the least that was reported of such memory. Its trials would take
// seconds.
const slowerThanNodes = 2

// steps are the stages, as they are shown.
var steps = map[doctor.Stage]string{
	doctor.StageMemory:     "making a context",
	doctor.StageRoundTrips: "verifying round trips",
	doctor.StageWaiting:    "waiting for its turn",
	doctor.StageCopies:     "measuring copies",
	doctor.StageTogether:   "copying with all GPUs at once",
}

// setStage reports a new stage; share is the share of all work finished before it.
func (e *examination) setStage(s doctor.Stage, share float64) {
	e.update(func(d *Device) { d.Stage, d.After, d.Step, d.Share, d.Left = s, "", steps[s], share, 0 })
}

// againSamples is the number of single copies of each direction when slow copies are measured again.
const againSamples = 32

func (l Local) plans(r Request) Plans {
	plans := PlansFor(r.Steps, r.Simulate)
	if l.Adjust != nil {
		plans = l.Adjust(plans)
	}
	if r.Steps.Again {
		plans.Bandwidth.Copies, plans.Bandwidth.Samples = 1, againSamples
	}
	return plans
}

// work does the steps with one GPU. It returns an error if ctx ends, or if the next step is
// pointless after the failure. Other errors go into the facts.
func (l Local) work(ctx context.Context, dev *cudart.Device, r Request, e *examination) error {
	plans := l.plans(r)
	e.setStage(doctor.StageMemory, 0)
	facts := doctor.Describe(dev)
	facts.ReadMemory(dev)
	e.begun()
	e.update(func(d *Device) { d.Facts = facts })

	verifying := 0.0
	if r.Steps.Verify {
		verifying = 1
		switch {
		case r.Steps.Bandwidth && r.Turn != nil:
			verifying = 0.5
		case r.Steps.Bandwidth:
			verifying = 0.8
		}
		plans.Verify.Peer = peerOf(dev, r.Peers)
		if err := l.verify(ctx, dev, plans.Verify, verifying, e); err != nil {
			return err
		}
	}
	if r.Turn != nil {
		e.setStage(doctor.StageWaiting, verifying)
		select {
		case <-r.Turn:
		case <-ctx.Done():
			return bounded.Ended(ctx)
		}
	}
	if r.Steps.Bandwidth {
		e.setStage(doctor.StageCopies, verifying)
		load := startLoad(dev.Runtime().Library().Simulated)
		b, err := measure.Run(ctx, bench.Link(plans.Bandwidth), measure.Env{Devices: []*cudart.Device{dev}}, nil)
		keep := func(to **result.Bench) {
			e.update(func(*Device) {
				if b != nil && (len(b.Series) > 0 || ctx.Err() == nil) {
					*to = b
				}
			})
		}
		others := load.others()
		e.update(func(d *Device) { d.Facts.OtherCPUs = others })
		keep(&e.Facts.Bandwidth)
		if err != nil || dev.Runtime().Library().Simulated { // which has the times of the simulator
			return err
		}
		env := measure.Env{Devices: []*cudart.Device{dev}}
		if e.Facts.Slowest() >= slowerThanNodes {
			env.Host = l.ReadHost()
		}
		b, err = measure.Run(ctx, bench.Trials(r.Device == 0), env, nil)
		keep(&e.Facts.Trials)
		return err
	}
	return nil
}

// together copies with all devices at the same time. Making a context takes longer than the
// copies, so the contexts are made concurrently first.
func (l Local) together(ctx context.Context, devices []*cudart.Device, r Request, e *examination) error {
	e.setStage(doctor.StageTogether, 0)
	var ready sync.WaitGroup
	for _, dev := range devices {
		ready.Go(func() { _, _, _ = dev.MemInfo() }) // the measurement meets its error again
	}
	ready.Wait()
	e.begun()
	b, err := measure.Run(ctx, bench.Together(l.plans(r).Together, r.Steps.Rate), measure.Env{Devices: devices}, func(p measure.Progress) {
		e.update(func(d *Device) { d.Share, d.Left = float64(p.Done)/float64(max(p.Total, 1)), p.Left })
	})
	if b == nil { // there is too little memory: nothing is wrong with a GPU
		b, err = &result.Bench{Name: "together", Answers: []string{}, Notes: []string{"not measured: " + err.Error()}, Errors: []string{}, Series: []result.Series{}, Views: []result.View{}}, nil
	}
	e.update(func(d *Device) {
		if len(b.Series) > 0 || ctx.Err() == nil {
			d.Together = b
		}
	})
	if ctx.Err() != nil {
		return err
	}
	return errors.Join(err, provePeers(ctx, devices, e))
}

// provePeers proves every direct path between the devices, in both directions.
func provePeers(ctx context.Context, devices []*cudart.Device, e *examination) error {
	var prover peers.Prover
	for _, from := range devices {
		for _, to := range devices {
			if from == to {
				continue
			}
			can, err := from.CanAccessPeer(to)
			if err == nil && !can {
				continue
			}
			path := doctor.PeerPath{From: from.Ordinal(), To: to.Ordinal(), ProofBytes: peers.ProofBytes}
			if err == nil {
				path.LostBytes, err = provePath(ctx, &prover, from, to)
			}
			if err != nil {
				path.Error = err.Error()
			}
			if ctx.Err() == nil {
				e.update(func(d *Device) { d.PeerPaths = append(d.PeerPaths, path) })
			}
		}
	}
	return prover.Release(ctx)
}

func provePath(ctx context.Context, prover *peers.Prover, from, to *cudart.Device) (lost int, err error) {
	if err := from.EnablePeerAccess(to); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, from.DisablePeerAccess(to)) }()
	return prover.Prove(ctx, peers.Path{From: from, To: to})
}

// peerOf returns the device through which round trips with dev go, or nil. See Request.Peers.
func peerOf(dev *cudart.Device, ordinals []int) (first *cudart.Device) {
	for _, ordinal := range ordinals {
		d, err := dev.Runtime().Device(ordinal)
		if err != nil {
			continue // what is wrong with it is told of it itself
		}
		there, err := dev.CanAccessPeer(d)
		reverse, failed := d.CanAccessPeer(dev)
		if err == nil && failed == nil && there && reverse {
			return d
		}
		if first == nil {
			first = d
		}
	}
	return first
}

// verify runs the round trips. Share is their part of the time of all steps.
func (l Local) verify(ctx context.Context, dev *cudart.Device, p verify.Plan, share float64, e *examination) error {
	e.setStage(doctor.StageRoundTrips, 0)
	shown, began := p.Progress, time.Now()
	p.Progress = func(at verify.Progress) {
		if shown != nil {
			shown(at)
		}
		done := float64(at.BytesDone) / float64(max(at.BytesTotal, 1))
		e.update(func(d *Device) {
			d.Share, d.Left = share*done, 0
			if done > 0.02 { // by the time so far; the first, small ones say nothing
				d.Left = time.Duration(float64(time.Since(began)) * (1 - done) / done)
			}
			if at.CasesDone > 0 {
				d.After, d.Facts.Verify = at.Case.String(), at.Report
				d.Step = fmt.Sprintf("verifying round trips, %s of %s: %s, %s", units.Count(at.CasesDone), units.Count(at.CasesTotal),
					strings.ReplaceAll(string(at.Case.Path), "_", " "), units.Bytes(at.Case.SizeBytes))
			}
		})
	}
	report, err := verify.Run(ctx, dev, p)
	e.update(func(d *Device) {
		if ctx.Err() == nil || report != nil && (report.Cases > 0 || report.FailureCount > 0) {
			d.Facts.Verify = report
		}
	})
	return err
}

// NVML is the report of the management library, and how reading it ended.
type NVML struct {
	Report *nvml.Report `json:"report,omitempty"` // nil without the library, or not of all GPUs: see the Probe
	Probe  doctor.Probe `json:"probe"`
}

// NVML reads the management library. A missing library is no error. It calls send before each
// call into the library, and with the report so far after each GPU.
func (l Local) NVML(_ context.Context, _ Request, send func(NVML)) (NVML, error) {
	var out NVML
	out.Probe.Name, out.Probe.Stage = probeNVML, doctor.StageNVML
	began := time.Now()
	gpus := -1 // of the report that was sent last, which is long
	read := l.ReadNVML
	if read == nil {
		read = func(calling func(string, *nvml.Report)) (*nvml.Report, error) { return nvml.Read("", calling) }
	}
	report, err := read(func(function string, report *nvml.Report) {
		out.Probe.Call, out.Report = function, nil
		if report != nil && len(report.GPUs) > gpus {
			out.Report, gpus = report, len(report.GPUs)
		}
		send(out)
	})
	out.Report, out.Probe.Seconds = report, time.Since(began).Seconds()
	out.Probe.State = doctor.ProbeOK
	if err != nil {
		out.Probe.State, out.Probe.Detail = doctor.ProbeFailed, err.Error()
	}
	return out, nil
}
