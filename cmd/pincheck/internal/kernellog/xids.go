package kernellog

import "slices"

// A Class is what a Xid is about.
type Class string

// The classes.
const (
	// Program is work of a program that the GPU refused, and its consequences. The hardware is not accused.
	Program Class = "program"
	// Engine is a part of the GPU that stopped: by a program, the driver or the hardware.
	Engine Class = "engine"
	// Firmware is a processor of the GPU that stopped answering.
	Firmware Class = "firmware"
	// Memory is an error of GPU memory.
	Memory Class = "memory"
	// Bus is a GPU that answers nothing.
	Bus Class = "bus"
	// NVLink is a link between GPUs.
	NVLink Class = "nvlink"
	// Init is a GPU that could not be started.
	Init Class = "init"
	// Information is a message about another Xid, or one that needs nothing.
	Information Class = "information"
)

// A Xid is a row of NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors, October 2025).
type Xid struct {
	Number  int
	Class   Class
	Meaning string
	// Action is what the catalogue says to do at once.
	Action string
}

// The actions of the catalogue.
const (
	ignore     = "nothing"
	restart    = "restart the program"
	resetGPU   = "reset the GPU"
	coldStart  = "turn the machine off and on"
	follow     = "follow the Xid beside it"
	support    = "contact support"
	updateSoft = "update the driver"
)

// xids are the Xids that occur today. Those that are not here are unused, or of test equipment.
var xids = slices.Concat([]Xid{
	{8, Program, "the GPU stopped processing", restart},
	{11, Program, "invalid or corrupted push buffer", restart},
	{13, Program, "graphics engine exception, such as an access out of bounds", restart},
	{25, Program, "invalid push buffer", restart},
	{31, Program, "page fault of GPU memory", restart},
	{32, Program, "invalid or corrupted push buffer", restart},
	{37, Engine, "error of the context-switch firmware", ignore},
	{38, Engine, "watchdog of the context-switch firmware", ignore},
	{43, Program, "the GPU stopped processing the work of a program", ignore},
	{44, Engine, "fault during a context switch", ignore},
	{45, Program, "work was removed after an earlier error, or its program ended", follow},
	{46, Engine, "the GPU stopped processing", resetGPU},
	{48, Memory, "uncorrectable ECC error", resetGPU},
	{54, Engine, "auxiliary power is not connected", coldStart},
	{56, Engine, "display engine error", support},
	{57, Engine, "error while programming the video memory interface", support},
	{58, Engine, "unstable video memory interface", support},
	{59, Firmware, "internal microcontroller error", resetGPU},
	{60, Engine, "video processor exception", restart},
	{61, Firmware, "internal microcontroller breakpoint", resetGPU},
	{62, Firmware, "internal microcontroller halt", resetGPU},
	{63, Memory, "a page or row of GPU memory was retired or remapped", ignore},
	{64, Memory, "a page or row of GPU memory could not be retired or remapped", resetGPU},
	{66, Engine, "illegal access by the driver", ignore},
	{67, Engine, "illegal access by the driver", ignore},
	{68, Engine, "video decoder exception", restart},
	{69, Program, "graphics engine class error", restart},
	{73, Engine, "video encoder error", restart},
	{74, NVLink, "NVLink error", resetGPU},
	{78, Engine, "the vGPU could not start", updateSoft},
	{79, Bus, "the GPU has fallen off the bus", coldStart},
	{80, Program, "corrupted data was sent to the GPU", restart},
	{81, Engine, "error of the VGA subsystem", support},
	{82, Engine, "JPEG decoder error", restart},
	{86, Engine, "optical flow accelerator exception", restart},
	{92, Memory, "high rate of corrected ECC errors", ignore},
	{93, Information, "wear limit of the InfoROM", ignore},
	{94, Memory, "contained memory error", restart},
	{95, Memory, "uncontained memory error", resetGPU},
	{106, Information, "test message", ignore},
	{107, Information, "test message", ignore},
	{109, Engine, "timeout of a context switch", resetGPU},
	{110, Engine, "security fault", resetGPU},
	{119, Firmware, "the GPU system processor (GSP) does not answer", resetGPU},
	{120, Firmware, "error of the GPU system processor (GSP)", resetGPU},
	{121, NVLink, "error of the link between CPU and GPU (C2C)", ignore},
	{122, Firmware, "read or write of the SPI flash failed", support},
	{123, Firmware, "the power management unit does not answer", resetGPU},
	{136, NVLink, "training of a link failed", resetGPU},
	{137, NVLink, "NVLink privilege error, mostly of a program that used memory of another GPU", ignore},
	{140, Memory, "unrecovered ECC error", resetGPU},
	{141, Engine, "CUDA fast path error", ignore},
	{142, Engine, "video encoder error", support},
	{143, Init, "GPU initialization error", resetGPU},
	{144, NVLink, "NVLink error (SAW)", resetGPU},
	{145, NVLink, "NVLink error (RLW)", resetGPU},
	{146, NVLink, "NVLink error (TLW)", resetGPU},
	{147, NVLink, "NVLink error (TREX)", resetGPU},
	{148, NVLink, "NVLink error (NVLPW)", resetGPU},
	{149, NVLink, "NVLink error (NETIR)", resetGPU},
	{150, NVLink, "NVLink error (MSE)", resetGPU},
	{151, Engine, "key rotation error", "restart the virtual machine"},
	{154, Information, "the recovery action of the GPU changed", follow},
	{155, NVLink, "NVLink error", resetGPU},
	{156, Memory, "a resource was retired", resetGPU},
	{157, Memory, "a resource could not be retired", ignore},
	{158, Firmware, "fatal timeout of the GPU", resetGPU},
	{160, Information, "a channel of memory was retired", ignore},
	{161, Memory, "a channel of memory could not be retired", ignore},
	{167, Bus, "fatal timeout of PCI Express", coldStart},
	{168, Memory, "errors in protected memory reduce the capacity", support},
	{169, Firmware, "internal microcontroller halt", resetGPU},
	{171, Memory, "uncorrectable error of DRAM", follow},
	{172, Memory, "uncorrectable error of SRAM", follow},
},
	several("copy engine exception", restart, 39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135),
	several("video decoder error", restart, 83, 84, 88, 89, 96, 97, 98),
	several("JPEG decoder error", restart, 99, 100, 101, 102, 103, 104, 105),
)

// several are Xids of engines of one kind.
func several(meaning, action string, numbers ...int) (rows []Xid) {
	for _, n := range numbers {
		rows = append(rows, Xid{n, Engine, meaning, action})
	}
	return rows
}

// Lookup returns the row of a Xid. A Xid that the catalogue does not explain counts as an error of an engine.
func Lookup(number int) Xid {
	if i := slices.IndexFunc(xids, func(x Xid) bool { return x.Number == number }); i >= 0 {
		return xids[i]
	}
	return Xid{Number: number, Class: Engine, Meaning: "not in NVIDIA's catalogue", Action: support}
}
