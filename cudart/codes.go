package cudart

import (
	_ "embed"
	"strconv"
	"strings"
	"sync"
)

// Codes that this package alone acts on.
const (
	success                     Code = 0   // no error
	errHardwareStackError       Code = 714 // hardware stack error
	errInvalidAddressSpace      Code = 717 // operation not supported on global/shared address space
	errInvalidPc                Code = 718 // invalid program counter
	errDeviceUninitialized      Code = 201 // invalid device context
	errPeerAccessAlreadyEnabled Code = 704 // peer access is already enabled
)

// The codes that callers of this package may test for: Err + the C name without cudaError. Any
// other code can be compared as a number, such as Code(900), and has a name and text too.
const (
	ErrInvalidValue                Code = 1   // invalid argument
	ErrMemoryAllocation            Code = 2   // out of memory
	ErrInitializationError         Code = 3   // initialization error
	ErrCudartUnloading             Code = 4   // driver shutting down
	ErrInvalidConfiguration        Code = 9   // invalid configuration argument
	ErrStubLibrary                 Code = 34  // CUDA driver is a stub library
	ErrInsufficientDriver          Code = 35  // CUDA driver version is insufficient for CUDA runtime version
	ErrCallRequiresNewerDriver     Code = 36  // API call is not supported in the installed CUDA driver
	ErrDevicesUnavailable          Code = 46  // CUDA-capable device(s) is/are busy or unavailable
	ErrNoDevice                    Code = 100 // no CUDA-capable device is detected
	ErrInvalidDevice               Code = 101 // invalid device ordinal
	ErrInvalidKernelImage          Code = 200 // device kernel image is invalid
	ErrNoKernelImageForDevice      Code = 209 // no kernel image is available for execution on the device
	ErrECCUncorrectable            Code = 214 // uncorrectable ECC error encountered
	ErrPeerAccessUnsupported       Code = 217 // peer access is not supported between these two devices
	ErrInvalidPtx                  Code = 218 // a PTX JIT compilation failed
	ErrNvlinkUncorrectable         Code = 220 // uncorrectable NVLink error detected during the execution
	ErrUnsupportedPtxVersion       Code = 222 // the provided PTX was compiled with an unsupported toolchain.
	ErrOperatingSystem             Code = 304 // OS call failed or operation not supported on this OS
	ErrInvalidResourceHandle       Code = 400 // invalid resource handle
	ErrSymbolNotFound              Code = 500 // named symbol not found
	ErrNotReady                    Code = 600 // device not ready
	ErrIllegalAddress              Code = 700 // an illegal memory access was encountered
	ErrLaunchOutOfResources        Code = 701 // too many resources requested for launch
	ErrLaunchTimeout               Code = 702 // the launch timed out and was terminated
	ErrPeerAccessNotEnabled        Code = 705 // peer access has not been enabled
	ErrContextIsDestroyed          Code = 709 // context is destroyed
	ErrAssert                      Code = 710 // device-side assert triggered
	ErrHostMemoryAlreadyRegistered Code = 712 // part or all of the requested memory range is already mapped
	ErrHostMemoryNotRegistered     Code = 713 // pointer does not correspond to a registered memory region
	ErrIllegalInstruction          Code = 715 // an illegal instruction was encountered
	ErrMisalignedAddress           Code = 716 // misaligned address
	ErrLaunchFailure               Code = 719 // unspecified launch failure
	ErrNotPermitted                Code = 800 // operation not permitted
	ErrNotSupported                Code = 801 // operation not supported
	ErrSystemNotReady              Code = 802 // system not yet initialized
	ErrSystemDriverMismatch        Code = 803 // system has unsupported display driver / cuda driver combination
	ErrCompatNotSupportedOnDevice  Code = 804 // forward compatibility was attempted on non supported HW
	ErrMpsConnectionFailed         Code = 805 // MPS client failed to connect to the MPS control daemon or the MPS server
	ErrMpsServerNotReady           Code = 807 // MPS server is not ready to accept new MPS client requests
	ErrUnknown                     Code = 999 // unknown error
)

// codesText has the codes of CUDA 11.8 to 13.0, one a line: number, C name, the driver's name, text.
//
//go:embed codes.txt
var codesText string

// A codeInfo holds the results of cudaGetErrorName and cudaGetErrorString for a code, and the
// name of the CUresult with the same number, "" if there is none.
type codeInfo struct{ name, driver, text string }

// codeTable returns the codes of codesText.
var codeTable = sync.OnceValue(func() map[Code]codeInfo {
	table := make(map[Code]codeInfo)
	for line := range strings.Lines(codesText) {
		if number, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " "); number != "#" {
			n, _ := strconv.Atoi(number) // the tests check the file
			name, rest, _ := strings.Cut(rest, " ")
			driver, text, _ := strings.Cut(rest, " ")
			table[Code(n)] = codeInfo{name, strings.TrimPrefix(driver, "-"), text}
		}
	}
	return table
})
