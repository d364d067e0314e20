package hostinfo

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRateOfALink(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		speed string
		width int
		want  float64
		gen   int
	}{
		{"2.5 GT/s PCIe", 16, 4.0, 1},
		{"5.0 GT/s PCIe", 16, 8.0, 2},
		{"8.0 GT/s PCIe", 16, 15.754, 3},
		{"8 GT/s", 8, 7.877, 3},
		{"16.0 GT/s PCIe", 16, 31.508, 4},
		{"32.0 GT/s PCIe", 16, 63.015, 5},
		{"64.0 GT/s PCIe", 16, 121.0, 6},
		{"Unknown", 16, 0, 0},
		{"Unknown speed", 16, 0, 0},
		{"32.0 GT/s PCIe", 0, 0, 5},
		{"-32.0 GT/s PCIe", 16, 0, 0},
		{"NaN GT/s PCIe", 16, 0, 0},
		{"Inf GT/s PCIe", 16, 0, 0},
		{"", 16, 0, 0},
	} {
		speed := parseSpeed(c.speed)
		assert.InDelta(t, c.want, PCIe{speed, c.width}.Rate(), 0.001, "%s x%d", c.speed, c.width)
		assert.Equal(t, c.gen, PCIe{Speed: speed}.Generation(), c.speed)
	}
	assert.Zero(t, parseWidth("255"))
	assert.Zero(t, parseWidth("x16"))
	assert.Equal(t, 16, parseWidth("16"))
}

func TestParseDriverVersion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in, want string
		open     bool
	}{
		{"NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC version: 12.3.0", "535.54.03", false},
		{"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (u@h)", "580.159.04", true},
		{"NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build", "570.86.15", true},
		{"NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02\n", "470.256.02", false},
		{"GCC version:  gcc version 13.3.0 (Ubuntu 535.54.03)", "", false},
		{"NVRM version: something new", "", false},
		{"", "", false},
	} {
		got, open := parseDriverVersion(c.in)
		assert.Equal(t, c.want, got, c.in)
		assert.Equal(t, c.open, open, c.in)
	}
}

func TestParseLimit(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]Limit{
		"unlimited":            {Known: true, Unlimited: true},
		"9223372036854775807":  {Known: true, Unlimited: true},
		"18446744073709551615": {Known: true, Unlimited: true},
		"0":                    {Known: true},
		"65536":                {Known: true, N: 65536},
		"":                     {},
		"-2":                   {},
		"max":                  {},
		"1e9":                  {},
	} {
		assert.Equal(t, want, parseLimit(in), in)
	}
}

func TestLimitJSON(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		l    Limit
		text string
	}{
		{Limit{}, "null"},
		{unlimited(), `-1`},
		{limitOf(0), "0"},
		{limitOf(math.MaxInt - 1), "9223372036854775806"},
		{limitOf(math.MaxInt), `-1`},
	} {
		b, err := json.Marshal(c.l)
		require.NoError(t, err)
		assert.Equal(t, c.text, string(b))
		var again Limit
		require.NoError(t, json.Unmarshal(b, &again))
		assert.Equal(t, c.l, again)
	}
	var l Limit
	assert.Error(t, json.Unmarshal([]byte(`"much"`), &l))
}

func TestParseCPUInfoArm(t *testing.T) {
	t.Parallel()
	c := parseCPUInfo("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\nprocessor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
	assert.Equal(t, 2, c.Threads)
	assert.Equal(t, "arm64 implementer 0x41 part 0xd4f", c.Model)
	assert.Zero(t, c.Cores, "unknown")
}

func TestNaturalOrder(t *testing.T) {
	t.Parallel()
	assert.Negative(t, compareNatural("node2", "node10"))
	assert.Positive(t, compareNatural("node10", "node2"))
	assert.Zero(t, compareNatural("node1", "node1"))
	assert.NotZero(t, compareNatural("node1", "node01"))
}

// The slower of the card and its slot counts.
func TestCardAndSlotAreMadeForTheLowerMaximum(t *testing.T) {
	t.Parallel()
	card := PCIDevice{Link: Link{CurrentSpeed: 2.5, CurrentWidth: 8, MaxSpeed: 32, MaxWidth: 16}}
	assert.Equal(t, PCIe{32, 16}, card.Made())
	card.Upstream = []Link{{CurrentSpeed: 16, CurrentWidth: 8}, {MaxSpeed: 2.5, MaxWidth: 1}}
	assert.Equal(t, PCIe{32, 16}, card.Made(), "the slot shows no maximum, and the next bridge is another link")
	card.Upstream[0].MaxSpeed, card.Upstream[0].MaxWidth = 16, 8
	assert.Equal(t, PCIe{16, 8}, card.Made())
	card.Upstream[0].MaxSpeed, card.Upstream[0].MaxWidth = 64, 16
	assert.Equal(t, PCIe{32, 16}, card.Made())
	card.Link = Link{CurrentSpeed: 32, CurrentWidth: 16}
	assert.Equal(t, PCIe{}, card.Made(), "what it is trained to is not what it can do")
}

func TestParsePCIe(t *testing.T) {
	t.Parallel()
	for _, l := range []PCIe{{2.5, 1}, {16, 8}, {32, 16}, {64, 32}} {
		back, err := ParsePCIe(l.String())
		require.NoError(t, err)
		assert.Equal(t, l, back)
	}
	for _, bad := range []string{"", "PCIe 0.0 x16", "PCIe 7.0 x16", "PCIe 5.1 x16", "PCIe 5.0 x0", "PCIe 5.0 x-1", "PCIe 5.0 x16 ", "PCIe 05.0 x16", "65 GT/s x16", "NVLink-C2C"} {
		_, err := ParsePCIe(bad)
		assert.Error(t, err, bad)
	}
}
