package cudasim

import "github.com/gopinned/pinned/cudart"

// traits are what a call needs before it runs.
type traits uint8

const (
	withoutDriver  traits = 1 << iota // works with no usable driver
	withoutContext                    // makes no context on the current device
	infallible                        // cannot fail, so is not counted for FailCall
	keepsLast                         // does not set the thread's last error
	hidden                            // OnCall is not called: the number of calls depends on threads
	blamesArgument                    // libcuda's calls its arguments invalid on a thread without a context
)

// An export is one C function of libcudart, of libcuda, or of both if they take the same
// arguments. A name that changed its signature between versions has a row for each signature.
type export struct {
	name   string         // in libcudart, "" for none
	driver string         // in libcuda, "" for none
	as     string         // the function of libcudart that one of libcuda alone stands for, "" for none
	args   int            // number of arguments
	stream int            // the argument that is a stream, counted from 1; 0 for none
	event  int            // the argument that is an event, counted from 1; 0 for none
	since  cudart.Version // the first version with this signature
	until  cudart.Version // the first version without it, 0 for none
	traits traits
	run    func(*call) cudart.Code
	text   func(cudart.Code) uintptr // instead of run, for functions that return a string
}

// nameIn is the name under which a version of the library exports the function, "" for none.
func (e *export) nameIn(api cudart.API, v cudart.Version) string {
	switch {
	case v < e.since || e.until != 0 && v >= e.until:
		return ""
	case api == cudart.DriverAPI:
		return e.driver
	}
	return e.name
}

// exports are the functions of all versions. A slot has an entry for each.
var exports []export

