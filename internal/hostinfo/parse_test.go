package hostinfo

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseCPUList(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   string
		want []int
		bad  bool
	}{
		{in: "", want: nil},
		{in: "0\n", want: []int{0}},
		{in: "0-3", want: []int{0, 1, 2, 3}},
		{in: "0-1,8,10-11", want: []int{0, 1, 8, 10, 11}},
		{in: "3-1", bad: true},
		{in: "0-", bad: true},
		{in: "-1", bad: true},
		{in: "1,,2", bad: true},
		{in: "a", bad: true},
		{in: "0-4294967295", bad: true},
		{in: "0-65535,0-65535", bad: true},
		{in: "99999999999999999999", bad: true},
	} {
		got, err := ParseCPUList(c.in)
		if c.bad {
			assert.Error(t, err, c.in)
			continue
		}
		require.NoError(t, err, c.in)
		assert.Equal(t, c.want, got, c.in)
	}
}

func TestLinkRate(t *testing.T) {
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
		assert.InDelta(t, c.want, LinkRate(speed, c.width), 0.001, "%s x%d", c.speed, c.width)
		assert.Equal(t, c.gen, Generation(speed), c.speed)
	}
	assert.Zero(t, parseWidth("255"))
	assert.Zero(t, parseWidth("x16"))
	assert.Equal(t, 16, parseWidth("16"))
}

func TestNormalPCIAddress(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"0000:00:06.0":     "0000:00:06.0",
		"00000000:00:06.0": "0000:00:06.0",
		"0000:C3:00.0":     "0000:c3:00.0",
		"10000:e1:00.0":    "10000:e1:00.0",
		"junk":             "junk",
		"":                 "",
	} {
		assert.Equal(t, want, NormalPCIAddress(in), in)
	}
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
		"max":                  {Known: true, Unlimited: true},
		"unlimited":            {Known: true, Unlimited: true},
		"-1":                   {Known: true, Unlimited: true},
		"9223372036854771712":  {Known: true, Unlimited: true},
		"18446744073709551615": {Known: true, Unlimited: true},
		"0":                    {Known: true},
		"65536":                {Known: true, N: 65536},
		"":                     {},
		"-2":                   {},
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
		{unlimited(), `"unlimited"`},
		{limitOf(0), "0"},
		{limitOf(math.MaxInt), "9223372036854775807"},
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

func TestChosen(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "madvise", chosen("always [madvise] never"))
	assert.Empty(t, chosen("always madvise never"))
	assert.Empty(t, chosen("always [madvise never"))
	assert.Empty(t, chosen("]["))
}

func TestParseCPUInfoArm(t *testing.T) {
	t.Parallel()
	c := parseCPUInfo("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\nprocessor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
	assert.Equal(t, 2, c.Threads)
	assert.Equal(t, "arm64 implementer 0x41 part 0xd4f", c.Model)
	assert.Zero(t, c.Cores, "unknown")
}

func TestMountinfoEscapes(t *testing.T) {
	t.Parallel()
	got := parseCgroupMounts(`32 31 0:29 / /mnt/a\040b rw shared:3 master:1 - cgroup cgroup rw,cpu,cpuacct` + "\n")
	require.Len(t, got, 1)
	assert.Equal(t, "mnt/a b", got[0].point)
	assert.True(t, got[0].serves("cpuacct"))
	assert.False(t, got[0].serves("memory"))
	assert.False(t, got[0].serves(""))
}

func TestNaturalOrder(t *testing.T) {
	t.Parallel()
	assert.Negative(t, compareNatural("node2", "node10"))
	assert.Positive(t, compareNatural("node10", "node2"))
	assert.Zero(t, compareNatural("node1", "node1"))
	assert.NotZero(t, compareNatural("node1", "node01"))
}
