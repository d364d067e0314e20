package supportfile

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

func read(t *testing.T, texts ...string) *Collection {
	t.Helper()
	c := &Collection{}
	for _, text := range texts {
		require.NoError(t, c.Read(bufio.NewReaderSize(strings.NewReader(text), Peeked)))
	}
	return c
}

func host(c *Collection) *hostinfo.Host { return hostinfo.Read(c.Files(), nil) }

const smiText = `
==============NVSMI LOG==============

Timestamp                                 : Mon Nov 24 10:12:13 2025
Driver Version                            : 535.104.05
Attached GPUs                             : 1
GPU 00000000:01:00.0
    Product Name                          : NVIDIA X
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Enabled
    PCI
        Device Id                         : 0x26B110DE
        Bus Id                            : 00000000:01:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 1
            Link Width
                Max                       : 16x
                Current                   : 8x
        Replays Since Reset               : 12
    Clocks Event Reasons
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
        SW Power Cap                      : Not Active
    Compute Mode                          : Exclusive_Process
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : 1
            DRAM Uncorrectable            : 2
    Remapped Rows                         : N/A
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 4242
            Type                          : C
            Name                          : python3
            Used GPU Memory               : 500 MiB
`

// Text and XML of nvidia-smi have the same content.
func TestNvidiaSMI(t *testing.T) {
	t.Parallel()
	c := read(t, smiText)
	r := c.NVML()
	require.Len(t, r.GPUs, 1)
	g := r.GPUs[0]
	assert.Equal(t, "535.104.05", r.Driver)
	assert.Equal(t, "NVIDIA X", g.Name)
	assert.Equal(t, 3, *g.UncorrectedVolatile)
	assert.Equal(t, 12, *g.PCIeReplays)
	assert.Equal(t, 3, *g.ComputeMode)
	assert.True(t, *g.MIG)
	assert.Nil(t, g.RemapFailed, "N/A is unknown")
	assert.Nil(t, g.Utilization)
	assert.Equal(t, []string{"hw_slowdown", "hw_thermal_slowdown"}, g.Throttle)
	assert.Equal(t, 4242, g.Processes[0].PID)
	assert.Equal(t, 500<<20, g.Processes[0].Memory)
	h := host(c)
	require.Len(t, h.GPUs, 1)
	assert.Equal(t, hostinfo.Link{CurrentSpeed: 2.5, CurrentWidth: 8, MaxSpeed: 16, MaxWidth: 16}, h.GPUs[0].Link)
	assert.Equal(t, "0x26b1", h.GPUs[0].DeviceID)
	assert.Equal(t, "535.104.05", h.NVIDIA.DriverVersion)

	x := read(t, `<?xml version="1.0" ?><nvidia_smi_log><driver_version>535.104.05</driver_version><gpu id="00000000:01:00.0"><product_name>NVIDIA X</product_name>
<persistence_mode>Enabled</persistence_mode><mig_mode><current_mig>Enabled</current_mig></mig_mode><pci><pci_device_id>26B110DE</pci_device_id><pci_bus_id>00000000:01:00.0</pci_bus_id>
<pci_gpu_link_info><pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen><link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths></pci_gpu_link_info>
<replay_counter>12</replay_counter></pci><clocks_event_reasons><clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons><compute_mode>Exclusive_Process</compute_mode>
<ecc_errors><volatile><sram_uncorrectable_parity>1</sram_uncorrectable_parity><dram_uncorrectable>2</dram_uncorrectable></volatile></ecc_errors>
<processes><process_info><pid>4242</pid><type>C</type><used_memory>500 MiB</used_memory></process_info></processes></gpu></nvidia_smi_log>`)
	assert.Equal(t, r, x.NVML())
	assert.Equal(t, h.GPUs, host(x).GPUs)
	assert.Equal(t, []string{SMIXML}, x.Kinds())
}

// If nvidia-smi cannot reach a GPU, only the error is known.
func TestNvidiaSMIComplains(t *testing.T) {
	t.Parallel()
	c := read(t, "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.  Reboot the system to recover this GPU\n")
	assert.Equal(t, "0000:01:00.0", c.NVML().GPUs[0].PCIBusID)
	assert.Contains(t, c.NVML().GPUs[0].Error, lostWords)
	assert.Contains(t, read(t, "Failed to initialize NVML: Driver/library version mismatch\n").Mismatch, "mismatch")
}

