package cudart

// Handles of streams that exist without being created.
const (
	nullStream      StreamHandle = 0
	legacyStream    StreamHandle = 1 // cudaStreamLegacy; 0 means the same
	perThreadStream StreamHandle = 2 // cudaStreamPerThread
)

// A foreign is the part of a timeline that only streams of other code have.
type foreign struct {
	// id is the stream's unique number (cudaStreamGetId), 0 if the library has none.
	// A handle is not unique: CUDA mostly gives a new stream the handle of the one
	// that was destroyed last, although the work of that one may go on.
	id     uint64
	unused chan struct{} // closed when the handle is used no more
}

// StreamFromHandle returns a Stream for a cudaStream_t that other code created on the
// primary context of the device, as all libraries do that use CUDA's runtime. Copies
// and events of the Stream are in order with what that code queues. All methods work,
// but the cudaStream_t is not theirs to destroy: neither Close nor the garbage
// collector does.
//
// The other code may queue work at any time. So each [Point] of the Stream records an
// event, and covers the work of both.
//
// Close the Stream before its owner destroys the cudaStream_t. Close records an event
// for the end of the work, if there are Points, and waits until no method uses the
// handle any more; the Points stay valid. It costs nothing to keep a Stream, and each
// handle needs only one.
//
// If the owner destroys the cudaStream_t first, CUDA may return errors, or crash. Points
// that have no event yet are then reached when cudaDeviceSynchronize succeeds, so that
// no memory is reused early; one call does for all of them. This package detects that a
// handle is another stream's by now with CUDA 12.0 or later (cudaStreamGetId). Before,
// it cannot: Points without an event may be reached early.
//
// Handles 0 and 1 are the legacy default stream of the device. Each entry there waits
// for all work that was queued before on streams that are not non-blocking, and later
// work there waits for it: correct, but slow. For code that was compiled for per-thread
// default streams 0 means handle 2, cudaStreamPerThread: a stream of each OS thread. It
// is refused, because goroutines move between threads.
//
// To check the handle StreamFromHandle records an event (cudaEventRecord), which blocks
// if the stream is full. The error wraps [ErrInvalidResourceHandle] if h is not a stream
// of the device's primary context, as far as CUDA recognizes that: an arbitrary number
// may crash it. The error wraps [ErrInvalidValue] if h is 2. A stream that is being
// captured into a graph cannot be used, neither here nor later: its copies run when the
// graph does, which no Point can see.
func (d *Device) StreamFromHandle(h StreamHandle) (*Stream, error) {
	if !d.made() {
		return nil, notMade(fnEventRecord)
	}
	if h == perThreadStream {
		return nil, invalid(fnEventRecord, "stream %#x of %v: it is another stream on each OS thread, and goroutines move between threads: create a stream, or use 0, the legacy default stream", uintptr(h), d)
	}
	t := newTimeline(d, uintptr(h))
	t.foreign = &foreign{unused: make(chan struct{})}
	t.exposed.Store(true)
	if h != nullStream && h != legacyStream { // nobody destroys the default streams
		if err := t.identify(); err != nil {
			return nil, err
		}
	}
	e, err := t.recordFree()
	if e != nil {
		d.putEvent(e)
	}
	if err != nil {
		return nil, err
	}
	return &Stream{dev: d, timeline: t}, nil
}

// isDefault reports whether the stream is the legacy default stream.
func (s *Stream) isDefault() bool {
	return s.timeline.foreign != nil && s.arg() <= uintptr(legacyStream)
}

// identify reads the unique number of the stream, if the library has such numbers.
func (t *timeline) identify() error {
	f := t.begin()
	defer t.dev.rt.end(f)
	switch code := t.readID(f); code {
	case success:
		t.foreign.id = f.out[0]
	case codeMissing, ErrCallRequiresNewerDriver:
	default:
		return t.dev.rt.errorf(fnStreamGetID, code, "%v", t)
	}
	return nil
}

func (t *timeline) readID(f *frame) Code {
	f.args[0], f.args[1] = t.value, f.outPtr(0)
	return t.dev.guard(fnStreamGetID, f)
}

// sameStream returns an error if the handle is not the stream's any more: the result
// would be for another stream's work. Only this package destroys its own streams, so only
// foreign ones are checked.
func (t *timeline) sameStream(f *frame) Code {
	if t.foreign == nil || t.foreign.id == 0 {
		return success
	}
	code := t.readID(f)
	if code == success && f.out[0] != t.foreign.id {
		code = ErrInvalidResourceHandle
	}
	if code != success {
		code = code.of(fnStreamGetID)
	}
	return code
}
