// Package cudasim simulates a CUDA runtime library with its driver and
// devices, for tests on machines without a GPU, as net/http/httptest does for
// servers.
//
//	sim, err := cudasim.New(cudasim.Config{})
//	rt, err := cudart.Open(cudart.Options{Source: sim})
//	…
//	err = sim.Check() // all given back, nothing misused?
//	err = sim.Close()
//
// A [Sim] is a [cudart.Source]: what it hands out are C function pointers, so
// that package cudart calls it just as it calls libcudart, and any other code
// that takes function pointers can too. It needs no C compiler, and runs on
// Linux (amd64 and arm64); elsewhere [New] returns an error that wraps
// [errors.ErrUnsupported]. Several can be open at once, in parallel tests.
//
// # Versions
//
// Config.Version chooses the personality: which names are exported and which
// signatures they have, how many bytes structs take ([Sim.StructSize]), what
// works without a driver. Memory behind a struct stays untouched, so that a
// canary there proves that the caller made enough room.
//
// # Streams and time
//
// Streams run later and in order, on goroutines. Data lands no earlier than
// the link model ([Link]) says, and no earlier than it can be copied here, and
// a read before synchronising sees the old bytes. [Sim.Hold] and [Sim.Release]
// make that certain. Copies of one direction share an engine. Pageable memory
// is staged: the call returns when the copy is done.
//
// Events tell the time of a virtual clock that knows the link model only: work
// that waits in a queue begins where the work before it ended, and the host
// takes no time. So cudaEventElapsedTime gives the model's figures whatever
// the machine is doing, while wall time is the machine's.
//
// # Memory
//
// Device memory is memory of the host, taken as it is touched, behind
// addresses on which the CPU faults. Copies are checked against allocations
// and registrations: a copy that spans two of them fails. cudaHostRegister
// follows the rules of the driver for overlap, protection and limits, and pins
// nothing. Managed memory is host memory; [Sim.Managed] tells what prefetch
// and advice did to it.
//
// # Threads
//
// The current device and the last error belong to the OS thread, and a new
// thread starts at device 0. Nearly every call makes a context on the current
// device, as with CUDA: [Sim.Contexts] tells where. [Sim.WrongDevice] tells of
// calls that used something of another device than the current one.
//
// # Mistakes and faults
//
// [Sim.Misuses] lists what a real driver would let pass, or punish with a
// crash or a hang. [Sim.Fail], [Sim.FailCall], [Sim.Stall] and
// [Sim.LoseDevice] make calls fail: a test that counts the calls of a run
// ([Sim.TotalCalls]) and repeats it with each of them failing has seen every
// error path. [Sim.Outstanding] counts what was not given back.
//
// # What is not simulated
//
// Kernels, graphs, arrays, IPC and peer mappings; contention between the two
// directions of a link; page faults and migration of managed memory; priorities;
// the time that calls themselves, pinning and host functions take. Properties
// of devices other than name, UUID and memory are zero: read attributes.
package cudasim
