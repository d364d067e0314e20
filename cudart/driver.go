package cudart

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"unsafe"
)

// libcuda instead of libcudart.
//
// The runtime's functions are thin: nearly each has a function of the driver with the same
// arguments, flags, structs and error numbers, and streams, events and the primary context are
// the same objects. So libcuda fills the same table of entries (binding), and all code above
// the table is unchanged. Where libcudart does more than one call, or takes other arguments, an
// adapter does it:
//
//	libcudart                            | with libcuda
//	initializes itself at the first call | cuInit in Open (countByDriver)
//	selects device 0 on a new thread     | the call fails without a context (wantsContext); guard
//	                                     | attaches the primary context and calls again, once a thread
//	initializes a device anew that was   | the same, for functions that use nothing of the
//	reset                                | context that was reset (symbol.renews)
//	keeps an error for each thread       | nothing: libcuda does not
//	copies in a direction                | a function for each direction
//	takes peers by their ordinals        | by their primary contexts
//
// The primary context of a device is retained once and never released, as libcudart does.

// An adapter makes the call of a function that needs more than its entry. It leaves the
// arguments as they were: the call may be made again.
type adapter func(b *binding, c *cCall) Code

// Functions of libcuda that stand for none of libcudart's.
var (
	driverOnly []symbol

	fnInit                   = add(&driverOnly, symbol{name: "cuInit", required: true})
	fnGetProcAddress         = add(new([]symbol), symbol{name: "cuGetProcAddress"}) // bound by itself
	fnDeviceGet              = add(&driverOnly, symbol{name: "cuDeviceGet", required: true})
	fnDeviceGetUUID          = add(&driverOnly, symbol{name: "cuDeviceGetUuid", since: 9020, required: true}) // _v2 is another UUID for a MIG instance
	fnPrimaryContextRetain   = add(&driverOnly, symbol{name: "cuDevicePrimaryCtxRetain", required: true})
	fnPrimaryContextGetState = add(&driverOnly, symbol{name: "cuDevicePrimaryCtxGetState", required: true})
	fnMemcpyHtoD             = add(&driverOnly, symbol{name: "cuMemcpyHtoD_v2", required: true})
	fnMemcpyDtoH             = add(&driverOnly, symbol{name: "cuMemcpyDtoH_v2", required: true})
	fnMemcpyDtoD             = add(&driverOnly, symbol{name: "cuMemcpyDtoD_v2", required: true})
	fnMemcpyHtoDAsync        = add(&driverOnly, symbol{name: "cuMemcpyHtoDAsync_v2", required: true})
	fnMemcpyDtoHAsync        = add(&driverOnly, symbol{name: "cuMemcpyDtoHAsync_v2", required: true})
	fnMemcpyDtoDAsync        = add(&driverOnly, symbol{name: "cuMemcpyDtoDAsync_v2", required: true})
)

