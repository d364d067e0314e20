package cudart

// A function is one of the CUDA runtime that this package calls.
type function uint8

const (
	fnRuntimeGetVersion function = iota
	fnDriverGetVersion
	fnGetDeviceCount
	fnSetDevice
	fnGetDevice
	fnGetDeviceProperties
	fnDeviceGetAttribute
	fnDeviceGetPCIBusID
	fnDeviceGetStreamPriorityRange
	fnDeviceSynchronize
	fnDeviceCanAccessPeer
	fnDeviceEnablePeerAccess
	fnDeviceDisablePeerAccess
	fnMemGetInfo
	fnMalloc
	fnFree
	fnMallocAsync
	fnFreeAsync
	fnMallocManaged
	fnMemPrefetch
	fnMemAdvise
	fnMemRangeGetAttribute
	fnMemPrefetchBatch
	fnMemDiscardBatch
	fnHostAlloc
	fnFreeHost
	fnHostRegister
	fnHostUnregister
	fnHostGetDevicePointer
	fnPointerGetAttributes
	fnMemcpy
	fnMemcpyAsync
	fnMemcpyPeerAsync
	fnMemcpyBatch
	fnMemset
	fnMemsetAsync
	fnStreamCreate
	fnStreamDestroy
	fnStreamQuery
	fnStreamSynchronize
	fnStreamWaitEvent
	fnStreamGetID
	fnEventCreate
	fnEventDestroy
	fnEventRecord
	fnEventQuery
	fnEventSynchronize
	fnEventElapsedTime
	fnLaunchHostFunc
	fnLibraryLoad
	fnLibraryUnload
	fnLibraryGetKernel
	fnFuncGetAttributes
	fnFuncSetAttribute
	fnLaunchKernel
	fnModuleLoad // from here to fnDriverLaunchKernel of the driver's library, libcuda
	fnModuleUnload
	fnModuleGetFunction
	fnDriverFuncGetAttribute
	fnDriverFuncSetAttribute
	fnDriverLaunchKernel
	fnGetLastError
	fnGetErrorName
	fnGetErrorString
	numFunctions
)

// An abi is how a function takes its arguments, if that changed between versions.
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
}

// versionRows is the number of symbols that bind needs to get the runtime's version.
// They come first.
const versionRows = 3

