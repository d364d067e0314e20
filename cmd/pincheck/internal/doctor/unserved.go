package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
)

// An unserved is a GPU that is not examined, with what is known of it.
type unserved struct {
	*Facts
	g        hostinfo.PCIDevice
	at       node
	own, why string // what gives this process GPUs of its own: see narrowed
	listed   bool   // by the kernel module
	known    *nvml.GPU
	path     string        // of its device node
	node     hostinfo.Node // that cannot be opened, if refused
	refused  bool
}

// serviceOf returns the service of a GPU that is not examined: that of the first reason that holds.
func (f *Facts) serviceOf(g hostinfo.PCIDevice, at node) busGPU {
	u := &unserved{Facts: f, g: g, at: at, known: f.nvmlOf(g), path: "its device node"}
	u.own, u.why = narrowed(f.Host)
	board, listed := boardOf(f.Host, g)
	u.listed = listed
	if board.Minor != "" {
		u.path = "/dev/nvidia" + board.Minor
	}
	u.node, u.refused = nodeAt(f.Host, u.path, board.Minor != "")
	for _, reason := range slices.Concat(reasonsOfTheSystem, reasonsOfChoice, reasonsOfNobody) {
		if one := reason(u); one.service != "" {
			return one
		}
	}
	return missingBy("", "")
}

// A reason returns the service of a GPU, and none if it is not for this reason that it is not examined.
type reason func(*unserved) busGPU

func keptBy(cause, seen string) busGPU {
	return busGPU{service: isExcluded, finding: excludedID, cause: cause, seen: seen}
}

func missingBy(cause, seen string) busGPU {
	return busGPU{service: isReported, finding: missingID, cause: cause, seen: seen}
}

func unexplained(seen string) busGPU { return busGPU{service: isUnexplained, seen: seen} }

// when returns a service if something holds, or else none.
func when(holds bool, one busGPU) busGPU {
	if !holds {
		return busGPU{}
	}
	return one
}

// reasonsOfTheSystem are what the hardware, the kernel and its module have done, which no choice of a process explains.
var reasonsOfTheSystem = []reason{
	func(u *unserved) busGPU { return when(u.g.OffBus, busGPU{service: isReported, finding: offBusID}) },
	func(u *unserved) busGPU {
		return when(u.g.VirtualFunction, keptBy("virtual_function", u.g.Dir()+"/physfn exists"))
	},
	func(u *unserved) busGPU {
		return when(u.g.SwitchedOff, keptBy("switched_off", "/proc/acpi/bbswitch: "+u.g.Address+" OFF"))
	},
	func(u *unserved) busGPU {
		return when(u.g.Driver != "" && u.g.Driver != nvidiaDriver, keptBy("driver", u.g.Dir()+"/driver is "+u.g.Driver))
	},
	func(u *unserved) busGPU {
		return when(u.g.Override != "" && u.g.Override != nvidiaDriver, keptBy("override", u.g.Dir()+"/driver_override is "+u.g.Override))
	},
	func(u *unserved) busGPU {
		return when(told(u.Host, u.g), keptBy("parameter", "/proc/driver/nvidia: GPU Excluded is Yes, or ExcludedGpus contains it"))
	},
	func(u *unserved) busGPU {
		assigned := u.Host.NVIDIA.AssignedGPUs
		return when(u.g.Driver == "" && len(assigned) > 0 && !slices.ContainsFunc(assigned, u.isAt), keptBy("assigned", "NVreg_AssignGpus is "+strings.Join(assigned, ",")))
	},
	func(u *unserved) busGPU {
		return when(slices.ContainsFunc(u.NotChosen, u.isAt), keptBy("device_option", "--device names other GPUs"))
	},
	func(u *unserved) busGPU {
		return when((u.at == nodeGone || u.at == nodeUnlisted) && u.own != "", keptBy(u.own, u.why+"; its device node is missing"))
	},
	func(u *unserved) busGPU {
		_, _, evidence, ok := unsupported(u.Host, u.g)
		return when(ok && u.known == nil && !u.listed, busGPU{service: isReported, finding: tooOldID, seen: evidence})
	},
	func(u *unserved) busGPU {
		cause := "no_driver"
		if u.g.NoWindow {
			cause = "window"
		}
		return when(u.driverless(), missingBy(cause, u.withoutDriver(u.g)))
	},
}

