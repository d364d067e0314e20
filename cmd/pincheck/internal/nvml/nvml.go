// Package nvml reads the health of GPUs from NVIDIA's management library,
// libnvidia-ml.so.1, which comes with the driver: memory errors, clocks and why they are
// reduced, modes, the PCI Express link, and the processes on a GPU.
//
// The library is optional, and so is each function: what the library, the driver or the
// GPU does not offer is unknown, and no error. It may hang on hosts that are sick, as may
// nvidia-smi: call [Read] in a process of its own.
package nvml

import (
	"errors"
	"fmt"
)

// A Report has the results of the library.
type Report struct {
	Library string `json:"library"`           // its path
	Driver  string `json:"driver,omitempty"`  // 580.159.04
	Version string `json:"version,omitempty"` // of NVML
	// ConfidentialComputing is that the feature is on; nil if unknown.
	ConfidentialComputing *bool `json:"confidential_computing,omitempty"`
	// Count is the number of GPUs of the host that this process may see.
	Count int `json:"count,omitempty"`
	// GPUs are these, in NVML's order, which is that of PCI addresses: fewer than Count if
	// the library did not return from a call. CUDA_VISIBLE_DEVICES does not count here.
	GPUs []GPU `json:"gpus"`
}

// GPU is one GPU. Pointers are nil, and strings and slices empty, where NVML does not say.
type GPU struct {
	Index    int    `json:"index"`
	Name     string `json:"name,omitempty"`
	UUID     string `json:"uuid,omitempty"`
	PCIBusID string `json:"pci_bus_id,omitempty"` // 00000000:06:00.0
	// Error is why nothing else is known of it: the GPU is lost, or closed to this user.
	Error string `json:"error,omitempty"`

	MemoryErrors
	Wear
	Clocks

	Persistence *bool `json:"persistence_mode,omitempty"`
	ComputeMode *int  `json:"compute_mode,omitempty"` // 0 default, 2 prohibited, 3 one process only
	MIG         *bool `json:"mig,omitempty"`
	// MIGInstances are those of a GPU with MIG on.
	MIGInstances *int `json:"mig_instances,omitempty"`

	Link

	// Processes with a CUDA context on the GPU, this one among them if it has one.
	Processes []Process `json:"processes,omitempty"`
}

// MemoryErrors are errors of a GPU's memory, and what was done about them.
type MemoryErrors struct {
	// ECC errors, since the driver was loaded (volatile) and ever (aggregate).
	ECC                  *bool `json:"ecc,omitempty"`
	CorrectedVolatile    *int  `json:"ecc_corrected_volatile,omitempty"`
	UncorrectedVolatile  *int  `json:"ecc_uncorrected_volatile,omitempty"`
	CorrectedAggregate   *int  `json:"ecc_corrected_aggregate,omitempty"`
	UncorrectedAggregate *int  `json:"ecc_uncorrected_aggregate,omitempty"`
	// RetiredPages are those of GPUs before Ampere, RemappedRows those after. RemapPending is that either wait
	// for a reset of the GPU, RemapFailed that no row was left to remap to.
	RetiredPages *int  `json:"retired_pages,omitempty"`
	RemappedRows *int  `json:"remapped_rows,omitempty"`
	RemapPending *bool `json:"remap_pending,omitempty"`
	RemapFailed  *bool `json:"remap_failed,omitempty"`
}

// Clocks are a GPU's clocks, temperature and load.
type Clocks struct {
	// Throttle are the reasons why clocks are reduced now: see throttleReasons.
	Throttle []string `json:"throttle,omitempty"`
	// Clocks in MHz, as they are now, and at most. 0 is unknown.
	SMClock        int `json:"sm_mhz,omitempty"`
	SMClockMax     int `json:"sm_max_mhz,omitempty"`
	MemoryClock    int `json:"memory_mhz,omitempty"`
	MemoryClockMax int `json:"memory_max_mhz,omitempty"`
	Temperature    int `json:"temperature_c,omitempty"`
	// Utilization is the share of the last second in which a kernel ran, in percent.
	Utilization *int `json:"utilization_percent,omitempty"`
}

// Link is the PCI Express link, now, and at most of the GPU in its slot.
type Link struct {
	PCIeGeneration    *int `json:"pcie_generation,omitempty"`
	PCIeWidth         *int `json:"pcie_width,omitempty"`
	PCIeGenerationMax *int `json:"pcie_max_generation,omitempty"`
	PCIeWidthMax      *int `json:"pcie_max_width,omitempty"`
	PCIeReplays       *int `json:"pcie_replays,omitempty"` // since the driver was loaded
}

// Wear is what of a GPU is used up or damaged, and what the driver asks for.
type Wear struct {
	// BanksWithoutSpares is the number of memory banks that have no row left to remap to.
	BanksWithoutSpares *int `json:"banks_without_spare_rows,omitempty"`
	// InfoROMCorrupted is that the checksum of the board's InfoROM is wrong.
	InfoROMCorrupted *bool `json:"inforom_corrupted,omitempty"`
	// Recovery is what the driver asks for after an error, such as none or reset.
	Recovery string `json:"recovery_action,omitempty"`
}

// Process is a process with a CUDA context on a GPU.
type Process struct {
	PID    int    `json:"pid"`
	Name   string `json:"name,omitempty"`         // not by NVML: by who knows the process
	Memory int    `json:"memory_bytes,omitempty"` // of the GPU; 0 if unknown
}

// ErrNoLibrary is returned by [Read] where no libnvidia-ml.so.1 loads.
var ErrNoLibrary = errors.New("no libnvidia-ml.so.1 that loads")

// Error is a call that failed.
type Error struct {
	Call string // the C function
	Code int    // nvmlReturn_t
}

func (e *Error) Error() string {
	text := codes[e.Code]
	if text == "" {
		text = "an error that is not in NVML's documentation"
	}
	return fmt.Sprintf("%s: %s (%d)", e.Call, text, e.Code)
}

// The codes of nvmlReturn_t that have a meaning here.
const (
	missing          = -1 // ours, for a function that the library does not have
	success          = 0
	insufficientSize = 7
	corruptedInfoROM = 14
)

// codes are those of nvmlReturn_t, in nvml.h's words.
var codes = map[int]string{
	missing: "the library does not have it",
	1:       "NVML was not initialized", 2: "invalid argument", 3: "not supported", 4: "no permission",
	6: "not found", insufficientSize: "insufficient size", 8: "insufficient power", 9: "the driver is not loaded",
	10: "timeout", 11: "interrupt request problem", 12: "the library does not load", 13: "function not found",
	corruptedInfoROM: "corrupted infoROM", 15: "the GPU is lost: it has fallen off the bus or is otherwise inaccessible",
	16: "the GPU needs a reset", 17: "the operating system refuses", 18: "the driver's library and its kernel module have different versions",
	19: "the GPU is in use", 20: "out of memory", 21: "no data", 25: "MIG is in the way", 999: "unknown error",
}
