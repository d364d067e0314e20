// Package probe asks CUDA and NVML about a machine and measures its GPUs, in child processes. A
// driver that hangs or crashes, as on faulty hosts, ends the child process only, and becomes a
// fact about the host.
//
// [Prober.Open] loads libcudart and lists the devices, [Prober.Device] examines one GPU, and
// [Prober.NVML] reads the management library. All of them return when their context ends,
// with what was found so far. A call that did not return is recorded in a doctor.Probe by name.
// Package probe/child runs the processes.
package probe