// The table refers to methods which refer to the table, so it is filled here.
func init() {
	exports = []export{
		{name: "cudaRuntimeGetVersion", args: 1, traits: withoutDriver, run: (*call).runtimeGetVersion},
		{name: "cudaDriverGetVersion", driver: "cuDriverGetVersion", args: 1, traits: withoutDriver, run: (*call).driverGetVersion},
		{name: "cudaGetLastError", args: 0, traits: withoutDriver | infallible | keepsLast, run: (*call).getLastError},
		{name: "cudaPeekAtLastError", args: 0, traits: withoutDriver | infallible | keepsLast, run: (*call).peekAtLastError},
		{name: "cudaGetErrorName", args: 1, traits: withoutDriver | infallible, text: errorName},
		{name: "cudaGetErrorString", args: 1, traits: withoutDriver | infallible, text: errorText},

		{name: "cudaGetDeviceCount", driver: "cuDeviceGetCount", args: 1, traits: withoutContext, run: (*call).getDeviceCount},
		{name: "cudaSetDevice", args: 1, traits: withoutContext, run: ofDevice(0, (*call).setDevice)},
		{name: "cudaGetDevice", args: 1, traits: withoutContext, run: (*call).getDevice},
		{name: "cudaGetDeviceProperties", args: 2, traits: withoutContext, run: (*call).getDeviceProperties},
		{name: "cudaGetDeviceProperties_v2", args: 2, since: 12000, until: 13000, traits: withoutContext, run: (*call).getDeviceProperties},
		{name: "cudaDeviceGetAttribute", driver: "cuDeviceGetAttribute", args: 3, traits: withoutContext, run: ofDevice(2, (*call).deviceGetAttribute)},
		{name: "cudaDeviceGetPCIBusId", driver: "cuDeviceGetPCIBusId", args: 3, traits: withoutContext, run: ofDevice(2, (*call).deviceGetPCIBusID)},
		{name: "cudaDeviceCanAccessPeer", driver: "cuDeviceCanAccessPeer", args: 3, traits: withoutContext, run: (*call).deviceCanAccessPeer},
		{name: "cudaDeviceEnablePeerAccess", args: 2, run: (*call).deviceEnablePeerAccess},
		{name: "cudaDeviceDisablePeerAccess", args: 1, run: (*call).deviceDisablePeerAccess},
		{name: "cudaDeviceGetStreamPriorityRange", driver: "cuCtxGetStreamPriorityRange", args: 2, run: (*call).deviceGetStreamPriorityRange},
		{name: "cudaDeviceSynchronize", driver: "cuCtxSynchronize", args: 0, run: (*call).deviceSynchronize},
		{name: "cudaDeviceReset", args: 0, traits: withoutContext, run: (*call).deviceReset},
		{name: "cudaMemGetInfo", driver: "cuMemGetInfo_v2", args: 2, run: (*call).memGetInfo},

		{name: "cudaMalloc", driver: "cuMemAlloc_v2", args: 2, run: (*call).malloc},
		{name: "cudaFree", driver: "cuMemFree_v2", args: 1, run: freeing("memory", deviceBlock, managedBlock)},
		{name: "cudaMallocAsync", driver: "cuMemAllocAsync", args: 3, stream: 3, run: onStream(2, (*call).mallocAsync)},
		{name: "cudaFreeAsync", driver: "cuMemFreeAsync", args: 2, stream: 2, run: onStream(1, (*call).freeAsync)},
		{name: "cudaHostAlloc", driver: "cuMemHostAlloc", args: 3, run: (*call).hostAlloc},
		{name: "cudaFreeHost", driver: "cuMemFreeHost", args: 1, run: freeing("host memory", hostBlock, hostBlock)},
		{name: "cudaHostRegister", driver: "cuMemHostRegister_v2", args: 3, run: (*call).hostRegister},
		{name: "cudaHostUnregister", driver: "cuMemHostUnregister", args: 1, run: (*call).hostUnregister},
		{name: "cudaHostGetFlags", driver: "cuMemHostGetFlags", args: 2, run: (*call).hostGetFlags},
		{name: "cudaHostGetDevicePointer", driver: "cuMemHostGetDevicePointer_v2", args: 3, run: (*call).hostGetDevicePointer},
		{name: "cudaPointerGetAttributes", args: 2, run: (*call).pointerGetAttributes},

		{name: "cudaMallocManaged", driver: "cuMemAllocManaged", args: 3, run: (*call).mallocManaged},
		{name: "cudaMemPrefetchAsync", driver: "cuMemPrefetchAsync", args: 4, stream: 4, until: 13000, run: (*call).prefetchToOrdinal},
		{name: "cudaMemPrefetchAsync_v2", driver: "cuMemPrefetchAsync_v2", args: 5, stream: 5, since: 12020, until: 13000, run: (*call).prefetchToLocation},
		{name: "cudaMemPrefetchAsync", driver: "cuMemPrefetchAsync_v2", args: 5, stream: 5, since: 13000, run: (*call).prefetchToLocation},
		{name: "cudaMemAdvise", driver: "cuMemAdvise", args: 4, until: 13000, run: (*call).adviseOrdinal},
		{name: "cudaMemAdvise_v2", driver: "cuMemAdvise_v2", args: 4, since: 12020, until: 13000, run: (*call).adviseLocation},
		{name: "cudaMemAdvise", driver: "cuMemAdvise_v2", args: 4, since: 13000, run: (*call).adviseLocation},
		{name: "cudaMemRangeGetAttribute", driver: "cuMemRangeGetAttribute", args: 5, run: (*call).memRangeGetAttribute},
		{name: "cudaMemDiscardBatchAsync", driver: "cuMemDiscardBatchAsync", args: 5, stream: 5, since: 13000, run: onStream(4, (*call).discardBatch)},

		{name: "cudaMemcpy", args: 4, run: (*call).memcpy},
		{name: "cudaMemcpyAsync", args: 5, stream: 5, run: (*call).memcpyAsync},
		{name: "cudaMemcpyPeerAsync", args: 6, stream: 6, run: (*call).memcpyPeerAsync},
		{name: "cudaMemset", driver: "cuMemsetD8_v2", args: 3, run: (*call).memset},
		{name: "cudaMemsetAsync", driver: "cuMemsetD8Async", args: 4, stream: 4, run: (*call).memsetAsync},
		{name: "cudaMemcpyBatchAsync", driver: "cuMemcpyBatchAsync", args: 9, stream: 9, since: 12080, until: 13000, traits: blamesArgument, run: (*call).memcpyBatchFailIndex},
		{name: "cudaMemcpyBatchAsync", driver: "cuMemcpyBatchAsync_v2", args: 8, stream: 8, since: 13000, traits: blamesArgument, run: (*call).memcpyBatch},

		{name: "cudaStreamCreateWithPriority", driver: "cuStreamCreateWithPriority", args: 3, run: (*call).streamCreateWithPriority},
		{name: "cudaStreamDestroy", driver: "cuStreamDestroy_v2", args: 1, stream: 1, run: (*call).streamDestroy},
		{name: "cudaStreamQuery", driver: "cuStreamQuery", args: 1, stream: 1, run: onStream(0, (*call).streamQuery)},
		{name: "cudaStreamSynchronize", driver: "cuStreamSynchronize", args: 1, stream: 1, run: onStream(0, (*call).streamSynchronize)},
		{name: "cudaStreamWaitEvent", driver: "cuStreamWaitEvent", args: 3, stream: 1, event: 2, run: onStream(0, (*call).streamWaitEvent)},
		{name: "cudaStreamGetPriority", driver: "cuStreamGetPriority", args: 2, stream: 1, run: onStream(0, (*call).streamGetPriority)},
		{name: "cudaStreamGetFlags", driver: "cuStreamGetFlags", args: 2, stream: 1, run: onStream(0, (*call).streamGetFlags)},
		{name: "cudaStreamGetId", driver: "cuStreamGetId", args: 2, stream: 1, since: 12000, run: onStream(0, (*call).streamGetID)},
		{name: "cudaLaunchHostFunc", driver: "cuLaunchHostFunc", args: 3, stream: 1, run: onStream(0, (*call).launchHostFunc)},

		{name: "cudaEventCreateWithFlags", driver: "cuEventCreate", args: 2, run: (*call).eventCreateWithFlags},
		{name: "cudaEventDestroy", driver: "cuEventDestroy_v2", args: 1, event: 1, run: (*call).eventDestroy},
		{name: "cudaEventRecord", driver: "cuEventRecord", args: 2, stream: 2, event: 1, run: onStream(1, (*call).eventRecord)},
		{name: "cudaEventQuery", driver: "cuEventQuery", args: 1, event: 1, run: (*call).eventQuery},
		{name: "cudaEventSynchronize", driver: "cuEventSynchronize", args: 1, event: 1, run: (*call).eventSynchronize},
		{name: "cudaEventElapsedTime", driver: "cuEventElapsedTime", args: 3, event: 3, run: (*call).eventElapsedTime},

		{driver: "cuInit", args: 1, traits: withoutDriver, run: (*call).initDriver},
		{driver: "cuGetProcAddress", args: 4, since: 11030, until: 12000, traits: withoutDriver | infallible | hidden, run: (*call).getProcAddress},
		{driver: "cuGetProcAddress_v2", args: 5, since: 12000, traits: withoutDriver | infallible | hidden, run: (*call).getProcAddress},
		{driver: "cuDeviceGet", args: 2, traits: withoutContext, run: ofDevice(1, (*call).deviceGet)},
		{driver: "cuDeviceGetName", as: "cudaGetDeviceProperties", args: 3, traits: withoutContext, run: ofDevice(2, (*call).deviceGetName)},
		{driver: "cuDeviceGetUuid", args: 2, traits: withoutContext, run: ofDevice(1, (*call).deviceGetUUID)},
		{driver: "cuDevicePrimaryCtxRetain", args: 2, traits: withoutContext, run: ofDevice(1, (*call).primaryContextRetain)},
		{driver: "cuDevicePrimaryCtxRelease_v2", args: 1, traits: withoutContext, run: ofDevice(0, (*call).primaryContextRelease)},
		{driver: "cuDevicePrimaryCtxReset_v2", args: 1, traits: withoutContext, run: ofDevice(0, (*call).primaryContextReset)},
		{driver: "cuDevicePrimaryCtxGetState", args: 3, traits: withoutContext | infallible | hidden, run: ofDevice(0, (*call).primaryContextGetState)},
		{driver: "cuCtxSetCurrent", as: "cudaSetDevice", args: 1, traits: withoutContext | infallible | hidden, run: (*call).contextSetCurrent},
		{driver: "cuCtxGetDevice", as: "cudaGetDevice", args: 1, traits: withoutContext, run: (*call).contextGetDevice},
		{driver: "cuCtxEnablePeerAccess", as: "cudaDeviceEnablePeerAccess", args: 2, run: withPeer((*call).deviceEnablePeerAccess)},
		{driver: "cuCtxDisablePeerAccess", as: "cudaDeviceDisablePeerAccess", args: 1, run: withPeer((*call).deviceDisablePeerAccess)},
		{driver: "cuPointerGetAttributes", as: "cudaPointerGetAttributes", args: 4, run: (*call).pointerAttributesOfDriver},
		{driver: "cuMemcpy", as: "cudaMemcpy", args: 3, run: copies(anyDirection)},
		{driver: "cuMemcpyHtoD_v2", as: "cudaMemcpy", args: 3, run: copies(hostToDevice)},
		{driver: "cuMemcpyDtoH_v2", as: "cudaMemcpy", args: 3, run: copies(deviceToHost)},
		{driver: "cuMemcpyDtoD_v2", as: "cudaMemcpy", args: 3, run: copies(deviceToDevice)},
		{driver: "cuMemcpyAsync", as: "cudaMemcpyAsync", args: 4, stream: 4, run: copiesAsync(anyDirection)},
		{driver: "cuMemcpyHtoDAsync_v2", as: "cudaMemcpyAsync", args: 4, stream: 4, run: copiesAsync(hostToDevice)},
		{driver: "cuMemcpyDtoHAsync_v2", as: "cudaMemcpyAsync", args: 4, stream: 4, run: copiesAsync(deviceToHost)},
		{driver: "cuMemcpyDtoDAsync_v2", as: "cudaMemcpyAsync", args: 4, stream: 4, run: copiesAsync(deviceToDevice)},
		{driver: "cuMemcpyPeerAsync", as: "cudaMemcpyPeerAsync", args: 6, stream: 6, run: (*call).memcpyContextsAsync},

		// The driver's own, in its library: they do not set the runtime's last error.
		{name: "cuModuleLoadDataEx", driver: "cuModuleLoadDataEx", args: 5, traits: keepsLast, run: (*call).moduleLoad},
		{name: "cuModuleUnload", driver: "cuModuleUnload", args: 1, traits: keepsLast, run: (*call).moduleUnload},
		{name: "cuModuleGetFunction", driver: "cuModuleGetFunction", args: 3, traits: keepsLast, run: (*call).moduleGetFunction},
		{name: "cuFuncGetAttribute", driver: "cuFuncGetAttribute", args: 3, traits: keepsLast, run: (*call).funcGetAttribute},
		{name: "cuFuncSetAttribute", driver: "cuFuncSetAttribute", args: 3, traits: keepsLast, run: (*call).funcSetAttribute},
		{name: "cuLaunchKernel", driver: "cuLaunchKernel", args: 11, stream: 9, traits: keepsLast, run: (*call).launchKernel},
		{name: "cuMemGetAddressRange_v2", driver: "cuMemGetAddressRange_v2", args: 3, traits: keepsLast, run: (*call).memGetAddressRange},
	}
}