// driverSymbols are the functions of libcuda that stand for libcudart's, under their exported
// names. The version of the driver decides, as the runtime's does in symbols.
var driverSymbols = []symbol{
	{fn: fnDriverGetVersion, name: "cuDriverGetVersion", required: true}, // the first to be bound

	{fn: fnGetDeviceCount, name: "cuDeviceGetCount", required: true, adapt: countByDriver},
	{fn: fnSetDevice, name: "cuCtxSetCurrent", required: true, adapt: setDeviceByDriver},
	{fn: fnGetDevice, name: "cuCtxGetDevice", required: true, adapt: getDeviceByDriver},
	{fn: fnGetDeviceProperties, name: "cuDeviceGetName", required: true, adapt: propertiesByDriver},
	{fn: fnDeviceGetAttribute, name: "cuDeviceGetAttribute", required: true},
	{fn: fnDeviceGetPCIBusID, name: "cuDeviceGetPCIBusId", required: true},
	{fn: fnDeviceSynchronize, name: "cuCtxSynchronize", required: true},
	{fn: fnDeviceCanAccessPeer, name: "cuDeviceCanAccessPeer", required: true},
	{fn: fnDeviceEnablePeerAccess, name: "cuCtxEnablePeerAccess", required: true, adapt: peerAccessByDriver},
	{fn: fnDeviceDisablePeerAccess, name: "cuCtxDisablePeerAccess", required: true, adapt: peerAccessByDriver},

	{fn: fnMemGetInfo, name: "cuMemGetInfo_v2", required: true},
	{fn: fnMalloc, name: "cuMemAlloc_v2", required: true},
	{fn: fnFree, name: "cuMemFree_v2", required: true, adapt: freeByDriver},
	{fn: fnMallocAsync, name: "cuMemAllocAsync", since: 11020},
	{fn: fnFreeAsync, name: "cuMemFreeAsync", since: 11020},
	{fn: fnMallocManaged, name: "cuMemAllocManaged", required: true},
	{fn: fnMemPrefetch, name: "cuMemPrefetchAsync", until: 12020, abi: abiOrdinal},
	{fn: fnMemPrefetch, name: "cuMemPrefetchAsync_v2", since: 12020, abi: abiLocation},
	{fn: fnMemAdvise, name: "cuMemAdvise", until: 12020, abi: abiOrdinal},
	{fn: fnMemAdvise, name: "cuMemAdvise_v2", since: 12020, abi: abiLocation},
	{fn: fnMemRangeGetAttribute, name: "cuMemRangeGetAttribute"},
	{fn: fnMemDiscardBatch, name: "cuMemDiscardBatchAsync", since: discardSince},

	{fn: fnHostAlloc, name: "cuMemHostAlloc", required: true},
	{fn: fnFreeHost, name: "cuMemFreeHost", required: true},
	{fn: fnHostRegister, name: "cuMemHostRegister_v2", required: true},
	{fn: fnHostUnregister, name: "cuMemHostUnregister", required: true},
	{fn: fnHostGetDevicePointer, name: "cuMemHostGetDevicePointer_v2", required: true},
	{fn: fnPointerGetAttributes, name: "cuPointerGetAttributes", required: true, adapt: pointerAttributesByDriver},

	{fn: fnMemcpy, name: "cuMemcpy", required: true, adapt: memcpyByDriver},
	{fn: fnMemcpyAsync, name: "cuMemcpyAsync", required: true, adapt: memcpyAsyncByDriver},
	{fn: fnMemcpyPeerAsync, name: "cuMemcpyPeerAsync", required: true, adapt: memcpyPeerByDriver},
	{fn: fnMemcpyBatch, name: "cuMemcpyBatchAsync", since: batchSince, until: 13000, abi: abiFailIndex},
	{fn: fnMemcpyBatch, name: "cuMemcpyBatchAsync_v2", since: 13000, abi: abiNoFailIndex},
	{fn: fnMemset, name: "cuMemsetD8_v2", required: true, adapt: memsetByDriver},
	{fn: fnMemsetAsync, name: "cuMemsetD8Async", required: true, adapt: memsetByDriver},

	{fn: fnStreamCreate, name: "cuStreamCreateWithPriority", required: true},
	{fn: fnStreamDestroy, name: "cuStreamDestroy_v2", required: true},
	{fn: fnStreamQuery, name: "cuStreamQuery", required: true},
	{fn: fnStreamSynchronize, name: "cuStreamSynchronize", required: true},
	{fn: fnStreamWaitEvent, name: "cuStreamWaitEvent", required: true},
	{fn: fnStreamGetID, name: "cuStreamGetId", since: 12000},
	{fn: fnEventCreate, name: "cuEventCreate", required: true},
	{fn: fnEventDestroy, name: "cuEventDestroy_v2", required: true},
	{fn: fnEventRecord, name: "cuEventRecord", required: true},
	{fn: fnEventQuery, name: "cuEventQuery", required: true},
	{fn: fnEventSynchronize, name: "cuEventSynchronize", required: true},
	{fn: fnEventElapsedTime, name: "cuEventElapsedTime", required: true},
	{fn: fnLaunchHostFunc, name: "cuLaunchHostFunc", required: true},
}

