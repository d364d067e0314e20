//go:build linux && !android && (amd64 || arm64)

package nvml

import (
	"encoding/binary"
	"maps"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// at returns the memory at an address that C got.
func at(address uintptr, n int) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), n)
}

func put32(address uintptr, n uint32) { binary.NativeEndian.PutUint32(at(address, 4), n) }
func put64(address uintptr, n uint64) { binary.NativeEndian.PutUint64(at(address, 8), n) }
func putText(address uintptr, s string) {
	copy(at(address, len(s)+1), s+"\x00")
}

// handles of the fake GPUs. The second is lost.
const (
	healthy = 0x1000
	lost    = 0x2000
)

// fake returns C functions in the place of the library's, made once: they are never freed.
var fake = sync.OnceValue(func() map[string]uintptr {
	text := func(s string) uintptr {
		return purego.NewCallback(func(_, to, _ uintptr) uintptr { putText(to, s); return success })
	}
	systemText := func(s string) uintptr {
		return purego.NewCallback(func(to, _ uintptr) uintptr { putText(to, s); return success })
	}
	number := func(n uint32) uintptr {
		return purego.NewCallback(func(_, to uintptr) uintptr { put32(to, n); return success })
	}
	numbers := func(n ...uint32) uintptr {
		return purego.NewCallback(func(_, a, b, c, d uintptr) uintptr {
			for i, to := range []uintptr{a, b, c, d}[:len(n)] {
				put32(to, n[i])
			}
			return success
		})
	}
	clock := func(sm, memory uint32) uintptr {
		return purego.NewCallback(func(_, kind, to uintptr) uintptr {
			put32(to, map[uintptr]uint32{clockSM: sm, clockMemory: memory}[kind])
			return success
		})
	}
	return map[string]uintptr{
		"nvmlInit_v2":                purego.NewCallback(func() uintptr { return success }),
		"nvmlShutdown":               purego.NewCallback(func() uintptr { return success }),
		"nvmlSystemGetDriverVersion": systemText("580.159.04"),
		"nvmlSystemGetNVMLVersion":   systemText("13.580.159.04"),
		"nvmlSystemGetConfComputeState": purego.NewCallback(func(to uintptr) uintptr {
			put32(to, 1)
			put32(to+4, 1)
			put32(to+8, 0)
			return success
		}),
		"nvmlDeviceGetCount_v2": purego.NewCallback(func(to uintptr) uintptr { put32(to, 2); return success }),
		"nvmlDeviceGetHandleByIndex_v2": purego.NewCallback(func(i, to uintptr) uintptr {
			put64(to, []uint64{healthy, lost}[i])
			return success
		}),
		"nvmlDeviceGetName": text("NVIDIA H200"),
		"nvmlDeviceGetUUID": text("GPU-00000000-1111-2222-3333-444444444444"),
		"nvmlDeviceGetPciInfo_v3": purego.NewCallback(func(d, to uintptr) uintptr {
			if d == lost {
				return 15
			}
			b := at(to, 68)
			copy(b, "0000:06:00.0")
			copy(b[busIDAt:], "00000000:06:00.0")
			return success
		}),
		"nvmlDeviceGetEccMode": numbers(1, 1),
		"nvmlDeviceGetTotalEccErrors": purego.NewCallback(func(_, kind, counter, to uintptr) uintptr {
			put64(to, uint64(10*kind+counter)+1<<33)
			return success
		}),
		"nvmlDeviceGetRetiredPages": purego.NewCallback(func(_, cause, count, addresses uintptr) uintptr {
			if addresses != 0 {
				return 2
			}
			put32(count, uint32(2*cause))
			return []uintptr{success, insufficientSize}[cause]
		}),
		"nvmlDeviceGetRetiredPagesPendingStatus": number(1),
		"nvmlDeviceValidateInforom":              purego.NewCallback(func(_ uintptr) uintptr { return corruptedInfoROM }),
		"nvmlDeviceGetRowRemapperHistogram": purego.NewCallback(func(_, to uintptr) uintptr {
			for i := range uintptr(5) {
				put32(to+4*i, uint32(i+1))
			}
			return success
		}),
		"nvmlDeviceGetFieldValues": purego.NewCallback(func(_, count, to uintptr) uintptr {
			if count != 1 || binary.NativeEndian.Uint32(at(to, 4)) != fieldRecovery {
				return 2
			}
			put32(to+fieldValueAt, 4)
			return success
		}),
		"nvmlDeviceGetRemappedRows": numbers(2, 1, 0, 0),
		"nvmlDeviceGetClockInfo":    clock(1980, 3201),
		"nvmlDeviceGetMaxClockInfo": clock(1980, 6402),
		"nvmlDeviceGetTemperature":  purego.NewCallback(func(_, sensor, to uintptr) uintptr { put32(to, 61+uint32(sensor)); return success }),
		"nvmlDeviceGetUtilizationRates": purego.NewCallback(func(_, to uintptr) uintptr {
			put32(to, 97)
			put32(to+4, 12)
			return success
		}),
		// The name of older drivers.
		"nvmlDeviceGetCurrentClocksThrottleReasons": purego.NewCallback(func(_, to uintptr) uintptr { put64(to, 0x1|0x40); return success }),
		"nvmlDeviceGetPersistenceMode":              number(0),
		"nvmlDeviceGetComputeMode":                  number(3),
		"nvmlDeviceGetMigMode":                      numbers(1, 0),
		"nvmlDeviceGetMaxMigDeviceCount":            number(7),
		"nvmlDeviceGetMigDeviceHandleByIndex": purego.NewCallback(func(_, i, to uintptr) uintptr {
			if i > 1 {
				return 6
			}
			put64(to, 0x3000)
			return success
		}),
		"nvmlDeviceGetCurrPcieLinkGeneration": number(5),
		"nvmlDeviceGetCurrPcieLinkWidth":      number(8),
		"nvmlDeviceGetMaxPcieLinkGeneration":  number(5),
		"nvmlDeviceGetMaxPcieLinkWidth":       number(16),
		"nvmlDeviceGetPcieReplayCounter":      number(17),
		"nvmlDeviceGetComputeRunningProcesses_v3": purego.NewCallback(func(_, count, list uintptr) uintptr {
			if binary.NativeEndian.Uint32(at(count, 4)) < 2 {
				return insufficientSize
			}
			put32(count, 2)
			put32(list, 4711)
			put64(list+8, 1<<30)
			put32(list+processSize, 4712)
			put64(list+processSize+8, ^uint64(0)) // not available
			return success
		}),
		"fails": purego.NewCallback(func(_, _, _, _ uintptr) uintptr { return 3 }),
	}
})

