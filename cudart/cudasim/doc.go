// Package cudasim simulates a CUDA runtime library with its driver and devices, or the
// driver's library alone, for tests on machines without a GPU, as net/http/httptest does
// for servers.
//
//	sim, rt := cudasim.Start(t, cudasim.Config{}) // in a test, which fails for what it leaves or misuses
//	rt, err := cudasim.Open(ctx, cudasim.Config{}) // in a program
//
// A [Sim] is a [cudart.Source]. Its symbols are C function pointers, so package
// cudart calls it exactly as it calls libcudart, and other code that takes
// function pointers can use it too. It needs no C compiler. It runs on Linux
// (amd64 and arm64); on other platforms [New] returns an error that wraps
// [errors.ErrUnsupported]. Several can be open at once, in parallel tests.
//
// # Versions
//
// Config.Version selects the runtime to imitate: which names are exported, their
// signatures, the sizes of structs, and what works without a driver. Memory
// after a struct is not written, so a canary there shows whether the caller's
// struct is large enough.
//
// # The driver's library
//
// With Config.API [cudart.DriverAPI] it is libcuda: it exports cuMemAlloc_v2 instead of cudaMalloc,
// and no thread has a context until cuCtxSetCurrent. Faults, counts and misuses keep the names of
// libcudart's functions, so a test works with both: cudaMemcpyAsync stands for each of libcuda's
// asynchronous copies. Functions that libcudart does not have, such as cuDevicePrimaryCtxRetain,
// have their own names. A call on a thread without a context returns CUDA_ERROR_INVALID_CONTEXT and
// is not counted.
//
// # Streams and time
//
// Streams run their operations later and in order, on goroutines. Data lands no
// earlier than the link model ([Link]) says, and a read before synchronising
// finds the old bytes. [Sim.Hold] and [Sim.Release] make the order certain.
// Copies in one direction share an engine. Copies of pageable memory are staged:
// the call returns when the copy is done.
//
// Events have times of a virtual clock, which follows the link model alone: an
// operation in a queue begins where the one before it ended, and the host takes
// no time. cudaEventElapsedTime therefore returns the figures of the model,
// whatever the load on the machine. Wall time is the machine's.
//
// # Full queues
//
// A stream holds 1024 operations that are not done, as many as real drivers do or nearly so
// (Config.QueueDepth). On a full stream every call that enqueues one more blocks until there is
// room: copies, memsets, prefetches, host functions, cudaEventRecord, cudaStreamWaitEvent,
// cudaMallocAsync and cudaFreeAsync. Other streams and calls continue. The wait ends with
// cudaErrorInvalidResourceHandle when the stream is destroyed, with the device's error when that is
// lost, and with cudaErrorCudartUnloading when the Sim is closed. A stream stays full while the Sim
// is held, or while a host function in it runs.
//
// # Memory
//
// Device memory is host memory, allocated as it is accessed. Its addresses are not mapped, so the
// CPU faults on them. Copies are checked against allocations and registrations: a copy that spans
// two of them fails. cudaHostRegister follows the driver's rules for overlap, protection and
// limits, but pins nothing. Managed memory is host memory. Its pages, of 64 KiB, reside on devices,
// on the host, or on several of them if they are read mostly: prefetches move them, and so do
// memsets and copies that access them as device memory, at Link.FaultToDevice. [Sim.TouchManaged]
// stands for an access by the CPU. Pages take device memory: a full device evicts its oldest pages.
// [Sim.ManagedResidence] returns where they are.
//
// # Hosts that refuse to pin
//
// [Hosts] lists hosts on which pinning fails, is limited, or is not needed, each of
// them a Config: [ConfidentialComputing], [WSL], [Linux611], [SharedPageTables] and
// others. A test can scale their limits down. HostMemory is a host that is short of
// memory. On Linux 6.11 to 6.13 a large registration fails and its memory stays
// pinned: a test that [Sim.LeakedBytes] is 0 shows that a program does not try.
//
// Memory of cudaHostAlloc does not start as zeros.
//
// # Peers
//
// Copies between devices go at Link.Peer once one device has been enabled to
// access the other (cudaDeviceEnablePeerAccess). Otherwise they are staged through
// the host, at the speed of the slower of the two links. Config.NoPeerAccess lists
// devices that cannot be enabled, Config.LostPeerCopies those whose direct copies succeed
// although no byte arrives. Peer access that is not disabled is outstanding.
// A copy to or from a lost device fails on the other device's stream, which goes on.
//
// # Kernels
//
// Devices run Go functions instead of kernels: of PTX only the kernels' names and parameters are
// read. The kernels of package kernel are there; Config.Kernels has others. A function
// ([KernelFunc]) does the work of a whole launch, in the order of its stream, on memory that
// [Launch.Read] and [Launch.Write] return. They refuse addresses that the device cannot access:
// then the device is unusable, and a [Misuse] of the kind "illegal access" reports the address. Code that has no kernel
// with a function, cubins and fat binaries fail with cudaErrorNoKernelImageForDevice, and the log
// of the load contains the reason.
//
// # Threads
//
// The current device and the last error belong to the OS thread, and a new thread has device 0.
// Nearly every call makes a context on the current device, as in CUDA: see [Sim.Contexts].
// [Sim.Misuses] reports calls that used an object of a device that was not current, as
// [Misuse] of the kind "wrong device".
//
// # Misuse
//
// [Sim.Misuses] lists what callers did that a real driver lets pass, or punishes
// with a crash or a hang. [Sim.Outstanding] counts what has not been released.
// [Sim.Check] returns both as an error.
//
// # Faults
//
// [Sim.Fail] makes calls of a function fail, once, several times or always, on all
// streams or on one ([Fault]). The error can be the call's own, one that it returns
// after its work, or one of the work that it enqueued, which either stays with the
// device or is returned once. [Sim.LoseDevice] loses a device.
//
// [Sim.FailCall] makes one call of a run fail, whichever function it is. A test
// that counts the calls of a run ([Sim.TotalCalls]) and repeats it with each of them
// failing has seen every path that one error takes.
//
// # Blocked calls
//
// [Sim.Block] makes calls block until the test unblocks them, if ever. For a stream on which no
// call returns:
//
//	unblock := sim.Block("", cudasim.Fault{Stream: stream.Handle(), Times: -1})
//	defer unblock()
//
// [Sim.AwaitBlocked] waits for the moment at which a call is blocked, so that a test
// needs no sleep. A blocked call keeps no other call from running, but it occupies
// an OS thread, as every call from C does: a thousand blocked calls are a thousand
// threads, and Go ends a process that has ten thousand. Close makes blocked calls
// return cudaErrorCudartUnloading.
//
// # What is not simulated
//
// Graphs, arrays and IPC; the threads of kernels, and the time that kernels of Config.Kernels
// take; contention between the two directions of a link;
// managed memory that moves because the process accesses it; stream priorities; the time that
// calls themselves, pinning and host functions take. Properties of devices other
// than name, UUID and memory are zero: read attributes.
package cudasim