// procAddressSince is the version for which functions are looked up that are older: all of them
// have had their signatures since.
const procAddressSince Version = 11040

// driverSymbol returns the address of a function of libcuda, 0 if it has none. A driver of 11.3
// or later returns the one of the row's version (cuGetProcAddress); the exported name is the
// one of that version as well.
func (rt *Runtime) driverSymbol(s *symbol) uintptr {
	const legacyStream = 1 // stream 0 is the legacy default stream
	if rt.entry[fnGetProcAddress] != 0 {
		name := append([]byte(strings.TrimSuffix(s.name, "_v2")), 0)
		version := max(s.since, procAddressSince)
		if s.since > 0 && s.since < procAddressSince {
			version = s.since
		}
		f := rt.begin()
		f.host, f.out = unsafe.Pointer(&name[0]), results{}
		f.args = [maxCallArgs]uintptr{uintptr(f.host), f.outPtr(0), uintptr(version), legacyStream, f.outPtr(1)}
		code, address := rt.callAnyDevice(fnGetProcAddress, f), uintptr(f.out[0])
		rt.end(f)
		if code == success && address != 0 {
			return address
		}
	}
	return rt.source.Symbol(s.name)
}

// bindDriver binds libcuda (cuDriverGetVersion, cuGetProcAddress).
func (rt *Runtime) bindDriver(ctx context.Context) (err error) {
	tooOld := func(name string) error {
		return &Error{Op: "cuDriverGetVersion", Code: ErrInsufficientDriver, API: DriverAPI,
			Detail: fmt.Sprintf("%s, for up to CUDA %v, has no function %s", rt.lib.Path, rt.lib.Driver, name)}
	}
	incomplete := func(name string) error {
		return fmt.Errorf("%w: %s, for up to CUDA %v, does not export %s, as all drivers of CUDA 11 and later do", errIncompleteDriver, rt.lib.Path, rt.lib.Driver, name)
	}
	lookup := rt.driverSymbol
	if err := rt.resolve(driverSymbols[:1], lookup, tooOld); err != nil {
		return err
	}
	if rt.lib.Driver, err = rt.version(fnDriverGetVersion); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if rt.lib.Runtime = rt.lib.Driver; rt.lib.Driver.Major() < 11 {
		return tooOld("of CUDA 11")
	}
	rt.entry[fnGetProcAddress] = cmp.Or(rt.source.Symbol("cuGetProcAddress_v2"), rt.source.Symbol("cuGetProcAddress"))
	if err := rt.resolve(driverOnly, lookup, incomplete); err != nil {
		return err
	}
	return rt.resolve(driverSymbols[1:], lookup, incomplete)
}

// then makes another call instead of the one that c was for.
func (c *cCall) then(b *binding, fn function, args ...uintptr) Code {
	c.entry = b.entry[fn]
	copy(c.args[:], args)
	name := c.name
	c.calls++
	c.name = nameCall(c.calls, c.device, fn) // for Runtime.Stuck
	code := c.call().of(fn)
	c.name = name
	return code
}

func (c *cCall) driverPtr(i int) uintptr { return uintptr(unsafe.Pointer(&c.driver[i])) }

// countByDriver initializes the driver. Having no device is no error of cuInit's to the callers.
func countByDriver(b *binding, c *cCall) Code {
	entry, args := c.entry, c.args
	code := c.then(b, fnInit, 0)
	if c.entry, c.args = entry, args; code == ErrNoDevice.of(fnInit) {
		return ErrNoDevice
	} else if code != success {
		return code
	}
	return c.call()
}

