package kernellog

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const offBus = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."

func seconds(s float64) *float64 { return &s }

// Each form of a line is read to the same message.
func TestPrefixes(t *testing.T) {
	t.Parallel()
	for prefix, want := range map[string]Event{
		"4,1234,5678901,-;":                             {Seconds: seconds(5.678901)},
		"4,1234,5678901,-,caller=T77;":                  {Seconds: seconds(5.678901)},
		"<4>[    5.500000] ":                            {Seconds: seconds(5.5)},
		"[    5.500000] ":                               {Seconds: seconds(5.5)},
		"[    5,500000] ":                               {Seconds: seconds(5.5)},
		"[    5.500000][ T1234] ":                       {Seconds: seconds(5.5)},
		"kern  :err   : [    5.500000] ":                {Seconds: seconds(5.5)},
		"[Sun Feb 23 16:24:18 2025] ":                   {When: "Sun Feb 23 16:24:18 2025"},
		"[dim. févr. 23 16:24:18 2025] ":                {When: "dim. févr. 23 16:24:18 2025"},
		"[日 2月 23 16:24:18 2025] ":                      {When: "日 2月 23 16:24:18 2025"},
		"2025-02-23T16:24:18,123456+00:00 ":             {When: "2025-02-23T16:24:18,123456+00:00"},
		"Feb 23 16:24:18 gpu17 kernel: ":                {When: "Feb 23 16:24:18"},
		"févr. 23 16:24:18 gpu17 kernel: ":              {When: "févr. 23 16:24:18"},
		"2025-02-23T16:24:18+0000 gpu17 kernel: ":       {When: "2025-02-23T16:24:18+0000"},
		"Feb 23 16:24:18 gpu17 kernel: [    5.500000] ": {When: "Feb 23 16:24:18", Seconds: seconds(5.5)},
		"":                            {},
		"                           ": {},
		"Feb 23 16:24:18 gpu17 kernel: [    5.500000][    C3] ":        {When: "Feb 23 16:24:18", Seconds: seconds(5.5)},
		"[Sun Feb 23 16:24:18 2025] \r\n[Sun Feb 23 16:24:18 2025] ":   {When: "Sun Feb 23 16:24:18 2025"},
		"[    1.000000] Linux version 6.8.0 (x)\n[    5.500000] ":      {Seconds: seconds(5.5)},
		"-- Boot 00112233445566778899aabbccddeeff --\n[    5.500000] ": {Seconds: seconds(5.5)},
	} {
		want.Kind, want.Xid, want.Address, want.Text, want.Count = KindXid, 79, "0000:01:00.0", offBus, 1
		assert.Equal(t, []Event{want}, Parse(prefix+offBus+"\n"), prefix)
	}
	assert.Empty(t, Parse("12,1234,5678901,-;"+offBus), "a program wrote it: its facility is not the kernel's")
	assert.Empty(t, Parse("my notes: NVRM: Xid (PCI:0000:01:00): 79, x"))
}

