// The experiment alloc times pinning and unpinning: n bytes by each method (hostmem, cudaHostAlloc,
// cudaHostRegister of memory that is resident, or not, or of posix_memalign, pools), on the first device alone.
//
//   - Clock: the host's, around the calls; the CPU time is that of pinning.
//   - pin_time, unpin_time: seconds of one of the sample's repetitions.
//   - pin_rate, unpin_rate: n bytes by that time, in GB/s of 1e9 bytes.

package bench

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/units"
)

// Methods of pinning, beside those of the experiment memory.
const (
	registerPlain     = "register_unpopulated" // mmap and cudaHostRegister
	registerAligned   = "posix_memalign"       // and cudaHostRegister
	registerPopulated = "register_populated"   // cudaHostRegister alone, of resident memory
	poolFirst         = "pool_first_use"
	poolReuse         = "pool_reuse"
)

// Names of the series.
const (
	pinTime   = "pin_time"
	pinRate   = "pin_rate"
	unpinTime = "unpin_time"
	unpinRate = "unpin_rate"
)

var alloc = measure.Experiment{
	Name:     "alloc",
	Group:    "Memory:",
	Question: "What is the fastest way to pin memory?",
	Long: `Measures how long it takes to pin and to unpin memory of several sizes, by
cudaHostAlloc, by registration, by populating pages in parallel first, and by a
pool that lends pinned memory again.`,
	Related: "pincheck bench memory, pincheck explain slow_pinning",
	Views: []result.View{
		{Title: "Pinning", Series: pinRate, X: result.Size, Lines: []string{result.Method}, Main: true},
		{Title: "Pinning, time", Series: pinTime, X: result.Size, Lines: []string{result.Method}},
		{Title: "Unpinning", Series: unpinRate, X: result.Size, Lines: []string{result.Method}},
		{Title: "Unpinning, time", Series: unpinTime, X: result.Size, Lines: []string{result.Method}},
	},
	Plan:    onDevices(planAlloc),
	Explain: explainAlloc,
}

// Of each list the last is the worst case of allocators that round up to powers of two.
var (
	allocSizes          = []int{4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20, 1<<30 + 1}
	quickAllocSizes     = []int{64 << 10, 16 << 20, 128<<20 + 1}
	simulatedAllocSizes = []int{64 << 10, 1 << 20, 16<<20 + 1}
)

func planAlloc(env measure.Env) ([]measure.Group, error) {
	dev := env.Devices[0] // pinning is the host's work
	sizes := sizesOf(env, simulatedAllocSizes, quickAllocSizes, allocSizes)
	var groups []measure.Group
	for _, m := range pinMethods {
		p := &pinner{dev: dev, method: m}
		g := measure.Group{Name: m.name, Setup: secondsAt(warmUpBytes, slowPin), Open: p.open, Close: p.close, Notes: p.said}
		for _, n := range sizes {
			if m.name == powerOfTwo && bits.OnesCount(uint(n)) == 1 {
				continue // it is cudaHostAlloc then
			}
			g.Cases = append(g.Cases, p.sized(n))
			g.Footprint.Pinned = max(g.Footprint.Pinned, takes(m.allocator(), n))
			g.Footprint.Device = max(g.Footprint.Device, min(n, piece))
			g.Setup += secondsAt(n, slowPin) // to compare
		}
		if len(g.Cases) > 0 {
			groups = append(groups, g)
		}
	}
	noted(&groups[0], onFirst(env, "pinning is the host's work")...)
	if dev.Runtime().Library().Simulated { // neither GPU nor driver takes part
		noted(&groups[0], "the simulated GPU neither pins nor populates memory: what this took is the time of the simulator and of this host")
	}
	return groups, nil
}

// A pinMethod is a way of pinning.
type pinMethod struct {
	name string
	// prepare does what is not counted, for memory of n bytes: once, or always before a
	// sample. pin pins it, and returns it with what unpins it; both are timed.
	prepare func(p *pinner, n int) error
	always  bool
	pin     func(ctx context.Context, p *pinner, n int) (memory hostkind.Memory, unpin func() error, err error)
	// pooled memory is unpinned later, by the pool, so that this is not counted.
	pooled bool
	// times is how often a sample pins and unpins, to be longer than the clock is coarse.
	// 0 means once.
	times int
}

func (m pinMethod) allocator() string {
	if m.name == powerOfTwo {
		return powerOfTwo
	}
	return ours
}

