package cudart

// The codes of CUDA 11.8 to 13.0: Err + the C name without cudaError, and
// Success, which no method returns as an error.
const (
	Success                           Code = 0     // no error
	ErrInvalidValue                   Code = 1     // invalid argument
	ErrMemoryAllocation               Code = 2     // out of memory
	ErrInitializationError            Code = 3     // initialization error
	ErrCudartUnloading                Code = 4     // driver shutting down
	ErrProfilerDisabled               Code = 5     // profiler disabled while using external profiling tool
	ErrProfilerNotInitialized         Code = 6     // profiler not initialized: call cudaProfilerInitialize()
	ErrProfilerAlreadyStarted         Code = 7     // profiler already started
	ErrProfilerAlreadyStopped         Code = 8     // profiler already stopped
	ErrInvalidConfiguration           Code = 9     // invalid configuration argument
	ErrInvalidPitchValue              Code = 12    // invalid pitch argument
	ErrInvalidSymbol                  Code = 13    // invalid device symbol
	ErrInvalidHostPointer             Code = 16    // invalid host pointer
	ErrInvalidDevicePointer           Code = 17    // invalid device pointer
	ErrInvalidTexture                 Code = 18    // invalid texture reference
	ErrInvalidTextureBinding          Code = 19    // texture is not bound to a pointer
	ErrInvalidChannelDescriptor       Code = 20    // invalid channel descriptor
	ErrInvalidMemcpyDirection         Code = 21    // invalid copy direction for memcpy
	ErrAddressOfConstant              Code = 22    // invalid address of constant
	ErrTextureFetchFailed             Code = 23    // fetch from texture failed
	ErrTextureNotBound                Code = 24    // cannot fetch from a texture that is not bound
	ErrSynchronizationError           Code = 25    // incorrect use of __syncthreads()
	ErrInvalidFilterSetting           Code = 26    // linear filtering not supported for non-float type
	ErrInvalidNormSetting             Code = 27    // read as normalized float not supported for 32-bit non float type
	ErrMixedDeviceExecution           Code = 28    // device emulation mode and device execution mode cannot be mixed
	ErrNotYetImplemented              Code = 31    // feature not yet implemented
	ErrMemoryValueTooLarge            Code = 32    // memory size or pointer value too large to fit in 32 bit
	ErrStubLibrary                    Code = 34    // CUDA driver is a stub library
	ErrInsufficientDriver             Code = 35    // CUDA driver version is insufficient for CUDA runtime version
	ErrCallRequiresNewerDriver        Code = 36    // API call is not supported in the installed CUDA driver
	ErrInvalidSurface                 Code = 37    // invalid surface reference
	ErrDuplicateVariableName          Code = 43    // duplicate global variable looked up by string name
	ErrDuplicateTextureName           Code = 44    // duplicate texture looked up by string name
	ErrDuplicateSurfaceName           Code = 45    // duplicate surface looked up by string name
	ErrDevicesUnavailable             Code = 46    // CUDA-capable device(s) is/are busy or unavailable
	ErrIncompatibleDriverContext      Code = 49    // incompatible driver context
	ErrMissingConfiguration           Code = 52    // __global__ function call is not configured
	ErrPriorLaunchFailure             Code = 53    // unspecified launch failure in prior launch
	ErrLaunchMaxDepthExceeded         Code = 65    // launch would exceed maximum depth of nested launches
	ErrLaunchFileScopedTex            Code = 66    // launch failed because kernel uses unsupported, file-scoped textures (texture objects are supported)
	ErrLaunchFileScopedSurf           Code = 67    // launch failed because kernel uses unsupported, file-scoped surfaces (surface objects are supported)
	ErrSyncDepthExceeded              Code = 68    // cudaDeviceSynchronize failed because caller's grid depth exceeds cudaLimitDevRuntimeSyncDepth
	ErrLaunchPendingCountExceeded     Code = 69    // launch failed because launch would exceed cudaLimitDevRuntimePendingLaunchCount
	ErrInvalidDeviceFunction          Code = 98    // invalid device function
	ErrNoDevice                       Code = 100   // no CUDA-capable device is detected
	ErrInvalidDevice                  Code = 101   // invalid device ordinal
	ErrDeviceNotLicensed              Code = 102   // device doesn't have valid Grid license
	ErrSoftwareValidityNotEstablished Code = 103   // integrity checks failed
	ErrStartupFailure                 Code = 127   // startup failure in cuda runtime
	ErrInvalidKernelImage             Code = 200   // device kernel image is invalid
	ErrDeviceUninitialized            Code = 201   // invalid device context
	ErrMapBufferObjectFailed          Code = 205   // mapping of buffer object failed
	ErrUnmapBufferObjectFailed        Code = 206   // unmapping of buffer object failed
	ErrArrayIsMapped                  Code = 207   // array is mapped
	ErrAlreadyMapped                  Code = 208   // resource already mapped
	ErrNoKernelImageForDevice         Code = 209   // no kernel image is available for execution on the device
	ErrAlreadyAcquired                Code = 210   // resource already acquired
	ErrNotMapped                      Code = 211   // resource not mapped
	ErrNotMappedAsArray               Code = 212   // resource not mapped as array
	ErrNotMappedAsPointer             Code = 213   // resource not mapped as pointer
	ErrECCUncorrectable               Code = 214   // uncorrectable ECC error encountered
	ErrUnsupportedLimit               Code = 215   // limit is not supported on this architecture
	ErrDeviceAlreadyInUse             Code = 216   // exclusive-thread device already in use by a different thread
	ErrPeerAccessUnsupported          Code = 217   // peer access is not supported between these two devices
	ErrInvalidPtx                     Code = 218   // a PTX JIT compilation failed
	ErrInvalidGraphicsContext         Code = 219   // invalid OpenGL or DirectX context
	ErrNvlinkUncorrectable            Code = 220   // uncorrectable NVLink error detected during the execution
	ErrJitCompilerNotFound            Code = 221   // PTX JIT compiler library not found
	ErrUnsupportedPtxVersion          Code = 222   // the provided PTX was compiled with an unsupported toolchain.
	ErrJitCompilationDisabled         Code = 223   // PTX JIT compilation was disabled
	ErrUnsupportedExecAffinity        Code = 224   // the provided execution affinity is not supported
	ErrUnsupportedDevSideSync         Code = 225   // the provided PTX contains unsupported call to cudaDeviceSynchronize
	ErrContained                      Code = 226   // Invalid access of peer GPU memory over nvlink or a hardware error
	ErrInvalidSource                  Code = 300   // device kernel image is invalid
	ErrFileNotFound                   Code = 301   // file not found
	ErrSharedObjectSymbolNotFound     Code = 302   // shared object symbol not found
	ErrSharedObjectInitFailed         Code = 303   // shared object initialization failed
	ErrOperatingSystem                Code = 304   // OS call failed or operation not supported on this OS
	ErrInvalidResourceHandle          Code = 400   // invalid resource handle
	ErrIllegalState                   Code = 401   // the operation cannot be performed in the present state
	ErrLossyQuery                     Code = 402   // attempted introspection would be semantically lossy
	ErrSymbolNotFound                 Code = 500   // named symbol not found
	ErrNotReady                       Code = 600   // device not ready
	ErrIllegalAddress                 Code = 700   // an illegal memory access was encountered
	ErrLaunchOutOfResources           Code = 701   // too many resources requested for launch
	ErrLaunchTimeout                  Code = 702   // the launch timed out and was terminated
	ErrLaunchIncompatibleTexturing    Code = 703   // launch uses incompatible texturing mode
	ErrPeerAccessAlreadyEnabled       Code = 704   // peer access is already enabled
	ErrPeerAccessNotEnabled           Code = 705   // peer access has not been enabled
	ErrSetOnActiveProcess             Code = 708   // cannot set while device is active in this process
	ErrContextIsDestroyed             Code = 709   // context is destroyed
	ErrAssert                         Code = 710   // device-side assert triggered
	ErrTooManyPeers                   Code = 711   // peer mapping resources exhausted
	ErrHostMemoryAlreadyRegistered    Code = 712   // part or all of the requested memory range is already mapped
	ErrHostMemoryNotRegistered        Code = 713   // pointer does not correspond to a registered memory region
	ErrHardwareStackError             Code = 714   // hardware stack error
	ErrIllegalInstruction             Code = 715   // an illegal instruction was encountered
	ErrMisalignedAddress              Code = 716   // misaligned address
	ErrInvalidAddressSpace            Code = 717   // operation not supported on global/shared address space
	ErrInvalidPc                      Code = 718   // invalid program counter
	ErrLaunchFailure                  Code = 719   // unspecified launch failure
	ErrCooperativeLaunchTooLarge      Code = 720   // too many blocks in cooperative launch
	ErrTensorMemoryLeak               Code = 721   // tensor memory not completely freed
	ErrNotPermitted                   Code = 800   // operation not permitted
	ErrNotSupported                   Code = 801   // operation not supported
	ErrSystemNotReady                 Code = 802   // system not yet initialized
	ErrSystemDriverMismatch           Code = 803   // system has unsupported display driver / cuda driver combination
	ErrCompatNotSupportedOnDevice     Code = 804   // forward compatibility was attempted on non supported HW
	ErrMpsConnectionFailed            Code = 805   // MPS client failed to connect to the MPS control daemon or the MPS server
	ErrMpsRpcFailure                  Code = 806   // the remote procedural call between the MPS server and the MPS client failed
	ErrMpsServerNotReady              Code = 807   // MPS server is not ready to accept new MPS client requests
	ErrMpsMaxClientsReached           Code = 808   // the hardware resources required to create MPS client have been exhausted
	ErrMpsMaxConnectionsReached       Code = 809   // the hardware resources required to support device connections have been exhausted
	ErrMpsClientTerminated            Code = 810   // the MPS client has been terminated by the server
	ErrCdpNotSupported                Code = 811   // is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it
	ErrCdpVersionMismatch             Code = 812   // unsupported interaction between different versions of CUDA Dynamic Parallelism
	ErrStreamCaptureUnsupported       Code = 900   // operation not permitted when stream is capturing
	ErrStreamCaptureInvalidated       Code = 901   // operation failed due to a previous error during capture
	ErrStreamCaptureMerge             Code = 902   // operation would result in a merge of separate capture sequences
	ErrStreamCaptureUnmatched         Code = 903   // capture was not ended in the same stream as it began
	ErrStreamCaptureUnjoined          Code = 904   // capturing stream has unjoined work
	ErrStreamCaptureIsolation         Code = 905   // dependency created on uncaptured work in another stream
	ErrStreamCaptureImplicit          Code = 906   // operation would make the legacy stream depend on a capturing blocking stream
	ErrCapturedEvent                  Code = 907   // operation not permitted on an event last recorded in a capturing stream
	ErrStreamCaptureWrongThread       Code = 908   // attempt to terminate a thread-local capture sequence from another thread
	ErrTimeout                        Code = 909   // wait operation timed out
	ErrGraphExecUpdateFailure         Code = 910   // the graph update was not performed because it included changes which violated constraints specific to instantiated graph update
	ErrExternalDevice                 Code = 911   // an async error has occured in external entity outside of CUDA
	ErrInvalidClusterSize             Code = 912   // a kernel launch error has occurred due to cluster misconfiguration
	ErrFunctionNotLoaded              Code = 913   // the function handle is not loaded when calling an API that requires a loaded function
	ErrInvalidResourceType            Code = 914   // one or more resources passed in are not valid resource types for the operation
	ErrInvalidResourceConfiguration   Code = 915   // one or more resources are insufficient or non-applicable for the operation
	ErrUnknown                        Code = 999   // unknown error
	ErrApiFailureBase                 Code = 10000 // api failure base
)