func reader(functions map[string]uintptr) *library {
	return &library{path: "fake", out: new(results), symbol: func(name string) uintptr { return functions[name] }}
}

func value[T any](v T) *T { return &v }

func TestRead(t *testing.T) {
	l := reader(fake())
	var called []string
	whole := make(map[int]int) // calls by how many GPUs were read before
	l.calling = func(name string, r *Report) {
		called = append(called, name)
		if r != nil {
			assert.Equal(t, 2, r.Count)
			whole[len(r.GPUs)]++
		}
	}
	r, err := l.read()
	require.NoError(t, err)
	const many = 1 << 33
	assert.Equal(t, &Report{
		Library: "fake", Driver: "580.159.04", Version: "13.580.159.04", ConfidentialComputing: value(true), Count: 2,
		GPUs: []GPU{{
			Name: "NVIDIA H200", UUID: "GPU-00000000-1111-2222-3333-444444444444", PCIBusID: "00000000:06:00.0",
			MemoryErrors: MemoryErrors{
				ECC: value(true), CorrectedVolatile: value(many), CorrectedAggregate: value(many + 1),
				UncorrectedVolatile: value(many + 10), UncorrectedAggregate: value(many + 11),
				RetiredPages: value(2),
				RemappedRows: value(3), RemapPending: value(true), RemapFailed: value(false),
			},
			Wear: Wear{BanksWithoutSpares: value(5), InfoROMCorrupted: value(true), Recovery: "drain_and_reset"},
			Clocks: Clocks{
				Throttle: []string{"gpu_idle", "hw_thermal_slowdown"},
				SMClock:  1980, SMClockMax: 1980, MemoryClock: 3201, MemoryClockMax: 6402,
				Temperature: 61, Utilization: value(97),
			},
			Persistence: value(false), ComputeMode: value(3), MIG: value(true), MIGInstances: value(2),
			Link:      Link{PCIeGeneration: value(5), PCIeWidth: value(8), PCIeGenerationMax: value(5), PCIeWidthMax: value(16), PCIeReplays: value(17)},
			Processes: []Process{{PID: 4711, Memory: 1 << 30}, {PID: 4712}},
		}, {
			Index: 1, Name: "NVIDIA H200", UUID: "GPU-00000000-1111-2222-3333-444444444444",
			Error: "nvmlDeviceGetPciInfo_v3: the GPU is lost: it has fallen off the bus or is otherwise inaccessible (15)",
		}},
	}, r)
	assert.Equal(t, "nvmlInit_v2", called[0])
	assert.Equal(t, "nvmlShutdown", called[len(called)-1])
	assert.Equal(t, map[int]int{0: len(called) - 5 - 4 - 1, 1: 4, 2: 1}, whole) // without those before the count, and with nvmlShutdown
}

// A function that is missing, or that fails, leaves its values unknown and no others.
func TestEachFunctionIsOptional(t *testing.T) {
	needed := []string{"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"}
	whole, err := reader(fake()).read()
	require.NoError(t, err)
	for name := range fake() {
		for _, instead := range []uintptr{0, fake()["fails"]} {
			functions := maps.Clone(fake())
			functions[name] = instead
			r, err := reader(functions).read()
			if slices.Contains(needed[:2], name) {
				var failed *Error
				require.ErrorAs(t, err, &failed, name)
				assert.Equal(t, name, failed.Call)
				continue
			}
			require.NoError(t, err, name)
			if name == "nvmlShutdown" || name == "fails" {
				continue
			}
			assert.NotEqual(t, whole, r, name)
			assert.Equal(t, name == needed[2] || name == "nvmlDeviceGetPciInfo_v3" && instead != 0, r.GPUs[0].Error != "", name)
		}
	}
	_, err = reader(nil).read()
	require.ErrorContains(t, err, "nvmlInit_v2")
}

func TestErrors(t *testing.T) {
	assert.EqualError(t, &Error{"nvmlInit_v2", 18}, "nvmlInit_v2: the driver's library and its kernel module have different versions (18)")
	assert.EqualError(t, &Error{"nvmlInit_v2", 12345}, "nvmlInit_v2: an error that is not in NVML's documentation (12345)")
	_, err := Read("/etc/hostname", nil)
	assert.ErrorIs(t, err, ErrNoLibrary)
}