const lspciText = `00:01.0 PCI bridge: Intel Corporation Device 4c01 (rev 01) (prog-if 00 [Normal decode])
	Bus: primary=00, secondary=01, subordinate=02, sec-latency=0
		LnkCap:	Port #2, Speed 16GT/s, Width x16, ASPM L1
		LnkSta:	Speed 16GT/s (ok), Width x16 (ok)
	Kernel driver in use: pcieport

01:00.0 PCI bridge: Broadcom Device c010 (prog-if 00 [Normal decode])
	Bus: primary=01, secondary=02, subordinate=02, sec-latency=0
		LnkSta:	Speed 8GT/s (downgraded), Width x8 (downgraded)

02:00.0 VGA compatible controller: NVIDIA Corporation GA102 [GeForce RTX 3090] (rev a1) (prog-if 00 [VGA controller])
	NUMA node: 1
	Region 0: Memory at fa000000 (32-bit, non-prefetchable) [size=16M]
	Region 1: Memory at <unassigned> (64-bit, prefetchable)
		LnkCap:	Port #0, Speed 16GT/s, Width x16, ASPM L0s L1
		LnkSta:	Speed 2.5GT/s (downgraded), Width x16 (ok)
	Kernel driver in use: nvidia
00: de 10 04 22 07 05 10 00 a1 00 00 03 00 00 80 00
10: 00 00 00 fa 0c 00 00 c0 00 00 00 00 0c 00 00 d0

02:00.1 Audio device: NVIDIA Corporation GA102 High Definition Audio Controller (rev a1)
	Kernel driver in use: snd_hda_intel
`

// The bridges above a GPU are found by their buses, and its ids in its configuration.
func TestLspci(t *testing.T) {
	t.Parallel()
	h := host(read(t, lspciText))
	require.Len(t, h.GPUs, 1)
	g := h.GPUs[0]
	assert.Equal(t, "0000:02:00.0", g.Address)
	assert.Equal(t, "0x2204", g.DeviceID)
	assert.Equal(t, "nvidia", g.Driver)
	assert.Equal(t, 1, *g.NUMANode)
	assert.True(t, g.NoWindow)
	assert.False(t, g.OffBus)
	require.Len(t, g.Upstream, 2)
	assert.Equal(t, hostinfo.Link{Address: "0000:01:00.0", CurrentSpeed: 8, CurrentWidth: 8}, g.Upstream[0])
	assert.Equal(t, "0000:00:01.0", g.Upstream[1].Address)
	off := strings.Replace(strings.Replace(lspciText, "(rev a1) (prog-if 00 [VGA controller])", "(rev ff) (prog-if ff)\n\t!!! Unknown header type 7f", 1), "00: de 10 04 22 07", "00: ff ff ff ff ff", 1)
	assert.True(t, host(read(t, off)).GPUs[0].OffBus)
	// Denied capabilities are no link, and a bus that leads to itself ends.
	denied := "02:00.0 3D controller: NVIDIA Corporation GA100 (rev a1)\n\tCapabilities: <access denied>\n"
	assert.Zero(t, host(read(t, denied)).GPUs[0].Link)
	host(read(t, "01:00.0 PCI bridge: X\n\tBus: primary=01, secondary=01, subordinate=01\n02:00.0 PCI bridge: X\n\tBus: primary=00, secondary=03\n03:00.0 PCI bridge: X\n\tBus: primary=00, secondary=02\n"+denied))
}

// A report has the log of this boot alone, and its copies of files are the host's.
func TestBugReport(t *testing.T) {
	t.Parallel()
	const section = "____________________________________________\n\n"
	report := section + reportTitle + ".  Please include this file\n\nuname: Linux host-1 6.1.0-9-amd64 #1 SMP x86_64 GNU/Linux\n\n" +
		section + "*** /proc/driver/nvidia/./gpus/0000:02:00.0/power does not exist\n\n" +
		section + "*** /sys/bus/pci/devices/0000:02:00.0/power/runtime_status\n*** ls: -r--r--r-- 1 root root 0 2025-11-24 /sys\nsuspended\n\n" +
		section + "/usr/bin/lspci -nnDvvvxxxx\n\n" + lspciText + section + "/usr/bin/nvidia-smi --query\n" + strings.ReplaceAll(smiText, "00000000:01:00.0", "00000000:02:00.0") +
		section + "Scanning kernel log files for NVIDIA kernel messages:\n\n  /var/log/messages:\nNov 20 10:00:00 h kernel: NVRM: Xid (PCI:0000:02:00): 48, a\n\n" +
		"  journalctl -b -0:\nNov 24 10:00:00 h kernel: NVRM: Xid (PCI:0000:02:00): 31, b\nNov 24 10:00:00 h kernel: NVRM: Xid (PCI:0000:02:00): 13, c\n\n  journalctl -b -1:\nNov 23 10:00:00 h kernel: NVRM: Xid (PCI:0000:02:00): 79, d\n\n" +
		section + "dmesg:\n\n[    1.000000] Linux version 6.1.0\n[   99.000000] NVRM: Xid (PCI:0000:02:00): 31, b\n" +
		section + "*** /proc/meminfo\n*** ls: -r--r--r-- 1 root root 0 2025-11-24 /proc/meminfo\nMemTotal:       1000 kB\n" +
		section + "*** /etc/shadow\n*** ls: -r--r--r-- 1 root root 0 2025-11-24 /etc/shadow\nroot:x\n"
	c := read(t, report)
	h := host(c)
	assert.Equal(t, []string{BugReport}, c.Kinds())
	assert.Equal(t, "6.1.0-9-amd64", h.Kernel.Release)
	assert.Equal(t, 1000<<10, h.Memory.Total)
	var xids []int
	for _, e := range h.KernelLog.Events {
		xids = append(xids, e.Xid)
		assert.Equal(t, 1, e.Count, "the journal repeats it")
	}
	assert.ElementsMatch(t, []int{31, 13}, xids)
	require.Len(t, h.GPUs, 1)
	assert.True(t, h.GPUs[0].Asleep, "runtime_status")
	assert.NotContains(t, fmt.Sprint(c.files), "root:x")
}

