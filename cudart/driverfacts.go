package cudart

import "strings"

// DriverFacts tells which parts of NVIDIA's driver a host shows this process.
// libcudart needs all of them, and a container may lack any.
type DriverFacts struct {
	LibPath             string   // libcuda.so.1, "" when it was not found
	KernelModuleVersion string   // "580.159.04", "" when no module is loaded
	DeviceNodes         []string // /dev/nvidiactl, /dev/nvidia0, /dev/dxg, ...
}

// String tells each part and whether it is there.
func (d DriverFacts) String() string {
	part := func(what, have string) string {
		if have == "" {
			have = "none"
		}
		return what + " " + have
	}
	return strings.Join([]string{
		part("libcuda", d.LibPath),
		part("kernel module", d.KernelModuleVersion),
		part("device nodes", strings.Join(d.DeviceNodes, " ")),
	}, ", ")
}