// propertiesByDriver reads name and UUID, which is all that newDevice reads. Everything else here
// takes a CUdevice to be its ordinal, which it has been in all versions.
func propertiesByDriver(b *binding, c *cCall) Code {
	args := c.args
	to, ordinal := args[0], args[1]
	code := c.then(b, fnDeviceGet, c.driverPtr(0), ordinal)
	if code == success && uintptr(uint32(c.driver[0])) != ordinal {
		code = ErrInvalidDevice.of(fnDeviceGet)
	}
	if code == success {
		code = c.then(b, fnGetDeviceProperties, to, nameSize, ordinal)
	}
	if code == success {
		code = c.then(b, fnDeviceGetUUID, to+nameSize, ordinal)
	}
	c.args = args
	return code
}

// context returns the primary context of a device, retained.
func (b *binding) context(c *cCall, ordinal int) (uintptr, Code) {
	if context := b.contexts[ordinal].Load(); context != 0 {
		return context, success
	}
	return b.retain(c, ordinal)
}

// retain retains the primary context, which makes one if there is none. Several goroutines
// may do that at once: only the count of its users differs.
func (b *binding) retain(c *cCall, ordinal int) (uintptr, Code) {
	code := c.then(b, fnPrimaryContextRetain, c.driverPtr(0), uintptr(ordinal))
	if code != success {
		return 0, code
	}
	b.contexts[ordinal].Store(uintptr(c.driver[0]))
	return uintptr(c.driver[0]), success
}

func setDeviceByDriver(b *binding, c *cCall) Code {
	args := c.args
	context, code := b.context(c, int(int32(args[0])))
	if code == success {
		code = c.then(b, fnSetDevice, context)
	}
	c.args = args
	return code
}

// getDeviceByDriver returns device -1 for a thread with no context, or a lost one.
func getDeviceByDriver(b *binding, c *cCall) Code {
	code := c.call()
	if code == errDeviceUninitialized || code == ErrContextIsDestroyed {
		*(*(**int32)(unsafe.Pointer(&c.args[0]))) = -1
		return success
	}
	return code
}

// freeByDriver attaches the primary context of the call's device if there is nothing to free.
func freeByDriver(b *binding, c *cCall) Code {
	if c.args[0] != 0 {
		return c.call()
	}
	return b.attachByDriver(c, int(c.device), true)
}

// attachByDriver makes the primary context of a device the calling thread's. Other code may have
// reset it (cuDevicePrimaryCtxReset, cudaDeviceReset): it is retained anew for functions that use
// nothing of it. Others then say that it is destroyed.
func (b *binding) attachByDriver(c *cCall, ordinal int, renews bool) Code {
	args := c.args
	defer func() { c.args = args }()
	context := b.contexts[ordinal].Load()
	if context != 0 && !renews {
		return c.then(b, fnSetDevice, context)
	}
	if context != 0 {
		c.driver[1] = 0
		if code := c.then(b, fnPrimaryContextGetState, uintptr(ordinal), c.driverPtr(0), c.driverPtr(1)); code != success {
			return code
		}
	}
	if active := uint32(c.driver[1]) != 0; context == 0 || !active {
		var code Code
		if context, code = b.retain(c, ordinal); code != success {
			return code
		}
	}
	return c.then(b, fnSetDevice, context)
}

// peerAccessByDriver takes the peer by its context. flags of cudaDeviceEnablePeerAccess stay.
func peerAccessByDriver(b *binding, c *cCall) Code {
	entry, args := c.entry, c.args
	peer := int(int32(args[0]))
	if peer == int(c.device) {
		return ErrInvalidDevice
	}
	context, code := b.context(c, peer)
	if code == success {
		c.entry, c.args = entry, args
		c.args[0] = context
		code = c.call()
	}
	c.args = args
	return code
}

