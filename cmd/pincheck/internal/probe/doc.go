// Package probe asks CUDA and NVML about a machine and measures its GPUs, in processes of
// their own: a driver that hangs or crashes, as it does on faulty hosts, is then a
// fact about the host, and not the end.
//
// [Prober.Open] loads libcudart and lists the devices, [Prober.Device] examines one GPU, and
// [Prober.NVML] reads the management library. All of them return when their context ends,
// with what was found until then. What did not return is in a doctor.Probe, with the name
// of the call.
package probe
