package cudart

// A function is one of the CUDA runtime, or of the driver's library, that this package
// calls. The variables below are all functions of the runtime and those that load and launch
// code; driver.go has the others.
type function uint8

// maxFunctions is more than there are.
const maxFunctions = 96

// An abi is a form of a function's arguments that differs between versions.
type abi uint8

const (
	abiStable      abi = iota // the same from 11.x to 13.x
	abiOrdinal                // a location is an int: a device, or -1 for the host
	abiLocation               // a location is a cudaMemLocation by value
	abiFailIndex              // one argument is for the index of the copy that failed
	abiNoFailIndex            // none is
)

// A symbol is an exported name, for the versions in which this package uses it. The
// runtime's version decides, never the presence of a name: 12.x exports plain names
// with the old signature beside _v2, and 13.x the same plain names with the new one.
type symbol struct {
	fn       function
	name     string
	required bool
	since    Version // first version in which it is used
	until    Version // first version in which it is not used any more, 0 for none
	abi      abi
	// afterClose marks functions that a closed Runtime still calls: they release memory,
	// streams and events, or report whether the GPU still uses them.
	afterClose bool
	// renews marks functions that use nothing of a context that other code of the process may
	// have reset: they initialize the device anew, as libcudart does by itself.
	renews bool
	// adapt makes the call instead of the function called name: see driverSymbols.
	adapt adapter
}

// symbols are the names of the runtime's functions, moduleSymbols those of libcuda that load
// and launch code, which are bound when code is loaded first. driverSymbols are the names of
// the runtime's functions where libcuda takes the runtime's place.
var symbols, moduleSymbols []symbol

var (
	functions       function             // their number
	names           [maxFunctions]string // of the oldest version
	worksAfterClose [maxFunctions]bool   // symbol.afterClose
	renewsContext   [maxFunctions]bool   // symbol.renews
)

// bind makes a function of the runtime, which has these names.
func bind(rows ...symbol) function { return add(&symbols, rows...) }

func required(name string) function { return bind(symbol{name: name, required: true}) }

func optional(name string) function { return bind(symbol{name: name}) }

func add(list *[]symbol, rows ...symbol) function {
	fn := functions
	functions++
	names[fn] = rows[0].name
	for _, s := range rows {
		s.fn = fn
		*list = append(*list, s)
		worksAfterClose[fn] = worksAfterClose[fn] || s.afterClose
		renewsContext[fn] = renewsContext[fn] || s.renews
	}
	return fn
}

// versionRows is the number of functions that bind needs to get the runtime's version.
// They come first.
const versionRows = 3