func TestMessages(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Event{
		"NVRM: Xid (0000:03:00): 14, Channel 00000001":                                        {Kind: KindXid, Xid: 14, Address: "0000:03:00.0"},
		"NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6": {Kind: KindXid, Xid: 149, Address: "0008:01:00.0"},
		"NVRM: Xid (PCI:0000:9b:00 GPU-I:05): 31, pid=7, name=a b, Ch 1":                      {Kind: KindXid, Xid: 31, Address: "0000:9b:00.0", PID: 7, Process: "a b"},
		"NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.":                                 {Kind: KindOffBus, Address: "0000:29:00.0"},
		"NVRM: GPU 0000:05:00.0: RmInitAdapter failed! (0x22:0x56:742)":                       {Kind: KindInit, Address: "0000:05:00.0"},
		"NVRM: RmInitAdapter failed! (0x27:0x38:1193)":                                        {Kind: KindInit},
		"NVRM: BAR1 is 0M @ 0x0 (PCI:0000:05:00.0)":                                           {Kind: KindWindow, Address: "0000:05:00.0"},
		"pci 0000:05:00.0: BAR 1: no space for [mem size 0x1000000000 64bit pref]":            {Kind: KindWindow, Address: "0000:05:00.0"},
		"pci 0000:05:00.0: BAR 1 [mem size 0x1000000000 64bit pref]: can't assign; no space":  {Kind: KindWindow, Address: "0000:05:00.0"},
		"nvidia 0000:03:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=x":       {Kind: KindAER, Address: "0000:03:00.0", Severity: "Uncorrected (Non-Fatal)"},
		"pcieport 0000:00:01.0: PCIe Bus Error: severity=Correctable, type=Physical Layer":    {Kind: KindAER, Address: "0000:00:01.0", Severity: "Corrected"},
		"Out of memory: Killed process 4242 (python3) total-vm:1kB":                           {Kind: KindOOM, PID: 4242, Process: "python3"},
		"Memory cgroup out of memory: Killed process 4242 (python3) total-vm:1kB":             {Kind: KindOOM, PID: 4242, Process: "python3"},
		"Loading of unsigned module is rejected":                                              {Kind: KindUnsigned},
		"NVRM: GPU 0000:01:00.0 requires use of the NVIDIA open kernel modules.":              {Kind: KindNeedsOpen, Address: "0000:01:00.0"},
		"pci 0000:05:00.0: BAR 3: assigned [mem 0xf0000000-0xf1ffffff 64bit pref]":            {},
		"nvidia: module verification failed: signature and/or required key missing":           {},
		"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01":                          {},
		"NVRM: GPU Board Serial Number: 1650124014249":                                        {},
		"usb 1-1: the GPU has fallen off the bus":                                             {},
	} {
		got := Parse("[    1.000000] " + text)
		if want.Kind == "" {
			assert.Empty(t, got, text)
			continue
		}
		want.Text, want.Count, want.Seconds = text, 1, seconds(1)
		assert.Equal(t, []Event{want}, got, text)
	}
}

// A message of several lines is one event, with the GPU that its first line names.
func TestMessagesOfSeveralLines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind  Kind
		at    string
		lines []string
		text  string
	}{
		{KindMismatch, "", []string{"NVRM: API mismatch: the client has the version 390.48, but", "NVRM: this kernel module has the version 390.42.  Please"},
			"NVRM: API mismatch: the client has the version 390.48, but this kernel module has the version 390.42.  Please"},
		{KindOffBus, "0000:18:00.0", []string{"NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2901) installed in this system has", "NVRM: fallen off the bus and is not responding to commands."},
			"NVRM: fallen off the bus and is not responding to commands."},
		{KindUnsupported, "0000:01:00.0", []string{"NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:0ffd)", "NVRM: installed in this system is not supported by the", "NVRM: NVIDIA 545.23.06 driver release."},
			"NVRM: installed in this system is not supported by the NVIDIA 545.23.06 driver release."},
	} {
		for name, joined := range map[string]string{
			"dmesg":   "[    1.000000] " + strings.Join(c.lines, "\n[    1.000000] "),
			"journal": "Feb 23 16:24:18 gpu17 kernel: " + strings.Join(c.lines, "\n                  "),
			"kmsg":    "3,7,1000000,-;" + strings.Join(c.lines, `\x0a`),
		} {
			got := Parse(joined + "\n")
			if assert.Len(t, got, 1, "%s %s", c.kind, name) {
				assert.Equal(t, c.kind, got[0].Kind, name)
				assert.Equal(t, c.at, got[0].Address, name)
				assert.Equal(t, c.text, got[0].Text, name)
			}
		}
	}
}

// Messages that are alike are counted; what is of an earlier boot is forgotten.
func TestCountsAndBoots(t *testing.T) {
	t.Parallel()
	log := "[    0.000000] Linux version 6.8.0\n[    1.000000] " + offBus + "\n[    0.000000] Linux version 6.8.0\n" +
		strings.Repeat("[    7.500000] NVRM: Xid (PCI:0000:02:00): 31, pid=7, name=a, x\n", 3) + "[    9.000000] NVRM: Xid (PCI:0000:02:00): 31, pid=8, name=b, y\n"
	got := Parse(log)
	require.Len(t, got, 1)
	assert.Equal(t, 4, got[0].Count)
	assert.Equal(t, 7, got[0].PID)
	assert.Equal(t, 9.0, *got[0].Seconds)
	var many strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&many, "[    1.000000] NVRM: Xid (PCI:%04x:01:00): 31, x\n", i)
	}
	assert.Len(t, Parse(many.String()), maxEvents)
}