// isAt reports whether an address is the GPU's.
func (u *unserved) isAt(address string) bool { return hostinfo.SamePCI(address, u.g.Address) }

// driverless reports whether no driver holds the GPU, where drivers show because one holds another GPU. A device node
// for each GPU speaks against it.
func (u *unserved) driverless() bool {
	h := u.Host
	asked := u.CUDADevices != nil || len(h.NVIDIA.GPUNodes()) < len(h.GPUs)
	return u.g.Driver == "" && !u.listed && asked && slices.ContainsFunc(h.GPUs, func(o hostinfo.PCIDevice) bool { return o.Driver != "" })
}

// reasonsOfChoice are what somebody wanted.
var reasonsOfChoice = []reason{
	func(u *unserved) busGPU {
		if u.known == nil || !isTrue(u.known.MIG) || u.known.MIGInstances == nil || *u.known.MIGInstances > 0 {
			return busGPU{}
		}
		return busGPU{service: isExcluded, finding: migID, seen: fmt.Sprintf("NVML: GPU %d (%s): MIG is on, with 0 instances", u.known.Index, u.known.PCIBusID)}
	},
	func(u *unserved) busGPU {
		seen := u.instanceShown()
		return when(seen != "", keptBy("mig", seen))
	},
	func(u *unserved) busGPU {
		one, ok := u.hiddenByChoice()
		return when(ok, one)
	},
	func(u *unserved) busGPU {
		if !u.refused || !strings.Contains(u.node.OpenError, eperm) {
			return busGPU{}
		}
		seen := u.node.Path + ": " + u.node.OpenError
		if unit := u.Host.Virt.Unit; unit != "" && u.own == "" {
			return keptBy("unit", seen+"; the process runs in "+unit)
		}
		return keptBy("control_group", seen)
	},
	func(u *unserved) busGPU { return when(u.own == "job", keptBy("job", u.why)) },
	func(u *unserved) busGPU {
		return when(u.ExpectedGPUs > 0 && u.countShown() >= u.ExpectedGPUs,
			keptBy("expected", fmt.Sprintf("--expect-gpus %d, and CUDA shows %d", u.ExpectedGPUs, u.countShown())))
	},
	func(u *unserved) busGPU {
		return when(u.at == nodesUnshown && u.Host.Virt.Container != "", keptBy("container", u.why+"; no device node of a GPU is visible"))
	},
}

// reasonsOfNobody are what is left: nobody chose it, as far as shows.
var reasonsOfNobody = []reason{
	func(u *unserved) busGPU {
		return when(u.at == nodeGone && u.CUDADevices != nil, missingBy("no_node", u.path+" is missing"))
	},
	func(u *unserved) busGPU {
		return when(u.refused && u.node.OpenError != "", missingBy("closed", u.node.Path+": "+u.node.OpenError))
	},
	func(u *unserved) busGPU {
		return when(u.refused && u.node.Closed, missingBy("closed", u.node.Path+" "+u.node.Mode))
	},
	func(u *unserved) busGPU {
		if u.known == nil || u.known.Error == "" {
			return busGPU{}
		}
		return missingBy("", "NVML: "+u.known.Error)
	},
	func(u *unserved) busGPU {
		return when(u.at == nodeUnlisted, unexplained("/proc/driver/nvidia/gpus does not list it"))
	},
	func(u *unserved) busGPU { return when(u.CUDADevices == nil, unexplained("")) }, // CUDA was not asked
	func(u *unserved) busGPU {
		return when(u.at == nodesUnshown && *u.CUDADevices > 0, unexplained("no device node of a GPU is visible"))
	},
	func(u *unserved) busGPU {
		if u.NVML == nil {
			return busGPU{}
		}
		failed := slices.ContainsFunc(u.managed(), func(o *nvml.GPU) bool { return o.Error != "" })
		return when(u.known != nil || u.NVML.Count >= len(u.Host.GPUs) && !failed, unexplained(fmt.Sprintf("NVML shows %d", u.NVML.Count)))
	},
}