var (
	fnRuntimeGetVersion = required("cudaRuntimeGetVersion")
	fnDriverGetVersion  = required("cudaDriverGetVersion")
	fnGetLastError      = required("cudaGetLastError")

	fnGetDeviceCount          = required("cudaGetDeviceCount")
	fnSetDevice               = required("cudaSetDevice")
	fnGetDevice               = required("cudaGetDevice")
	fnGetDeviceProperties     = required("cudaGetDeviceProperties")
	fnDeviceGetAttribute      = required("cudaDeviceGetAttribute")
	fnDeviceGetPCIBusID       = required("cudaDeviceGetPCIBusId")
	fnDeviceSynchronize       = bind(symbol{name: "cudaDeviceSynchronize", required: true, afterClose: true, renews: true})
	fnDeviceCanAccessPeer     = optional("cudaDeviceCanAccessPeer")
	fnDeviceEnablePeerAccess  = optional("cudaDeviceEnablePeerAccess")
	fnDeviceDisablePeerAccess = bind(symbol{name: "cudaDeviceDisablePeerAccess", afterClose: true})

	fnMemGetInfo    = bind(symbol{name: "cudaMemGetInfo", required: true, renews: true})
	fnMalloc        = bind(symbol{name: "cudaMalloc", required: true, renews: true})
	fnFree          = bind(symbol{name: "cudaFree", required: true, afterClose: true})
	fnMallocAsync   = bind(symbol{name: "cudaMallocAsync", since: 11020})
	fnFreeAsync     = bind(symbol{name: "cudaFreeAsync", since: 11020, afterClose: true})
	fnMallocManaged = bind(symbol{name: "cudaMallocManaged", renews: true})
	fnMemPrefetch   = bind(
		symbol{name: "cudaMemPrefetchAsync", until: 12020, abi: abiOrdinal},
		symbol{name: "cudaMemPrefetchAsync_v2", since: 12020, until: 13000, abi: abiLocation},
		symbol{name: "cudaMemPrefetchAsync", since: 13000, abi: abiLocation})
	fnMemAdvise = bind(
		symbol{name: "cudaMemAdvise", until: 12020, abi: abiOrdinal},
		symbol{name: "cudaMemAdvise_v2", since: 12020, until: 13000, abi: abiLocation},
		symbol{name: "cudaMemAdvise", since: 13000, abi: abiLocation})
	fnMemRangeGetAttribute = optional("cudaMemRangeGetAttribute")
	fnMemDiscardBatch      = bind(symbol{name: "cudaMemDiscardBatchAsync", since: discardSince})

	fnHostAlloc            = bind(symbol{name: "cudaHostAlloc", required: true, renews: true})
	fnFreeHost             = bind(symbol{name: "cudaFreeHost", required: true, afterClose: true})
	fnHostRegister         = bind(symbol{name: "cudaHostRegister", required: true, renews: true})
	fnHostUnregister       = bind(symbol{name: "cudaHostUnregister", required: true, afterClose: true})
	fnHostGetDevicePointer = required("cudaHostGetDevicePointer")
	fnPointerGetAttributes = bind(symbol{name: "cudaPointerGetAttributes", required: true, afterClose: true, renews: true})

	fnMemcpy          = required("cudaMemcpy")
	fnMemcpyAsync     = required("cudaMemcpyAsync")
	fnMemcpyPeerAsync = optional("cudaMemcpyPeerAsync")
	fnMemcpyBatch     = bind(
		symbol{name: "cudaMemcpyBatchAsync", since: batchSince, until: 13000, abi: abiFailIndex},
		symbol{name: "cudaMemcpyBatchAsync", since: 13000, abi: abiNoFailIndex})
	fnMemset      = required("cudaMemset")
	fnMemsetAsync = required("cudaMemsetAsync")

	fnStreamCreate      = bind(symbol{name: "cudaStreamCreateWithPriority", required: true, renews: true})
	fnStreamDestroy     = bind(symbol{name: "cudaStreamDestroy", required: true, afterClose: true})
	fnStreamQuery       = bind(symbol{name: "cudaStreamQuery", required: true, afterClose: true})
	fnStreamSynchronize = required("cudaStreamSynchronize")
	fnStreamWaitEvent   = required("cudaStreamWaitEvent")
	fnStreamGetID       = bind(symbol{name: "cudaStreamGetId", since: 12000, afterClose: true})
	fnEventCreate       = required("cudaEventCreateWithFlags") // for the end of streams, too: does not renew
	fnEventDestroy      = bind(symbol{name: "cudaEventDestroy", required: true, afterClose: true})
	fnEventRecord       = bind(symbol{name: "cudaEventRecord", required: true, afterClose: true})
	fnEventQuery        = bind(symbol{name: "cudaEventQuery", required: true, afterClose: true})
	fnEventSynchronize  = required("cudaEventSynchronize")
	fnEventElapsedTime  = required("cudaEventElapsedTime")
	fnLaunchHostFunc    = required("cudaLaunchHostFunc")

	fnModuleLoad         = add(&moduleSymbols, symbol{name: "cuModuleLoadDataEx", required: true, renews: true})
	fnModuleUnload       = add(&moduleSymbols, symbol{name: "cuModuleUnload", required: true, afterClose: true})
	fnModuleGetFunction  = add(&moduleSymbols, symbol{name: "cuModuleGetFunction", required: true})
	fnFuncGetAttribute   = add(&moduleSymbols, symbol{name: "cuFuncGetAttribute", required: true})
	fnFuncSetAttribute   = add(&moduleSymbols, symbol{name: "cuFuncSetAttribute", required: true})
	fnLaunchKernel       = add(&moduleSymbols, symbol{name: "cuLaunchKernel", required: true})
	fnMemGetAddressRange = add(&moduleSymbols, symbol{name: "cuMemGetAddressRange_v2"})
)

// serves reports whether the row is the one to use with a runtime of version v.
func (s *symbol) serves(v Version) bool {
	return v >= s.since && (s.until == 0 || v < s.until)
}

// name is the C name of a function, for messages.
func (fn function) name() string { return names[fn] }