// A long log keeps its first and its last lines that matter, and what is kept reads the same again.
func TestReduce(t *testing.T) {
	t.Parallel()
	var long strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&long, "[%5d.000000] NVRM: Xid (PCI:0000:02:00): %d, pid=%d, name=a\n[%5d.000000] usb 1-1: a message\n", i, 13+i%2*18, i, i)
	}
	kept := Reduce(long.String())
	assert.LessOrEqual(t, len(kept), 2*maxKept)
	assert.Contains(t, kept, "[    0.000000]")
	assert.Contains(t, kept, "[19999.000000]")
	assert.NotContains(t, kept, "usb")
	assert.Equal(t, kept, Reduce(kept))
	small := "[    1.000000] " + offBus + "\n"
	assert.Equal(t, small, Reduce("[    0.500000] other\n"+small+"[    2.000000] NVRM: GPU Board Serial Number: 1650124014249\n"))
}

func TestTable(t *testing.T) {
	t.Parallel()
	seen := map[int]bool{}
	for _, x := range xids() {
		assert.False(t, seen[x.Number], "%d is there twice", x.Number)
		seen[x.Number] = true
		assert.NotEmpty(t, x.Meaning, x.Number)
		assert.NotEmpty(t, x.Action, x.Number)
		assert.Regexp(t, `^[a-zA-Z]`, x.Meaning)
		assert.Positive(t, x.Number)
		assert.Contains(t, []Class{Program, Engine, Firmware, Memory, Bus, NVLink, Init, Information}, x.Class, x.Number)
	}
	lines := strings.Split(strings.TrimSpace(xidsText), "\n\n")
	assert.Len(t, lines, 2, "comments, and rows")
	for line := range strings.SplitSeq(lines[1], "\n") {
		assert.Regexp(t, `^[0-9 ]+ \| [a-z]+ \| [^|]+ \| [^|]+$`, line)
	}
	wanted := []int{8, 13, 31, 32, 38, 43, 44, 45, 46, 48, 56, 57, 61, 62, 63, 64, 68, 69, 74, 79, 92, 94, 95, 109, 110, 119, 120, 121, 122, 123, 136, 137, 140, 143,
		144, 145, 146, 147, 148, 149, 150, 154, 155, 156, 158}
	for _, n := range wanted {
		assert.True(t, seen[n], n)
	}
	for _, n := range []int{13, 31, 43, 45} {
		assert.Equal(t, Program, Lookup(n).Class, "Xid %d does not accuse hardware", n)
	}
	assert.Equal(t, Engine, Lookup(9999).Class)
}

// Read returns at once, whether the log may be read or not.
func TestReadThisHost(t *testing.T) {
	t.Parallel()
	text, err := Read()
	if err != nil {
		t.Logf("refused: %v", err)
		assert.Empty(t, text)
		return
	}
	assert.LessOrEqual(t, len(text), 2*maxKept)
}

func FuzzParse(f *testing.F) {
	f.Add("[    1.000000] " + offBus + "\n")
	f.Add("4,1,2,-;NVRM: API mismatch: x\\x0aNVRM: y\n kernel: [")
	f.Add("[Do] NVRM: The NVIDIA GPU 0000:01:00.0\n[Do] NVRM: is not supported by\n-- Boot x --\n")
	f.Fuzz(func(t *testing.T, text string) {
		events := Parse(text)
		assert.LessOrEqual(t, len(events), maxEvents)
		for _, e := range events {
			assert.Positive(t, e.Count)
			assert.LessOrEqual(t, len(e.When), maxStamp)
			if utf8.ValidString(text) {
				assert.True(t, slices.Contains([]string{"", "0"}, e.Address) || len(e.Address) >= len("0000:00:00.0"))
			}
		}
		assert.LessOrEqual(t, len(Reduce(text)), 2*maxKept+maxLine)
	})
}
