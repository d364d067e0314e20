package cudasim

import "github.com/gopinned/pinned/cudart"

// traits are what a call needs before it runs.
type traits uint8

const (
	withoutDriver  traits = 1 << iota // works with no usable driver
	withoutContext                    // makes no context on the current device
	infallible                        // cannot fail, so is not counted for FailCall
	keepsLast                         // does not set the thread's last error
)

// An export is one C function. A name that changed its signature between
// versions has a row for each signature.
type export struct {
	name   string
	args   int            // number of arguments
	stream int            // the argument that is a stream, counted from 1; 0 for none
	event  int            // the argument that is an event, counted from 1; 0 for none
	since  cudart.Version // the first version with this signature
	until  cudart.Version // the first version without it, 0 for none
	traits traits
	run    func(*call) cudart.Code
	text   func(cudart.Code) uintptr // instead of run, for functions that return a string
}

// nameIn is the name under which a version exports the function, "" for none.
func (e *export) nameIn(v cudart.Version) string {
	if v < e.since || e.until != 0 && v >= e.until {
		return ""
	}
	return e.name
}

// exports are the functions of all versions. A slot has an entry for each.
var exports []export

// The table refers to methods which refer to the table, so it is filled here.
func init() {
	exports = []export{
		{name: "cudaRuntimeGetVersion", args: 1, traits: withoutDriver, run: (*call).runtimeGetVersion},
		{name: "cudaDriverGetVersion", args: 1, traits: withoutDriver, run: (*call).driverGetVersion},
		{name: "cudaGetLastError", args: 0, traits: withoutDriver | infallible | keepsLast, run: (*call).getLastError},
		{name: "cudaPeekAtLastError", args: 0, traits: withoutDriver | infallible | keepsLast, run: (*call).peekAtLastError},
		{name: "cudaGetErrorName", args: 1, traits: withoutDriver | infallible, text: errorName},
		{name: "cudaGetErrorString", args: 1, traits: withoutDriver | infallible, text: errorText},

		{name: "cudaGetDeviceCount", args: 1, traits: withoutContext, run: (*call).getDeviceCount},
		{name: "cudaSetDevice", args: 1, traits: withoutContext, run: (*call).setDevice},
		{name: "cudaGetDevice", args: 1, traits: withoutContext, run: (*call).getDevice},
		{name: "cudaGetDeviceProperties", args: 2, traits: withoutContext, run: (*call).getDeviceProperties},
		{name: "cudaGetDeviceProperties_v2", args: 2, since: 12000, until: 13000, traits: withoutContext, run: (*call).getDevicePropertiesV2},
		{name: "cudaDeviceGetAttribute", args: 3, traits: withoutContext, run: (*call).deviceGetAttribute},
		{name: "cudaDeviceGetPCIBusId", args: 3, traits: withoutContext, run: (*call).deviceGetPCIBusID},
		{name: "cudaDeviceCanAccessPeer", args: 3, traits: withoutContext, run: (*call).deviceCanAccessPeer},
		{name: "cudaDeviceEnablePeerAccess", args: 2, run: (*call).deviceEnablePeerAccess},
		{name: "cudaDeviceDisablePeerAccess", args: 1, run: (*call).deviceDisablePeerAccess},
		{name: "cudaDeviceGetStreamPriorityRange", args: 2, run: (*call).deviceGetStreamPriorityRange},
		{name: "cudaDeviceSynchronize", args: 0, run: (*call).deviceSynchronize},
		{name: "cudaDeviceReset", args: 0, traits: withoutContext, run: (*call).deviceReset},
		{name: "cudaMemGetInfo", args: 2, run: (*call).memGetInfo},

		{name: "cudaMalloc", args: 2, run: (*call).malloc},
		{name: "cudaFree", args: 1, run: (*call).free},
		{name: "cudaMallocAsync", args: 3, stream: 3, run: (*call).mallocAsync},
		{name: "cudaFreeAsync", args: 2, stream: 2, run: (*call).freeAsync},
		{name: "cudaHostAlloc", args: 3, run: (*call).hostAlloc},
		{name: "cudaFreeHost", args: 1, run: (*call).freeHost},
		{name: "cudaHostRegister", args: 3, run: (*call).hostRegister},
		{name: "cudaHostUnregister", args: 1, run: (*call).hostUnregister},
		{name: "cudaHostGetFlags", args: 2, run: (*call).hostGetFlags},
		{name: "cudaHostGetDevicePointer", args: 3, run: (*call).hostGetDevicePointer},
		{name: "cudaPointerGetAttributes", args: 2, run: (*call).pointerGetAttributes},

		{name: "cudaMallocManaged", args: 3, run: (*call).mallocManaged},
		{name: "cudaMemPrefetchAsync", args: 4, stream: 4, until: 13000, run: (*call).prefetchToOrdinal},
		{name: "cudaMemPrefetchAsync_v2", args: 5, stream: 5, since: 12020, until: 13000, run: (*call).prefetchToLocation},
		{name: "cudaMemPrefetchAsync", args: 5, stream: 5, since: 13000, run: (*call).prefetchToLocation},
		{name: "cudaMemAdvise", args: 4, until: 13000, run: (*call).adviseOrdinal},
		{name: "cudaMemAdvise_v2", args: 4, since: 12020, until: 13000, run: (*call).adviseLocation},
		{name: "cudaMemAdvise", args: 4, since: 13000, run: (*call).adviseLocation},
		{name: "cudaMemRangeGetAttribute", args: 5, run: (*call).memRangeGetAttribute},
		{name: "cudaMemPrefetchBatchAsync", args: 8, stream: 8, since: 13000, run: (*call).prefetchBatch},
		{name: "cudaMemDiscardBatchAsync", args: 5, stream: 5, since: 13000, run: (*call).discardBatch},

		{name: "cudaMemcpy", args: 4, run: (*call).memcpy},
		{name: "cudaMemcpyAsync", args: 5, stream: 5, run: (*call).memcpyAsync},
		{name: "cudaMemcpyPeerAsync", args: 6, stream: 6, run: (*call).memcpyPeerAsync},
		{name: "cudaMemset", args: 3, run: (*call).memset},
		{name: "cudaMemsetAsync", args: 4, stream: 4, run: (*call).memsetAsync},
		{name: "cudaMemcpyBatchAsync", args: 9, stream: 9, since: 12080, until: 13000, run: (*call).memcpyBatchFailIndex},
		{name: "cudaMemcpyBatchAsync", args: 8, stream: 8, since: 13000, run: (*call).memcpyBatch},

		{name: "cudaStreamCreateWithPriority", args: 3, run: (*call).streamCreateWithPriority},
		{name: "cudaStreamDestroy", args: 1, stream: 1, run: (*call).streamDestroy},
		{name: "cudaStreamQuery", args: 1, stream: 1, run: (*call).streamQuery},
		{name: "cudaStreamSynchronize", args: 1, stream: 1, run: (*call).streamSynchronize},
		{name: "cudaStreamWaitEvent", args: 3, stream: 1, event: 2, run: (*call).streamWaitEvent},
		{name: "cudaStreamGetPriority", args: 2, stream: 1, run: (*call).streamGetPriority},
		{name: "cudaStreamGetFlags", args: 2, stream: 1, run: (*call).streamGetFlags},
		{name: "cudaStreamGetId", args: 2, stream: 1, since: 12000, run: (*call).streamGetID},
		{name: "cudaLaunchHostFunc", args: 3, stream: 1, run: (*call).launchHostFunc},

		{name: "cudaEventCreateWithFlags", args: 2, run: (*call).eventCreateWithFlags},
		{name: "cudaEventDestroy", args: 1, event: 1, run: (*call).eventDestroy},
		{name: "cudaEventRecord", args: 2, stream: 2, event: 1, run: (*call).eventRecord},
		{name: "cudaEventQuery", args: 1, event: 1, run: (*call).eventQuery},
		{name: "cudaEventSynchronize", args: 1, event: 1, run: (*call).eventSynchronize},
		{name: "cudaEventElapsedTime", args: 3, event: 3, run: (*call).eventElapsedTime},

		// The driver's own, in its library: they do not set the runtime's last error.
		{name: "cuModuleLoadDataEx", args: 5, traits: keepsLast, run: (*call).moduleLoad},
		{name: "cuModuleUnload", args: 1, traits: keepsLast, run: (*call).moduleUnload},
		{name: "cuModuleGetFunction", args: 3, traits: keepsLast, run: (*call).moduleGetFunction},
		{name: "cuFuncGetAttribute", args: 3, traits: keepsLast, run: (*call).funcGetAttribute},
		{name: "cuFuncSetAttribute", args: 3, traits: keepsLast, run: (*call).funcSetAttribute},
		{name: "cuLaunchKernel", args: 11, stream: 9, traits: keepsLast, run: (*call).launchKernel},
	}
}