// codeInfo is what cudaGetErrorName and cudaGetErrorString say of a code.
type codeInfo struct {
	code       Code
	name, text string
}

// codeTable holds every code above, sorted by value. Names and texts are those
// of the newest library that has the code, word for word, flaws included, so
// that a search for a message finds what others wrote about it.
var codeTable = [...]codeInfo{
	{Success, "cudaSuccess", "no error"},
	{ErrInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
	{ErrMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
	{ErrInitializationError, "cudaErrorInitializationError", "initialization error"},
	{ErrCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
	{ErrProfilerDisabled, "cudaErrorProfilerDisabled", "profiler disabled while using external profiling tool"},
	{ErrProfilerNotInitialized, "cudaErrorProfilerNotInitialized", "profiler not initialized: call cudaProfilerInitialize()"},
	{ErrProfilerAlreadyStarted, "cudaErrorProfilerAlreadyStarted", "profiler already started"},
	{ErrProfilerAlreadyStopped, "cudaErrorProfilerAlreadyStopped", "profiler already stopped"},
	{ErrInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
	{ErrInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
	{ErrInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
	{ErrInvalidHostPointer, "cudaErrorInvalidHostPointer", "invalid host pointer"},
	{ErrInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
	{ErrInvalidTexture, "cudaErrorInvalidTexture", "invalid texture reference"},
	{ErrInvalidTextureBinding, "cudaErrorInvalidTextureBinding", "texture is not bound to a pointer"},
	{ErrInvalidChannelDescriptor, "cudaErrorInvalidChannelDescriptor", "invalid channel descriptor"},
	{ErrInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
	{ErrAddressOfConstant, "cudaErrorAddressOfConstant", "invalid address of constant"},
	{ErrTextureFetchFailed, "cudaErrorTextureFetchFailed", "fetch from texture failed"},
	{ErrTextureNotBound, "cudaErrorTextureNotBound", "cannot fetch from a texture that is not bound"},
	{ErrSynchronizationError, "cudaErrorSynchronizationError", "incorrect use of __syncthreads()"},
	{ErrInvalidFilterSetting, "cudaErrorInvalidFilterSetting", "linear filtering not supported for non-float type"},
	{ErrInvalidNormSetting, "cudaErrorInvalidNormSetting", "read as normalized float not supported for 32-bit non float type"},
	{ErrMixedDeviceExecution, "cudaErrorMixedDeviceExecution", "device emulation mode and device execution mode cannot be mixed"},
	{ErrNotYetImplemented, "cudaErrorNotYetImplemented", "feature not yet implemented"},
	{ErrMemoryValueTooLarge, "cudaErrorMemoryValueTooLarge", "memory size or pointer value too large to fit in 32 bit"},
	{ErrStubLibrary, "cudaErrorStubLibrary", "CUDA driver is a stub library"},
	{ErrInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
	{ErrCallRequiresNewerDriver, "cudaErrorCallRequiresNewerDriver", "API call is not supported in the installed CUDA driver"},
	{ErrInvalidSurface, "cudaErrorInvalidSurface", "invalid surface reference"},
	{ErrDuplicateVariableName, "cudaErrorDuplicateVariableName", "duplicate global variable looked up by string name"},
	{ErrDuplicateTextureName, "cudaErrorDuplicateTextureName", "duplicate texture looked up by string name"},
	{ErrDuplicateSurfaceName, "cudaErrorDuplicateSurfaceName", "duplicate surface looked up by string name"},
	{ErrDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
	{ErrIncompatibleDriverContext, "cudaErrorIncompatibleDriverContext", "incompatible driver context"},
	{ErrMissingConfiguration, "cudaErrorMissingConfiguration", "__global__ function call is not configured"},
	{ErrPriorLaunchFailure, "cudaErrorPriorLaunchFailure", "unspecified launch failure in prior launch"},
	{ErrLaunchMaxDepthExceeded, "cudaErrorLaunchMaxDepthExceeded", "launch would exceed maximum depth of nested launches"},
	{ErrLaunchFileScopedTex, "cudaErrorLaunchFileScopedTex", "launch failed because kernel uses unsupported, file-scoped textures (texture objects are supported)"},
	{ErrLaunchFileScopedSurf, "cudaErrorLaunchFileScopedSurf", "launch failed because kernel uses unsupported, file-scoped surfaces (surface objects are supported)"},
	{ErrSyncDepthExceeded, "cudaErrorSyncDepthExceeded", "cudaDeviceSynchronize failed because caller's grid depth exceeds cudaLimitDevRuntimeSyncDepth"},
	{ErrLaunchPendingCountExceeded, "cudaErrorLaunchPendingCountExceeded", "launch failed because launch would exceed cudaLimitDevRuntimePendingLaunchCount"},
	{ErrInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
	{ErrNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
	{ErrInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
	{ErrDeviceNotLicensed, "cudaErrorDeviceNotLicensed", "device doesn't have valid Grid license"},
	{ErrSoftwareValidityNotEstablished, "cudaErrorSoftwareValidityNotEstablished", "integrity checks failed"},
	{ErrStartupFailure, "cudaErrorStartupFailure", "startup failure in cuda runtime"},
	{ErrInvalidKernelImage, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
	{ErrDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
	{ErrMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
	{ErrUnmapBufferObjectFailed, "cudaErrorUnmapBufferObjectFailed", "unmapping of buffer object failed"},
	{ErrArrayIsMapped, "cudaErrorArrayIsMapped", "array is mapped"},
	{ErrAlreadyMapped, "cudaErrorAlreadyMapped", "resource already mapped"},
	{ErrNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
	{ErrAlreadyAcquired, "cudaErrorAlreadyAcquired", "resource already acquired"},
	{ErrNotMapped, "cudaErrorNotMapped", "resource not mapped"},
	{ErrNotMappedAsArray, "cudaErrorNotMappedAsArray", "resource not mapped as array"},
	{ErrNotMappedAsPointer, "cudaErrorNotMappedAsPointer", "resource not mapped as pointer"},
	{ErrECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
	{ErrUnsupportedLimit, "cudaErrorUnsupportedLimit", "limit is not supported on this architecture"},
	{ErrDeviceAlreadyInUse, "cudaErrorDeviceAlreadyInUse", "exclusive-thread device already in use by a different thread"},
	{ErrPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
	{ErrInvalidPtx, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
	{ErrInvalidGraphicsContext, "cudaErrorInvalidGraphicsContext", "invalid OpenGL or DirectX context"},
	{ErrNvlinkUncorrectable, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"},
	{ErrJitCompilerNotFound, "cudaErrorJitCompilerNotFound", "PTX JIT compiler library not found"},
	{ErrUnsupportedPtxVersion, "cudaErrorUnsupportedPtxVersion", "the provided PTX was compiled with an unsupported toolchain."},
	{ErrJitCompilationDisabled, "cudaErrorJitCompilationDisabled", "PTX JIT compilation was disabled"},
	{ErrUnsupportedExecAffinity, "cudaErrorUnsupportedExecAffinity", "the provided execution affinity is not supported"},
	{ErrUnsupportedDevSideSync, "cudaErrorUnsupportedDevSideSync", "the provided PTX contains unsupported call to cudaDeviceSynchronize"},
	{ErrContained, "cudaErrorContained", "Invalid access of peer GPU memory over nvlink or a hardware error"},
	{ErrInvalidSource, "cudaErrorInvalidSource", "device kernel image is invalid"},
	{ErrFileNotFound, "cudaErrorFileNotFound", "file not found"},
	{ErrSharedObjectSymbolNotFound, "cudaErrorSharedObjectSymbolNotFound", "shared object symbol not found"},
	{ErrSharedObjectInitFailed, "cudaErrorSharedObjectInitFailed", "shared object initialization failed"},
	{ErrOperatingSystem, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
	{ErrInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
	{ErrIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
	{ErrLossyQuery, "cudaErrorLossyQuery", "attempted introspection would be semantically lossy"},
	{ErrSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
	{ErrNotReady, "cudaErrorNotReady", "device not ready"},
	{ErrIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
	{ErrLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
	{ErrLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
	{ErrLaunchIncompatibleTexturing, "cudaErrorLaunchIncompatibleTexturing", "launch uses incompatible texturing mode"},
	{ErrPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
	{ErrPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
	{ErrSetOnActiveProcess, "cudaErrorSetOnActiveProcess", "cannot set while device is active in this process"},
	{ErrContextIsDestroyed, "cudaErrorContextIsDestroyed", "context is destroyed"},
	{ErrAssert, "cudaErrorAssert", "device-side assert triggered"},
	{ErrTooManyPeers, "cudaErrorTooManyPeers", "peer mapping resources exhausted"},
	{ErrHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
	{ErrHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
	{ErrHardwareStackError, "cudaErrorHardwareStackError", "hardware stack error"},
	{ErrIllegalInstruction, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
	{ErrMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
	{ErrInvalidAddressSpace, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"},
	{ErrInvalidPc, "cudaErrorInvalidPc", "invalid program counter"},
	{ErrLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
	{ErrCooperativeLaunchTooLarge, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
	{ErrTensorMemoryLeak, "cudaErrorTensorMemoryLeak", "tensor memory not completely freed"},
	{ErrNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
	{ErrNotSupported, "cudaErrorNotSupported", "operation not supported"},
	{ErrSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
	{ErrSystemDriverMismatch, "cudaErrorSystemDriverMismatch", "system has unsupported display driver / cuda driver combination"},
	{ErrCompatNotSupportedOnDevice, "cudaErrorCompatNotSupportedOnDevice", "forward compatibility was attempted on non supported HW"},
	{ErrMpsConnectionFailed, "cudaErrorMpsConnectionFailed", "MPS client failed to connect to the MPS control daemon or the MPS server"},
	{ErrMpsRpcFailure, "cudaErrorMpsRpcFailure", "the remote procedural call between the MPS server and the MPS client failed"},
	{ErrMpsServerNotReady, "cudaErrorMpsServerNotReady", "MPS server is not ready to accept new MPS client requests"},
	{ErrMpsMaxClientsReached, "cudaErrorMpsMaxClientsReached", "the hardware resources required to create MPS client have been exhausted"},
	{ErrMpsMaxConnectionsReached, "cudaErrorMpsMaxConnectionsReached", "the hardware resources required to support device connections have been exhausted"},
	{ErrMpsClientTerminated, "cudaErrorMpsClientTerminated", "the MPS client has been terminated by the server"},
	{ErrCdpNotSupported, "cudaErrorCdpNotSupported", "is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it"},
	{ErrCdpVersionMismatch, "cudaErrorCdpVersionMismatch", "unsupported interaction between different versions of CUDA Dynamic Parallelism"},
	{ErrStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
	{ErrStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
	{ErrStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
	{ErrStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
	{ErrStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
	{ErrStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
	{ErrStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
	{ErrCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
	{ErrStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
	{ErrTimeout, "cudaErrorTimeout", "wait operation timed out"},
	{ErrGraphExecUpdateFailure, "cudaErrorGraphExecUpdateFailure", "the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"},
	{ErrExternalDevice, "cudaErrorExternalDevice", "an async error has occured in external entity outside of CUDA"},
	{ErrInvalidClusterSize, "cudaErrorInvalidClusterSize", "a kernel launch error has occurred due to cluster misconfiguration"},
	{ErrFunctionNotLoaded, "cudaErrorFunctionNotLoaded", "the function handle is not loaded when calling an API that requires a loaded function"},
	{ErrInvalidResourceType, "cudaErrorInvalidResourceType", "one or more resources passed in are not valid resource types for the operation"},
	{ErrInvalidResourceConfiguration, "cudaErrorInvalidResourceConfiguration", "one or more resources are insufficient or non-applicable for the operation"},
	{ErrUnknown, "cudaErrorUnknown", "unknown error"},
	{ErrApiFailureBase, "cudaErrorApiFailureBase", "api failure base"},
}