// symbols are all names that are bound.
var symbols = [...]symbol{
	{fn: fnRuntimeGetVersion, name: "cudaRuntimeGetVersion", required: true},
	{fn: fnDriverGetVersion, name: "cudaDriverGetVersion", required: true},
	{fn: fnGetLastError, name: "cudaGetLastError", required: true},
	{fn: fnGetErrorName, name: "cudaGetErrorName", required: true},
	{fn: fnGetErrorString, name: "cudaGetErrorString", required: true},

	{fn: fnGetDeviceCount, name: "cudaGetDeviceCount", required: true},
	{fn: fnSetDevice, name: "cudaSetDevice", required: true},
	{fn: fnGetDevice, name: "cudaGetDevice", required: true},
	{fn: fnGetDeviceProperties, name: "cudaGetDeviceProperties", required: true},
	{fn: fnDeviceGetAttribute, name: "cudaDeviceGetAttribute", required: true},
	{fn: fnDeviceGetPCIBusID, name: "cudaDeviceGetPCIBusId", required: true},
	{fn: fnDeviceGetStreamPriorityRange, name: "cudaDeviceGetStreamPriorityRange", required: true},
	{fn: fnDeviceSynchronize, name: "cudaDeviceSynchronize", required: true},
	{fn: fnDeviceCanAccessPeer, name: "cudaDeviceCanAccessPeer"},
	{fn: fnDeviceEnablePeerAccess, name: "cudaDeviceEnablePeerAccess"},
	{fn: fnDeviceDisablePeerAccess, name: "cudaDeviceDisablePeerAccess"},

	{fn: fnMemGetInfo, name: "cudaMemGetInfo", required: true},
	{fn: fnMalloc, name: "cudaMalloc", required: true},
	{fn: fnFree, name: "cudaFree", required: true},
	{fn: fnMallocAsync, name: "cudaMallocAsync", since: 11020},
	{fn: fnFreeAsync, name: "cudaFreeAsync", since: 11020},
	{fn: fnMallocManaged, name: "cudaMallocManaged"},
	{fn: fnMemPrefetch, name: "cudaMemPrefetchAsync", until: 12020, abi: abiOrdinal},
	{fn: fnMemPrefetch, name: "cudaMemPrefetchAsync_v2", since: 12020, until: 13000, abi: abiLocation},
	{fn: fnMemPrefetch, name: "cudaMemPrefetchAsync", since: 13000, abi: abiLocation},
	{fn: fnMemAdvise, name: "cudaMemAdvise", until: 12020, abi: abiOrdinal},
	{fn: fnMemAdvise, name: "cudaMemAdvise_v2", since: 12020, until: 13000, abi: abiLocation},
	{fn: fnMemAdvise, name: "cudaMemAdvise", since: 13000, abi: abiLocation},
	{fn: fnMemRangeGetAttribute, name: "cudaMemRangeGetAttribute"},
	{fn: fnMemPrefetchBatch, name: "cudaMemPrefetchBatchAsync", since: prefetchBatchSince},
	{fn: fnMemDiscardBatch, name: "cudaMemDiscardBatchAsync", since: prefetchBatchSince},

	{fn: fnHostAlloc, name: "cudaHostAlloc", required: true},
	{fn: fnFreeHost, name: "cudaFreeHost", required: true},
	{fn: fnHostRegister, name: "cudaHostRegister", required: true},
	{fn: fnHostUnregister, name: "cudaHostUnregister", required: true},
	{fn: fnHostGetDevicePointer, name: "cudaHostGetDevicePointer", required: true},
	{fn: fnPointerGetAttributes, name: "cudaPointerGetAttributes", required: true},

	{fn: fnMemcpy, name: "cudaMemcpy", required: true},
	{fn: fnMemcpyAsync, name: "cudaMemcpyAsync", required: true},
	{fn: fnMemcpyPeerAsync, name: "cudaMemcpyPeerAsync"},
	{fn: fnMemcpyBatch, name: "cudaMemcpyBatchAsync", since: batchSince, until: 13000, abi: abiFailIndex},
	{fn: fnMemcpyBatch, name: "cudaMemcpyBatchAsync", since: 13000, abi: abiNoFailIndex},
	{fn: fnMemset, name: "cudaMemset", required: true},
	{fn: fnMemsetAsync, name: "cudaMemsetAsync", required: true},

	{fn: fnStreamCreate, name: "cudaStreamCreateWithPriority", required: true},
	{fn: fnStreamDestroy, name: "cudaStreamDestroy", required: true},
	{fn: fnStreamQuery, name: "cudaStreamQuery", required: true},
	{fn: fnStreamSynchronize, name: "cudaStreamSynchronize", required: true},
	{fn: fnStreamWaitEvent, name: "cudaStreamWaitEvent", required: true},
	{fn: fnStreamGetID, name: "cudaStreamGetId", since: 12000},
	{fn: fnEventCreate, name: "cudaEventCreateWithFlags", required: true},
	{fn: fnEventDestroy, name: "cudaEventDestroy", required: true},
	{fn: fnEventRecord, name: "cudaEventRecord", required: true},
	{fn: fnEventQuery, name: "cudaEventQuery", required: true},
	{fn: fnEventSynchronize, name: "cudaEventSynchronize", required: true},
	{fn: fnEventElapsedTime, name: "cudaEventElapsedTime", required: true},
	{fn: fnLaunchHostFunc, name: "cudaLaunchHostFunc", required: true},

	{fn: fnLibraryLoad, name: "cudaLibraryLoadData", since: librarySince},
	{fn: fnLibraryUnload, name: "cudaLibraryUnload", since: librarySince},
	{fn: fnLibraryGetKernel, name: "cudaLibraryGetKernel", since: librarySince},
	{fn: fnFuncGetAttributes, name: "cudaFuncGetAttributes", since: librarySince},
	{fn: fnFuncSetAttribute, name: "cudaFuncSetAttribute", since: librarySince},
	{fn: fnLaunchKernel, name: "cudaLaunchKernelExC", since: librarySince},
}

// driverSymbols are the names of libcuda that are bound if the runtime cannot load code.
// They are the same in all versions.
var driverSymbols = [...]symbol{
	{fn: fnModuleLoad, name: "cuModuleLoadDataEx"},
	{fn: fnModuleUnload, name: "cuModuleUnload"},
	{fn: fnModuleGetFunction, name: "cuModuleGetFunction"},
	{fn: fnDriverFuncGetAttribute, name: "cuFuncGetAttribute"},
	{fn: fnDriverFuncSetAttribute, name: "cuFuncSetAttribute"},
	{fn: fnDriverLaunchKernel, name: "cuLaunchKernel"},
}

// serves reports whether the row is the one to use with a runtime of version v.
func (s *symbol) serves(v Version) bool {
	return v >= s.since && (s.until == 0 || v < s.until)
}

// name is the C name of a function, for messages.
func (fn function) name() string {
	for _, rows := range [][]symbol{symbols[:], driverSymbols[:]} {
		for i := range rows {
			if rows[i].fn == fn {
				return rows[i].name
			}
		}
	}
	return "unknown function"
}