var pinMethods = []pinMethod{
	{name: ours, pin: pinOurs},
	{name: cudas, pin: pinByCUDA},
	{name: powerOfTwo, pin: pinByCUDA},
	{name: registerPlain, pin: registering(mapPlain)},
	{name: registerAligned, pin: registering(memoryByC)},
	{name: registerPopulated, prepare: populated, pin: register},
	{name: poolFirst, prepare: freshPool, always: true, pin: pinFromPool, pooled: true},
	{name: poolReuse, prepare: filledPool, pin: pinFromPool, pooled: true, times: 64},
}

// A pinner pins by one method.
type pinner struct {
	dev    *cudart.Device
	method pinMethod
	notes  []string

	// What is prepared, for memory of this size.
	size   int
	undo   lifetime.Stack
	memory []byte
	pool   *pool.Pool

	abandonable
}

// warmUpBytes is the number of bytes that are pinned before the first sample, for the context, the driver's
// code, and what hostmem finds out about the host.
const warmUpBytes = 4 << 20

func (p *pinner) open(ctx context.Context) error {
	_, err := p.once(ctx, warmUpBytes, p.measure)
	return err
}

func (p *pinner) close() error { return p.release(p.reset) }

func (p *pinner) said() []string {
	if p.abandoned {
		return nil
	}
	return p.notes
}

func (p *pinner) reset() error {
	p.size, p.memory, p.pool = 0, nil, nil
	return p.undo.Run(context.Background())
}

// prepare makes what the method needs for n bytes, unless it is there.
func (p *pinner) prepare(n int) error {
	if p.method.prepare == nil || p.size == n && !p.method.always {
		return nil
	}
	if err := p.reset(); err != nil {
		return err
	}
	p.size = n
	return p.method.prepare(p, n)
}

// pinning has the durations of pinning and unpinning.
type pinning struct{ pin, unpin, cpu time.Duration } // cpu is of pinning

// once calls do, and returns when it has, or when ctx ends: what is pinned by then is unpinned
// later.
func (p *pinner) once(ctx context.Context, n int, do func(context.Context, int) (pinning, error)) (pinning, error) {
	return once(ctx, &p.abandonable, func() (pinning, error) { return do(ctx, n) })
}

// measure pins and unpins n bytes.
func (p *pinner) measure(ctx context.Context, n int) (all pinning, err error) {
	if err := p.prepare(n); err != nil {
		return pinning{}, err
	}
	times := max(p.method.times, 1)
	var pin, unpin measure.Stopwatch
	for range times {
		pin.Start()
		_, release, err := p.method.pin(ctx, p, n)
		all.pin += pin.Stop()
		if err != nil {
			return pinning{}, err
		}
		unpin.Start()
		err = release()
		all.unpin += unpin.Stop()
		if err != nil {
			return pinning{}, err
		}
	}
	return pinning{all.pin / time.Duration(times), all.unpin / time.Duration(times), pin.CPU()}, nil
}

// prove shows that copies of memory that is pinned by this method arrive.
func (p *pinner) prove(ctx context.Context, n int) (_ pinning, err error) {
	if err := p.prepare(n); err != nil {
		return pinning{}, err
	}
	memory, release, err := p.method.pin(ctx, p, n)
	if err != nil {
		return pinning{}, err
	}
	defer func() { err = errors.Join(err, release()) }()
	return pinning{}, prove(ctx, p.dev, memory, n)
}

// sized is the case of one size, whose samples measure all its series.
func (p *pinner) sized(n int) measure.Case {
	labels := labelled(result.Method, p.method.name, result.Size, strconv.Itoa(n))
	var pin, unpin, cpu time.Duration // of the last sample; of all
	c := measure.Case{
		Series: result.Series{Name: pinTime, Labels: labels, Unit: result.Seconds, Better: result.Lower, BytesPerSample: n * max(p.method.times, 1)},
		Budget: max(200*time.Millisecond, 3*secondsAt(n, slowPin)),
		Sample: func(ctx context.Context) (float64, error) {
			took, err := p.once(ctx, n, p.measure)
			pin, unpin, cpu = took.pin, took.unpin, cpu+took.cpu
			return pin.Seconds(), err
		},
		CPU: func() time.Duration { return cpu },
		Verify: func(ctx context.Context) error {
			_, err := p.once(ctx, n, p.prove)
			return err
		},
	}
	also := func(name string, of *time.Duration, asRate bool) {
		s := result.Series{Name: name, Labels: labels, Unit: result.Seconds, Better: result.Lower}
		if asRate {
			s.Unit, s.Better = result.GBPerSecond, result.Higher
		}
		c.Also = append(c.Also, measure.Also{Series: s, Last: func() (float64, bool) {
			if asRate {
				return float64(n) / float64(of.Nanoseconds()), *of > 0
			}
			return of.Seconds(), true
		}})
	}
	if p.method.name != poolReuse { // which pins nothing
		also(pinRate, &pin, true)
	}
	if !p.method.pooled {
		also(unpinTime, &unpin, false)
		also(unpinRate, &unpin, true)
	}
	return c
}