func memcpyPeerByDriver(b *binding, c *cCall) Code {
	entry, args := c.entry, c.args
	to, code := b.context(c, int(int32(args[1])))
	var from uintptr
	if code == success {
		from, code = b.context(c, int(int32(args[3])))
	}
	if code == success {
		c.entry, c.args = entry, args
		c.args[1], c.args[3] = to, from
		code = c.call()
	}
	c.args = args
	return code
}

// The functions for each copyKind.
var (
	memcpyKinds      = [...]function{hostToDevice: fnMemcpyHtoD, deviceToHost: fnMemcpyDtoH, deviceToDevice: fnMemcpyDtoD, byAddress: fnMemcpy}
	memcpyAsyncKinds = [...]function{hostToDevice: fnMemcpyHtoDAsync, deviceToHost: fnMemcpyDtoHAsync, deviceToDevice: fnMemcpyDtoDAsync, byAddress: fnMemcpyAsync}
)

func memcpyByDriver(b *binding, c *cCall) Code {
	if c.args[2] == 0 {
		return success
	}
	c.entry = b.entry[memcpyKinds[c.args[3]]]
	return c.call()
}

func memcpyAsyncByDriver(b *binding, c *cCall) Code {
	kind := c.args[3]
	if c.args[2] == 0 {
		return success
	}
	c.entry, c.args[3] = b.entry[memcpyAsyncKinds[kind]], c.args[4]
	code := c.call()
	c.args[3] = kind
	return code
}

func memsetByDriver(_ *binding, c *cCall) Code {
	if c.args[2] == 0 {
		return success
	}
	return c.call()
}

// A pointerQuery has the arguments of cuPointerGetAttributes, and what it writes.
type pointerQuery struct {
	attributes [5]int32
	to         [5]uintptr

	memoryType, managed, ordinal uint64 // ints; the rest of each stays 0
	devicePtr, hostPtr           uint64
}

var pointerQueries = sync.Pool{New: func() any {
	const memoryType, devicePointer, hostPointer, isManaged, deviceOrdinal = 2, 3, 4, 8, 9
	q := &pointerQuery{attributes: [5]int32{memoryType, isManaged, deviceOrdinal, devicePointer, hostPointer}}
	for i, to := range [...]*uint64{&q.memoryType, &q.managed, &q.ordinal, &q.devicePtr, &q.hostPtr} {
		q.to[i] = uintptr(unsafe.Pointer(to))
	}
	return q
}}

// pointerAttributesByDriver fills a cPointerAttributes. The device's address of host memory
// is the one for the current context, so the call fails if there is none.
func pointerAttributesByDriver(b *binding, c *cCall) Code {
	args := c.args
	defer func() { c.args = args }()
	if code := c.then(b, fnGetDevice, c.driverPtr(0)); code != success {
		_, code = code.call(fnGetDevice)
		return code
	}
	q := pointerQueries.Get().(*pointerQuery)
	defer pointerQueries.Put(q)
	q.memoryType, q.managed, q.ordinal, q.devicePtr, q.hostPtr = 0, 0, 0, 0, 0
	code := c.then(b, fnPointerGetAttributes, uintptr(len(q.to)), uintptr(unsafe.Pointer(&q.attributes)), uintptr(unsafe.Pointer(&q.to)), args[1])
	if code != success {
		_, code = code.call(fnPointerGetAttributes)
		return code
	}
	const driverHost, driverDevice = 1, 2 // CUmemorytype
	a := *(**cPointerAttributes)(unsafe.Pointer(&args[0]))
	*a = cPointerAttributes{kind: int32(MemoryUnregistered), device: ordinalNone, hostPtr: uint64(args[1])}
	switch {
	case q.managed != 0:
		a.kind = int32(MemoryManaged)
	case q.memoryType == driverHost:
		a.kind = int32(MemoryHost)
	case q.memoryType == driverDevice:
		a.kind = int32(MemoryDevice)
	default:
		return success
	}
	a.device, a.devicePtr, a.hostPtr = int32(q.ordinal), q.devicePtr, q.hostPtr
	return success
}