// A compressed report has a member for each section, and may end anywhere.
func TestCutOff(t *testing.T) {
	t.Parallel()
	whole, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "testdata", "reports", "bug-report-off-the-bus.log.gz"))
	require.NoError(t, err)
	c := read(t, string(whole))
	assert.False(t, c.Cut)
	cut := read(t, string(whole[:len(whole)-9]))
	assert.True(t, cut.Cut)
	assert.Equal(t, len(host(c).GPUs), len(host(cut).GPUs))
}

// An endless is an endless text that begins with something known.
type endless struct {
	start *strings.Reader
	line  string
	at    int
}

func (e *endless) Read(b []byte) (int, error) {
	if e.start.Len() > 0 {
		return e.start.Read(b)
	}
	n := copy(b, e.line[e.at:])
	e.at = (e.at + n) % len(e.line)
	return n, nil
}

// Texts of strangers take bounded memory: of many GPUs, devices, processes, messages and files, and of long lines.
func TestHostileTexts(t *testing.T) {
	t.Parallel()
	const much = 512 << 10
	for name, e := range map[string]*endless{
		"log":     {line: "[    1.000000] NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=\x1b[2J\u202e, x\n"},
		"value":   {start: strings.NewReader(smiText), line: "        Process ID                        : 4242\n"},
		"nested":  {start: strings.NewReader("<nvidia_smi_log>\n"), line: "<a>"},
		"lines":   {start: strings.NewReader("[    1.000000] NVRM: x\n"), line: "no line feed"},
		"files":   {start: strings.NewReader(reportTitle + "\n"), line: "____________________________________________\n\n*** /proc/driver/nvidia/gpus/../../../../x\nx\n"},
		"devices": {line: "01:00.0 VGA compatible controller: NVIDIA Corporation X\n\tRegion 1: Memory at <unassigned>\n"},
	} {
		if e.start == nil {
			e.start = strings.NewReader("")
		}
		c := &Collection{}
		require.NoError(t, c.Read(bufio.NewReaderSize(io.LimitReader(e, much), Peeked)), name)
		h := host(c)
		assert.LessOrEqual(t, len(h.KernelLog.Events), 1, name)
		assert.LessOrEqual(t, c.log.Len(), maxFile, name)
		assert.LessOrEqual(t, len(c.files), maxFiles, name)
		if r := c.NVML(); r != nil && len(r.GPUs) > 0 {
			assert.LessOrEqual(t, len(r.GPUs[0].Processes), maxProcesses, name)
		}
	}
	var bomb bytes.Buffer
	w, err := gzip.NewWriterLevel(&bomb, gzip.BestCompression)
	require.NoError(t, err)
	_, err = io.CopyN(w, &endless{start: strings.NewReader("[    1.000000] NVRM: x\n"), line: "xxxxxxxxxxxxxxx\n"}, much)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	c := &Collection{limit: much / 2}
	assert.ErrorContains(t, c.Read(bufio.NewReaderSize(&bomb, Peeked)), "decompressed")
}

func FuzzRead(f *testing.F) {
	f.Add(smiText[:300])
	f.Add("<nvidia_smi_log><gpu id=\"00000000:01:00.0\"><pci><pci_bus_id>1</pci_bus_id></pci>")
	f.Add(lspciText[:200])
	f.Add(reportTitle + "\n____________________\n\n*** /proc/meminfo\nx\n____________________\n\ndmesg:\n[    1.0] NVRM: x\n")
	f.Add("\x1f\x8b\x08\x00")
	f.Fuzz(func(t *testing.T, text string) {
		c := &Collection{}
		if c.Read(bufio.NewReaderSize(strings.NewReader(text), Peeked)) == nil {
			host(c)
			c.NVML()
		}
	})
}