func pinOurs(ctx context.Context, p *pinner, n int) (hostkind.Memory, func() error, error) {
	b, err := hostmem.Alloc(ctx, p.dev, n, hostmem.Options{Label: "bench"})
	if err != nil {
		return nil, nil, err
	}
	for _, note := range b.Info().Notes {
		if note = p.method.name + ": " + note; !slices.Contains(p.notes, note) {
			p.notes = append(p.notes, note)
		}
	}
	return hostkind.Pinned(b), b.Close, nil
}

// pinByCUDA is cudaHostAlloc, of the rounded size where the method rounds.
func pinByCUDA(_ context.Context, p *pinner, n int) (hostkind.Memory, func() error, error) {
	return hostkind.HostAlloc(p.dev, takes(p.method.allocator(), n), 0)
}

// registering returns a method that allocates memory and registers it as it is.
func registering(allocate func(n int) ([]byte, func() error, error)) func(context.Context, *pinner, int) (hostkind.Memory, func() error, error) {
	return func(_ context.Context, p *pinner, n int) (hostkind.Memory, func() error, error) {
		b, free, err := allocate(n)
		if err != nil {
			return nil, nil, err
		}
		return hostkind.Register(p.dev, b, cudart.HostRegisterPortable, free)
	}
}

// populated maps memory and makes it resident.
func populated(p *pinner, n int) error {
	m, release, err := hostos.MapHuge(n)
	if err != nil {
		return err
	}
	p.undo.PushClose(release)
	p.memory = m
	touch(p.memory)
	return nil
}

// register registers what is populated.
func register(_ context.Context, p *pinner, n int) (hostkind.Memory, func() error, error) {
	return hostkind.Register(p.dev, p.memory, cudart.HostRegisterPortable, func() error { return nil })
}

// freshPool makes a pool that has nothing pinned.
func freshPool(p *pinner, n int) error {
	made, err := pool.New(p.dev, pool.Options{})
	if err != nil {
		return err
	}
	p.pool = made
	p.undo.PushClose(made.Close)
	return nil
}

// filledPool makes a pool that has idle memory of n bytes.
func filledPool(p *pinner, n int) error {
	if err := freshPool(p, n); err != nil {
		return err
	}
	l, err := p.pool.Get(context.Background(), n)
	if err != nil {
		return err
	}
	return l.Release()
}

func pinFromPool(ctx context.Context, p *pinner, n int) (hostkind.Memory, func() error, error) {
	l, err := p.pool.Get(ctx, n)
	if err != nil {
		return nil, nil, err
	}
	return hostkind.Pinned(l), func() error { return l.Release() }, nil
}

func explainAlloc(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	none := func(*answers) *result.Series { return nil }
	return explained(b, none, func(a *answers) {
		at := a.largest(pinRate, result.Method, ours)
		if at == nil {
			at = a.largest(pinRate)
		}
		of := func(method string) *result.Series { return a.other(at, pinRate, result.Method, method) }
		a.faster("%s pins %s as fast as %s.", named{"hostmem.Alloc", of(ours)}, named{"cudaHostAlloc", of(cudas)})
		if at == nil {
			return
		}
		size := units.Bytes(at.Labels.Size())
		a.row("at "+size, named{"hostmem.Alloc", of(ours)}, named{"cudaHostAlloc", of(cudas)}, named{"power of two", of(powerOfTwo)}, named{"register", of(registerPlain)})
		first := a.largest(pinTime, result.Method, poolFirst)
		again := a.other(first, pinTime, result.Method, poolReuse)
		if again != nil {
			a.row("pool, "+units.Bytes(again.Labels.Size()), named{"first lease", first}, named{"again", again})
		}
		if rounded, exact := a.other(at, pinTime, result.Method, powerOfTwo), a.other(at, pinTime, result.Method, cudas); rounded != nil && exact != nil {
			a.say("An allocator that rounds up to a power of two pins %s for %s, and takes %s instead of %s.", units.Bytes(roundedUp(at.Labels.Size())), size, units.Seconds(rounded.Median), units.Seconds(exact.Median))
		}
		if s := a.other(at, pinTime, result.Method, registerPopulated); s != nil {
			a.say("Registering %s of resident memory takes %s. The rest of the time to pin is for populating the pages.", size, units.Seconds(s.Median))
		}
	}, nothingMore)
}
